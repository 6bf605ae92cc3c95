"""Processes that torchrun or srun started: rank 0 controls, all of them work."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cluster import launched
from posttrain.config.checks import launched_size
from posttrain.core.errors import UsageError

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path
from posttrain.cluster import launched
from tests.unit.cluster.things import Together

class Mine(Together):
    "A class of the script itself."

def once():
    if launched.is_launched_worker():
        launched.serve_controller()
        return
    processes = launched.LaunchedProcesses.detect()
    pool = processes.pool(range(3), Path("logs"), 120.0, lambda: 0)
    workers = pool.start("actor", Mine)
    print([result[:2] for result in workers.scatter("total", [1, 10, 100])], flush=True)
    pool.close()
    processes.close()

if __name__ == "__main__":
    once()
    once()  # one run after the other in the same processes
"""


def finish(processes):
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        yield output


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_all_ranks_work_and_end_with_the_controller(tmp_path, launcher):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", free_port()]
        started = [subprocess.Popen(command, env=environment, **options)]
    else:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SLURM_STEP_NUM_TASKS": "3"}
        ranks = [environment | place | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
        started = [subprocess.Popen(command, env=rank, **options) for rank in ranks]
    output = "".join(finish(started))
    assert output.count("[(111, 0), (111, 1), (111, 2)]") == 2, output
    assert (tmp_path / "logs/worker-2.log").exists()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_who_was_launched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert launched_size() == 1 and launched.LaunchedProcesses.detect() is None and not launched.is_launched_worker()
    monkeypatch.setenv("SLURM_PROCID", "0")  # the batch script itself has it too
    assert launched_size() == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert launched_size() == 4 and launched.LaunchedProcesses.detect().size == 4 and not launched.is_launched_worker()
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert launched.is_launched_worker()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="4 processes were started together, but MASTER_ADDR"):
        launched.address()
