"""Adapters merged on the way, and converted themselves, against the adapter's own forward pass."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain.convert.adapter_files import AdapterBase, read_adapter, write_adapter
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.parameters import model_parameters
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import read_json
from tests.unit.convert.models import converted, core, weights

peft = pytest.importorskip("peft")

TOKENS = torch.arange(1, 20)[None] * 37 % 101
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"],
}


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def adapted(folder, name, out, auto=AutoModelForCausalLM, **options):
    base = auto.from_pretrained(folder)
    options.setdefault("task_type", "CAUSAL_LM")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2", **options)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(out)
    return logits(model), logits(auto.from_pretrained(folder))


def base_of(folder):
    config = read_json(folder / "config.json")
    return AdapterBase(config, *model_parameters(config))


def read(folder, base, kind="hf", **known):
    return read_adapter(folder, base_of(base), kind, CheckpointLayout(), known)[0]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3"])
def test_merged_weights_compute_what_the_adapter_does(name, rslora, tiny, tmp_path):
    expected, without = adapted(tiny(name), name, tmp_path / "lora", use_rslora=rslora)
    assert (expected - without).abs().max() > 0.1
    adapter = read(tmp_path / "lora", tiny(name))
    converted(tiny(name), tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2), adapter=adapter)
    converted(tmp_path / "core", tmp_path / "hf", CheckpointLayout(), "mcore")
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) - expected).abs().max() < 1e-4
    # the same from the other side: merged while a Megatron checkpoint is read
    converted(tiny(name), tmp_path / "plain", CheckpointLayout("mcore", tp=2))
    converted(tmp_path / "plain", tmp_path / "hf2", CheckpointLayout(), "mcore", adapter=adapter)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf2")) - expected).abs().max() < 1e-4


def test_merging_into_half_precision_rounds_once(tiny, tmp_path):
    adapted(tiny("llama"), "llama", tmp_path / "lora")
    adapter = read(tmp_path / "lora", tiny("llama"))
    name = "model.layers.1.self_attn.q_proj"
    pair = load_file(tmp_path / "lora/adapter_model.safetensors")
    delta = 7 / 3 * pair[f"base_model.model.{name}.lora_B.weight"] @ pair[f"base_model.model.{name}.lora_A.weight"]
    converted(tiny("llama"), tmp_path / "low", CheckpointLayout(), dtype=torch.bfloat16)
    for source, out in ((tiny("llama"), "from32"), (tmp_path / "low", "from16")):
        converted(source, tmp_path / out, CheckpointLayout(), adapter=adapter, dtype=torch.bfloat16)
        expected = (weights(source)[f"{name}.weight"].float() + delta).bfloat16()
        found = weights(tmp_path / out)[f"{name}.weight"]
        assert ((found.float() - expected.float()).abs() <= expected.float().abs() / 128).all()
        assert (found == expected).float().mean() > 0.98  # the order of sums may move a tie


@pytest.mark.parametrize(
    "layout",
    [
        CheckpointLayout("mcore", tp=2, pp=2),
        CheckpointLayout("legacy", tp=2),
        CheckpointLayout("mcore", pp=3, layers_per_stage=(1, 2, 1)),
        CheckpointLayout("mcore", pp=2, layers_per_virtual_stage=1, noop=(1, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_adapters_go_to_megatron_and_back(name, layout, tiny, tmp_path):
    if name == "deepseek_v3" and layout.format == "legacy":
        pytest.skip("legacy has no multi-latent attention")
    adapted(tiny(name), name, tmp_path / "lora")
    base = base_of(tiny(name))
    write_adapter(read(tmp_path / "lora", tiny(name)), base, tmp_path / "core", layout, None)
    write_adapter(read(tmp_path / "core", tiny(name), layout.format), base, tmp_path / "back", CheckpointLayout(), None)
    before, after = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("lora", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    old, new = (json.loads((tmp_path / place / "adapter_config.json").read_text()) for place in ("lora", "back"))
    assert (old["r"], old["lora_alpha"]) == (new["r"], new["lora_alpha"])


def test_what_comes_back_is_peft_s_own(tiny, tmp_path):
    expected, _ = adapted(tiny("llama"), "llama", tmp_path / "lora")
    base = base_of(tiny("llama"))
    write_adapter(
        read(tmp_path / "lora", tiny("llama")), base, tmp_path / "core", CheckpointLayout("mcore", tp=2), None
    )
    write_adapter(read(tmp_path / "core", tiny("llama"), "mcore"), base, tmp_path / "back", CheckpointLayout(), None)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny("llama")), tmp_path / "back")
    assert (logits(model) - expected).abs().max() < 1e-5


def test_a_rank_has_its_share_of_an_adapter(tiny, tmp_path):
    adapted(tiny("llama"), "llama", tmp_path / "lora")
    hf = load_file(tmp_path / "lora/adapter_model.safetensors")
    base = base_of(tiny("llama"))
    write_adapter(
        read(tmp_path / "lora", tiny("llama")), base, tmp_path / "core", CheckpointLayout("mcore", tp=2), None
    )
    rank = core(tmp_path / "core", single="mp_rank_01")["model"]
    # q and v have different A: both stand in the A of linear_qkv, and their rows of B beside the other's zeros
    a, b = (hf[f"base_model.model.model.layers.2.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
    other, v = (hf[f"base_model.model.model.layers.2.self_attn.v_proj.lora_{x}.weight"] for x in "AB")
    module = "decoder.layers.2.self_attention.linear_qkv"
    assert torch.equal(rank[f"{module}.lora_A.default.weight"], torch.cat([a, other]))
    zeros = torch.zeros
    expected = torch.cat(
        [torch.cat([b[8:], zeros(8, 3)], 1), zeros(4, 6), torch.cat([zeros(4, 3), v[4:]], 1)]  # queries, key, value
    )
    assert torch.equal(rank[f"{module}.lora_B.default.weight"], expected)
    # behind a row-parallel matrix A is cut and B is whole; the rank is the same everywhere
    a, b = (hf[f"base_model.model.model.layers.2.mlp.down_proj.lora_{x}.weight"] for x in "AB")
    module = "decoder.layers.2.mlp.linear_fc2"
    assert torch.equal(rank[f"{module}.lora_A.default.weight"], torch.cat([a[:, 12:], zeros(3, 12)]))
    assert torch.equal(rank[f"{module}.lora_B.default.weight"], torch.cat([b, zeros(16, 3)], 1))
    config = json.loads((tmp_path / "core/adapter_config.json").read_text())
    assert config["r"] == 6 and config["lora_alpha"] == 14  # the same alpha / r


def test_adapters_that_megatron_saved_are_merged(tiny, tmp_path):
    expected, _ = adapted(tiny("llama"), "llama", tmp_path / "lora")
    base = base_of(tiny("llama"))
    write_adapter(
        read(tmp_path / "lora", tiny("llama")), base, tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2), None
    )
    for file in ("convert.json", "adapter_config.json"):  # Megatron writes no such files
        (tmp_path / "core" / file).unlink()
    with pytest.raises(UsageError, match="--lora_rank and --lora_alpha"):
        read(tmp_path / "core", tiny("llama"), "mcore")
    adapter = read(tmp_path / "core", tiny("llama"), "mcore", r=6, lora_alpha=14)
    converted(tiny("llama"), tmp_path / "hf", CheckpointLayout(), adapter=adapter)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) - expected).abs().max() < 1e-4


def test_the_head_of_an_adapted_reward_model_comes_along(tiny, tmp_path):
    folder = tmp_path / "reward"
    model = AutoModelForSequenceClassification.from_pretrained(tiny("llama"), num_labels=1, pad_token_id=0)
    model.score.weight.data = torch.linspace(-1.0, 1.0, 16)[None]  # a new one is too small to see adapters by
    model.save_pretrained(folder)
    options = {"task_type": "SEQ_CLS", "auto": AutoModelForSequenceClassification}
    expected, without = adapted(folder, "llama", tmp_path / "lora", **options)
    assert (expected - without).abs().max() > 0.01
    write_adapter(
        read(tmp_path / "lora", folder), base_of(folder), tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2), None
    )
    assert core(tmp_path / "core", 0, 1, None)["model"]["rm_head.weight"].shape == (1, 16)
    adapter = read(tmp_path / "core", folder, "mcore")
    converted(folder, tmp_path / "merged", CheckpointLayout(), adapter=adapter)
    found = logits(AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged"))
    assert (found - expected).abs().max() < 1e-5


def test_adapters_of_another_model_are_refused(tiny, tmp_path):
    adapted(tiny("phi3"), "phi3", tmp_path / "lora")
    with pytest.raises(CheckpointError, match="does not belong to any matrix"):
        read(tmp_path / "lora", tiny("llama"))


@pytest.mark.parametrize("change", ["lost", "copy"])
def test_a_damaged_rank_of_an_adapter_is_refused(change, tiny, tmp_path):
    adapted(tiny("llama"), "llama", tmp_path / "lora")
    adapter = read(tmp_path / "lora", tiny("llama"))
    write_adapter(adapter, base_of(tiny("llama")), tmp_path / "core", CheckpointLayout("mcore", tp=2), None)
    state = core(tmp_path / "core", single="mp_rank_01")
    name = "decoder.layers.2.mlp.linear_fc2.lora_{}.default.weight"
    if change == "lost":
        del state["model"][name.format("A")], state["model"][name.format("B")]
    else:
        state["model"][name.format("B")][3] += 1
    torch.save(state, tmp_path / "core/iter_0000001/mp_rank_01/model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="is not complete" if change == "lost" else "differs between"):
        read(tmp_path / "core", tiny("llama"), "mcore")


def test_half_an_adapter_is_refused(tiny, tmp_path):
    adapted(tiny("llama"), "llama", tmp_path / "lora")
    tensors = load_file(tmp_path / "lora/adapter_model.safetensors")
    del tensors["base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "lora/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="needs exactly one lora_A"):
        read(tmp_path / "lora", tiny("llama"))
