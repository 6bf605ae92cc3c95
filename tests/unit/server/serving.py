"""A server in a thread of its own, as `posttrain serve` makes it, and plain sockets to send requests to it."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.endpoint.http import listen
from posttrain.endpoint.metrics import ServerMetrics
from posttrain.engines.base import LOCAL
from posttrain.inference.model import InferenceModel
from posttrain.server import app, completions
from posttrain.server.app import ApiServer, ServeOptions
from posttrain.server.completions import CompletionService

PATIENCE = 120  # seconds; only a hang is ever that slow


def pico(engine=LOCAL):
    return InferenceModel(ModelConfig(path="pico"), DataConfig(max_length=2**20, on_overlong="error"), engine=engine)


@contextmanager
def serving(model, *, slots=8, **options):
    """A running server with `port` and `service`."""
    asked = ServeOptions(port=0, name="pico", **options)
    asked.check()
    model.engine.max_slots = slots
    metrics = ServerMetrics(app.METRICS | completions.METRICS)
    service = CompletionService(
        model,
        name=asked.name,
        max_tokens=asked.max_tokens,
        max_length=asked.max_length,
        queue=asked.queue,
        seconds=asked.timeout_seconds,
        metrics=metrics,
    )
    with running(service, asked, metrics) as found:
        yield found


@contextmanager
def running(service, options, metrics):
    found = ApiServer(service, options, metrics)
    listening, stopping = threading.Event(), threading.Event()

    async def run():
        engine = service.start()
        (opened,) = listen("127.0.0.1", 0)
        found.port = opened.getsockname()[1]
        serving = asyncio.ensure_future(found.http.serve([opened]))
        listening.set()
        await asyncio.get_running_loop().run_in_executor(None, stopping.wait)
        found.http.should_exit = True
        found.http.cut_off()
        await serving
        service.close()
        await asyncio.wait((engine,))
        found.engine_error = engine.exception()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert listening.wait(PATIENCE)
    try:
        yield found
    finally:
        stopping.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


class RawConnection:
    """A connection on which bytes are sent and read as they are."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.file.close()
        self.socket.close()

    def send(self, method, path, body=b"", **headers):
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        usual = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(body)}
        headers = usual | {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return self

    def head(self):
        """(status, headers) of the next response."""
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers

    def response(self):
        """(status, headers, body); a body in chunks is put together."""
        status, headers = self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(iter(self.chunk, b""))
        elif "content-length" in headers:
            body = self.file.read(int(headers["content-length"]))
        else:
            body = self.file.read()
        return status, headers, body

    def chunk(self):
        data = self.file.read(int(self.file.readline(), 16))
        self.file.readline()
        return data


def ask(port, method, path, body=b"", **headers):
    """One request on a connection of its own; (status, headers, body), JSON read."""
    with RawConnection(port) as connection:
        status, found, raw = connection.send(method, path, body, **headers).response()
    return status, found, json.loads(raw) if found["content-type"] == "application/json" else raw.decode()


def metrics_of(port):
    """Name with labels -> number."""
    _, _, page = ask(port, "GET", "/metrics")
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def wait_for(happened):
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
