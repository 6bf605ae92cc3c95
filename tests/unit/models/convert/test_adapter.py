"""Adapters merged on the way, against the adapter's own forward pass."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.errors import CheckpointError
from posttrain.models.convert.megatron import Layout
from tests.unit.models.convert.models import converted

peft = pytest.importorskip("peft")

TOKENS = torch.arange(1, 20)[None] * 37 % 101
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
}


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def adapted(folder, name, out, **options):
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM", **options
    )
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(out)
    return logits(model), logits(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_merged_weights_compute_what_the_adapter_does(name, rslora, tiny, tmp_path):
    expected, without = adapted(tiny(name), name, tmp_path / "lora", use_rslora=rslora)
    assert (expected - without).abs().max() > 0.1
    converted(tiny(name), tmp_path / "core", Layout("mcore", tp=2, pp=2), lora=tmp_path / "lora")
    converted(tmp_path / "core", tmp_path / "hf", Layout(), "mcore")
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) - expected).abs().max() < 1e-4
    # the same from the other side: merged while a Megatron checkpoint is read
    converted(tiny(name), tmp_path / "plain", Layout("mcore", tp=2))
    converted(tmp_path / "plain", tmp_path / "hf2", Layout(), "mcore", lora=tmp_path / "lora")
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf2")) - expected).abs().max() < 1e-4


def test_adapters_of_another_model_are_refused(tiny, tmp_path):
    adapted(tiny("phi3"), "phi3", tmp_path / "lora")
    with pytest.raises(CheckpointError, match="belongs to no matrix"):
        converted(tiny("llama"), tmp_path / "core", Layout("mcore"), lora=tmp_path / "lora")
