"""Measure the server under load: throughput against offline generation, fairness, errors and memory.

The server is a separate process, `posttrain serve` as users start it; the clients are in this process and use plain
HTTP, so that they cost little. Every completion has full length, offline too, so that both do the same work.
BENCH_MODEL is a model directory (default: pico), BENCH_SECONDS the duration of the streams (60).
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.inference.model import InferenceModel

CLIENTS, STREAMS = 32, 64
TOKENS = 128  # per completion
TURNS = 4  # requests per client, one after another
ROUNDS = 2
SECONDS = float(os.environ.get("BENCH_SECONDS", "60"))
MODEL = os.environ.get("BENCH_MODEL", "pico")
QUESTION = "What is {} plus {}? Say it in words, and then explain how you know."


def measure_serve() -> None:
    served = InferenceModel(ModelConfig(path=MODEL), DataConfig())
    with Server("--slots", str(STREAMS)) as server:
        ways = {
            "offline": (lambda: offline(served), time.process_time),
            "whole answers": (lambda: asyncio.run(online(server.port, False)), server.cpu_seconds),
            "streams": (lambda: asyncio.run(online(server.port, True)), server.cpu_seconds),
        }
        speed, work = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):  # in turns, so that a busy machine is busy for all
            for name, (measure, clock) in ways.items():
                before = clock()
                speed[name] = max(speed[name], measure())
                work[name] = min(work[name], (clock() - before) / (CLIENTS * TURNS * TOKENS) * 1000)
        for name in ways:
            ratio = "" if name == "offline" else f", {speed[name] / speed['offline']:.2f} of offline"
            print(f"serve {MODEL}, {CLIENTS} at once, {name}: {speed[name]:,.0f} tokens/s{ratio}; ", end="")
            print(f"processor seconds for 1,000 tokens: {work[name]:.3f}", flush=True)
        endure(server)


def offline(served: InferenceModel) -> float:
    """Return tokens per second of offline generation for the same prompts, as many at a time as there are clients."""
    work = [
        GenerationRequest(
            prompt=served.encode([{"role": "user", "content": question(client, turn)}]).tokens, seed=client
        )
        for turn in range(TURNS)
        for client in range(CLIENTS)
    ]
    served.engine.most = CLIENTS
    started = time.perf_counter()
    samples = served.generate(work, Sampling(max_tokens=TOKENS))
    assert all(sample.mask.sum() == TOKENS for sample in samples)
    return len(work) * TOKENS / (time.perf_counter() - started)


async def online(port: int, stream: bool) -> float:
    async def client(number: int) -> int:
        async with Connection(port) as connection:
            return sum([await connection.ask(question(number, turn), stream) for turn in range(TURNS)])

    started = time.perf_counter()
    tokens = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    seconds = time.perf_counter() - started
    assert sum(tokens) == CLIENTS * TURNS * TOKENS
    return sum(tokens) / seconds


def endure(server: "Server") -> None:
    """Run many streams for a long time."""
    memory: list[float] = []

    async def client(number: int, end: float) -> int:
        tokens = turn = 0
        async with Connection(server.port) as connection:
            while time.monotonic() < end:
                tokens += await connection.ask(question(number, turn), True)
                turn += 1
        return tokens

    async def watch(end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(SECONDS / 12)
            memory.append(server.memory())

    async def everybody() -> list[int]:
        end = time.monotonic() + SECONDS
        watching = asyncio.ensure_future(watch(end))
        tokens = await asyncio.gather(*(client(number, end) for number in range(STREAMS)))
        await watching
        return tokens

    tokens = np.array(asyncio.run(everybody()))
    print(f"serve {MODEL}, {STREAMS} streams for {SECONDS:g} s: no error, {tokens.sum():,} tokens", flush=True)
    print(f"  tokens of a stream: least {tokens.min():,}, most {tokens.max():,} ({tokens.min() / tokens.max():.2f})")
    shown = ", ".join(f"{size:.0f}" for size in memory)
    print(f"  memory of the server over time, in MiB: {shown}", flush=True)


def question(client: int, turn: int) -> str:
    return QUESTION.format(client, turn)


class Connection:
    """A client that keeps its connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    async def ask(self, text: str, stream: bool) -> int:
        """Return the number of tokens of the completion; raise an error for any other response."""
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "stream": stream}
        asked |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        body = json.dumps(asked).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        self.writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 200"), head
        if stream:
            data = b""
            while size := int(await self.reader.readline(), 16):
                data = (data + await self.reader.readexactly(size + 2))[-2000:]
            await self.reader.readline()
            assert data.endswith(b"data: [DONE]\n\n\r\n"), data
        else:
            found = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            assert found is not None
            data = await self.reader.readexactly(int(found[1]))
        counts = re.findall(rb'"completion_tokens": ?(\d+)', data)
        return int(counts[-1])


class Server:
    """`posttrain serve` in a separate process."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "posttrain", "serve", MODEL, "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def __enter__(self) -> "Server":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found is not None, line
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads, which is more reliable than wall time on a busy machine."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Return its current memory in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
