"""The operator's process: from settings to running workers, and an orderly end."""

import asyncio
import logging
import os
import random
import signal
import socket
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import kopf

from trainingjob.api.job import GROUP, VERSION, InvalidJob
from trainingjob.backends.kuberay import KubeRayBackend, NodeTable
from trainingjob.engine import handlers, metrics, server
from trainingjob.engine.jobs import Key
from trainingjob.engine.queue import WorkQueue, work
from trainingjob.engine.reconciler import Reconciler
from trainingjob.engine.settings import Settings, token_key
from trainingjob.engine.store import KubeJobStore
from trainingjob.kube.client import KubeClient
from trainingjob.kube.errors import KubeError
from trainingjob.kube.lease import Lease
from trainingjob.kube.resources import TRAINING_JOBS
from trainingjob.planning.names import FIELD_MANAGER

log = logging.getLogger(__name__)

RESYNC_SECONDS = 300


class Operator:
    """One replica. `run` returns when it was asked to end, or when it lost its lease."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._why_not_ready: str | None = "starting"
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT (returns 0) or until the lease is lost (1)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        settings = self._settings
        key = token_key(Path(settings.token_key_file))
        async with AsyncExitStack() as stack:
            runner = await server.serve(settings.port, lambda: self._why_not_ready)
            stack.push_async_callback(runner.cleanup)
            client = await KubeClient.connect(FIELD_MANAGER, observer=metrics.observe_request)
            stack.push_async_callback(client.close)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64))
            )
            if not await self._until(self._crds_served(client)):
                return 0
            lost: asyncio.Task[None] | None = None
            if settings.leader_election.enabled:
                lease = Lease(
                    client,
                    settings.leader_election.namespace,
                    settings.leader_election.name,
                    f"{socket.gethostname()}_{os.getpid()}",
                )
                self._why_not_ready = None  # a standby is ready to take over
                if not await self._until(lease.acquire()):
                    return 0
                lost = asyncio.create_task(lease.hold())
                stack.push_async_callback(lease.release)
            metrics.LEADER.set(1)
            await self._act(client, session, key, lost)
            metrics.LEADER.set(0)
        return 1 if lost and lost.done() else 0

    async def _until(self, awaited: Any) -> bool:
        """Waits for `awaited`; False when the process was asked to end before."""
        task, stop = asyncio.ensure_future(awaited), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return False

    async def _crds_served(self, client: KubeClient) -> None:
        wanted = {f"/apis/{GROUP}/{VERSION}": "trainingjobs", "/apis/ray.io/v1": "rayclusters"}
        for path, plural in wanted.items():
            while True:
                try:
                    served = await client.raw(path)
                    if any(r["name"] == plural for r in served["resources"]):
                        break
                    missing = f"{plural} is not served"
                except KubeError as error:
                    missing = str(error)
                remedy = "install KubeRay" if plural == "rayclusters" else "install the chart's CRD"
                self._why_not_ready = f"waiting for {plural}: {missing}; {remedy}"
                log.warning(self._why_not_ready)
                await asyncio.sleep(5)

    async def _act(
        self,
        client: KubeClient,
        session: aiohttp.ClientSession,
        token: bytes,
        lost: "asyncio.Task[None] | None",
    ) -> None:
        settings = self._settings
        queue: WorkQueue[Key] = WorkQueue()
        nodes = NodeTable(enabled=settings.watch_nodes)
        phases = metrics.JobPhases()
        store = KubeJobStore(client, FIELD_MANAGER)
        backend = KubeRayBackend(client, session, settings.catalogue, token, nodes)
        reconciler = Reconciler(store, backend, settings.catalogue)
        metrics.QUEUE_DEPTH.set_function(queue.__len__)

        async def handle(key: Key) -> None:
            began = time.monotonic()
            try:
                again = await reconciler.reconcile(key)
                queue.succeeded(key)
                if again is not None:
                    queue.add_after(key, again)
            except InvalidJob as error:
                log.warning("%s/%s: %s", *key, error)
                with suppress(KubeError):
                    await store.report_invalid(key, error)
            except KubeError as error:
                metrics.ERRORS.labels(type(error).__name__).inc()
                log.warning("%s/%s: %s; again in %.1f s", *key, error, queue.retry(key))
            except Exception as error:
                metrics.ERRORS.labels(type(error).__name__).inc()
                log.exception("%s/%s: cannot be reconciled", *key)
                queue.retry(key)
            finally:
                metrics.RECONCILES.observe(time.monotonic() - began)

        registry = kopf.OperatorRegistry()
        handlers.register(registry, queue, store, reconciler, phases, nodes)

        @kopf.on.login(registry=registry)
        def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
            return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

        tasks = [asyncio.create_task(work(queue, handle)) for _ in range(settings.workers)]
        tasks.append(asyncio.create_task(self._resync(client, queue)))
        if lost:
            lost.add_done_callback(lambda _: self._stop.set())
        ready = asyncio.Event()
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=handlers.kopf_settings(),
                standalone=True,
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                stop_flag=self._stop,
                ready_flag=ready,
            )
        )
        self._why_not_ready = None
        try:
            await watching
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _resync(self, client: KubeClient, queue: WorkQueue[Key]) -> None:
        """Heals lost events: now and then every job is looked at."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.2))
            namespaces: list[str | None] = [*self._settings.namespaces] or [None]
            for namespace in namespaces:
                try:
                    jobs = await client.find(TRAINING_JOBS, namespace)
                except KubeError as error:
                    log.warning("resync: %s", error)
                    continue
                for job in jobs:
                    queue.add((job["metadata"]["namespace"], job["metadata"]["name"]))
