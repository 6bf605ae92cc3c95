"""HTTP/1.1 over asyncio, as much as an API needs: keep-alive, limits, streams, and word of clients that hang up.

Strict: what is not understood is refused, never guessed. Bodies need a Content-Length.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

HEAD_LIMIT = 32 * 2**10  # bytes of a request before its body
MOST_CONNECTIONS = 1024
READ_SECONDS = 30.0  # for a request to arrive, once it has begun
IDLE_SECONDS = 75.0  # between two requests of a connection
LINGER_SECONDS = 10.0  # a client still sends what is refused, and must be able to read why
REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (\S+) HTTP/1\.([01])")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(slots=True, frozen=True)
class Call:
    """What a client asks."""

    method: str
    path: str
    headers: dict[str, str]  # names in small letters
    body: bytes = b""
    keep_alive: bool = True
    chunks: bool = True  # HTTP/1.0 knows none


@dataclass(slots=True)
class Reply:
    """What it is told: a body, or events as they come."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    events: AsyncGenerator[bytes, None] | None = None


class Refusal(Exception):  # noqa: N818  an answer, not a fault
    """Becomes the answer, in the shape that OpenAI's clients read."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def reply(self) -> Reply:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Reply(json.dumps(self.body()).encode(), self.status, headers=headers)


Handler = Callable[[Call], Awaitable[Reply]]
"""Cancelled when the client hangs up."""


class HttpServer:
    """Connections, and the requests on each one after another."""

    def __init__(self, admit: Callable[[Call], None], handler: Handler, *, max_body: int, seconds: float) -> None:
        """`admit` refuses strangers, before their body is read.

        `seconds`: for one request; who does not read the answer is cut off then.
        """
        self.admit, self.handler, self.max_body, self.seconds = admit, handler, max_body, seconds
        self.server: asyncio.Server | None = None
        self.busy: dict[asyncio.Task[Any], bool] = {}  # connections, and whether a request is under way
        self.closing = False

    async def listen(self, host: str, port: int) -> int:
        """The port, which is another if 0 was asked for."""
        self.server = await asyncio.start_server(self.connection, host, port, limit=HEAD_LIMIT, backlog=1024)
        return int(self.server.sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        """No new connection, and no new request on those that are there."""
        assert self.server is not None
        self.closing = True
        self.server.close()
        for task, busy in self.busy.items():
            if not busy:
                task.cancel()

    async def idle(self) -> None:
        """Until no request is under way."""
        while self.busy:
            await asyncio.wait(set(self.busy))

    async def cut_off(self) -> int:
        """End what is still under way; how much that was."""
        late = list(self.busy)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=5)
        return len(late)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if self.closing or len(self.busy) >= MOST_CONNECTIONS:
                refusal = Refusal(503, f"there are {len(self.busy)} connections already; try again later")
                await write(writer, refusal.reply(), last=True)
                return
            self.busy[task] = False
            while await self.request(reader, writer, task) and not self.closing:
                self.busy[task] = False
        except (ConnectionError, TimeoutError, asyncio.CancelledError):  # it hung up, is asleep, or we are closing
            writer.transport.abort()
        finally:
            self.busy.pop(task, None)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: asyncio.Task[Any]
    ) -> bool:
        """Read and answer one; whether there can be another."""
        try:
            call = await self.read(reader, writer, connection)
        except Refusal as refusal:
            await write(writer, refusal.reply(), last=True)
            await linger(reader, writer)
            return False
        if call is None:
            return False
        last = self.closing or not call.keep_alive
        answer = asyncio.ensure_future(self.answer(call, writer, last))
        silence = asyncio.ensure_future(reader.read(1))  # nothing comes, unless the client hangs up
        try:
            await asyncio.wait((answer, silence), return_when=asyncio.FIRST_COMPLETED)
            out_of_turn = silence.done()
            if not answer.done() and not silence.result():
                return False
            await answer
        finally:
            for task in (answer, silence):
                task.cancel()
            await asyncio.gather(answer, silence, return_exceptions=True)
        return not last and not out_of_turn

    async def read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: asyncio.Task[Any]
    ) -> Call | None:
        """None when the client has gone."""
        async with asyncio.timeout(IDLE_SECONDS):
            first = await reader.read(1)
        if not first:
            return None
        self.busy[connection] = True
        async with asyncio.timeout(READ_SECONDS):
            try:
                head = first + await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return None
            except asyncio.LimitOverrunError:
                raise Refusal(431, f"the headers are longer than {HEAD_LIMIT // 2**10} KiB") from None
            call, size = parse(head)
            self.admit(call)
            if size > self.max_body:
                raise Refusal(
                    413, f"the body has {size:,} bytes; this server takes {self.max_body:,}", code="body_too_large"
                )
            if not size:
                return call
            if call.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            try:
                body = await reader.readexactly(size)
            except asyncio.IncompleteReadError:
                return None
        return Call(call.method, call.path, call.headers, body, call.keep_alive, call.chunks)

    async def answer(self, call: Call, writer: asyncio.StreamWriter, last: bool) -> None:
        begun = False
        try:
            async with asyncio.timeout(self.seconds):
                try:
                    reply = await self.handler(call)
                except Refusal as refusal:
                    reply = refusal.reply()
                begun = True
                await write(writer, reply, last=last, chunks=call.chunks)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            raise
        except Exception:  # a fault of ours: the client is told so, and the log has the rest
            if not begun:
                sorry = Refusal(500, "something went wrong in the server; its log says what")
                await write(writer, sorry.reply(), last=True)
            raise


def parse(head: bytes) -> tuple[Call, int]:
    """The request without its body, and the body's size."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = REQUEST_LINE.fullmatch(first)
    if not found:
        raise Refusal(400, f"this is no HTTP/1.1 request: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header = HEADER.fullmatch(line)
        if not header:
            raise Refusal(400, f"this is no header: {line[:80]!r}")
        name = header[1].lower()
        if name in headers and name in ("content-length", "host", "authorization", "content-type"):
            raise Refusal(400, f"the header {name} is there twice")
        headers[name] = header[2]
    if "transfer-encoding" in headers:
        raise Refusal(411, "send the body's size as Content-Length, not in chunks")
    size = headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,15}", size):
        raise Refusal(400, f"Content-Length {size[:40]!r} is no size")
    modern = found[3] == "1"
    keep_alive = modern and "close" not in headers.get("connection", "").lower()
    path = unquote(found[2].partition("?")[0])
    return Call(found[1], path, headers, keep_alive=keep_alive, chunks=modern), int(size)


async def write(writer: asyncio.StreamWriter, reply: Reply, *, last: bool, chunks: bool = True) -> None:
    stream = reply.events is not None
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", f"Content-Type: {reply.content_type}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    if not stream:
        lines.append(f"Content-Length: {len(reply.body)}")
    elif chunks:
        lines.append("Transfer-Encoding: chunked")
    lines.append(f"Connection: {'close' if last else 'keep-alive'}")
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + reply.body)
    if reply.events is not None:
        async with contextlib.aclosing(reply.events) as events:  # a client that has gone ends them, too
            async for event in events:
                writer.write(b"%x\r\n%b\r\n" % (len(event), event) if chunks else event)
                await writer.drain()
        if chunks:
            writer.write(b"0\r\n\r\n")
    await writer.drain()


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what is still on its way: a connection that is closed before takes our answer with it."""
    if writer.can_write_eof():
        writer.write_eof()
    async with asyncio.timeout(LINGER_SECONDS):
        while await reader.read(2**16):
            pass
