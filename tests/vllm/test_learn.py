"""GRPO learns with vLLM what it learns with the local engine, and both agree on what was sampled."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from posttrain.train.launch import train
from tests.e2e.rows import write_rows
from tests.learn.test_online import PRINTABLE


@pytest.mark.parametrize(
    "changes",
    [{}, {"ahead": 1}, {"temperature": 0.8, "top_p": 0.9}, {"lora_rank": 8}, {"lora_rank": 8, "ahead": 1}],
    ids=str,
)
def test_reward_rises(changes, tmp_path):
    metrics = run(tmp_path, **changes)
    rewards = [row["reward"] for row in metrics]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    gain = 0.04 if "lora_rank" in changes else 0.15  # adapters on random weights learn little, with every engine
    assert first < 0.5 and last > first + gain, rewards
    assert max(row.get("sampler_kl", 0.0) for row in metrics) < 1e-6
    if "ahead" in changes:  # with weights that are older by a step
        assert 0 < max(row["policy_drift"] for row in metrics[1:]) < 0.1


LAYOUTS = {
    "two engines": (2, [], []),
    "one engine in two processes": (2, [], ["tensor_parallel_size=2"]),
    "an engine apart": (2, ["rollout.devices=1"], []),
}


def test_layouts_change_nothing(tmp_path):
    """Completions depend on their seeds, not on the worker."""
    found = {}
    for name, (devices, layout, options) in {"one process": (1, [], []), **LAYOUTS}.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        metrics = run(folder, steps=3, cluster={"devices": devices, "layout": layout}, engine=["vllm", *options])
        found[name] = [row["reward"] for row in metrics]
        assert max(row["sampler_kl"] for row in metrics) < 1e-6
    for name in LAYOUTS:
        assert found[name] == pytest.approx(found["one process"], abs=0.01), name


@pytest.mark.parametrize("processes", [1, 2])
def test_weight_updates_during_generation(processes, tmp_path):
    """An engine on its own devices is checked after each update, during generation too, with any tensor parallelism."""
    layout = [f"rollout.devices={processes}", f"rollout.tp={processes}"]
    engine = ["vllm", "inflight", "max_num_seqs=32"]
    metrics = run(
        tmp_path, steps=12, cluster={"devices": 1 + processes, "layout": layout}, engine=engine, ahead=1, max_tokens=16
    )
    rewards = [row["reward"] for row in metrics]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert all(row["staleness"] <= 1 and 0 <= row["mixed_versions"] <= 1 for row in metrics)


def run(folder, *, lora_rank=0, steps=20, cluster=None, engine=("vllm", "max_num_seqs=64"), **rollout):
    (folder / "printable.py").write_text(PRINTABLE)
    train(
        "grpo",
        model={"path": "pico", "lora_rank": lora_rank},
        data={"train": [write_rows("prompt", folder)]},
        reward=[f"{folder}/printable.py:score"],
        rollout={"samples_per_prompt": 8, "max_tokens": 8, "engine": list(engine)} | rollout,
        rewards={"workers": 1},
        update={"rows_per_step": 8, "learning_rate": 1e-2 if lora_rank else 1e-3},
        save={"every": 0},
        algo={"kl_coef": 0.0},
        steps=steps,
        cluster=cluster or {},
        out=str(folder / "run"),
        quiet=True,
    )
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
