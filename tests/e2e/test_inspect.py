"""`posttrain inspect` and `posttrain diff`: what a folder holds, and where two differ."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.commands import command
from tests.tiny import tiny_folder


@pytest.fixture
def llama(tmp_path):
    return tiny_folder("llama", tmp_path)


@pytest.fixture
def core(llama, tmp_path):
    assert command("convert", llama, tmp_path / "core", "--to", "mcore", "--tp", 2, "--pp", 2) == 0
    return tmp_path / "core"


def seen(capsys, *words, code=0):
    capsys.readouterr()
    assert command(*words) == code
    return capsys.readouterr().out


def facts(text):
    return dict(re.split(r"\s+", line, maxsplit=1) for line in text.split("\n\n")[0].splitlines())


def test_a_hugging_face_folder(llama, capsys):
    found = facts(seen(capsys, "inspect", llama))
    tensors = load_file(llama / "model.safetensors")
    assert found["format"] == "Hugging Face" and found["family"] == "llama (LlamaForCausalLM)"
    assert found["parameters"] == f"{sum(tensor.numel() for tensor in tensors.values()):,}"
    assert found["types"].startswith(f"float32: {len(tensors)} tensors")
    assert "2 layers" in found["model"] and "4 heads in 2 groups" in found["model"]
    assert "tokenizer.json" in found["tokenizer"] and "with a chat template" in found["tokenizer"]
    assert "102 tokens" in found["tokenizer"]


def test_a_megatron_folder_and_its_hashes(core, llama, capsys):
    text = seen(capsys, "inspect", core, "--hashes")
    found = facts(text)
    assert found["format"] == "Megatron core" and found["layout"].startswith("tp 2, pp 2, ep 1")
    assert found["parameters"] == facts(seen(capsys, "inspect", llama))["parameters"]
    manifest = json.loads((core / "convert.json").read_text())
    assert all(row["sha256"] in text for row in manifest["target"])
    assert "all tensors have the sha256 that convert.json records" in text
    rank = core / "iter_0000001/mp_rank_01_001/model_optim_rng.pt"
    data = bytearray(rank.read_bytes())
    place = bytes(torch.load(rank, weights_only=False)["model"]["output_layer.weight"].numpy().tobytes()[:64])
    data[data.index(place)] ^= 1
    rank.write_bytes(bytes(data))
    assert command("inspect", core, "--hashes") == 1
    assert "mp_rank_01_001" in capsys.readouterr().err


def test_megatron_without_configuration_is_still_looked_at(core, capsys):
    (core / "config.json").unlink()
    (core / "convert.json").unlink()
    found = facts(seen(capsys, "inspect", core, code=1))
    assert found["layout"].startswith("tp 2, pp 2") and "config.json" in found["problem"]


def test_a_run_and_adapters(tmp_path, capsys):
    options = ["--model.path", "pico", "--data.train", "examples/data/chat.jsonl", "--steps", 1, "--quiet"]
    assert command("sft", *options, "--model.lora_rank", 2, "--out", tmp_path / "run") == 0
    found = facts(seen(capsys, "inspect", tmp_path / "run", "--hashes"))
    assert found["format"] == "checkpoint of a run (adapters, peft)" and found["step"] == "1"
    assert found["complete"] == "yes" and "r 2" in found["adapters"]


def test_unknown_families_and_other_folders(llama, tmp_path, capsys):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    found = facts(seen(capsys, "inspect", llama, code=1))
    assert found["family"].startswith("rwkv") and "not supported" in found["problem"]
    assert command("inspect", tmp_path / "nowhere") == 2
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/.metadata").write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    assert command("inspect", tmp_path / "dist") == 2
    assert "--ckpt-convert-format torch" in capsys.readouterr().err


def test_equal_across_formats(llama, core, tmp_path, capsys):
    assert command("convert", core, tmp_path / "legacy", "--to", "legacy") == 0
    for other in (core, tmp_path / "legacy", llama):
        assert "0 differ; 0 only in A, 0 only in B" in seen(capsys, "diff", llama, other)


def test_what_differs_is_named_with_how_much(llama, core, tmp_path, capsys):
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += 0.5
    tensors["lm_head.weight"][0] += 0.25
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    text = seen(capsys, "diff", llama, core, code=1)
    rows = [line.split() for line in text.splitlines() if "weight [" in line]
    assert [row[5] for row in rows] == ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"]
    assert [float(row[0]) for row in rows] == [0.5, 0.25] and [row[3] for row in rows] == ["1", "32"]
    assert "2 differ" in text


def test_rounding_and_other_sizes(llama, tmp_path, capsys):
    assert command("convert", llama, tmp_path / "half", "--to", "hf", "--dtype", "bf16") == 0
    text = seen(capsys, "diff", llama, tmp_path / "half", code=1)
    assert "float32 / bfloat16" in text and "have different types" in text
    other = tiny_folder("qwen2", tmp_path)
    text = seen(capsys, "diff", llama, other, code=1)
    assert "only in A: lm_head.weight 104 x 32" in text and "only in B: model.layers.0.self_attn.q_proj.bias" in text
