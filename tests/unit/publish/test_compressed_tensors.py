"""Weights of 8 and 4 bits, read by transformers with compressed-tensors, which `make test-export` installs."""

import importlib.util
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from posttrain.core.errors import UsageError
from posttrain.models.export import load_source
from posttrain.publish.divergence import Original
from posttrain.publish.formats import Calibration, export
from tests.e2e.rows import write_rows
from tests.tiny import tiny_folder

READER = importlib.util.find_spec("compressed_tensors") is not None
WRITER = importlib.util.find_spec("llmcompressor") is not None
needs_reader = pytest.mark.skipif(not READER, reason="compressed-tensors is not installed: make test-export")
needs_writer = pytest.mark.skipif(not WRITER, reason="llm-compressor is not installed: make test-export")
# Rows of 32 share a scale; vLLM has no kernel for less.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def read_elsewhere(folder):
    """The model as transformers reads it: its layers compute with weights that compressed-tensors decompressed."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def divergence(folder, other):
    loaded = load_source(str(folder))
    return Original(loaded.model, loaded.tokenizer).measure(other)


@needs_reader
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_fp8_gives_another_reader_the_same_model(name, tmp_path):
    """compressed-tensors rounds activations itself, so the divergence that was reported is that of its layers."""
    folder = tiny_folder(name, tmp_path)
    report = export(str(folder), tmp_path / "out", target_format="fp8")
    stored = safe_open(tmp_path / "out/model-00001-of-00001.safetensors", framework="pt")
    model = read_elsewhere(tmp_path / "out")
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    assert torch.equal(layer.weight.float(), stored.get_tensor("model.layers.1.mlp.down_proj.weight").float())
    assert torch.equal(layer.weight_scale, stored.get_tensor("model.layers.1.mlp.down_proj.weight_scale"))
    found = divergence(folder, model)
    assert found.tokens == report["tokens"]
    assert found.kl == pytest.approx(report["kl"], rel=0.05) and found.worst == pytest.approx(report["worst"], rel=0.2)


@needs_writer
@pytest.mark.parametrize(("method", "kind"), [("gptq", "chat"), ("awq", "text"), ("gptq", "pair")])
def test_four_bits_are_chosen_with_examples_and_read_back(method, kind, tmp_path):
    folder = tiny_folder("llama", tmp_path, **SIZES)
    data = write_rows(kind, tmp_path)
    out = tmp_path / "out"
    report = export(str(folder), out, target_format=method, calibration=Calibration(data, 4))
    assert 0 < report["kl"] < 0.05 and report["remarks"][0].startswith("calibrated with 4 examples")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert config["format"] == "pack-quantized" and config["ignore"] == ["lm_head"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, method == "gptq")
    stored = safe_open(out / "model.safetensors", framework="pt")
    packed = stored.get_slice("model.layers.0.mlp.up_proj.weight_packed")
    assert packed.get_dtype() == "I32" and packed.get_shape() == [96, 64 // 8]
    assert stored.get_slice("model.layers.0.mlp.up_proj.weight_scale").get_shape() == [96, 64 // 32]
    assert divergence(folder, read_elsewhere(out)).kl == pytest.approx(report["kl"], rel=1e-3)
    assert (out / "tokenizer.json").is_file()


@needs_writer
def test_examples_decide_what_gptq_keeps(tmp_path):
    """With other examples other weights come out; without any use of them the files would be equal."""
    folder = tiny_folder("llama", tmp_path, **SIZES)
    (tmp_path / "other.jsonl").write_text('{"text": "aaaa aaaa aaaa"}\n{"text": "7777"}\n', encoding="utf-8")
    packed = []
    for number, data in enumerate((write_rows("text", tmp_path), tmp_path / "other.jsonl")):
        export(str(folder), tmp_path / str(number), target_format="gptq", calibration=Calibration(str(data), 2))
        stored = safe_open(tmp_path / str(number) / "model.safetensors", framework="pt")
        packed.append(stored.get_tensor("model.layers.1.mlp.down_proj.weight_packed"))
    assert not torch.equal(*packed)


@needs_writer
def test_what_cannot_be_quantized_is_refused(tmp_path):
    data = write_rows("text", tmp_path)
    with pytest.raises(UsageError, match="mixtures of experts"):
        mixture = tiny_folder("mixtral", tmp_path)
        export(str(mixture), tmp_path / "out", target_format="gptq", calibration=Calibration(data))
    with pytest.raises(UsageError, match="--calibration_data"):
        export(str(tiny_folder("llama", tmp_path)), tmp_path / "out", target_format="awq")
    assert not (tmp_path / "out").exists()
