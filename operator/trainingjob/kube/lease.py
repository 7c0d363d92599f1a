"""Leader election by a Lease: of several replicas, one acts.

The holder stops when it could not renew for `renew_deadline`, which is shorter than the duration
after which others may take over. Clocks are only compared with themselves: an observer waits until
it has seen the same record for a whole duration on its own monotonic clock (as client-go does).
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from trainingjob.kube.client import KubeClient, Object
from trainingjob.kube.errors import Conflict, KubeError, NotFound
from trainingjob.kube.resources import LEASES

log = logging.getLogger(__name__)


@dataclass
class Lease:
    """One candidate for the Lease `namespace`/`name`. Times in seconds."""

    client: KubeClient
    namespace: str
    name: str
    identity: str
    duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    def __post_init__(self) -> None:
        self._seen: tuple[object, float] = (None, time.monotonic())
        self._held: Object | None = None

    async def acquire(self) -> None:
        """Returns when this candidate holds the Lease."""
        while True:
            try:
                if await self._try():
                    log.info("holding lease %s/%s", self.namespace, self.name)
                    return
            except KubeError as error:
                log.warning("lease: %s", error)
            await asyncio.sleep(self.retry_period)

    async def hold(self) -> None:
        """Renews the Lease; returns when it is lost, and acting must stop."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(self.retry_period)
            left = self.renew_deadline - (time.monotonic() - renewed)
            if left <= 0:
                log.error("lease not renewed for %s s", self.renew_deadline)
                return
            try:
                began = time.monotonic()
                if not await asyncio.wait_for(self._try(), left):
                    log.error("lease taken over by another replica")
                    return
                renewed = began
            except (KubeError, TimeoutError) as error:
                log.warning("lease not renewed: %s", error)

    async def release(self) -> None:
        """Lets the next candidate take over at once."""
        if self._held is None:
            return
        self._held["spec"]["holderIdentity"] = ""
        try:
            await self.client.replace(LEASES, self._held)
        except KubeError as error:
            log.warning("lease not released: %s", error)

    async def _try(self) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(self.duration),
            "renewTime": now,
        }
        try:
            lease = await self.client.get(LEASES, self.namespace, self.name)
        except NotFound:
            new = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": {**mine, "acquireTime": now, "leaseTransitions": 0},
            }
            try:
                self._held = await self.client.create(LEASES, new)
            except Conflict:
                return False
            return True
        spec = lease.setdefault("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self.identity and not self._expired(lease):
            self._held = None
            return False
        if holder != self.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec.update(mine)
        try:
            self._held = await self.client.replace(LEASES, lease)
        except Conflict:
            return False
        return True

    def _expired(self, lease: Object) -> bool:
        record = lease["metadata"]["resourceVersion"]
        if record != self._seen[0]:
            self._seen = (record, time.monotonic())
        return time.monotonic() - self._seen[1] > self.duration
