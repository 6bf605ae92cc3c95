"""The commands of docs/ray.md run, and leave nothing behind."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.nodes import ROOT, SECONDS, gone, rows_of

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)


def posttrain(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posttrain", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where the cluster is remembered
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    posttrain("cluster", "down")


def test_the_page(workplace):
    shown = "".join(re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs/ray.md").read_text(), re.MULTILINE | re.DOTALL))
    commands = [shlex.split(line) for line in shown.replace("\\\n", " ").splitlines()]
    assert [words[:2] for words in commands] == [
        ["pip", "install"],
        ["posttrain", "cluster"],
        ["posttrain", "sft"],
        ["posttrain", "grpo"],
        ["posttrain", "cluster"],
    ]
    for words in commands[1:]:
        done = posttrain(*words[1:])
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}{done.stdout}"
        if words[1:3] == ["cluster", "up"]:
            again = posttrain(*words[1:])
            assert again.returncode == 2 and "a cluster is running at 127.0.0.2:" in again.stderr
            file = Path("cache/posttrain/ray-cluster.json")
            assert file.stat().st_mode & 0o077 == 0, "other users can read the token"
            ours = processes_of(re.search(r'"folder": "(.+?)"', file.read_text())[1])
            assert len(ours) > 4
    assert [row["step"] for row in rows_of(Path("runs/on-ray"))] == [1, 2, 3, 4, 5]
    assert [row["sync_bytes"] > 0 for row in rows_of(Path("runs/apart"))] == [True, True]
    logs = [Path(f"runs/apart/logs/worker-{number}.log").read_text() for number in range(3)]
    assert all("Ray node" in log and " at 127.0.0." in log for log in logs)
    assert all(map(gone, ours)) and not file.exists()
    assert "no cluster" in posttrain("cluster", "down").stdout


def processes_of(folder):
    """Those whose command names it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if folder.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_start_that_fails_leaves_nothing(workplace):
    done = posttrain("cluster", "up", "--memory", "1")  # less than Ray takes
    assert done.returncode == 1 and "Ray did not start" in done.stderr
    assert not Path("cache/posttrain/ray-cluster.json").exists()
    shutil.rmtree("cache", ignore_errors=True)
    assert posttrain("cluster", "sideways").returncode == 2
