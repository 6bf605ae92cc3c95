"""`posttrain convert`: formats, the original's flags, heads, runs, and that both sides compute the same."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.e2e.commands import command
from tests.tiny import tiny_folder


@pytest.fixture
def llama(tmp_path):
    return tiny_folder("llama", tmp_path)


def same(a, b):
    a, b = (load_file(folder / "model.safetensors") for folder in (a, b))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_there_and_back_with_proof(llama, tmp_path, capsys):
    core = tmp_path / "core"
    assert command("convert", llama, core, "--to", "mcore", "--tp", 2, "--pp", 2, "--verify", "logits") == 0
    assert "largest difference 0" in capsys.readouterr().out
    assert (core / "tokenizer.json").is_file() and (core / "chat_template.jinja").is_file()
    assert command("convert", core, tmp_path / "legacy", "--to", "legacy") == 0
    assert command("convert", tmp_path / "legacy", tmp_path / "back", "--to", "hf", "--verify", "logits") == 0
    same(llama, tmp_path / "back")


def test_flags_of_the_original(llama, tmp_path):
    core = tmp_path / "core"
    flags = ["--model-type", "GPT", "--load-model-type", "hf", "--save-model-type", "mg", "--use-mcore-models"]
    flags += ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2, "--num-layer-list", "1,1"]
    flags += ["--load-dir", llama, "--save-dir", core, "--tokenizer-model", llama / "tokenizer.json"]
    flags += ["--model-type-hf", "llama2", "--params-dtype", "bf16", "--make-vocab-size-divisible-by", 8]
    assert command("convert", *flags) == 0
    state = torch.load(core / "iter_0000001/mp_rank_01_000/model_optim_rng.pt", weights_only=False)
    assert state["model"]["embedding.word_embeddings.weight"].shape == (56, 32)
    assert state["model"]["embedding.word_embeddings.weight"].dtype == torch.bfloat16
    assert state["args"].tensor_model_parallel_size == 2 and state["args"].padded_vocab_size == 112
    # back into the original's folder: a new folder beside the old weights
    flags = ["--load-model-type", "mg", "--save-model-type", "hf", "--use-mcore-models", "--load-dir", core]
    assert command("convert", *flags, "--save-dir", llama) == 0
    before, after = load_file(llama / "model.safetensors"), load_file(llama / "mg2hf/model.safetensors")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)


def test_megatron_files_without_configuration_need_the_original(llama, tmp_path, capsys):
    assert command("convert", llama, tmp_path / "core", "--to", "mcore") == 0
    (tmp_path / "core/config.json").unlink()
    assert command("convert", tmp_path / "core", tmp_path / "hf", "--to", "hf") == 2
    assert "config.json" in capsys.readouterr().err
    assert command("convert", tmp_path / "core", tmp_path / "hf", "--to", "hf", "--original", llama) == 0
    same(llama, tmp_path / "hf")


def test_a_reward_models_head_travels(tmp_path):
    folder = tiny_folder("qwen2", tmp_path, head="score")
    assert command("convert", folder, tmp_path / "core", "--to", "mcore", "--tp", 2, "--pp", 2) == 0
    last = torch.load(tmp_path / "core/iter_0000001/mp_rank_01_001/model_optim_rng.pt", weights_only=False)["model"]
    assert torch.equal(last["rm_head.weight"], AutoModelForSequenceClassification.from_pretrained(folder).score.weight)
    assert "output_layer.weight" not in last
    assert command("convert", tmp_path / "core", tmp_path / "back", "--to", "hf", "--verify", "logits") == 0
    same(folder, tmp_path / "back")


def test_a_run_is_a_source_and_a_target(tmp_path):
    options = ["--model.path", "pico", "--data.train", "examples/data/chat.jsonl", "--steps", 1, "--quiet"]
    assert command("sft", *options, "--model.lora_rank", 2, "--out", tmp_path / "run") == 0
    assert command("export", tmp_path / "run", tmp_path / "exported") == 0
    assert command("convert", tmp_path / "run", tmp_path / "core", "--from", "sharded", "--to", "mcore") == 0
    assert command("convert", tmp_path / "core", tmp_path / "again", "--to", "sharded") == 0
    assert command("convert", tmp_path / "again", tmp_path / "hf", "--to", "hf") == 0
    merged, found = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "hf"))
    assert merged.keys() == found.keys()
    assert all((merged[name] - found[name]).abs().max() < 1e-6 for name in merged)
    assert command("sft", *options[2:], "--model.path", tmp_path / "again", "--out", tmp_path / "more") == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "two folders are needed"),
        (["SRC", "OUT"], "--to: say what to write"),
        (["nowhere", "OUT", "--to", "hf"], "there is no folder nowhere"),
        (["SRC", "OUT", "--to", "mcore", "--tp", "3"], "--tp 3 does not divide"),
        (["SRC", "OUT", "--to", "mcore", "--verify", "logits", "--dtype", "bf16"], "leave --dtype and --lora out"),
        (["EMPTY", "OUT", "--to", "hf"], "neither a Hugging Face folder"),
    ],
)
def test_mistakes_are_named(arguments, complaint, llama, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {"SRC": llama, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    assert command("convert", *(places.get(word, word) for word in arguments)) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_killed_conversion_leaves_no_target(llama, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from posttrain.models.convert import convert\n"
        "convert.Conversion.write_manifest = lambda self, report: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from posttrain.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["convert", str(llama), str(tmp_path / "core"), "--to", "mcore"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True)
    assert done.returncode == -9
    assert not (tmp_path / "core").exists()
    assert command(*words) == 0
    assert json.loads((tmp_path / "core/convert.json").read_text())["elements"] > 0
