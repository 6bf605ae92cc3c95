"""The HTTP server: routes, authorisation of clients, start and shutdown."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from posttrain.core.errors import UsageError
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.http import (
    Handler,
    HttpServer,
    RequestLifetime,
    address_of,
    api_error,
    as_handler,
    check_client,
    check_token,
    json_only,
    listen,
    server_error,
)
from posttrain.endpoint.http_limits import HEALTH, Headers, HttpLimits
from posttrain.endpoint.metrics import ServerMetrics

GRACE_SECONDS = 30.0  # for a slow client to read its response, after the time for generating it
CUT_OFF_SECONDS = 5.0  # for handlers to end after their connections were closed
METRICS = {
    "requests_total": "Requests by path and status; 499: the client disconnected.",
    "connections": "Open connections.",
    "uptime_seconds": "Seconds since the start.",
    "peak_resident_bytes": "Peak memory of the process.",
}


@dataclass(kw_only=True, slots=True)
class ServeOptions:
    """Where to listen, and the limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    name: str = ""
    queue: int = 1024
    max_tokens: int = 1024
    max_length: int = 4096
    max_body_mib: float = 2.0
    timeout_seconds: float = 600.0
    drain_seconds: float = 30.0

    def check(self) -> None:
        check_token(self.host, self.token)
        for name, least in (("port", 0), ("queue", 0), ("max_tokens", 1), ("max_length", 2), ("drain_seconds", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("max_body_mib", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0.")
        if self.port > 65535:
            raise UsageError(f"port is {self.port}; it must be at most 65535.")


class Service(Protocol):
    """What is served: its routes, and a thread that computes the responses."""

    name: str
    names: tuple[str, ...]  # of the model and of its adapters
    routes: dict[str, Handler]

    def start(self) -> asyncio.Future[None]: ...
    def close(self) -> None: ...
    def gauges(self) -> dict[str, float]: ...


class ApiServer:
    """Serves the paths of a service and those that every service has, to clients that are authorised."""

    def __init__(self, service: Service, options: ServeOptions, metrics: ServerMetrics) -> None:
        self.service, self.options, self.metrics = service, options, metrics
        self.started, self.created = time.monotonic(), int(time.time())
        pages: dict[str, Callable[[HttpRequest], Response]] = {
            HEALTH: lambda _: JSONResponse({"status": "ok"}),
            "/v1/models": lambda _: JSONResponse({"object": "list", "data": list(map(self.model, service.names))}),
            "/v1/models/{name:path}": self.model_page,
            "/metrics": self.metrics_page,
        }
        self.paths = [
            *service.routes,
            HEALTH,
            "/v1/models",
            *(f"/v1/models/{name}" for name in service.names),
            "/metrics",
        ]
        routes = [Route(path, as_handler(page), methods=["GET"]) for path, page in pages.items()]
        routes += [Route(path, json_only(handler), methods=["POST"]) for path, handler in service.routes.items()]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(RequestLifetime, count=self.count)],
            exception_handlers={ApiError: api_error, HTTPException: self.http_error, Exception: server_error},
        )
        app.router.redirect_slashes = False
        limits = HttpLimits(int(options.max_body_mib * 2**20), options.timeout_seconds + GRACE_SECONDS, self.admit)
        self.http = HttpServer(app, limits)

    def count(self, path: str, status: int) -> None:
        self.metrics.count("requests_total", path=path if path in self.paths else "other", status=str(status))

    def admit(self, path: str, headers: Headers) -> None:
        """Raise ApiError unless the client may send this request; called before its body is read."""
        if path == HEALTH:
            return
        try:
            check_client(headers, self.options.token)
        except ApiError as error:
            self.count(path, error.status)
            raise

    def model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "posttrain"}

    def model_page(self, request: HttpRequest) -> Response:
        if request.path_params["name"] not in self.service.names:
            raise HTTPException(404)
        return JSONResponse(self.model(request.path_params["name"]))

    def metrics_page(self, _: HttpRequest) -> Response:
        gauges = {
            **self.service.gauges(),
            "connections": len(self.http.limits.open),
            "uptime_seconds": time.monotonic() - self.started,
            "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        return PlainTextResponse(self.metrics.page(gauges), media_type="text/plain; version=0.0.4")

    async def http_error(self, request: HttpRequest, error: Exception) -> Response:
        """Respond to what Starlette's router raises: an unknown path, or another method."""
        assert isinstance(error, HTTPException)
        path = str(request.scope["path"])
        if error.status_code == 405:
            method = "POST" if path in self.service.routes else "GET"
            return ApiError(405, f"{path} accepts {method} only").response()
        there = ", ".join(self.paths)
        return ApiError(404, f"unknown path {path[:80]}; this server has {there}", code="unknown_url").response()

    async def run(self, ready: Callable[[str], None], warn: Callable[[str], None]) -> int:
        """Serve until a signal arrives or the engine ends; return the exit code.

        It is 0 after SIGTERM if every request in progress was completed, 143 if not, and 130 after Ctrl-C.
        """
        options, loop = self.options, asyncio.get_running_loop()
        signals: list[int] = []
        first, second = asyncio.Event(), asyncio.Event()

        def received(number: int) -> None:
            signals.append(number)
            (second if first.is_set() else first).set()

        sockets = listen(options.host, options.port)
        gc.freeze()  # a full garbage-collection pass over libraries and the model takes longer than a decode step
        engine = self.service.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, received, number)
        try:
            serving = asyncio.ensure_future(self.http.serve(sockets))
            ready(address_of(options.host, sockets))
            await either(engine, first)
            under_way = self.http.under_way()
            if signals and under_way:
                warn(f"finishing {requests_text(under_way)} in progress; a second signal stops at once")
            self.http.should_exit = True
            # If the engine has failed, waiting requests get an error and nothing else is in progress.
            await either(serving, second, options.drain_seconds if signals else 1.0)
            cut_off = self.http.cut_off()
            await asyncio.wait((serving,), timeout=CUT_OFF_SECONDS)
        finally:
            self.service.close()
            await asyncio.wait((engine,))
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        engine.result()
        if cut_off:
            warn(f"{requests_text(cut_off)} cut off before the end of the response")
        return 130 if signal.SIGINT in signals else 143 if cut_off or second.is_set() else 0


async def either(work: asyncio.Future[Any], stop: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until the work is done, the event is set, or the time is over."""
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((work, stopped), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()


def requests_text(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"
