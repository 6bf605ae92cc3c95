"""MCP servers as tools, with the `mcp` package: a command that speaks over its pipes, or an address.

The library is asynchronous: an event loop in a thread holds the connection. If the server is lost, the call fails, and
the next one connects again. A server may serve all conversations, or each conversation have a connection of its own:
over pipes a process, over HTTP a session.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

from posttrain.core.errors import PosttrainError, UsageError

PREFIX, SESSION_PREFIX = "mcp:", "mcp-session:"  # of a value of rollout.tools: one for all; one per conversation


class ServerLostError(PosttrainError):
    """The server ended, or does not speak MCP any longer."""


class RefusedError(PosttrainError):
    """The server answered that it does not do what it was asked for."""


class McpServer:
    """One server, connected when it is first needed."""

    def __init__(self, spec: str, folder: str, seconds: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`spec`: a command line, or http://...; `folder`: where a command runs; `seconds`: limit of a request.

        `loop`: of another server, whose thread this one then shares.
        """
        try:
            import mcp
        except ModuleNotFoundError:
            raise UsageError(f"{PREFIX}{spec} needs the mcp package: pip install posttrain[mcp]") from None
        self.spec, self.folder, self.seconds, self.library = spec, folder, seconds, mcp
        self.target: Any = spec
        if not spec.startswith(("http://", "https://")):
            command, *arguments = shlex.split(spec)
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            environment = {**os.environ, "PATH": path}
            self.target = mcp.StdioServerParameters(command=command, args=arguments, env=environment, cwd=folder)
        self.loop = loop or asyncio.new_event_loop()
        if loop is None:
            threading.Thread(target=self.loop.run_forever, name=f"mcp {spec}", daemon=True).start()
        self.connection: tuple[Any, asyncio.Event, Any] | None = None  # client, its end, the task that holds it

    def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools as chat templates read them."""
        page = self.ask(lambda client: client.list_tools(), self.seconds)
        found = list(page.tools)
        while cursor := page.next_cursor:
            page = self.ask(lambda client, cursor=cursor: client.list_tools(cursor=cursor), self.seconds)
            found += page.tools
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in found
        ]

    def call(self, name: str, arguments: dict[str, Any], seconds: float) -> str:
        """Return the text of a result; what the server reports as an error begins with `error: `."""
        try:
            result = self.ask(lambda client: client.call_tool(name, arguments), seconds)
        except RefusedError as error:
            return f"error: {error}"
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return ("error: " if result.is_error else "") + "\n".join(parts)

    def again(self) -> McpServer:
        """Return another connection to this server, which is made with its first call."""
        return McpServer(self.spec, self.folder, self.seconds, self.loop)

    def close(self) -> None:
        """End the connection, and the process of a server over pipes."""
        self.loop.call_soon_threadsafe(self.lost, EOFError("closed"))

    def ask(self, request: Any, seconds: float) -> Any:
        """Return the answer to a request; a server that has none within this time is ended, and started anew later."""
        future = asyncio.run_coroutine_threadsafe(self.answer(request), self.loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            self.loop.call_soon_threadsafe(self.lost, error)
            raise ServerLostError(
                f"{PREFIX}{self.spec}: no answer within {seconds:.1f} s; raise reward.timeout_seconds if it needs more"
            ) from None

    async def answer(self, request: Any) -> Any:
        """Send a request; in the event loop's thread."""
        mcp = self.library
        try:
            if self.connection is None:
                self.connection = await self.connect()
            return await request(self.connection[0])
        except mcp.MCPError as error:
            code = error.error.code
            if code not in (mcp.types.CONNECTION_CLOSED, mcp.types.REQUEST_TIMEOUT):
                raise RefusedError(str(error)) from None
            raise self.lost(error) from None
        except (OSError, EOFError, RuntimeError, ExceptionGroup) as error:
            raise self.lost(error) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("anyio", "httpx", "httpx2", "httpcore2"):
                raise self.lost(error) from None
            raise

    def lost(self, error: BaseException) -> ServerLostError:
        if self.connection is not None:
            self.connection[1].set()
            self.connection = None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return ServerLostError(f"{PREFIX}{self.spec}: the server is lost: {type(error).__name__}: {error}")

    async def connect(self) -> tuple[Any, asyncio.Event, Any]:
        """Connect, in a task that also closes the connection: the library wants one task for both."""
        ready: asyncio.Future[Any] = self.loop.create_future()
        end = asyncio.Event()

        async def hold() -> None:
            try:
                async with self.library.Client(self.target) as client:
                    ready.set_result(client)
                    await end.wait()
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
                elif not isinstance(error, Exception):
                    raise
                # otherwise the connection is closed already, and a call has failed with the reason

        task = asyncio.ensure_future(hold())
        try:
            return await ready, end, task
        except asyncio.CancelledError:
            task.cancel()  # ends a server that has not answered in time
            raise
