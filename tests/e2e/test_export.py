"""From a run to a folder that stock transformers loads, through the command; and runs as models of other runs."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.checkpoint import newest_valid
from posttrain.checkpoints.tensor_files import load_tensors
from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.data.dataset import Encoder, load_dataset
from posttrain.models.pico import pico_folder
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train.learner import Learner
from tests.e2e.commands import command, rows_of
from tests.e2e.rows import write_rows

INSTALLED = importlib.util.find_spec("llmcompressor") is not None


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("chat", "pair", "stepwise"):
        write_rows(kind, tmp_path)


def train(verb, out, *more, path="pico"):
    given = ("--model.path", path, "--data.train", f"{ALGORITHMS[verb].example_kind}.jsonl", "--out", out, "--quiet")
    assert command(verb, *given, "--steps", 3, "--train.learning_rate", 1e-3, *more) == 0
    return newest_valid(Path(out) / "checkpoints")


def samples(kind="pair", path="pico"):
    model = ModelConfig(path=str(path))
    encoder = Encoder(load_tokenizer(model), DataConfig(), kind, vocab_size=263)
    return [sample for row in load_dataset([f"{kind}.jsonl"], encoder).examples for sample in row]


def logprobs(model, sample):
    """Log-probabilities of a sample's tokens by the stock model: [T - 1]."""
    ids = torch.tensor(sample.tokens, dtype=torch.long)[None]
    with torch.no_grad():
        found = model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0]


def assert_same_language_model(folder, run):
    """What stock code computes with the exported folder is what the run's learner computes."""
    stock = AutoModelForCausalLM.from_pretrained(folder)
    learner = Learner(ModelConfig(path=str(run)), TrainConfig(), trainable=False)
    some = samples()
    for sample, found in zip(some, learner.logprobs(some), strict=True):
        expected = logprobs(stock, sample).numpy() * sample.mask[1:]
        np.testing.assert_allclose(found[1:], expected, atol=1e-4)
    return stock


def test_a_plain_folder_that_stock_code_loads(capsys, tmp_path):
    newest = train("sft", "run")
    capsys.readouterr()
    assert command("export", "run", "out") == 0
    said = capsys.readouterr().out
    assert "out was read back and computes the same as run" in said and f"from: {newest / 'model'}" in said
    stock = assert_same_language_model("out", "run")
    base = AutoModelForCausalLM.from_pretrained(pico_folder())
    assert not torch.equal(stock.lm_head.weight, base.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained("out")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer.decode(asked) == "<s><|user|>1+1=<|end|><|assistant|>"
    assert stock.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not (tmp_path / "out/optimizer.safetensors").exists()
    assert command("export", "run", "out") == 2  # it would overwrite


def test_an_older_checkpoint_can_be_named(tmp_path):
    train("sft", "run", "--save.every_steps", 1)
    assert command("export", "run/checkpoints/step-00000002", "two") == 0
    assert command("export", "run", "three") == 0
    two, three = (load_tensors(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in ("two", "three"))
    assert not torch.equal(two, three)


def test_adapters_are_merged_or_kept(tmp_path, capsys):
    train("sft", "run", "--model.lora_rank", 4)
    assert command("export", "run", "merged") == 0
    assert ", adapters merged" in capsys.readouterr().out
    stock = assert_same_language_model("merged", "run")
    base = AutoModelForCausalLM.from_pretrained(pico_folder())
    assert torch.equal(stock.lm_head.weight, base.lm_head.weight)  # no adapter there
    assert not torch.equal(stock.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)
    assert command("export", "run", "apart", "--no_merge") == 0
    assert (tmp_path / "apart/adapter_model.safetensors").is_file()
    assert not (tmp_path / "apart/model.safetensors").exists()
    assert_same_language_model("merged", "apart")


@pytest.mark.parametrize("lora", [(), ("--model.lora_rank", 4)], ids=["weights", "adapters"])
def test_the_average_of_the_weights(lora, capsys):
    newest = train("sft", "run", "--train.ema_decay", 0.5, *lora)
    assert command("export", "run", "last") == 0
    assert command("export", "run", "average", "--ema") == 0
    assert ", moving average of the weights" in capsys.readouterr().out
    last, average = (AutoModelForCausalLM.from_pretrained(name) for name in ("last", "average"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(last.state_dict()[name], average.state_dict()[name])
    if not lora:
        saved = load_tensors(newest / "ema.safetensors")
        assert all(torch.equal(average.state_dict()[name], saved[name]) for name in saved)
    train("sft", "without")
    assert command("export", "without", "nothing", "--ema") == 2
    assert "train.ema_decay" in capsys.readouterr().err


def test_schedule_free_is_evaluated_at_the_weights_that_are_saved():
    schedule_free = ("--train.optimizer", "schedule_free", "--train.lr_scheduler", "constant")
    newest = train("sft", "run", *schedule_free, "--data.eval", "chat.jsonl", "--eval.every_steps", 3)
    model = AutoModelForCausalLM.from_pretrained(newest / "model")

    def loss():
        chosen = [(logprobs(model, sample), torch.tensor(sample.mask[1:])) for sample in samples("chat")]
        return float(-sum((found * mask).sum() for found, mask in chosen) / sum(mask.sum() for _, mask in chosen))

    assert rows_of(Path("run/metrics.jsonl"))[-1]["eval/loss"] == pytest.approx(loss(), rel=1e-5)
    trained = load_tensors(newest / "optimizer.safetensors")
    model.load_state_dict(
        {name.removeprefix("master/"): t for name, t in trained.items() if name.startswith("master/")}
    )
    assert rows_of(Path("run/metrics.jsonl"))[-1]["eval/loss"] != pytest.approx(loss(), rel=1e-3)


@pytest.mark.parametrize("lora", [(), ("--model.lora_rank", 4)], ids=["weights", "adapters"])
def test_a_reward_model_keeps_its_scores_and_their_scale(lora, tmp_path):
    train("reward", "run", *lora)
    assert command("export", "run", "out") == 0
    stock = AutoModelForSequenceClassification.from_pretrained("out").eval()
    some = samples()
    scores = Learner(ModelConfig(path="run"), TrainConfig(), head="score", trainable=False).scores(some)
    longest = max(map(len, some))
    padding = AutoTokenizer.from_pretrained("out").pad_token_id
    assert padding == stock.config.pad_token_id
    padded = torch.full((len(some), longest), padding)
    for row, sample in zip(padded, some, strict=True):
        row[: len(sample)] = torch.tensor(sample.tokens)
    with torch.no_grad():  # the whole batch at once: stock code must find each last token
        found = stock(input_ids=padded, attention_mask=padded != padding).logits[:, 0].tolist()
    assert found == pytest.approx(scores, abs=1e-4) and len(set(found)) > 1
    config = json.loads((tmp_path / "out/config.json").read_text())
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    assert config["score_mean"] == pytest.approx(mean, abs=1e-4)
    assert config["score_std"] == pytest.approx(std, abs=1e-4) and std > 0
    assert config["architectures"] == ["LlamaForSequenceClassification"] and stock.config.num_labels == 1


def test_a_process_reward_model_says_which_tokens_it_uses(tmp_path):
    train("prm", "run", "--algo.placeholder", "#", "--algo.positive_token", "Y", "--algo.negative_token", "N")
    assert command("export", "run", "out") == 0
    config = AutoModelForCausalLM.from_pretrained("out").config
    assert config.placeholder_token == "#" and config.reward_tokens == ["Y", "N"]


def test_runs_follow_one_another(tmp_path, capsys):
    """sft -> dpo with the sft run as model -> reward on it -> export; the reference is where the policy began."""
    train("sft", "first")
    train("dpo", "second", "--train.batch_size", 7, path="first")
    metrics = rows_of(tmp_path / "second/metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and metrics[-1]["loss"] < math.log(2)
    assert metrics[0]["margin"] == pytest.approx(0, abs=1e-6)
    first = AutoModelForCausalLM.from_pretrained(newest_valid(tmp_path / "first/checkpoints") / "model")
    chosen = [float((logprobs(first, sample) * torch.tensor(sample.mask[1:])).sum()) for sample in samples()[::2]]
    assert metrics[0]["chosen_logprob"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-4)
    assert command("export", "second", "out") == 0
    assert_same_language_model("out", "second")
    train("reward", "third", path="out")
    train("dpo", "fourth", "--algo.reference", "first", path="second")
    assert rows_of(tmp_path / "fourth/metrics.jsonl")[0]["margin"] > 0.01  # second has moved away from first
    capsys.readouterr()
    given = ("--model.path", "third", "--data.train", "chat.jsonl", "--out", "fifth")
    assert command("sft", *given) == 2
    assert "is a reward model" in capsys.readouterr().err


def test_adapters_on_a_run_of_adapters():
    """The base of the second is the first, merged: its reference too."""
    train("sft", "first", "--model.lora_rank", 4)
    train("dpo", "second", "--model.lora_rank", 2, path="first")
    assert rows_of(Path("second/metrics.jsonl"))[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert command("export", "second", "out") == 0
    assert_same_language_model("out", "second")


def test_files_for_other_runtimes(tmp_path, capsys):
    """The adapters of a run in a GGUF file and in FP8, through the command; what is not possible is refused."""
    train("sft", "run", "--model.lora_rank", 4)
    assert command("export", "run", "plain") == 0
    capsys.readouterr()
    assert command("export", "run", "llama", "--format", "gguf", "--gguf_type", "f16") == 0
    said = capsys.readouterr().out
    assert ", adapters merged" in said and "KL per token from the original" in said and "ollama create" in said
    assert sorted(file.name for file in (tmp_path / "llama").iterdir()) == ["Modelfile", "llama-f16.gguf"]
    plain = AutoModelForCausalLM.from_pretrained("plain")
    copy = AutoModelForCausalLM.from_pretrained("llama", gguf_file="llama-f16.gguf", config=plain.config)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(copy.state_dict()[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)
    assert command("export", "run", "eight", "--format", "fp8") == 0
    assert "same most likely token" in capsys.readouterr().out
    assert command("export", "run", "apart", "--no_merge", "--format", "gguf") == 2
    assert "--no_merge" in capsys.readouterr().err and not (tmp_path / "apart").exists()
    assert command("export", "run", "four", "--format", "awq") == 2
    assert ("--calibration_data" if INSTALLED else "posttrain[llm-compressor]") in capsys.readouterr().err
