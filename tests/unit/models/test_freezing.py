"""Frozen weights: which ones, that they do not change, and that the others have the gradients of a whole model."""

import pytest
import torch

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest
from posttrain.data.packing import collate
from posttrain.models.loading import load_model, trainable_parameters
from posttrain.nn import layers
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.kernels import reference
from posttrain.nn.optimizer import Optimizer
from tests.tiny import tiny_folder
from tests.unit.models.test_memory import sample

CPU = torch.device("cpu")


def load(folder, head="token", **options):
    return load_model(ModelConfig(path=str(folder), **options), head, device=CPU, trainable=True, seed=0)


def trained(folder, head="token", **options):
    return set(trainable_parameters(load(folder, head, **options)))


def test_which_weights_are_trained(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    everything = trained(folder)
    first = {name for name in everything if ".layers.0." in name}
    last = {name for name in everything if ".layers.1." in name}
    assert (
        first
        and last
        and everything == first | last | {*("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    )
    assert trained(folder, freeze_layers=1) == everything - first - {"model.embed_tokens.weight"}
    assert trained(folder, trainable_layers=1) == last
    assert trained(folder, trainable_layers=-1) == first
    assert trained(folder, trainable_layers=1, trainable_parameters=("lm_head", r".*\.norm")) == last | {
        *("lm_head.weight", "model.norm.weight")
    }
    assert trained(folder, frozen_parameters=(r"model\.layers", "model.embed")) == {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert trained(folder, trainable_layers=1, frozen_parameters=(".*mlp",)) == {n for n in last if ".mlp." not in n}


def test_a_new_score_head_is_trained(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    assert "score.weight" in trained(folder, "score", trainable_layers=1)
    assert "score.weight" not in trained(folder, "score", frozen_parameters=("score",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_layers": 3}, "model.freeze_layers: LlamaForCausalLM has 2 layers, not 3"),
        ({"trainable_layers": -3}, "model.trainable_layers: LlamaForCausalLM has 2 layers, not 3"),
        ({"trainable_parameters": ("layers",)}, "model.trainable_parameters: no weight has a name that begins with"),
        ({"frozen_parameters": (".*",)}, "every weight is frozen"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        load(tiny_folder("llama", tmp_path), **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{"freeze_layers": 1}, {"trainable_layers": -1}, {"frozen_parameters": (".*k_proj", ".*norm", "lm_head")}],
)
def test_gradients_are_those_of_the_whole_model(options, dtype, fused, tmp_path):
    folder, found = tiny_folder("qwen3", tmp_path), []
    for chosen in ({}, options):
        model = load(folder, dtype=dtype, **chosen)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if fused:
            assert layers.use_fused_layers(model, reference)
        parameters = trainable_parameters(model)
        optimizer = Optimizer(parameters, TrainConfig(max_grad_norm=0))
        batch = collate([sample(8), sample(5)])
        forward(
            ModelRunner(model, False), batch, ForwardRequest(names=frozenset({"logprobs"}))
        ).logprobs.sum().backward()
        found.append({name: master.grad.clone() for name, master in optimizer.masters.items()})
        assert all(p.grad is None for name, p in model.named_parameters() if name not in parameters)
        optimizer.step(0.1)
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert changed == set(parameters)
    whole, part = found
    assert part.keys() < whole.keys()
    for name, gradient in part.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6)
