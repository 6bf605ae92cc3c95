"""Serves a local model as a judge: `posttrain serve` in a process of its own, on loopback, with a token."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path

from posttrain.core.errors import UsageError
from posttrain.sandbox.process import REAPER

READY = re.compile(r"serving .* on (http://\S+?):? ")
SHOWN_LINES = 20  # of the output of a server that does not start
SLACK_TOKENS = 4096  # for the question, besides max_tokens


class JudgeServer:
    """A running server; `stop` ends it. It also ends with this process, however that ends."""

    def __init__(self, model: str, max_tokens: int) -> None:
        """`model`: what `posttrain serve` takes; a UsageError with its output if it does not start."""
        self.identity = model_identity(model)
        self.token = secrets.token_hex(16)
        folder = tempfile.mkdtemp(prefix="posttrain-judge-")  # the reaper removes it
        lifeline, self.lifeline = os.pipe()
        place = str(Path(model).absolute()) if Path(model).exists() else model
        limits = ["--max_tokens", str(max_tokens), "--max_length", str(max_tokens + SLACK_TOKENS)]
        serve = [sys.executable, "-P", "-u", "-m", "posttrain", "serve", place, "--port", "0", "--name", model, *limits]
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH", "")) if path)
        null = os.open(os.devnull, os.O_RDONLY)  # the reaper closes the pipes that it is given
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(REAPER), str(lifeline), str(null), *serve],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lifeline, null),
            cwd=folder,
            env=os.environ | {"POSTTRAIN_TOKEN": self.token, "PYTHONPATH": paths},
            start_new_session=True,
            text=True,
            errors="replace",
        )
        os.close(lifeline)
        os.close(null)
        self.output: deque[str] = deque(maxlen=SHOWN_LINES)
        self.address = self._wait()
        threading.Thread(target=self._drain, name="judge output", daemon=True).start()

    def _wait(self) -> str:
        """Return the address once the model is loaded."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self.output.append(line)
                if found := READY.search(line):
                    return f"{found[1].rstrip('/')}/v1"
        except BaseException:
            self.stop()
            raise
        self.stop()
        raise UsageError(f"the judge's model cannot be served:\n{''.join(self.output).strip()}")

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(self.process.stdout)

    def stop(self) -> None:
        os.close(self.lifeline)  # the reaper then ends the server
        self.process.wait()


def model_identity(model: str) -> str:
    """Return a text that changes when files of a model change: replies are kept under it."""
    folder = Path(model)
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.is_file():
            status = file.stat()
            digest.update(f"{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return f"{folder.absolute() if folder.exists() else model} {digest.hexdigest()}"
