"""Requests to the API server: plain objects in and out, typed errors, retries of what is safe."""

import json
import logging
import os
import re
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from trainingjob.kube.errors import KubeError, Unavailable, error_for
from trainingjob.kube.resources import Resource

log = logging.getLogger(__name__)

Object = dict[str, Any]
Observer = Callable[[str, str, int, float], None]
"""Called with verb, plural, HTTP status (0: no answer) and seconds of each request."""

_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_PATCH = {
    "apply": "application/apply-patch+yaml",
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
}


class KubeClient:
    """A connection to one API server. Use `connect`, and `close` at the end."""

    def __init__(self, api: ApiClient, field_manager: str, observer: Observer | None = None):
        self._api = api
        self._manager = field_manager
        self._observe = observer or (lambda verb, plural, status, seconds: None)

    @classmethod
    async def connect(
        cls,
        field_manager: str,
        *,
        context: str | None = None,
        observer: Observer | None = None,
    ) -> "KubeClient":
        """A client with the rights of the pod's service account or of the kubeconfig.

        Raises:
            Unavailable: neither is there, or it cannot be read.
        """
        configuration = Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG"):
                kube_config.load_incluster_config(client_configuration=configuration)
            else:
                await kube_config.load_kube_config(
                    context=context, client_configuration=configuration
                )
        except (kube_config.ConfigException, OSError, ValueError) as error:
            raise Unavailable(0, "NoConfiguration", f"no cluster: {error}", "kubeconfig") from None
        configuration.connection_pool_maxsize = 32
        api = ApiClient(configuration)
        api.user_agent = field_manager
        return cls(api, field_manager, observer)

    async def close(self) -> None:
        """Closes the connections."""
        await self._api.close()

    # -- verbs -----------------------------------------------------------------------------------

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """One object.

        Raises:
            NotFound: there is none. KubeError: as for every verb here.
        """
        return await self._json("get", resource, resource.path(namespace, name))

    async def find(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
    ) -> list[Object]:
        """All objects that match the selectors, in pages of 500."""
        found: list[Object] = []
        query = {"limit": "500", "labelSelector": labels, "fieldSelector": fields}
        while True:
            page = await self._json("list", resource, resource.path(namespace), query=query)
            found += page.get("items") or []
            after = page["metadata"].get("continue")
            if not after:
                return found
            query["continue"] = after

    async def apply(self, resource: Resource, manifest: Object) -> Object:
        """Creates the object or brings the fields in `manifest` to it (server-side apply)."""
        meta = manifest["metadata"]
        return await self._json(
            "apply",
            resource,
            resource.path(meta.get("namespace"), meta["name"]),
            query={"fieldManager": self._manager, "force": "true"},
            body=manifest,
        )

    async def create(self, resource: Resource, manifest: Object) -> Object:
        """Creates the object.

        Raises:
            Conflict: it exists.
        """
        path = resource.path(manifest["metadata"].get("namespace"))
        return await self._json("create", resource, path, body=manifest)

    async def replace_status(self, resource: Resource, manifest: Object) -> Object:
        """Writes the status, if nobody wrote the object since `manifest` was read.

        Raises:
            Conflict: somebody did.
        """
        meta = manifest["metadata"]
        path = resource.path(meta["namespace"], meta["name"], "status")
        return await self._json("replace", resource, path, body=manifest)

    async def replace(self, resource: Resource, manifest: Object) -> Object:
        """Writes the object, if nobody wrote it since `manifest` was read."""
        meta = manifest["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        return await self._json("replace", resource, path, body=manifest)

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Object | list[Object]
    ) -> Object:
        """A JSON patch (a list) or a merge patch (an object)."""
        kind = "json" if isinstance(patch, list) else "merge"
        return await self._json(kind, resource, resource.path(namespace, name), body=patch)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Deletes the object; with `uid` only the one that has it. Absent is fine.

        Raises:
            Conflict: the object has another uid.
        """
        options: Object = {"propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._json("delete", resource, resource.path(namespace, name), body=options)
        except KubeError as error:
            if error.status != 404:
                raise

    async def raw(self, path: str) -> Object:
        """The JSON at a path, such as /version."""
        return await self._json("get", Resource("", "v1", "raw", ""), path)

    # -- requests ----------------------------------------------------------------------------------

    async def _json(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Any = None,
    ) -> Object:
        method, content = {
            "get": ("GET", None),
            "list": ("GET", None),
            "create": ("POST", "application/json"),
            "replace": ("PUT", "application/json"),
            "delete": ("DELETE", "application/json"),
        }.get(verb) or ("PATCH", _PATCH[verb])
        # A create that was carried out and whose answer got lost would be done twice.
        safe = verb != "create"
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(lambda e: safe and isinstance(e, Unavailable)),
            wait=wait_random_exponential(multiplier=0.2, max=3),
            stop=stop_after_attempt(4),
            reraise=True,
        ):
            with attempt:
                began, status = time.monotonic(), 0
                try:
                    response = await self._send(method, path, query, body, content)
                    status = response.status
                    answer: Object = json.loads(await response.read())
                    return answer
                except KubeError as error:
                    status = error.status
                    raise
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    raise _no_answer(error, method, path) from error
                finally:
                    self._observe(verb, resource.plural, status, time.monotonic() - began)
        raise AssertionError("unreachable")

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        body: Any,
        content: str | None,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if content:
            headers["Content-Type"] = content
        asked = {k: v for k, v in (query or {}).items() if v}
        full = f"{path}?{urlencode(asked)}" if asked else path
        try:
            method, url, headers, _, _ = await self._api.param_serialize(
                method, full, header_params=headers, auth_settings=["BearerToken"]
            )
            answer = await self._api.call_api(method, url, headers, body, _request_timeout=_TIMEOUT)
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError) as error:
            raise _no_answer(error, method, path) from error
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 400:
            text = (await response.read()).decode("utf-8", "replace")
            raise _failure(response, text, f"{method} {path}")
        return response


def _no_answer(error: BaseException, method: str, path: str) -> Unavailable:
    said = str(error) or type(error).__name__
    return Unavailable(0, "NoAnswer", f"the API server does not answer: {said}", f"{method} {path}")


def _failure(response: aiohttp.ClientResponse, text: str, request: str) -> KubeError:
    try:
        said = json.loads(text)
        reason, message = said.get("reason", ""), said.get("message", text)
    except ValueError:
        reason, message = "", re.sub(r"\s+", " ", text)[:300] or str(response.reason)
    return error_for(response.status, reason, message, request)
