"""Workers that are forked behave as those that are started: environment, exit codes, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cluster import fork_server as forks
from posttrain.cluster.processes import ProcessPool, RendezvousStore, start_importing, worker_threads
from posttrain.core.errors import WorkerError
from tests.unit.cluster.things import Thing

SECONDS = 300.0  # generous: the machine may be busy
MODULES = ("torch", "tests.unit.cluster.things")
EARLY = (*MODULES, "json")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", "of this test")
    monkeypatch.chdir(tmp_path)
    store = RendezvousStore(SECONDS)
    made = ProcessPool(2, tmp_path, timeout_seconds=SECONDS, rendezvous=store, preload=MODULES)
    yield made
    made.close()
    assert store.store  # lives as long as the pool


def test_forked_workers_have_environment_folder_log_and_session_of_their_own(pool, tmp_path):
    things = pool.start("thing", Thing, "name")
    processes = [process for _, process, _, _ in things.call("identify")]
    assert [channel.process.pid for channel in pool.channels] == processes
    assert things.call("environment", "MARK") == ["of this test"] * 2
    for number, process in enumerate(processes):
        assert Path(f"/proc/{process}/cwd").readlink() == tmp_path
        assert os.getsid(process) == process
        assert f"--- worker process {process}" in (tmp_path / f"worker-{number}.log").read_text()
    assert len(list(Path(f"/proc/{processes[0]}/task").iterdir())) > 1, "its threads are its own"
    pool.close()
    assert [channel.process.poll() for channel in pool.channels] == [0, 0]


def test_a_forked_worker_that_is_killed_is_named(pool):
    things = pool.start("thing", Thing, "name")
    with pytest.raises(WorkerError, match=r"rank 1 .*was killed by SIGKILL") as lost:
        things.scatter("kill", [False, True])
    assert lost.value.lost


def test_when_the_server_is_killed_its_workers_are_lost_and_the_next_ones_have_a_new_one(pool, tmp_path):
    things = pool.start("thing", Thing, "name")
    things.call("identify")
    (server,) = [found for found in forks._servers.values() if not found.lost and found.modules == MODULES]
    os.kill(server.server.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        things.scatter("stop", [False, False])
    again = ProcessPool(1, tmp_path, timeout_seconds=SECONDS, rendezvous=RendezvousStore(SECONDS), preload=MODULES)
    assert again.start("thing", Thing, "new").call("echo", 3) == [3]
    again.close()


def test_workers_are_forked_from_the_server_that_began_to_import_before(tmp_path):
    """Otherwise the libraries would be imported once more, when the first worker is needed."""
    start_importing(2, EARLY)
    (early,) = [found for found in forks._servers.values() if found.modules == EARLY]
    store = RendezvousStore(SECONDS)
    pool = ProcessPool(1, tmp_path, timeout_seconds=SECONDS, rendezvous=store, threads=worker_threads(2), preload=EARLY)
    try:
        (pid,) = [process for _, process, _, _ in pool.start("thing", Thing, "name").call("identify")]
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[1]) == early.server.pid
    finally:
        pool.close()


def test_a_server_that_is_still_importing_is_not_waited_for(tmp_path, monkeypatch):
    """A command that fails at once, for wrong options, ends at once."""
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    server = forks.ForkServer(("endless_import",), os.environ)
    server.close()
    assert server.server.returncode == -signal.SIGKILL


def test_a_run_lets_them_import_first(tmp_path, monkeypatch):
    """Before the trainer imports what a run needs: both take seconds."""
    code = (
        "import sys\nfrom posttrain.cli import main, train\nfrom posttrain.cluster import processes\n"
        "def started(workers, modules):\n"
        "    print(workers, *modules, 'posttrain.train.launch' in sys.modules, flush=True)\n"
        "    raise SystemExit(3)\n"
        "processes.start_importing = started\n"
        "main.main(['sft', '--model', 'pico', '--data', 'rows.jsonl', *sys.argv[1:]])\n"
    )
    (tmp_path / "rows.jsonl").write_text("{}\n")
    command = [sys.executable, "-c", code, "--cluster.devices", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "2 posttrain.train.rollout_workers False\n", done.stderr


def test_nothing_is_left_when_the_controller_is_killed(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from posttrain.cluster.processes import ProcessPool, RendezvousStore\n"
        "from tests.unit.cluster.things import Thing\n"
        "pool = ProcessPool(1, Path(sys.argv[1]), timeout_seconds=300, rendezvous=RendezvousStore(300),\n"
        f"                   preload={MODULES!r})\n"
        "pool.start('thing', Thing, 'name').call('identify')\n"
        "from posttrain.cluster import fork_server as forks\n"
        "(server,) = forks._servers.values()\n"
        "print(server.server.pid, pool.channels[0].process.pid, flush=True)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as controller:
        processes = controller.stdout.readline().split()
        controller.kill()
    assert len(processes) == 2
    until = time.monotonic() + SECONDS
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < until, "something is left"
        time.sleep(0.05)
