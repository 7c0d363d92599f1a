"""Requests to one Ray dashboard.

Source: Ray's Jobs REST API (python/ray/dashboard/modules/job) and state API (modules/state).
"""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from trainingjob.planning.observed import Driver, DriverState

_ALREADY_EXISTS = "Please use a different submission_id"
_LIMITS = aiohttp.ClientTimeout(total=10, sock_connect=2)
_LARGEST_TAIL = 256 * 1024


class RayError(Exception):
    """The dashboard does not answer, or not as it should: nothing is known."""


class RayRefused(RayError):
    """The dashboard answered that it will not."""


@dataclass(frozen=True)
class RayJob:
    """A Ray job and where its driver runs."""

    driver: Driver
    node_id: str | None
    metadata: dict[str, str]


class Dashboard:
    """The dashboard at `address`, with its token. The session belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, address: str, token: str) -> None:
        self._session, self._address = session, address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def ping(self) -> None:
        """Returns when the dashboard takes our token.

        Raises:
            RayError: it does not answer, or does not take the token.
        """
        await self._json("GET", "/api/version")

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
    ) -> None:
        """Submits the entrypoint; a submission of that id with the same metadata is adopted.

        Raises:
            RayRefused: the id is taken by a job with other metadata.
        """
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "runtime_env": runtime_env,
            "metadata": metadata,
        }
        try:
            await self._json("POST", "/api/jobs/", body)
        except RayRefused as error:
            if _ALREADY_EXISTS not in str(error):
                raise
            found = await self.job(submission_id)
            if found is None or found.metadata != metadata:
                raise RayRefused(f"submission id {submission_id} is taken by another job") from None

    async def job(self, submission_id: str) -> RayJob | None:
        """The Ray job of that id, None when Ray does not know it."""
        found = await self._json("GET", f"/api/jobs/{submission_id}", absent_is_none=True)
        if found is None:
            return None
        driver = Driver(
            state=DriverState(found["status"]),
            exit_code=found.get("driver_exit_code"),
            error_type=found.get("error_type") or "",
            message=found.get("message") or "",
        )
        return RayJob(driver, found.get("driver_node_id"), found.get("metadata") or {})

    async def stop(self, submission_id: str) -> None:
        """Sends the driver SIGTERM; Ray kills it later if it does not end."""
        await self._json("POST", f"/api/jobs/{submission_id}/stop", absent_is_none=True)

    async def tail(self, node_id: str, file: str, lines: int) -> str:
        """The last lines of a file in the node's log directory; empty when it is not there.

        This endpoint reads from the end of the file. The Jobs API's own logs would load the whole
        file into the dashboard's memory.
        """
        query = {"node_id": node_id, "filename": file, "lines": str(lines), "timeout": "5"}
        try:
            async with self._session.get(
                f"{self._address}/api/v0/logs/file",
                params=query,
                headers=self._headers,
                timeout=_LIMITS,
            ) as response:
                if response.status != 200:
                    return ""
                data = b""
                async for chunk in response.content.iter_any():
                    data = (data + chunk)[-_LARGEST_TAIL:]
                return data.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RayError(f"no answer from {self._address}: {error or type(error)}") from error

    async def _json(
        self, method: str, path: str, body: Any = None, *, absent_is_none: bool = False
    ) -> Any:
        try:
            async with self._session.request(
                method,
                self._address + path,
                json=body,
                headers=self._headers,
                timeout=_LIMITS,
            ) as response:
                text = await response.text()
                if response.status == 404 and absent_is_none:
                    return None
                if response.status >= 400:
                    # 5xx with this text is Ray's way to say that the request itself is wrong; a
                    # token that is not taken says nothing about the request.
                    wrong = response.status < 500 and response.status not in (401, 403)
                    refused = wrong or _ALREADY_EXISTS in text
                    kind = RayRefused if refused else RayError
                    raise kind(f"{method} {path}: {response.status} {text.strip()[-300:]}")
                return json.loads(text) if text else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            said = str(error) or type(error).__name__
            raise RayError(f"no answer from {self._address}: {said}") from error
