"""`posttrain convert`: formats, the original's flags, heads, runs, and that both sides compute the same."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from posttrain.checkpoints.checkpoint import write_checkpoint
from posttrain.models.paths import resolve_path
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


def test_a_reward_models_head_travels_in_mindspeeds_spelling(llama, tmp_path):
    """--orm: on the way back the configuration is that of the language model, as in MindSpeed-LLM's scripts."""
    folder = tiny_folder("llama", tmp_path, head="score")
    flags = ("--use-mcore-models", "--orm", "--model-type-hf", "llama2")
    there = ("--load-model-type", "hf", "--save-model-type", "mg", "--target-tensor-parallel-size", 2)
    assert command("convert", *flags, *there, "--load-dir", folder, "--save-dir", tmp_path / "core") == 0
    (tmp_path / "core/config.json").unlink()
    back = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tmp_path / "core")
    assert command("convert", *flags, *back, "--original", llama, "--save-dir", tmp_path / "back") == 0
    same(folder, tmp_path / "back")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "back").config.num_labels == 1


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


# Command lines of the older tool as its users have them, places replaced.
OLD = """
--use-mcore-models --model-type GPT --load-model-type hf --save-model-type mg --target-tensor-parallel-size 2
    --target-pipeline-parallel-size 2 --add-qkv-bias --load-dir HF --save-dir mcore --tokenizer-model HF/tokenizer.json
    --model-type-hf llama2 --params-dtype fp32 --num-layer-list 1, 1
--model-type GPT --load-model-type hf --save-model-type mg --target-tensor-parallel-size 2
    --target-pipeline-parallel-size 2 --num-layer-list 1,1 --model-type-hf llama2 --load-dir HF --save-dir legacy
    --tokenizer-model HF/tokenizer.model
--model-type GPT --load-model-type mg --save-model-type mg --target-tensor-parallel-size 2
    --target-pipeline-parallel-size 1 --load-dir legacy --save-dir legacy-tp2
--model-type GPT --load-model-type mg --save-model-type mg --use-mcore-models --load-from-legacy
    --target-tensor-parallel-size 1 --target-pipeline-parallel-size 2 --load-dir legacy-tp2 --save-dir mcore-pp2
--model-type GPT --load-model-type mg --save-model-type mg --use-mcore-models --target-tensor-parallel-size 2
    --target-pipeline-parallel-size 2 --target-expert-model-parallel-size 1 --spec some.layers layer_spec
    --load-dir mcore-pp2 --save-dir mcore-tp2pp2
--model-type GPT --load-model-type mg --save-model-type mg --use-mcore-models --target-tensor-parallel-size 1
    --target-pipeline-parallel-size 3 --noop-layers 2 --load-checkpoint-loosely --load-dir mcore-tp2pp2 --save-dir noop
--model-type GPT --load-model-type mg --save-model-type mg --use-mcore-models --save-to-legacy
    --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --load-dir noop --save-dir legacy-again
--model-type GPT --load-model-type mg --save-model-type hf --model-type-hf llama2 --load-dir legacy-again
    --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 --save-dir HF
"""


def old_commands(text, places):
    """One list of words for each command: lines that begin with a blank belong to the one before."""
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        words = [places.get(word, word) for word in line.split()]
        yield [str(places["HF"] / word[3:]) if str(word).startswith("HF/") else word for word in words]


def test_command_lines_of_the_older_tool(llama, tmp_path):
    names = ["mcore", "legacy", "legacy-tp2", "mcore-pp2", "mcore-tp2pp2", "noop", "legacy-again"]
    places = {name: tmp_path / name for name in names} | {"HF": llama}
    commands = list(old_commands(OLD, places))
    assert len(commands) == 8
    for words in commands:
        assert command("convert", *words) == 0, words
    same(llama, llama / "mg2hf")  # all the way round, and beside the original
    formats = {name: json.loads((tmp_path / name / "convert.json").read_text())["to"] for name in names}
    assert [formats[name]["format"] for name in names] == [
        name.split("-")[0].replace("noop", "mcore") for name in names
    ]
    assert formats["mcore"]["layers_per_stage"] == [1, 1] and formats["noop"]["noop"] == [2]


LORA = """
--model-type GPT --use-mcore-models --load-model-type mg --save-model-type hf --load-dir mcore --lora-load adapters
    --lora-r 2 --lora-alpha 32 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2
    --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 --save-dir HF
--model-type GPT --use-mcore-models --load-model-type mg --save-model-type mg --load-dir mcore --lora-load adapters
    --lora-r 2 --lora-alpha 32 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2
    --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 --save-dir merged
--model-type GPT --use-mcore-models --load-model-type mg --save-model-type hf --load-dir adapters --lora-r 2
    --lora-alpha 32 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --target-tensor-parallel-size 1
    --target-pipeline-parallel-size 1 --load-checkpoint-loosely --save-lora-to-hf --save-dir HF2
"""


def test_adapters_through_the_older_tools_command_lines(tmp_path):
    """Trained here, taken to Megatron's names, merged there, and taken back; all compute the same."""
    options = ["--model.path", "pico", "--data.train", "examples/data/chat.jsonl", "--steps", 2, "--quiet"]
    options += ["--model.lora_rank", 2, "--train.learning_rate", 0.1, "--update.warmup", 0]
    assert command("sft", *options, "--out", tmp_path / "run") == 0
    assert command("export", tmp_path / "run", tmp_path / "exported") == 0
    model = next((tmp_path / "run/checkpoints").glob("step-*")) / "model"
    base = Path(resolve_path("pico"))
    for name in ("hf", "hf2"):
        shutil.copytree(base, tmp_path / name)
    assert command("convert", base, tmp_path / "mcore", "--to", "mcore", "--tp", 2) == 0
    words = ["--lora-r", 2, "--lora-alpha", 32]
    assert command("convert", model, tmp_path / "adapters", "--to", "mcore", "--tp", 2, "--pp", 2) == 0
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    places = {name: tmp_path / name for name in ("mcore", "adapters", "merged")}
    places |= {"HF": tmp_path / "hf", "HF2": tmp_path / "hf2"}
    # Fused matrices hold the adapters of several: their rank is larger, and what they add is the same.
    assert (
        config["r"] == 6
        and config["lora_alpha"] == 3 * json.loads((model / "adapter_config.json").read_text())["lora_alpha"]
    )
    text = LORA.replace("--lora-r 2", "--lora-r 6").replace("--lora-alpha 32", f"--lora-alpha {config['lora_alpha']}")
    for words in old_commands(text, places):
        assert command("convert", *words) == 0, words
    assert command("convert", tmp_path / "merged", tmp_path / "merged-hf", "--to", "hf") == 0
    expected, plain = load_file(tmp_path / "exported/model.safetensors"), load_file(base / "model.safetensors")
    assert max((expected[name] - plain[name]).abs().max() for name in expected) > 1e-2
    for folder in (tmp_path / "hf/mg2hf", tmp_path / "merged-hf"):
        found = load_file(folder / "model.safetensors")
        assert max((expected[name] - found[name]).abs().max() for name in expected) < 1e-5
    before, after = (load_file(f / "adapter_model.safetensors") for f in (model, tmp_path / "hf2/mg2hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_process_reward_model_and_its_facts_travel(tmp_path):
    options = ["--model.path", "pico", "--data.train", "examples/data/steps.jsonl", "--steps", 1, "--quiet"]
    assert command("prm", *options, "--out", tmp_path / "run") == 0
    assert command("export", tmp_path / "run", tmp_path / "model") == 0
    assert command("convert", tmp_path / "model", tmp_path / "core", "--to", "mcore", "--tp", 2, "--pp", 2) == 0
    assert command("convert", tmp_path / "core", tmp_path / "back", "--to", "hf", "--verify", "logits") == 0
    same(tmp_path / "model", tmp_path / "back")
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("model", "back"))
    assert before == after and any("placeholder" in key for key in after)


def test_a_head_that_judges_every_token_travels_with_its_bias(tmp_path):
    folder = tiny_folder("qwen2", tmp_path)
    AutoModelForTokenClassification.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    assert "score.bias" in load_file(folder / "model.safetensors")
    assert command("convert", folder, tmp_path / "core", "--to", "legacy", "--tp", 2, "--pp", 2) == 0
    assert command("convert", tmp_path / "core", tmp_path / "back", "--to", "hf") == 0
    same(folder, tmp_path / "back")


def test_a_run_taken_elsewhere_goes_on_as_if_nothing_had_happened(tmp_path):
    options = ["--model.path", "pico", "--data.train", "examples/data/chat.jsonl", "--steps", 4, "--quiet"]
    assert (
        command("sft", *options, "--save.every_steps", 2, "--save.max_checkpoints", 5, "--out", tmp_path / "run") == 0
    )
    half = tmp_path / "run/checkpoints/step-00000002"
    assert command("convert", half, tmp_path / "moved", "--from", "sharded", "--to", "sharded") == 0
    assert [path.name for path in (tmp_path / "moved/checkpoints").iterdir()] == ["step-00000002"]
    optimizer = "checkpoints/step-00000002/optimizer.safetensors"
    assert (tmp_path / "moved" / optimizer).read_bytes() == (tmp_path / "run" / optimizer).read_bytes()
    assert command("sft", "--out", tmp_path / "moved", "--resume", "--quiet") == 0
    last = "checkpoints/step-00000004"
    same(tmp_path / "run" / last / "model", tmp_path / "moved" / last / "model")
    # other weights than those that the optimizer's state is of: it stays behind
    assert command("convert", half, tmp_path / "half", "--from", "sharded", "--to", "sharded", "--dtype", "bf16") == 0
    assert [path.name for path in (tmp_path / "half/checkpoints/step-00000000").iterdir() if path.is_dir()] == ["model"]
    assert not (tmp_path / "half/checkpoints/step-00000000/optimizer.safetensors").exists()


def test_a_checkpoint_that_several_ranks_wrote(llama, tmp_path):
    def write(folder):
        shutil.copytree(llama, folder / "model")
        for kind, file in (("model", folder / "model/model.safetensors"), ("optimizer", folder / "optimizer")):
            tensors = load_file(llama / "model.safetensors")
            homes = {n: f"{kind}-{1 + i % 2:05d}-of-00002.safetensors" for i, n in enumerate(tensors)}
            for home in set(homes.values()):
                save_file({n: t for n, t in tensors.items() if homes[n] == home}, file.parent / home)
            index = file.parent / f"{kind}.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": homes}))
            file.unlink(missing_ok=True)

    write_checkpoint(tmp_path / "run/checkpoints", 7, write)
    assert command("convert", tmp_path / "run", tmp_path / "core", "--to", "mcore", "--tp", 2) == 0
    assert command("convert", tmp_path / "core", tmp_path / "hf", "--to", "hf") == 0
    same(llama, tmp_path / "hf")
    assert command("convert", tmp_path / "run", tmp_path / "again", "--to", "sharded") == 0
    found = {path.name for path in (tmp_path / "again/checkpoints/step-00000007").iterdir()}
    assert "optimizer.safetensors.index.json" in found and "optimizer-00002-of-00002.safetensors" in found


def test_distributed_checkpoints_are_refused_with_a_way_out(llama, tmp_path, capsys):
    place = tmp_path / "core/iter_0000003"
    place.mkdir(parents=True)
    (tmp_path / "core/latest_checkpointed_iteration.txt").write_text("3")
    (place / ".metadata").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    (place / "__0_0.distcp").write_bytes(b"x")
    assert command("convert", tmp_path / "core", tmp_path / "hf", "--to", "hf", "--original", llama) == 2
    error = capsys.readouterr().err
    assert "iter_0000003" in error and "--ckpt-convert-format torch" in error and "dcp_to_torch" in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "SOURCE is not set. Directory to read"),
        (["SRC"], "OUTPUT_DIR is not set. Directory to write"),
        (["SRC", "OUT"], "--target_format is not set. Format to write: Hugging Face, Megatron core"),
        (["SRC", "OUT", "--target_format", "ggml"], "it must be one of"),
        (["nowhere", "OUT", "--to", "hf"], "nowhere: no such directory"),
        (["SRC", "OUT", "--to", "mcore", "--tp", "3"], "--tensor_parallel_size 3 does not divide"),
        (["SRC", "OUT", "--to", "mcore", "--pp", "0"], "pipeline_parallel_size is 0; it must be at least 1"),
        (["SRC", "OUT", "--to", "mcore", "--noop-layers", "1,x"], "noop_layers is '1 x'; it must be a list of whole"),
        (["SRC", "OUT", "--to", "mcore", "--verify", "logits", "--dtype", "bf16"], "leave out --dtype and --lora"),
        (["EMPTY", "OUT", "--to", "hf"], "neither a Hugging Face folder"),
        (["SRC", "OUT", "--to", "hf", "--tp", "2"], "--target_format hf is not divided into ranks"),
        (["SRC", "OUT", "--to", "mcore", "--orm"], "the source is a language model, it has no score head"),
        (
            ["SRC", "OUT", "--to", "mcore", "--tp", "2", "--moe-tp-extend-ep"],
            "--tp_extend_ep: the model has no experts",
        ),
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
        "from posttrain.convert import conversion\n"
        "conversion.Conversion.write_manifest = lambda self, report: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from posttrain.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["convert", str(llama), str(tmp_path / "core"), "--to", "mcore"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True)
    assert done.returncode == -9
    assert not (tmp_path / "core").exists()
    assert command(*words) == 0
    assert json.loads((tmp_path / "core/convert.json").read_text())["elements"] > 0
