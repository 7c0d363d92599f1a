"""Liveness, readiness and metrics over HTTP."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from trainingjob.engine.metrics import REGISTRY


async def serve(port: int, ready: Callable[[], str | None]) -> web.AppRunner:
    """Serves /livez, /readyz and /metrics; `ready` says why not, or None. `cleanup` ends it."""

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why_not = ready()
        return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.add_routes(
        [web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
