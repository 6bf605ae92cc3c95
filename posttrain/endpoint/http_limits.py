"""Limits that uvicorn lacks: strict request heads, body size, a deadline for every wait, bounded connections.

uvicorn parses with h11, which accepts some shapes that a proxy in front may read differently (folded headers, bare line
feeds, repeated headers). Here every head is checked before h11 reads it, and what does not match exactly is refused.

A connection goes through these states:

    head    waits for a request; its head is collected until the empty line      IDLE_SECONDS, then READ_SECONDS
    body    the head is accepted, the body arrives                               READ_SECONDS from the first byte
    work    the request is complete; the application responds                    request_seconds
    refused the error is sent; what still arrives is discarded                   LINGER_SECONDS
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.endpoint.errors import ApiError

HEAD_BYTES = 32 * 2**10  # request line and headers
MAX_CONNECTIONS = 1024
HEALTH_CONNECTIONS = 64  # beyond the limit, for /health alone: an overloaded server still reports that it is alive
BACKLOG = 512  # connections that the kernel keeps until they are accepted, which may happen all at once
OTHER_FILES = BACKLOG + 128  # descriptors that the process needs besides connections
READ_SECONDS = 30.0  # for a request to arrive, from its first byte
IDLE_SECONDS = 75.0  # between two requests on a connection
LINGER_SECONDS = 10.0  # a client that is still sending must be able to read why it was refused
HEALTH = "/health"

REQUEST_LINE = re.compile(rb"[A-Z]{1,16} [!-~]+ HTTP/1\.[01]")
HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
NOT_REPEATED = {b"content-length", b"host", b"authorization", b"content-type"}

Headers = dict[bytes, bytes]


@dataclass(slots=True, eq=False)
class HttpLimits:
    """The limits of one server, and the state that its connections share."""

    max_body: int  # bytes
    request_seconds: float  # from a complete request to the end of its response; a client that does not read is cut off
    admit: Callable[[str, Headers], None]  # raises ApiError for a path and headers that are not allowed
    max_connections: int = 0  # 0: MAX_CONNECTIONS, or as many as the process may open files for
    open: set[LimitedProtocol] = field(default_factory=set)
    waiting: dict[LimitedProtocol, None] = field(default_factory=dict)
    """Connections without a complete request, the longest waiting first; they are closed to make room for new ones."""

    def __post_init__(self) -> None:
        self.max_connections = self.max_connections or connections_for_files()

    @property
    def overfull(self) -> int:
        """Connections beyond the limit."""
        return len(self.open) - self.max_connections

    def close_longest_waiting(self) -> None:
        connection = next(iter(self.waiting))
        del self.waiting[connection]
        self.open.discard(connection)  # the event loop closes it later
        connection.transport.abort()

    def protocol(self, **uvicorn_arguments: Any) -> LimitedProtocol:
        """Create the protocol of a connection; uvicorn calls this in place of a class (`Config.http`)."""
        return LimitedProtocol(self, **uvicorn_arguments)


def connections_for_files() -> int:
    """Raise the process's limit of open files as far as needed and allowed; return the connections that fit."""
    needed = MAX_CONNECTIONS + HEALTH_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - HEALTH_CONNECTIONS - OTHER_FILES))


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, limits: HttpLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.limits = limits
        self.conn = CheckedConnection(self.check_request)
        self.state: Literal["head", "body", "work", "refused"] = "head"
        self.head = bytearray()
        self.body_left = 0  # bytes
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> bool:
        """Whether a request was accepted and its response is not complete."""
        return self.state in ("body", "work")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn writes head and body apart; with Nagle's algorithm the body would wait for the client's delayed ACK.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limits.open.add(self)
        if self.limits.overfull > 0 and self.limits.waiting:
            self.limits.close_longest_waiting()
        self.wait_for_request()
        if self.limits.overfull > HEALTH_CONNECTIONS:
            self.refuse(self.too_many())

    def wait_for_request(self) -> None:
        self.state = "head"
        self.limits.waiting[self] = None
        self.set_deadline(IDLE_SECONDS)

    def set_deadline(self, seconds: float) -> None:
        """Close the connection after this time unless another deadline is set before."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.open.discard(self)
        self.limits.waiting.pop(self, None)
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.state == "head":
            data = self.read_head(data)
        if self.state == "body":
            data = self.read_body(data)
        if self.state == "work" and data:  # a second request before the response to the first: it is never read
            self.cycle.keep_alive = False

    def read_head(self, data: bytes) -> bytes:
        """Return what follows the head, once it is complete and accepted."""
        if not self.head:
            self.set_deadline(READ_SECONDS)
            self.limits.waiting[self] = self.limits.waiting.pop(self, None)  # now the newest
        searched = max(0, len(self.head) - 3)
        self.head += data
        end = self.head.find(b"\r\n\r\n", searched)
        if (end if end >= 0 else len(self.head)) > HEAD_BYTES:
            self.refuse(ApiError(431, f"the headers are longer than {HEAD_BYTES // 2**10} KiB"))
        elif end >= 0:
            head, rest = bytes(self.head[: end + 4]), bytes(self.head[end + 4 :])
            self.head.clear()
            try:
                check_head(head)
            except ApiError as error:
                self.refuse(error)
                return b""
            self.state = "body"
            super().data_received(head)
            return rest
        return b""

    def read_body(self, data: bytes) -> bytes:
        """Pass on what belongs to the body; return the rest."""
        own, rest = data[: self.body_left], data[self.body_left :]
        self.body_left -= len(own)
        if own:
            super().data_received(own)
        if not self.body_left:
            self.state = "work"
            self.limits.waiting.pop(self, None)
            self.set_deadline(self.limits.request_seconds)
        return rest

    def _should_upgrade(self) -> bool:
        return False  # a header that asks for another protocol is ignored

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except ApiError as error:
            self.refuse(error)

    def check_request(self, request: h11.Request) -> None:
        """Check a request whose head h11 has parsed, before the application receives it."""
        path = unquote(request.target.partition(b"?")[0].decode("ascii"))
        headers = dict(request.headers)
        if path != HEALTH and self.limits.overfull > 0:
            raise self.too_many()
        self.limits.admit(path, headers)
        size = int(headers.get(b"content-length", b"0"))
        if size > self.limits.max_body:
            message = f"the body has {size:,} bytes; this server takes {self.limits.max_body:,}"
            raise ApiError(413, message, code="body_too_large")
        self.body_left = size

    def too_many(self) -> ApiError:
        return ApiError(503, f"all {self.limits.max_connections} connections are in use; try again later")

    def refuse(self, error: ApiError) -> None:
        """Send the error, and close once the client has closed its side, so that it can read it."""
        self.state = "refused"
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        reason = HTTPStatus(error.status).phrase.encode()
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self.set_deadline(LINGER_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.body_left:  # the application responded before the body was there: the rest is not read
            self.transport.abort()
        elif not self.transport.is_closing():
            self.wait_for_request()


class CheckedConnection(h11.Connection):
    """h11's state of a connection, with a check of every request; all errors are ApiError."""

    def __init__(self, check: Callable[[h11.Request], None]) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=HEAD_BYTES + 4)
        self.check = check

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            raise ApiError(400, f"not a valid HTTP/1.1 request: {error}") from None
        if isinstance(event, h11.Request):
            self.check(event)
        # uvicorn would stop reading, and so not notice that the client closes the connection; nothing is buffered here.
        return h11.NEED_DATA if event is h11.PAUSED else event


def check_head(head: bytes) -> None:
    """Accept exactly: a request line and headers, each ended by CRLF; no folding; a body only with Content-Length."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if not REQUEST_LINE.fullmatch(first):
        raise ApiError(400, f"not an HTTP/1.1 request line: {first[:80].decode('latin-1')!r}")
    seen: set[bytes] = set()
    for line in lines:
        found = HEADER_LINE.fullmatch(line)
        if not found:
            raise ApiError(400, f"not a header line: {line[:80].decode('latin-1')!r}")
        name = found[1].lower()
        if name in NOT_REPEATED & seen:
            raise ApiError(400, f"the header {name.decode()} is repeated")
        if name == b"content-length" and not found[2].isdigit():
            raise ApiError(400, f"Content-Length is not a number: {found[2][:40].decode('latin-1')!r}")
        if name == b"transfer-encoding":
            raise ApiError(411, "send the body's size as Content-Length; chunked bodies are not accepted")
        seen.add(name)
