"""Devices and collectives of accelerators that are not CUDA: what torch says of them decides."""

import pytest
import torch

from posttrain.core import accelerators


@pytest.fixture
def xpu(monkeypatch):
    """Two Intel devices, as torch would report them."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)


def test_another_vendors_devices_are_chosen_by_its_variable_and_use_its_collectives(xpu, monkeypatch):
    assert accelerators.visible_devices() == ["0", "1"]
    assert accelerators.choose_device("1") == {"ZE_AFFINITY_MASK": "1"} and accelerators.choose_device(None) == {}
    assert accelerators.collective_backend() == "cpu:gloo,xpu:xccl"
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3,5")
    assert accelerators.visible_devices() == ["3", "5"]


def test_devices_that_processes_cannot_divide_are_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert accelerators.visible_devices() is None and accelerators.collective_backend() == "gloo"
    assert not accelerators.is_in_use()
