"""A step that would not fit into device memory is made smaller, and gives the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from posttrain import sft
from posttrain.algorithms import ALGORITHMS
from posttrain.config import sections as configs
from posttrain.models import memory
from posttrain.train import memory_plan, setup
from posttrain.train.memory_plan import FAST_TOKENS, StepSize

MIB = 2**20


@pytest.fixture
def examples(tmp_path: Path) -> str:
    rows = [{"prompt": "x" * 40, "completion": "y" * 80} for _ in range(64)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("mebibytes", "expected"),
    [
        (2000, StepSize(micro_batch_tokens=8192)),
        (200, StepSize(micro_batch_tokens=FAST_TOKENS)),  # smaller micro-batches cost less time
        (
            120,
            StepSize(micro_batch_tokens=4096, gradient_checkpointing=True),
        ),  # than recomputation does, but not below FAST_TOKENS
        (1, None),
    ],
)
def test_the_fastest_step_that_fits_is_chosen(mebibytes, expected, monkeypatch):
    monkeypatch.setattr(memory, "BASE_BYTES", 0)
    config = configs.with_algorithm(ALGORITHMS["sft"])
    config.model.path, config.data.max_length = "pico", 256
    algorithm = ALGORITHMS["sft"](config.algo)
    largest = memory_plan.full_micro_batch(config, algorithm)
    found = memory_plan.fitting_step(config, algorithm, torch.device("cpu"), largest, mebibytes * MIB)
    assert found == expected


def test_moments_go_to_host_memory_where_nothing_smaller_fits(monkeypatch):
    monkeypatch.setattr(memory, "BASE_BYTES", 0)
    monkeypatch.setattr(memory_plan, "STAGED_BYTES", 2**16)
    config = configs.with_algorithm(ALGORITHMS["sft"])
    config.model.path, config.data.max_length = "pico", 64
    algorithm, device = ALGORITHMS["sft"](config.algo), torch.device("cuda")
    held = memory_plan.estimate_memory(config, algorithm, device, []).model
    largest = memory_plan.full_micro_batch(config, algorithm)
    available = held.weights + held.masters + held.gradients + held.optimizer + 2**16
    found = memory_plan.fitting_step(config, algorithm, device, largest, available)
    assert found is not None and found.host_moments
    assert found.options(config)[-1] == "--cluster.offload moments"
    needed = memory_plan.estimate_memory(found.applied(config), algorithm, device, largest[:1])
    assert needed.model.optimizer == 0 and needed.with_overhead <= available
    monkeypatch.setattr(memory_plan, "host_memory", lambda: held.optimizer)
    assert memory_plan.fitting_step(config, algorithm, device, largest, available) is None


def test_inputs_of_layers_go_to_host_memory_where_recomputation_does_not_suffice(monkeypatch):
    monkeypatch.setattr(memory, "BASE_BYTES", 0)
    config = configs.with_algorithm(ALGORITHMS["sft"])
    config.model.path, config.data.max_length, config.train.micro_batch_tokens = "pico", 4096, 4096
    algorithm, device = ALGORITHMS["sft"](config.algo), torch.device("cuda")
    largest = memory_plan.full_micro_batch(config, algorithm)
    checkpointed = memory_plan.with_model(config, gradient_checkpointing=True)
    both = memory_plan.with_offload(checkpointed, "activations")
    needed = [
        memory_plan.estimate_memory(each, algorithm, device, largest).with_overhead for each in (checkpointed, both)
    ]
    available = int(sum(needed) / 2 / (1 - memory.MARGIN))
    found = memory_plan.fitting_step(config, algorithm, device, largest, available)
    assert found == StepSize(micro_batch_tokens=4096, gradient_checkpointing=True, host_activations=True)
    assert found.options(config) == ["--model.gradient_checkpointing", "--cluster.offload activations"]
    assert memory_plan.estimate_memory(found.applied(config), algorithm, device, largest).fits(available)
    assert memory_plan.fitting_step(config, algorithm, torch.device("cpu"), largest, available) is None
    monkeypatch.setattr(memory_plan, "host_memory", lambda: 2**22)  # as large as what is moved
    assert memory_plan.fitting_step(config, algorithm, device, largest, available) is None


def test_moments_in_host_memory_change_no_number(examples, tmp_path):
    options = {"train": {"max_steps": 3, "batch_size": 16}}
    plain = sft("pico", examples, output_dir=str(tmp_path / "plain"), **options)
    offloaded = sft("pico", examples, output_dir=str(tmp_path / "host"), cluster={"offload": ["moments"]}, **options)
    assert losses(offloaded.output_dir) == losses(plain.output_dir)
    weights = [dict(result.model().named_parameters()) for result in (plain, offloaded)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_makes_its_step_fit_and_computes_the_same(examples, tmp_path, monkeypatch, capsys):
    options = {"train": {"max_steps": 2, "batch_size": 32, "micro_batch_tokens": 4096}}
    whole = sft("pico", examples, output_dir=str(tmp_path / "whole"), **options).output_dir
    capsys.readouterr()
    monkeypatch.setattr(memory, "BASE_BYTES", 0)
    monkeypatch.setattr(setup, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(setup, "device_memory", lambda device: ("pretended", 30 * MIB))
    fitted = sft("pico", examples, output_dir=str(tmp_path / "fitted"), **options).output_dir
    used = yaml.safe_load((fitted / "config.yaml").read_text())
    assert used["train"]["micro_batch_tokens"] < 4096 and used["model"]["gradient_checkpointing"]
    said = "a step with micro-batches of 4,096 tokens does not fit; using --model.gradient_checkpointing --train.micro_"
    assert said in capsys.readouterr().out
    assert losses(fitted) == pytest.approx(losses(whole), rel=1e-5)
    options["train"]["fit_memory"] = False
    as_asked = sft("pico", examples, output_dir=str(tmp_path / "asked"), **options).output_dir
    assert yaml.safe_load((as_asked / "config.yaml").read_text())["train"]["micro_batch_tokens"] == 4096
