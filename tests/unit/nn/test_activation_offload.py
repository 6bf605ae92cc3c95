"""The inputs of checkpointed layers leave the device between the passes, and numbers stay what they are."""

from __future__ import annotations

import pytest
import torch

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import ForwardRequest, Sample
from posttrain.data.packing import collate
from posttrain.models import memory
from posttrain.nn.activation_offload import ActivationOffload, SavedInput
from posttrain.nn.forward import ModelRunner, forward
from posttrain.train.learner import Learner
from tests.tiny import tiny_folder
from tests.unit.nn.test_sharing import rows

REQUEST = ForwardRequest(names=frozenset({"logprobs"}))
CONFIGS = {
    "llama": {},
    "gemma2": {},
    "adapters with dropout": {"lora_rank": 4, "lora_dropout": 0.5},
    "gpt2": {},  # its model, not its layers, calls the checkpointing
}


def gradients(runner: ModelRunner, samples: list[Sample]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    runner.model.zero_grad()
    runner.model.train()
    device = next(runner.model.parameters()).device
    forward(runner, collate(samples, device), REQUEST).logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in runner.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_same_bit_for_bit(name, tmp_path, monkeypatch):
    family = name if name in ("gemma2", "gpt2") else "llama"
    options = {"gradient_checkpointing": True, **CONFIGS[name]}
    learner = Learner(ModelConfig(path=str(tiny_folder(family, tmp_path)), **options), TrainConfig(), layout=None)
    plain = gradients(learner.runner, rows())
    left: list[SavedInput] = []
    monkeypatch.setattr(SavedInput, "leave", lambda saved, leave=SavedInput.leave: (left.append(saved), leave(saved)))
    ActivationOffload(torch.device("cpu")).install(learner.model)
    for _ in range(2):
        found = gradients(learner.runner, rows())
        assert found.keys() == plain.keys() and all(torch.equal(found[key], plain[key]) for key in plain)
    layers = learner.model.config.num_hidden_layers
    assert len(left) in (2 * (layers - 1), 2 * (layers - 1) + 1)  # all but the last layer's


def test_what_has_left_is_not_on_the_device():
    offload = ActivationOffload(torch.device("cpu"))
    kept = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(torch.utils.weak.WeakTensorKeyDictionary({hidden: None}))
        return hidden.sin().sin()

    hidden = torch.ones(4, requires_grad=True) * 1.0
    for place in range(4):
        hidden = offload.run_layer(place, layer, hidden)
    assert [len(each) for each in kept] == [0, 0, 0, 1]
    hidden.sum().backward()


def test_the_plan_counts_what_stays():
    """With L layers, inputs of L - 1 are in host memory, and those of two at most on the device at the same time."""
    config = ModelConfig(path="pico", gradient_checkpointing=True)
    sample = rows([(400, (400,))])
    found = []
    for offload in (False, True):
        model = memory.empty_model(config, "token", torch.bfloat16)
        found.append(memory.pass_memory(model, sample, REQUEST, offload=offload))
    plain, offloaded = found
    layers, size = model.config.num_hidden_layers, 2 * 800 * model.config.hidden_size
    assert offloaded.host == layers * size and plain.host == 0
    assert plain.activations - offloaded.activations == (layers - 1) * size
    assert offloaded.peak <= plain.peak - (layers - 2) * size
    assert offloaded.forward_only == plain.forward_only


@pytest.mark.gpu
def test_on_a_gpu_memory_falls_and_gradients_stay(tmp_path):
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = str(tiny_folder("llama", tmp_path, **sizes))
    learner = Learner(ModelConfig(path=folder, gradient_checkpointing=True), TrainConfig(), layout=None)
    samples = rows([(4000, (4000,))] * 2)
    found, peaks = [], []
    for offloaded in (False, True):
        if offloaded:
            ActivationOffload(learner.device).install(learner.model)
        gradients(learner.runner, samples)
        torch.cuda.reset_peak_memory_stats()
        found.append(gradients(learner.runner, samples))
        peaks.append(torch.cuda.max_memory_allocated())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-2, atol=1e-3 * float(value.abs().max()))
    assert peaks[1] < peaks[0]
