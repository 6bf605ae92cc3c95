"""Two actors of Ray as one more layout of the test of tests/invariance: the same cases, the same comparison."""

import importlib.util

import pytest
import torch.distributed as dist

from posttrain.config.sections import ClusterConfig
from tests.invariance.test_ranks import as_rank, folders_for_all, test_ranks_do_not_matter
from tests.ray.nodes import SECONDS

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)

__all__ = ["test_ranks_do_not_matter"]


class Rank:
    """One of the actors."""

    def work(self, folders):
        return as_rank(dist.get_rank(), folders, ["ray"])


@pytest.fixture(scope="module")
def made(nodes, tmp_path_factory):
    """Tiny models, and the results of both actors; all cases in one start."""
    from posttrain.cluster.placement import Placement

    place = tmp_path_factory.mktemp("ranks")
    folders = folders_for_all(place)
    places = Placement(
        ClusterConfig(devices=2, ray_address=nodes.address, worker_timeout_seconds=float(SECONDS)), place / "logs"
    )
    try:
        answers = places.pool("actor").start("actor", Rank).call("work", folders)
    finally:
        places.close()
    return {"folders": folders, "answers": {"ray": answers}}
