"""A step that runs out of memory is repeated with smaller micro-batches, which does not change its result."""

import json

import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.checkpoint import newest_valid
from posttrain.checkpoints.tensor_files import load_tensors
from posttrain.config.parsing import parse
from posttrain.core.errors import PosttrainError
from posttrain.core.files import read_json
from posttrain.train.setup import open_offline, open_online
from tests.e2e.rows import ROWS, write_judge

STEPS = 3
LENGTHS = (60, 60, 40, 30, 30, 20, 10)


@pytest.fixture
def train(tmp_path):
    """Trains a few steps; passes of more than `max_tokens` tokens run out of memory. Returns the run directory."""
    rows = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter * length}]}
        for letter, length in zip("abcdefg", LENGTHS, strict=True)  # no common prefixes, which are computed once
    ]
    files = {"chat": rows, "pair": ROWS["pair"], "prompt": ROWS["prompt"]}
    for name, kept in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def run(name, verb, max_tokens, *options):
        kind = {"sft": "chat", "dpo": "pair"}.get(verb, "prompt")
        given = ["--model.path", "pico", "--data.train", str(tmp_path / f"{kind}.jsonl"), "--output_dir"]
        given += [str(tmp_path / name), "--train.max_steps", str(STEPS), "--train.batch_size", "7", "--quiet"]
        given += ["--train.lr_scheduler", "constant", "--train.warmup_ratio", "0", *options]
        config = parse(verb, ALGORITHMS[verb], given)
        opened = open_online if verb in ("grpo", "ppo") else open_offline
        with opened(verb, config) as loop:
            for learner in loop.policy.workers.host.objects.values():
                if getattr(learner, "optimizer", None) is not None:
                    learner.runner.test_max_tokens = max_tokens
            loop.train()
        return tmp_path / name

    return run


def weights(folder):
    return load_tensors(newest_valid(folder / "checkpoints") / "model" / "model.safetensors")


def assert_equal(first, second, **tolerances):
    for name, tensor in weights(first).items():
        torch.testing.assert_close(tensor, weights(second)[name], **tolerances)


EXACT = {"rtol": 0, "atol": 0}


def test_the_step_is_repeated_with_half_of_the_tokens(train, capsys):
    """Packed into 140 tokens, the largest micro-batch has 103, of which half are 51."""
    found = train("short", "sft", 100, "--train.micro_batch_tokens", "140")
    assert capsys.readouterr().err.count("out of memory; micro-batches have at most 51 tokens") == 1
    assert_equal(found, train("small", "sft", 0, "--train.micro_batch_tokens", "51"), **EXACT)
    assert_equal(found, train("large", "sft", 0, "--train.micro_batch_tokens", "140"), rtol=1e-4, atol=1e-6)
    assert read_json(newest_valid(found / "checkpoints") / "state.json")["progress"]["micro_batch_tokens"] == 51


def test_a_resumed_run_keeps_the_smaller_size(train, capsys):
    half = train("half", "sft", 100, "--train.micro_batch_tokens", "140", "--save.every_steps", "1")
    assert "out of memory" in capsys.readouterr().err
    train("half", "sft", 100, "--train.micro_batch_tokens", "140", "--resume", "--train.max_steps", "5")
    assert "out of memory" not in capsys.readouterr().err
    whole = train("whole", "sft", 0, "--train.micro_batch_tokens", "51", "--train.max_steps", "5")
    assert_equal(half, whole, **EXACT)


@pytest.mark.parametrize(("verb", "most"), [("dpo", 60), ("grpo", 60), ("ppo", 60)])
def test_pairs_completions_and_a_critic(verb, most, train, tmp_path, capsys):
    options = ["--model.dtype", "float32", "--train.micro_batch_tokens", "4096"]
    if verb != "dpo":
        options += ["--reward", write_judge(tmp_path), "--rollout.max_tokens", "8", "--rollout.samples_per_prompt", "2"]
    found = train("short", verb, most, *options)
    assert "out of memory; micro-batches have at most" in capsys.readouterr().err
    assert_equal(found, train("large", verb, 0, *options), rtol=1e-3, atol=1e-5)


def test_one_example_that_does_not_fit(train):
    with pytest.raises(
        PosttrainError, match="out of memory with one example per micro-batch; the longest has 6"
    ) as error:
        train("short", "sft", 30, "--train.micro_batch_tokens", "140")
    for words in ("step 1:", "chat.jsonl:", "forward and backward", "posttrain plan", "--resume"):
        assert words in str(error.value)


def test_memory_of_the_host(train, monkeypatch, capsys):
    """A MemoryError of Python is the same: it is raised where samples are laid out."""
    from posttrain.train import learner

    laid_out = learner.collate

    def collate(samples, *args):
        if sum(map(len, samples)) > 100:
            raise MemoryError
        return laid_out(samples, *args)

    monkeypatch.setattr(learner, "collate", collate)
    train("short", "sft", 0, "--train.micro_batch_tokens", "140")
    assert "out of memory; micro-batches have at most 51 tokens" in capsys.readouterr().err
