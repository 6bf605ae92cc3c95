"""`posttrain board [RUNS]`: shows runs on a local web page until Ctrl-C."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.config.tools import ToolArgs, positional, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError


@dataclass(kw_only=True)
class BoardArgs(ToolArgs):
    """Options of `posttrain board`."""

    verb: ClassVar[str] = "board"
    about: ClassVar[str] = TOOLS["board"]
    example: ClassVar[str] = "posttrain board runs --port 8400"

    runs: tuple[str, ...] = positional(("runs",), required=False)
    """Run directories, or directories that hold some."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than this machine's own needs a token."""
    port: int = 8400
    """Port to listen on; 0: any free one."""
    token: str = ""
    """Token that the page must send; it is safer in the environment variable POSTTRAIN_TOKEN."""
    allow_control: bool = False
    """Let the page start, stop and resume runs; needs a token, and without one a random one is used and printed."""
    cache_dir: str = ""
    """Directory for indexes of recorded completions; empty: ~/.cache/posttrain/board."""


ARGS = (BoardArgs,)


def run(args: list[str]) -> int:
    """Serve the page; 0 after SIGTERM, 130 after Ctrl-C."""
    options = read_tool(BoardArgs(), args)
    token = options.token or os.environ.get("POSTTRAIN_TOKEN", "")
    if options.allow_control and not token:
        import secrets

        token = secrets.token_urlsafe(24)
    if options.runs == BoardArgs().runs and not Path("runs").is_dir():
        raise UsageError("there is no directory runs here. Name run directories: posttrain board RUN ...")
    import asyncio
    from urllib.parse import quote

    from posttrain.board.app import BoardOptions, BoardServer
    from posttrain.board.rollout_index import default_cache

    board_options = BoardOptions(
        runs=options.runs,
        host=options.host,
        port=options.port,
        token=token,
        allow_control=options.allow_control,
        cache=Path(options.cache_dir).expanduser() if options.cache_dir else default_cache(),
    )
    board_options.check()
    server = BoardServer(board_options)
    count = len(server.board.list.find())

    def ready(address: str) -> None:
        # After the number sign, so that the browser does not send it and no log records it.
        secret = f"/#token={quote(token, safe='')}" if token else "/"
        can = "reads, starts, stops and resumes" if options.allow_control else "only reads"
        print(f"board of {count} run{'s' * (count != 1)} on {address}{secret} ({can}). Ctrl-C stops it", flush=True)

    return asyncio.run(server.run(ready))
