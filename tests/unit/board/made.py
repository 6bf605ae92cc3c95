"""Run directories as runs write them, a board on a port of this machine, and requests to it."""

import asyncio
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

from posttrain.board.app import BoardOptions, BoardServer
from posttrain.board.files import RunFolder
from posttrain.board.rollouts import RolloutReader
from posttrain.board.runs import BoardRun
from posttrain.core.jsonl import as_line
from posttrain.endpoint.http import listen

PATIENCE = 120  # seconds; only a hang is ever that slow
CONFIG = "verb: grpo\nmodel:\n  path: pico\ntrain:\n  max_steps: {steps}\n  learning_rate: {rate}\n"
TIME = "2026-01-02 03:04:05"


def row(step=1, group=0, reward=1.0, text="four", asked="2+2=", tokens=4, **more):
    """A row of rollouts.jsonl, in the order in which its fields are written."""
    numbers = list(range(1, tokens + 3))
    found = {
        "step": step,
        "group": group,
        "origin": "questions.jsonl:1",
        "version": 0,
        "newest": 0,
        "finish": "stop",
        "reward": reward,
        "baseline": 0.0,
        "rewards": {"right": reward},
        "failure": "",
        "seconds": 0.1,
        "turns": 1,
        "prompt": [{"role": "user", "content": asked}],
        "text": text,
        "columns": {},
        "prompt_length": 2,
        "tokens": numbers,
        "mask": "00" + "1" * tokens,
        "logprobs": [-0.5] * tokens,
        "advantages": [0.25] * tokens,
    }
    return found | more


def make_run(path, *, steps=3, rows=(), log="", rate=0.1, metrics=None):
    """A run directory; `rows` are those of rollouts.jsonl."""
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(steps=steps, rate=rate))
    metrics = metrics or [
        {"step": n, "loss": 1 / n, "reward": n / steps, "tokens": 10.0, "time/train": 2.0, "time/generate": 1.0}
        for n in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    (path / "logs/run.log").write_text(log or f"{TIME} info: done: {steps} steps; loss 0.3. Run directory: x\n")
    if rows:
        (path / "rollouts.jsonl").write_bytes(lines(rows))
    return path


def lines(rows):
    return "".join(map(as_line, rows)).encode("utf-8", "backslashreplace")


def run_of(path):
    return BoardRun(RunFolder(path.resolve()), path.name)


def reader_of(path, cache=None):
    return RolloutReader(run_of(path), cache)


@contextmanager
def board(*names, **options):
    """A board in a thread; it has `ask`, which returns status, headers and body."""
    asked = BoardOptions(runs=tuple(map(str, names)), port=0, **options)
    asked.check()
    server = BoardServer(asked)
    listening, stopping = threading.Event(), threading.Event()

    async def run():
        (opened,) = listen("127.0.0.1", 0)
        server.address = f"http://127.0.0.1:{opened.getsockname()[1]}"
        serving = asyncio.ensure_future(server.http.serve([opened]))
        listening.set()
        await asyncio.get_running_loop().run_in_executor(None, stopping.wait)
        server.http.should_exit = True
        server.http.cut_off()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert listening.wait(PATIENCE)
    try:
        yield server
    finally:
        stopping.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def ask(server, path, body=None, **headers):
    """Status, headers and body of a response."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.address + path, data, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def get(server, name, **values):
    """The JSON of a response that must succeed."""
    status, _, body = ask(server, f"/api/{name}?{urllib.parse.urlencode(values)}")
    assert status == 200, (name, status, body)
    return json.loads(body)
