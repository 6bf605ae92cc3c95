"""A Ray cluster of two nodes on this machine, for all tests of this folder."""

import importlib.util

import pytest

from tests.ray.nodes import Nodes


@pytest.fixture(scope="session")
def nodes(tmp_path_factory):
    """Three places on each node."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here")
    with Nodes(places=3) as found:
        yield found


@pytest.fixture
def both(nodes):
    """The same; the second node is there, whatever the test before did to it."""
    nodes.bring_back()
    return nodes
