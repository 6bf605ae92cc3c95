"""Ray nodes, and runs on them that can be watched and disturbed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600  # generous: the machine may be busy
STORE = 80 * 2**20  # bytes of a node's object store


class Nodes:
    """Two Ray nodes; the second one can be lost, and come back."""

    def __init__(self, places):
        self.places = places

    def __enter__(self):
        # Short: Ray makes sockets in it, whose names have a limited length.
        self.folder = tempfile.mkdtemp(prefix="ptray-test-")
        self.before = dict(os.environ)
        os.environ |= {"RAY_TMPDIR": self.folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
        os.environ |= {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=self.options() | {"include_dashboard": False})
        self.address, self.second = self.cluster.address, None
        self.bring_back()
        return self

    def __exit__(self, *_):
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.environ.clear()
        os.environ |= self.before

    def options(self):
        return {"num_cpus": self.places, "object_store_memory": STORE}

    def bring_back(self):
        if self.second is None:
            self.second = self.cluster.add_node(**self.options())

    def lose(self):
        """The second node at once, as if its plug was pulled; the beginning of its id."""
        lost, self.second = self.second, None
        self.cluster.remove_node(lost, allow_graceful=False)
        return lost.node_id[:8]


class Run:
    """`posttrain ...` in a process of its own."""

    def __init__(self, folder, *args):
        self.folder = folder
        self.output = folder.with_suffix(".out")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.output.open("wb") as file:
            command = [sys.executable, "-m", "posttrain", *map(str, args), "--out", str(folder), "--quiet"]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def said(self):
        return " ".join(self.output.read_text().split())

    def wait(self):
        """Its exit code."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()

    def until(self, what, why):
        end = time.monotonic() + SECONDS
        while not (found := what()):
            assert time.monotonic() < end and self.process.poll() is None, f"{why}: {self.said()}"
            time.sleep(0.05)
        return found

    def until_step(self, step):
        return self.until(lambda: self.steps() >= step, f"step {step}")

    def steps(self):
        return max((row["step"] for row in rows_of(self.folder)), default=0)

    def worker(self, number):
        """(process, node) of the worker that writes this log now."""
        log = (self.folder / f"logs/worker-{number}.log").read_text()
        return re.findall(r"--- worker process (\d+) on .*?, Ray node (\w+) at", log)[-1]


def rows_of(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def agree(folder, other, names=("loss", "grad_norm"), tolerance=1e-5):
    """Every step is there once, with the same numbers."""
    found, expected = rows_of(folder), rows_of(other)
    assert expected and [row["step"] for row in found] == [row["step"] for row in expected]
    for row, like in zip(found, expected, strict=True):
        for name in names:
            assert row[name] == pytest.approx(like[name], abs=tolerance, rel=tolerance), f"{name}, step {row['step']}"


def gone(process):
    """Whether a process has ended; one that was killed may take a moment."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
