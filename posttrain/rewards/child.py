"""The process in which reward functions run: `python -m posttrain.rewards.child REQUESTS REPLIES`, two pipes.

It reads a JSON line at a time and answers with JSON lines; what functions print goes elsewhere. Whatever happens in a
function is caught here if Python can catch it; what it cannot (a hang, a crash), the parent sees and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards import signatures
from posttrain.rewards.remote import RemoteError, RemoteTimeoutError, Service
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import allow_seconds, verifiers

REASON_LIMIT = 3000  # characters
FIRST_DESCRIPTOR = 200  # our pipes are moved up here, away from numbers that people try
HERE = str(Path(__file__).parents[1])

Outcome = dict[str, Any]


class Catch:
    """Catches everything, also SystemExit and KeyboardInterrupt: a reward function must not end its process."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Catch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return True

    @property
    def text(self) -> str:
        """The traceback, without our own frames; the end is kept if it is long."""
        error = self.error
        assert error is not None
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(HERE):
            trace = trace.tb_next
        text = type(error).__name__
        with Catch():  # an error's own __str__ may fail
            text = "".join(traceback.format_exception(type(error), error, trace, limit=-20)).strip()
        return text if len(text) <= REASON_LIMIT else "... " + text[-REASON_LIMIT:]


@dataclasses.dataclass(slots=True, frozen=True)
class Asked:
    """A loaded reward: what it returns for completions, raw; a batch function takes several at once."""

    call: Callable[[Sequence[Completion]], Any]
    batch: bool
    adapted: signatures.Adapted | None = None


def load(spec: dict[str, str], seconds: float) -> Asked:
    """UsageError says what the user must mend."""
    place = spec["place"]
    if spec["kind"] == "verifier":
        judge = verifiers()[place].judge
        return Asked(lambda completions: judge(completions[0]), batch=False)
    if spec["kind"] == "remote":
        return Asked(Service(place, seconds * 0.9).ask, batch=True)  # so that it can say itself that it took too long
    module = import_place(place)
    if not hasattr(module, spec["function"]):
        there = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UsageError(f"{place} has no function {spec['function']!r}; it has {', '.join(there) or 'none'}")
    adapted = signatures.adapt(getattr(module, spec["function"]), spec["function"])
    return Asked(adapted.call, adapted.form.batch, adapted)


def import_place(place: str) -> Any:
    """The module of a file that ends in .py, or of a dotted name."""
    return _import_file(place) if place.endswith(".py") else _import_module(place)


def _import_file(place: str) -> Any:
    name = f"reward_{Path(place).stem}"
    if (found := sys.modules.get(name)) is not None and found.__file__ == place:
        return found  # a second function of the same file
    folder = str(Path(place).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # files beside it can be imported
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name, None)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


def _import_module(place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {place!r}: {error}") from error
        raise


def ok(result: Any, seconds: float) -> Outcome:
    """One element of what a function returned; an error if it is no finite number."""
    with Catch() as caught:
        value, reason = signatures.one_result(result)
        return {"kind": "ok", "value": value, "reason": reason[-REASON_LIMIT:], "seconds": seconds}
    return failure(caught, seconds)


def failure(caught: Catch, seconds: float) -> Outcome:
    error = caught.error
    late = isinstance(error, RemoteTimeoutError)
    own = isinstance(error, RemoteError | UsageError)
    text = str(error) if own else caught.text
    return {"kind": "timeout" if late else "error", "value": None, "reason": text, "seconds": seconds}


class Servant:
    """Answers requests until the parent is gone."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = fcntl.fcntl(requests, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        self.replies = fcntl.fcntl(replies, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        os.close(requests)
        os.close(replies)
        self.pid = os.getpid()
        self.folder = Path.cwd()
        self.asked: dict[str, Asked] = {}
        self.seconds = 10.0
        self.number = 0

    def run(self) -> None:
        threading.Thread(target=self._watch_parent, daemon=True).start()
        lines = os.fdopen(self.requests, "rb", closefd=False)
        while line := lines.readline():
            self._come_home()
            message = json.loads(line)
            self.number = message["number"]
            if message["do"] == "limits":
                self._limit(message)
            elif message["do"] == "load":
                self._load(message)
            else:
                self._answer(message)
            self._reply({"done": True})
        self._end()

    def _watch_parent(self) -> None:
        """Without a parent nobody would end a function that hangs."""
        poll = select.poll()
        poll.register(self.requests, 0)  # only the hang-up
        poll.poll()
        self._end()

    def _end(self) -> None:
        """The parent is gone; it would have cleaned up."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    def _come_home(self) -> None:
        """A function may have gone elsewhere, or removed the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(self.folder)

    def _reply(self, outcome: Outcome) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a function forked and returned twice
        rest = json.dumps({"number": self.number, **outcome}).encode() + b"\n"
        while rest:
            rest = rest[os.write(self.replies, rest) :]

    def _limit(self, message: dict[str, Any]) -> None:
        self.seconds = message["seconds"]
        allow_seconds(self.seconds)
        sys.path += [path for path in message["paths"] if path not in sys.path]
        for name, value in message["limits"].items():
            with contextlib.suppress(ValueError, OSError, AttributeError):  # not every system has each of them
                kind = getattr(resource, name)
                hard = resource.getrlimit(kind)[1]
                limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(kind, (limit, limit))

    def _load(self, message: dict[str, Any]) -> None:
        spec = message["spec"]
        with Catch() as caught:
            asked = self.asked.get(spec["text"]) or load(spec, self.seconds)
            missing = asked.adapted.missing(message["columns"]) if asked.adapted and message["columns"] else []
            if missing:
                there = ", ".join(message["columns"])
                raise UsageError(f"it asks for {', '.join(missing)}, which the data does not have; there is {there}")
            self.asked[spec["text"]] = asked
            self._reply({"batch": asked.batch})
        if caught.error is not None:
            wrong_use = isinstance(caught.error, UsageError)
            self._reply({"fault": str(caught.error) if wrong_use else caught.text})

    def _answer(self, message: dict[str, Any]) -> None:
        asked = self.asked[message["spec"]]
        completions = [Completion(**fields) for fields in message["completions"]]
        if asked.batch and len(completions) > 1 and not message["singly"]:
            outcomes = self._batch(asked, completions)
            if outcomes is not None:
                for at, outcome in enumerate(outcomes):
                    self._reply({"at": at, **outcome})
                return
        for at, completion in enumerate(completions):
            outcome = self._one(asked, completion)
            self._reply({"at": at, **outcome})
            if outcome["kind"] == "error" and "MemoryError" in outcome["reason"]:
                self._reply({"retire": True})  # who knows how much is still held: the next gets a fresh process
                return

    def _batch(self, asked: Asked, completions: list[Completion]) -> list[Outcome] | None:
        """None: it failed, and asking for one at a time may show for which."""
        start = self._start_clock()
        with Catch() as caught:
            results = signatures.many_results(asked.call(completions), len(completions))
            seconds = (time.perf_counter() - start) / len(completions)
            return [ok(result, seconds) for result in results]
        if isinstance(caught.error, RemoteError):
            return [failure(caught, time.perf_counter() - start)] * len(completions)
        self._reply({"singly": True})  # the parent's clock starts again
        return None

    def _one(self, asked: Asked, completion: Completion) -> Outcome:
        start = self._start_clock()
        with Catch() as caught:
            result = asked.call([completion])
            if asked.batch:
                (result,) = signatures.many_results(result, 1)
            return ok(result, time.perf_counter() - start)
        return failure(caught, time.perf_counter() - start)

    def _start_clock(self) -> float:
        """Processor time is bounded, too: it ends a loop in C that outlives a killed parent."""
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        limit = int(used + 8 * self.seconds + 60)
        resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        return time.perf_counter()


if __name__ == "__main__":
    Servant(int(sys.argv[1]), int(sys.argv[2])).run()
