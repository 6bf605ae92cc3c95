"""Host memory is the machine's or the container's, by cgroup v1 or v2."""

import os

import pytest

from posttrain.core import host


@pytest.mark.parametrize("version", [0, 1], ids=["v2", "v1"])
@pytest.mark.parametrize(
    ("limit", "smaller"), [("4294967296\n", True), ("max\n", False), ("9223372036854771712\n", False)]
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, version, limit, smaller):
    files = [tmp_path / "v2", tmp_path / "v1"]
    files[version].write_text(limit)
    monkeypatch.setattr(host, "CGROUP_LIMITS", files)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.host_memory() == (min(machine, 2**32) if smaller else machine)


def test_host_memory_is_plausible():
    assert 2**28 < host.host_memory() < 2**50
