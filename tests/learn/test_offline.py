"""Every offline trainer learns: on small data, with a fixed seed, the number that it is about moves as it should."""

import json
import random

import pytest

from posttrain.train.launch import train
from tests.e2e.commands import rows_of

SUMS = [(a, b) for a in range(10) for b in range(10)]
random.Random(0).shuffle(SUMS)
GOOD, BAD = "aeimquy", "bfjnrvz"  # neither is likelier for a model that has learnt nothing


def chat(a, b, index):
    return {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": f"{a + b}"}]}


def text(a, b, index):
    return {"text": f"{a}+{b}={a + b}; {b}+{a}={a + b}"}


def pair(a, b, index):
    return {"prompt": f"{a}{b}", "chosen": GOOD[index % 7] + GOOD[a % 7], "rejected": BAD[index % 7] + BAD[b % 7]}


def labelled(a, b, index):
    words = pair(a, b, index)
    return {"prompt": words["prompt"], "completion": words["chosen" if a % 2 else "rejected"], "label": bool(a % 2)}


def stepwise(a, b, index):
    words = pair(a, b, index)
    first, second = ("chosen" if number % 2 else "rejected" for number in (a, b))
    return {"prompt": words["prompt"], "completions": [words[first], words[second]], "labels": [a % 2, b % 2]}


ROWS = {
    "pretrain": text,
    "sft": chat,
    "distill": chat,
    **dict.fromkeys(("reward", "dpo", "simpo", "orpo", "cpo"), pair),
    "kto": labelled,
    "prm": stepwise,
}


@pytest.fixture
def learn(tmp_path):
    """Trains on 72 rows, evaluates on 28 others; returns the metrics of all steps."""

    def run(verb, steps, rate=1e-3, out="run", model=None, **algo):
        rows = [ROWS[verb](a, b, index) for index, (a, b) in enumerate(SUMS)]
        for name, part in (("train", rows[:72]), ("eval", rows[72:])):
            (tmp_path / f"{verb}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        train(
            verb,
            model={"path": "pico"} | (model or {}),
            data={"train": str(tmp_path / f"{verb}-train.jsonl"), "eval": str(tmp_path / f"{verb}-eval.jsonl")},
            update={"rows_per_step": 8, "learning_rate": rate, "schedule": "constant"},
            save={"every": 0},
            steps=steps,
            out=str(tmp_path / out),
            quiet=True,
            algo=algo,
        )
        return rows_of(tmp_path / out / "metrics.jsonl")

    return run


@pytest.mark.parametrize("verb", ["sft", "pretrain"])
def test_the_loss_falls_to_less_than_half(verb, learn):
    metrics = learn(verb, 40)
    assert metrics[0]["loss"] == pytest.approx(5.6, abs=0.2)  # log 263: pico knows nothing
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 2 and metrics[-1]["eval/loss"] < metrics[0]["loss"] / 2


def test_a_reward_model_ranks_every_pair(learn):
    metrics = learn("reward", 40)
    assert metrics[0]["accuracy"] < 1
    assert all(row["accuracy"] == 1 for row in metrics[-9:])  # an epoch
    assert metrics[-1]["eval/accuracy"] == 1 and metrics[-1]["eval/margin"] > 3


@pytest.mark.parametrize(
    ("loss", "smoothing"),
    [("sigmoid", 0), ("sigmoid", 0.1), ("robust", 0.1), ("ipo", 0), ("hinge", 0), ("aot", 0), ("aot_unpaired", 0.1)],
)
def test_dpo_prefers_the_chosen(loss, smoothing, learn):
    metrics = learn("dpo", 20, rate=3e-4, loss_type=loss, label_smoothing=smoothing)
    assert metrics[0]["margin"] == pytest.approx(0, abs=1e-6)  # the policy is still the reference
    assert metrics[-1]["accuracy"] == 1 and metrics[-1]["margin"] > 0.3
    assert metrics[-1]["eval/accuracy"] > 0.9 and metrics[-1]["eval/margin"] > 0.3
    assert metrics[-1]["eval/chosen_reward"] > metrics[-1]["eval/rejected_reward"]


def test_a_reference_that_follows_lets_the_policy_go_further(learn):
    """TR-DPO: the loss is flat once the margin over a reference is large; over one that follows it never is."""
    gaps = []
    for steps in (0, 2):
        last = learn("dpo", 20, rate=3e-4, out=f"run-{steps}", beta=1.0, reference_sync_steps=steps)[-1]
        gaps.append(last["eval/chosen_logprob"] - last["eval/rejected_logprob"])
    assert gaps[1] > 1.2 * gaps[0] > 0, gaps


def test_adapters_learn_too(learn):
    """Without them the policy is the reference, so there is no second model."""
    pytest.importorskip("peft")
    metrics = learn("dpo", 20, rate=3e-3, model={"lora_rank": 8})
    assert metrics[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["eval/accuracy"] > 0.9 and metrics[-1]["eval/margin"] > 0.3


@pytest.mark.parametrize("verb", ["simpo", "orpo", "cpo"])
def test_without_a_reference_the_chosen_is_preferred_too(verb, learn):
    metrics = learn(verb, 20)
    assert metrics[0]["accuracy"] < 1 and metrics[-1]["eval/accuracy"] > 0.9
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[-1]["eval/margin"] > metrics[0]["margin"] + 0.3


@pytest.mark.parametrize("variant", ["kto", "vanilla"])
def test_kto_parts_the_desirable_from_the_undesirable(variant, learn):
    metrics = learn("kto", 25, rate=3e-4, variant=variant)
    assert metrics[0]["desirable_reward"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["eval/desirable_reward"] > metrics[-1]["eval/undesirable_reward"] + 0.3
    assert metrics[-1]["eval/accuracy"] > 0.8 and metrics[-1]["loss"] < metrics[0]["loss"]


def test_a_process_reward_model_judges_the_steps(learn):
    metrics = learn("prm", 40)
    assert metrics[0]["accuracy"] < 0.8
    assert metrics[-1]["accuracy"] == 1 and metrics[-1]["eval/accuracy"] > 0.9


def test_a_student_comes_near_its_teacher(learn, tmp_path):
    learn("sft", 40, out="teacher")
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        metrics = learn("distill", 30, out=divergence, teacher=str(tmp_path / "teacher"), divergence=divergence)
        assert metrics[-1]["loss"] < metrics[0]["loss"] / 3, divergence
        assert 0 <= metrics[-1]["eval/loss"] < metrics[0]["loss"] / 3, divergence
    same = learn("distill", 1, out="same", model={"path": str(tmp_path / "teacher")}, teacher=str(tmp_path / "teacher"))
    assert same[0]["loss"] == pytest.approx(0, abs=1e-5)
