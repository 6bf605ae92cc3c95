"""A pool of Ray actors behaves like a pool of processes."""

import importlib
import importlib.util
import os
import re
import signal
import time

import pytest

from posttrain.config.sections import ClusterConfig
from posttrain.core.errors import UsageError, WorkerError
from tests.ray.nodes import SECONDS, gone
from tests.unit.cluster.things import Thing

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)


@pytest.fixture
def places(both, tmp_path):
    """Pools of two workers."""
    from posttrain.cluster.placement import Placement

    made = []

    def make(**options):
        config = ClusterConfig(devices=2, ray_address=both.address, worker_timeout_seconds=float(SECONDS), **options)
        made.append(Placement(config, tmp_path / "logs"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_calls_reach_the_objects_by_rank(places, tmp_path):
    found, handler = places(), signal.getsignal(signal.SIGTERM)
    workers = found.pool("actor").start("actor", Thing, "a")
    results = workers.scatter("identify", ["x", "y"], word=1)
    assert [(name, args, kwargs) for name, _, args, kwargs in results] == [
        ("a", ("x",), {"word": 1}),
        ("a", ("y",), {"word": 1}),
    ]
    processes = [process for _, process, *_ in results]
    assert len({*processes, os.getpid()}) == 3
    for number, process in enumerate(processes):
        log = (tmp_path / f"logs/worker-{number}.log").read_text()
        assert f"--- worker process {process} on " in log and "Ray node" in log
    assert signal.getsignal(signal.SIGTERM) == handler, "Ray's own handler would end the run unsaved"
    found.close()
    assert all(map(gone, processes))


def test_what_a_worker_raises(places):
    workers = places().pool("actor").start("actor", Thing, "a")
    with pytest.raises(WorkerError, match=r"actor worker, rank [01] \(on .*Ray node \w{8} at .*AttributeError"):
        workers.call("nothing")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_one_that_is_lost(places, how):
    found = places()
    found.step = 7
    pool = found.pool("actor")
    workers = pool.start("actor", Thing, "a")
    processes = [process for _, process, *_ in workers.call("identify")]
    os.kill(processes[1], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    pool.timeout_seconds = float(SECONDS) if how == "kill" else 5.0
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"actor worker, rank 1 \(on .*Ray node \w{8} at .*, step 7\)") as raised:
        workers.call("identify")
    assert raised.value.lost
    assert time.monotonic() - began < SECONDS / 2, "noticed at once, or when the deadline is over"
    words = "crashed, or was killed by hand" if how == "kill" else "did not finish identify within 5 s"
    assert words in str(raised.value), raised.value
    assert all(map(gone, processes)), "one that is stopped is ended too"


def test_more_than_there_is(both, tmp_path):
    import ray

    from posttrain.cluster.placement import Placement

    places = Placement(ClusterConfig(devices=7, ray_address=both.address, worker_timeout_seconds=2.0), tmp_path)
    # Where an earlier test lost a node there may soon be more, and it waits.
    said = r"cluster.devices is 7, but the Ray cluster has 6 CPUs on 2 nodes|could not place 7 .* 6 of 6 CPUs are free"
    with pytest.raises((UsageError, WorkerError), match=said) as raised:
        places.pool("actor")
    assert raised.type is WorkerError or not ray.is_initialized()
    places.close()
    assert not ray.is_initialized()


def test_places_that_others_have(places):
    one, other = places(), places()
    one.pool("actor")
    other.cluster.devices = 6
    other.ray_cluster().timeout_seconds = 2.0
    with pytest.raises(
        WorkerError, match=r"could not place 6 workers with 1 CPU each within 2 s.* \d of 6 CPUs are free"
    ):
        other.pool("actor")


def test_tensor_ranks_share_a_node(both, tmp_path):
    """Four fit as three and one; pairs that talk all the time are not torn apart."""
    from posttrain.cluster.placement import Placement

    found = Placement(
        ClusterConfig(
            devices=4, ray_address=both.address, tensor_parallel_size=2, worker_timeout_seconds=float(SECONDS)
        ),
        tmp_path,
    )
    try:
        found.pool("actor").start("actor", Thing, "a").call("identify")
        logs = [(tmp_path / f"worker-{number}.log").read_text() for number in range(4)]
    finally:
        found.close()
    nodes = [re.search(r"Ray node (\w+) at", log)[1] for log in logs]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_more_tensor_ranks_than_a_node_has_places(both, tmp_path, caplog):
    from posttrain.cluster.placement import Placement

    found = Placement(
        ClusterConfig(
            devices=4, ray_address=both.address, tensor_parallel_size=4, worker_timeout_seconds=float(SECONDS)
        ),
        tmp_path,
    )
    try:
        assert len(found.pool("actor").start("actor", Thing, "a").call("identify")) == 4
    finally:
        found.close()
    assert "no Ray node has 4 CPUs, so tensor- or context-parallel workers communicate across nodes" in caplog.text


def test_another_version(both, tmp_path, monkeypatch):
    import ray

    from posttrain.cluster.placement import Placement

    monkeypatch.setattr(ray, "__version__", "2.1.0")
    places = Placement(ClusterConfig(devices=2, ray_address=both.address), tmp_path)
    with pytest.raises(UsageError, match=r"versions differ. The cluster was started with: Ray: .* Ray: 2\.1\.0 Python"):
        places.pool("actor")
    assert not ray.is_initialized()


def test_a_node_where_the_package_is_missing(places, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class WorkerActor:\n    def serve(self, *args):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("posttrain.cluster.ray.WorkerActor", importlib.import_module("only_here").WorkerActor)
    (tmp_path / "only_here.py").unlink()
    said = r"new worker, rank [01] .* did not start: ModuleNotFoundError: No module named 'only_here'. All nodes need"
    with pytest.raises(WorkerError, match=said):
        places().pool("actor")


def test_two_ways_to_start_workers(monkeypatch):
    from posttrain.cli.train import read

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="torchrun or srun started 2 processes"):
        read("sft", ["--model.path", "pico", "--data.train", "rows.jsonl", "--cluster.ray", "auto"])


@pytest.mark.parametrize(
    ("address", "words"),
    [("ray://127.0.0.1:10001", "Run the command on a node of the cluster"), ("nonsense", "no Ray cluster answers")],
)
def test_no_cluster_there(address, words, tmp_path):
    from posttrain.cluster.placement import Placement

    with pytest.raises(UsageError, match=words):
        Placement(ClusterConfig(devices=2, ray_address=address), tmp_path).pool("actor")
