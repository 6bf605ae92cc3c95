"""A model behind HTTP: who may ask what, and how the server starts and ends."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.core.errors import UsageError
from posttrain.server.http import Call, Handler, HttpServer, Refusal, Reply
from posttrain.server.metrics import Metrics

SHORTEST_TOKEN = 8
GRACE_SECONDS = 30.0  # to write an answer to a slow reader, after the time for making it
METRICS = {
    "requests_total": "Requests by path and status; 499: the client hung up.",
    "connections": "Connections that are open.",
    "uptime_seconds": "Seconds since the start.",
    "peak_resident_bytes": "The most memory that the process has had.",
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
        if not is_loopback(self.host) and not self.token:
            raise UsageError(
                f"--host {self.host}: others could reach the server, so it needs a --token that they must know, "
                "or POSTTRAIN_TOKEN in the environment"
            )
        if self.token and (
            len(self.token) < SHORTEST_TOKEN or not self.token.isascii() or not self.token.isprintable()
        ):
            raise UsageError(f"--token: needs at least {SHORTEST_TOKEN} printable ASCII characters")
        for name, least in (("port", 0), ("queue", 0), ("max_tokens", 1), ("max_length", 2), ("drain_seconds", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("max_body_mib", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0.")
        if self.port > 65535:
            raise UsageError(f"port is {self.port}; it must be at most 65535.")


class Service(Protocol):
    """What is served: its own paths, and a thread that works for them."""

    name: str
    routes: dict[str, Handler]

    def start(self) -> asyncio.Future[None]: ...
    def close(self) -> None: ...
    def gauges(self) -> dict[str, float]: ...


class Server:
    """The paths that every service has; and who may come in."""

    def __init__(self, service: Service, options: ServeOptions, metrics: Metrics) -> None:
        self.service, self.options, self.metrics = service, options, metrics
        self.started, self.created = time.monotonic(), int(time.time())
        seconds = options.timeout_seconds + GRACE_SECONDS
        self.http = HttpServer(self.admit, self.handle, max_body=int(options.max_body_mib * 2**20), seconds=seconds)
        self.pages: dict[str, Callable[[], Reply]] = {
            "/health": lambda: told({"status": "ok"}),
            "/v1/models": lambda: told({"object": "list", "data": [self.model()]}),
            f"/v1/models/{service.name}": lambda: told(self.model()),
            "/metrics": self.metrics_page,
        }

    async def handle(self, call: Call) -> Reply:
        status = 499
        try:
            reply = await self.route(call)
            status = reply.status
            return reply
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            self.count(call, status)

    def count(self, call: Call, status: int) -> None:
        known = call.path in self.pages or call.path in self.service.routes
        self.metrics.count("requests_total", path=call.path if known else "other", status=str(status))

    def route(self, call: Call) -> Awaitable[Reply]:
        if call.path in self.pages:
            if call.method != "GET":
                raise Refusal(405, f"{call.path} is read with GET")
            return done(self.pages[call.path]())
        if call.path not in self.service.routes:
            there = ", ".join([*self.service.routes, *self.pages])
            raise Refusal(404, f"there is no {call.path[:80]} here; there are {there}", code="unknown_url")
        if call.method != "POST":
            raise Refusal(405, f"{call.path} is asked with POST")
        kind = call.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no page of another site can send from a browser
            raise Refusal(415, f"send Content-Type: application/json, not {kind[:80] or 'none'}")
        return self.service.routes[call.path](call)

    def admit(self, call: Call) -> None:
        token = self.options.token
        if call.path == "/health":
            return
        if not token:
            host = call.headers.get("host", "")
            if not is_loopback(host.rsplit(":", 1)[0] if not host.endswith("]") else host):
                self.count(call, 403)
                raise Refusal(403, "without a token this server answers to localhost only")
            return
        given = call.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            self.count(call, 401)
            what = "the token is wrong" if given else "a token is needed: Authorization: Bearer ..."
            raise Refusal(401, what, code="invalid_api_key")

    def model(self) -> dict[str, Any]:
        return {"id": self.service.name, "object": "model", "created": self.created, "owned_by": "posttrain"}

    def metrics_page(self) -> Reply:
        gauges = {
            **self.service.gauges(),
            "connections": len(self.http.busy),
            "uptime_seconds": time.monotonic() - self.started,
            "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        page = self.metrics.page(gauges)
        return Reply(page.encode(), content_type="text/plain; version=0.0.4; charset=utf-8")

    async def run(self, ready: Callable[[str], None], warn: Callable[[str], None]) -> int:
        """Until a signal, or the engine's end. The exit code: 0 after SIGTERM if every request was answered."""
        options, loop = self.options, asyncio.get_running_loop()
        signals: list[int] = []
        first, second = asyncio.Event(), asyncio.Event()

        def received(number: int) -> None:
            signals.append(number)
            (second if first.is_set() else first).set()

        engine = self.service.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, received, number)
        try:
            try:
                port = await self.http.listen(options.host, options.port)
            except OSError as error:
                raise UsageError(f"--host {options.host} --port {options.port}: {error.strerror or error}") from None
            ready(f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}")
            await either(engine, first)
            self.http.stop_listening()
            if signals and self.http.busy:
                warn(f"finishing what is under way, {requests(len(self.http.busy))}; again to stop at once")
            if signals:
                await either(asyncio.ensure_future(self.http.idle()), second, options.drain_seconds)
            else:  # the engine died; those who wait are told
                await either(asyncio.ensure_future(self.http.idle()), second, 1.0)
            cut = await self.http.cut_off()
        finally:
            self.service.close()
            await asyncio.wait((engine,))
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        engine.result()
        if cut:
            warn(f"cut off: {requests(cut)}")
        return 130 if signal.SIGINT in signals else 143 if cut or second.is_set() else 0


async def either(work: asyncio.Future[Any], wish: asyncio.Event, seconds: float | None = None) -> None:
    """Until the work is done, somebody wishes it, or time is up."""
    wished = asyncio.ensure_future(wish.wait())
    try:
        await asyncio.wait((work, wished), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wished.cancel()


def requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


async def done(reply: Reply) -> Reply:
    return reply


def told(data: dict[str, Any]) -> Reply:
    return Reply(json.dumps(data).encode())


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
