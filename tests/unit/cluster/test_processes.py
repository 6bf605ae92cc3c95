"""Worker processes: calls, groups, logs; a failure names the worker and leaves no process behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from posttrain.cluster import worker_pool
from posttrain.cluster.processes import ProcessPool, RendezvousStore, threads_per_worker
from posttrain.cluster.worker_host import RoleRef
from posttrain.core.errors import UsageError, WorkerError
from tests.unit.cluster.things import Late, Thing, Together

GENEROUS = 120.0


@contextmanager
def pool(folder, size=1, seconds=GENEROUS, **options):
    store = RendezvousStore(GENEROUS)
    limits = {"timeout_seconds": seconds, "current_step": lambda: 12}
    found = ProcessPool(size, folder / "logs", rendezvous=store, **limits, **options)
    try:
        yield found
    finally:
        found.close()


def light(folder, size, seconds=GENEROUS):
    """A pool of several processes that form no group."""
    from posttrain.cluster.processes import start_process
    from posttrain.cluster.worker_pool import Channel, WorkerPool

    channels = []
    for rank in range(size):
        log = folder / f"worker-{rank}.log"
        process, connection = start_process(log, None, 0)
        channels.append(Channel(rank, rank, connection, log, process, "here"))
    return WorkerPool(channels, seconds, lambda: 12)


def gone(pid, seconds=5.0):
    """Whether a process ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def light_pool(tmp_path_factory):
    found = light(tmp_path_factory.mktemp("pool"), 2)
    yield found
    found.close()


def test_results_come_by_rank(light_pool):
    workers = light_pool.start("actor", Thing, "a")
    results = workers.call("identify", 1, key=[2])
    assert [result[0] for result in results] == ["a", "a"]
    assert [result[2:] for result in results] == [((1,), {"key": [2]})] * 2
    pids = [result[1] for result in results]
    assert len({*pids, os.getpid()}) == 3
    assert workers.scatter("echo", ["first", "second"]) == ["first", "second"]
    assert workers.call("all_seen") == [["first"], ["second"]]


def test_roles_share_the_processes_and_may_hold_each_other(light_pool):
    first = light_pool.start("first", Thing, "f")
    second = light_pool.start("second", Thing, "s", RoleRef("first"))
    assert second.call("name_of_other") == ["f", "f"]
    assert first.call("identify")[0][1] == second.call("identify")[0][1]


def test_generating_ahead_runs_beside_other_calls(light_pool):
    workers = light_pool.start("beside", Thing, "b")
    found = []
    thread = threading.Thread(target=lambda: found.append(workers.call("generate")))
    thread.start()
    while not any(call.method == "generate" for call in light_pool.calls.values()):
        time.sleep(0.001)
    workers.call("release")
    thread.join(GENEROUS)
    assert found == [[True, True]]


def test_a_call_may_be_left_under_way(light_pool):
    workers = light_pool.start("later", Thing, "l")
    one, two = workers.submit("echo", 1), workers.submit("echo", 2)
    assert two.result() == [2, 2] and one.result() == [1, 1]


def test_closed_workers_are_removed(tmp_path):
    light_pool = light(tmp_path, 1)
    workers = light_pool.start("short", Thing, "s")
    workers.close()
    with pytest.raises(WorkerError, match="KeyError: 'short'"):
        workers.call("identify")


def test_pools_load_in_parallel(tmp_path):
    (first, second) = pools = [light(tmp_path, 1) for _ in range(2)]
    workers = [first.start("a", Late, tmp_path, "one", "two"), second.start("b", Late, tmp_path, "two", "one")]
    assert [one.call("here") for one in workers] == [[True], [True]]
    for light_pool in pools:
        light_pool.close()


def test_an_object_that_cannot_be_built_is_reported_by_the_first_call(tmp_path):
    light_pool = light(tmp_path, 2)
    first, second = light_pool.start("critic", Thing), light_pool.start("beside", Thing, "b")
    for workers in (second, first):  # the first to fail is named, whoever is asked
        with pytest.raises(WorkerError, match=r"critic worker, rank [01] .* failed: TypeError: .*missing 1 required"):
            workers.call("identify")


def test_a_pool_can_be_closed_while_it_loads(tmp_path):
    light_pool = light(tmp_path, 1)
    light_pool.start("a", Late, tmp_path, "one", "never")
    while not (tmp_path / "one").exists():
        time.sleep(0.01)
    light_pool.close()
    assert gone(light_pool.channels[0].process.pid)
    with pytest.raises(WorkerError, match="start of a was cancelled"):
        light_pool.wait_until_set_up()


def test_a_group_and_its_logs(tmp_path):
    with pool(tmp_path, 2, threads=1, first_number=3) as found:
        workers = found.start("actor", Together)
        assert workers.scatter("total", [1, 10]) == [(11, 0, 1), (11, 1, 1)]
        pids = [channel.process.pid for channel in found.channels]
        with pytest.raises(WorkerError) as lost:  # the other one is told by the group that its peer is gone
            workers.call("lose", 1)
        assert str(lost.value).startswith("actor worker, rank 1 (on ")
        assert "step 12" in str(lost.value) and "SIGKILL" in str(lost.value)
        assert str(tmp_path / "logs/worker-4.log") in str(lost.value)
        assert lost.value.lost
    assert [
        f"worker process {pid}" in (tmp_path / f"logs/worker-{3 + i}.log").read_text() for i, pid in enumerate(pids)
    ]
    assert "most recent call first" in (tmp_path / "logs/worker-3.log").read_text()
    assert all(map(gone, pids))


def test_the_first_to_fail_is_named_with_its_error_and_its_log(tmp_path):
    light_pool = light(tmp_path, 3)
    workers = light_pool.start("critic", Thing, "c")
    with pytest.raises(
        WorkerError, match=r"critic worker, rank 2 \(on here, step 12\) failed: ValueError: this is w"
    ) as e:
        workers.scatter("fail", [0, 1, 2], mine=2)
    assert str(tmp_path / "worker-2.log") in str(e.value) and not e.value.lost
    assert "and more of it" in (tmp_path / "worker-2.log").read_text()
    assert "in fail" in (tmp_path / "worker-0.log").read_text(), "where the others waited"
    with pytest.raises(WorkerError, match="rank 2"):  # it stays so
        workers.call("identify")


def test_errors_for_users_are_raised_unchanged(tmp_path):
    workers = light(tmp_path, 2).start("actor", Thing, "a")
    with pytest.raises(UsageError, match=r"^model.path: no such thing$"):
        workers.call("refuse")


@pytest.fixture
def quick_heartbeats(monkeypatch):
    """Heartbeats are every 5 s, so that no worker is silent for this long unless it is stopped."""
    monkeypatch.setattr(worker_pool, "SILENCE_SECONDS", 8.0)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_stopped_worker_is_found_by_its_heartbeat_long_before_the_deadline(tmp_path, quick_heartbeats, elsewhere):
    light_pool = light(tmp_path, 2, seconds=1800.0)
    workers = light_pool.start("actor", Thing, "a")
    assert workers.call("identify")
    if elsewhere:  # as on another machine: nothing is known of its process
        process, light_pool.channels[1].process = light_pool.channels[1].process, None
    with pytest.raises(WorkerError, match=r"rank 1 .* sent no heartbeat for 8 s: it is stopped") as stopped:
        workers.scatter("stop", [False, True])
    assert stopped.value.lost
    if elsewhere:
        process.kill()


def test_a_long_computation_is_not_a_stop(tmp_path, quick_heartbeats):
    light_pool = light(tmp_path, 1, seconds=1800.0)
    workers = light_pool.start("actor", Thing, "a")
    assert workers.call("hold_lock", 11.0) == [11.0]
    light_pool.close()


def test_a_lost_worker_has_the_name_of_the_role_whose_devices_it_is_on(tmp_path):
    light_pool = light(tmp_path, 1)
    light_pool.owner = "critic"
    critic, reference = light_pool.start("critic", Thing, "c"), light_pool.start("reference", Thing, "r")
    assert critic.call("identify")
    light_pool.channels[0].process.kill()
    with pytest.raises(WorkerError, match=r"^critic worker, rank 0 .*SIGKILL.*, found by identify of reference"):
        reference.call("identify")


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        ("kill", ([False, True],), "rank 1 .*was killed by SIGKILL, by hand or by the kernel"),
        (
            "stop",
            ([False, True],),
            r"rank 1 .*stop within 1 s \(cluster.worker_timeout_seconds\) and does not answer a ping.*either: 0",
        ),
        ("stop", ([False, False],), "rank 0 .*; it is still running. Ranks that did not finish either: 1"),
        ("quit", (), "rank 0 .*ended with exit code 7"),
        ("unsendable", (), "TypeError: cannot pickle"),
    ],
)
def test_a_lost_worker_ends_the_pool_in_time_with_all_its_processes(tmp_path, method, args, words):
    light_pool = light(tmp_path, 2)
    workers = light_pool.start("actor", Thing, "a")
    children = workers.call("child")
    pids = [channel.process.pid for channel in light_pool.channels]
    light_pool.timeout_seconds = 1.0 if method == "stop" else GENEROUS
    with pytest.raises(WorkerError, match=words):
        workers.scatter(method, *args) if args else workers.call(method)
    assert all(map(gone, pids + children))


def test_a_call_that_the_worker_cannot_read(tmp_path):
    workers = light(tmp_path, 1).start("actor", Thing, "a")
    with pytest.raises(WorkerError, match=r"the call cannot be unpickled in this process: .*not a number"):
        workers.call("echo", Unmade())


class Unmade:
    def __reduce__(self):
        return int, ("not a number",)


CONTROLLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.cluster.test_processes import light
from tests.unit.cluster.things import Thing

class Mine(Thing):
    "A class of the script itself."

if __name__ == "__main__":
    from posttrain.cluster.processes import form_group
    from posttrain.cluster.worker_host import GroupSpec
    light_pool = light(Path({folder!r}), 2)
    form_group(light_pool, [GroupSpec(0, 1, ("", 0), "", 1.0)] * 2)
    workers = light_pool.start("actor", Mine, "mine")
    print(*[result[1] for result in workers.call("identify")], flush=True)
    workers.call("fail", -1)
"""


def controller(tmp_path):
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(root=str(Path(__file__).parents[3]), folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True, text=True)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2, "classes of the script did not travel"
    return process, pids


def test_workers_end_with_a_controller_that_is_killed(tmp_path):
    process, pids = controller(tmp_path)
    process.kill()
    process.wait()
    assert all(map(gone, pids))


def test_ctrl_c_is_for_the_controller_alone(tmp_path):
    process, pids = controller(tmp_path)
    for pid in pids:  # a terminal and Slurm send it to all
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.1)
    assert all(Path(f"/proc/{pid}").is_dir() for pid in pids)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(GENEROUS) != 0
    assert all(map(gone, pids))


def test_nothing_listens_beyond_this_machine():
    store = RendezvousStore(5.0)
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {
        entry[1] for entry in listening if entry[3] == "0A" and int(entry[1].split(":")[1], 16) == store.address[1]
    }
    assert ports == {f"0100007F:{store.address[1]:04X}"}
    assert len({store.new_group_name() for _ in range(3)}) == 3


def test_each_worker_gets_its_share_of_the_cores_and_its_device(tmp_path):
    cores = len(os.sched_getaffinity(0))
    assert threads_per_worker(1) == cores and threads_per_worker(10 * cores) == 1
    with pool(tmp_path, 1, devices=["5"]) as found:
        assert found.start("a", Thing, "a").call("environment", "CUDA_VISIBLE_DEVICES") == ["5"]
