"""`posttrain generate` on vLLM: greedy completions equal the local engine's, also with adapters or tensor parallel."""

import importlib.util
import json
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.train.learner import Learner
from tests.e2e.commands import command, rows_of
from tests.tiny import tiny_folder

HEADS = {"hidden_size": 128, "intermediate_size": 96}  # 4 heads of 32, the smallest that vLLM has kernels for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, adapters for it, prompts, and the local engine's completions."""
    folder = tmp_path_factory.mktemp("generate")
    tiny_folder("qwen2", folder, **HEADS).rename(folder / "model")
    adapted = Learner(ModelConfig(path=str(folder / "model"), lora_rank=4), TrainConfig(learning_rate=1e-2))
    for name, parameter in adapted.parameters().items():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    adapted.save(folder / "run")
    with (folder / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n} and {n * n}?"}) + "\n" for n in range(6))
    for name in ("model", "run/model"):
        assert command(*asked(folder, name, "local")) == 0
    return folder


def asked(folder, model, out, *options):
    rest = ["--greedy", "--max_tokens", 12, "--batch", 2, "--dtype", "float32", "--quiet"]
    place = folder / f"{model.replace('/', '-')}-{out}.jsonl"
    return ["generate", folder / model, folder / "prompts.jsonl", "--out", place, *rest, *options]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("model", ["--engine", "vllm", "max_num_seqs=4", "--devices", 2]),
        ("model", ["--engine", "vllm", "tensor_parallel_size=2", "--devices", 2]),
        ("run/model", ["--engine", "vllm"]),
    ],
    ids=["two", "divided", "adapters"],
)
def test_greedy_completions_are_those_of_the_local_engine(folder, model, options, request):
    out = request.node.callspec.id
    assert command(*asked(folder, model, out, *options)) == 0
    ours = rows_of(folder / f"{model.replace('/', '-')}-local.jsonl")
    theirs = rows_of(folder / f"{model.replace('/', '-')}-{out}.jsonl")
    assert len({str(row["tokens"]) for row in ours}) > 3
    for mine, other in zip(ours, theirs, strict=True):
        assert other.pop("logprob") == pytest.approx(mine["logprob"], abs=1e-3)
        assert other == {name: value for name, value in mine.items() if name != "logprob"}


def test_adapters_change_the_completions(folder):
    plain, adapted = (rows_of(folder / f"{name}-local.jsonl") for name in ("model", "run-model"))
    assert [row["tokens"] for row in plain] != [row["tokens"] for row in adapted]


def test_the_settings_know_the_engine(folder, capsys):
    out = "engine"
    assert command(*asked(folder, "model", out, "--engine", "vllm")) == 0
    settings = json.loads(Path(f"{folder}/model-{out}.jsonl.settings.json").read_text())["settings"]
    assert settings["engine"] == "vllm"
    assert command(*asked(folder, "model", out, "--resume")) == 2
    assert "engine was 'vllm', is None" in capsys.readouterr().err
    assert command(*asked(folder, "model", out, "--engine", "vllm", "max_num_seqs=2", "--resume")) == 0
    assert command(*asked(folder, "model", "wrong", "--engine", "vllm", "max_sums=2")) == 2
    assert "did you mean max_num_seqs" in capsys.readouterr().err


def test_eval_and_pipelines_ask_it_too(folder, tmp_path):
    (tmp_path / "reward.py").write_text("def length(text): return len(text) / 10\n")
    reward = ["--reward", f"{tmp_path}/reward.py:length", "--quiet"]
    data, engine = folder / "prompts.jsonl", ["vllm", "max_num_seqs=4"]
    options = ["--max_tokens", 4, "--engine", *engine, "--out", tmp_path / "eval"]
    assert command("eval", folder / "model", data, *reward, *options) == 0
    seal = json.loads((tmp_path / "eval/a/answers.jsonl.done.json").read_text())
    assert seal["settings"]["engine"] == "vllm"
    options = [
        "--model.path",
        folder / "model",
        "--data.train",
        data,
        "--generate.samples_per_prompt",
        2,
        "--generate.max_tokens",
        4,
    ]
    options += ["--generate.engine", *engine, "--iterations", 1, "--out", tmp_path / "rs", *reward]
    assert command("rejection-sampling", *options) == 0
    assert len(rows_of(tmp_path / "rs/iteration-1/answers.jsonl")) == 12
