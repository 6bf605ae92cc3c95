"""HTTP for services: uvicorn with limits, requests that end with their connections, streams of events, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.core.errors import UsageError
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.http_limits import BACKLOG, IDLE_SECONDS, Headers, HttpLimits, LimitedProtocol

MIN_TOKEN_LENGTH = 8

Handler = Callable[[HttpRequest], Awaitable[Response]]
"""Is cancelled when the client disconnects."""


class HttpServer(uvicorn.Server):
    """uvicorn with the limits of http_limits; signals are left to the caller. Set `should_exit` to drain."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        config = uvicorn.Config(
            app,
            http=limits.protocol,  # type: ignore[arg-type]  # called like a class
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(IDLE_SECONDS),
        )
        super().__init__(config)
        self.limits = limits

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def connections(self) -> list[LimitedProtocol]:
        return [found for found in self.server_state.connections if isinstance(found, LimitedProtocol)]

    def under_way(self) -> int:
        """Count the requests whose response is not complete."""
        return sum(connection.under_way for connection in self.connections())

    def cut_off(self) -> int:
        """Close all connections, which cancels their handlers; return how many requests were under way."""
        count = self.under_way()
        for connection in self.connections():
            connection.transport.abort()
        return count


class RequestLifetime:
    """ASGI middleware: reads the whole body, then runs the handler, and cancels it when the client disconnects."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        """`count` is called with path and status of every request; 499 if the client left before the response."""
        self.app, self.count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.count(scope["path"], status)
            await send(message)

        try:
            body = await read_body(receive)
            if body is not None:
                await self.run(scope, body, receive, counted_send)
        finally:
            if not status:
                self.count(scope["path"], 499)

    async def run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        disconnect = asyncio.ensure_future(receive())  # after the body nothing else can come

        async def replay() -> Message:
            return messages.pop() if messages else await asyncio.shield(disconnect)

        handler = asyncio.ensure_future(self.app(scope, replay, send))
        try:
            await asyncio.wait((handler, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if handler.done():
                handler.result()
        finally:
            for task in (handler, disconnect):
                task.cancel()
            await asyncio.gather(handler, disconnect, return_exceptions=True)


async def read_body(receive: Receive) -> bytes | None:
    """Read the whole body; None if the client has disconnected. Its size was checked before (http_limits)."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class EventStream(StreamingResponse):
    """Server-sent events. `close` is called when they end for any reason, even before the first."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)  # RequestLifetime notices a disconnect
        finally:
            self.close()


def as_handler(page: Callable[[HttpRequest], Response]) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        return page(request)

    return handle


def json_only(handler: Handler) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page of another site cannot send this type without a CORS preflight
            raise ApiError(415, f"send Content-Type: application/json, not {kind[:80] or 'none'}")
        return await handler(request)

    return handle


async def api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def server_error(_: HttpRequest, error: Exception) -> Response:
    return ApiError(500, "the server failed; its log has the details").response()


def listen(host: str, port: int) -> list[socket.socket]:
    """Open a socket for every address of the host; port 0 takes any free one, the same for all."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            if sockets and not port:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(socket.create_server(address[:2], family=family, backlog=BACKLOG))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise UsageError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return sockets


def address_of(host: str, sockets: list[socket.socket]) -> str:
    host = host.strip("[]")
    return f"http://{f'[{host}]' if ':' in host else host}:{sockets[0].getsockname()[1]}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_token(host: str, token: str) -> None:
    """Raise UsageError for an address that other machines can reach without a token, and for a token that is weak."""
    if not is_loopback(host) and not token:
        raise UsageError(
            f"--host {host}: other machines could reach the server, so it needs a --token that clients must "
            "send, or POSTTRAIN_TOKEN in the environment"
        )
    if token and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
        raise UsageError(f"--token: needs at least {MIN_TOKEN_LENGTH} printable ASCII characters")


def check_client(headers: Headers, token: str) -> None:
    """Raise ApiError unless a request has the token, or, where there is none, is addressed to this machine."""
    if not token:
        host = headers.get(b"host", b"").decode("latin-1")
        if not is_loopback(host.rsplit(":", 1)[0] if not host.endswith("]") else host):
            raise ApiError(403, "without a token this server accepts requests to localhost only")
        return
    given = headers.get(b"authorization", b"")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        what = "the token is wrong" if given else "a token is required: Authorization: Bearer ..."
        raise ApiError(401, what, code="invalid_api_key")
