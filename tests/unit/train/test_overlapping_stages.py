"""rollout.prompts_per_stage: overlapping stages change nothing but the time."""

import json
from pathlib import Path

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import from_mapping
from posttrain.core.errors import UsageError
from posttrain.rollout.overlap import OverlappingStages
from posttrain.train.setup import open_online, samples_of

OPTIONS = {
    "model.path": "pico",
    "train.batch_size": 3,
    "train.max_steps": 2,
    "train.learning_rate": 1e-3,
    "rollout.samples_per_prompt": 3,
    "rollout.max_tokens": 6,
    "algo.kl_coef": 0.1,
    "algo.mini_batch_size": 3,
    "quiet": True,
}
EXAMPLES = Path(__file__).parents[3] / "examples"


def trained(folder, *, threads=False, **more):
    """The weights' file after two steps and the sizes of parts; `threads`: the reference is beside the policy."""
    data = {"data.train": [str(EXAMPLES / "data/questions.jsonl")], "output_dir": str(folder)}
    reward = {"reward.functions": [f"{EXAMPLES / 'reward.py'}:letters"]}
    config = from_mapping("grpo", ALGORITHMS["grpo"], OPTIONS | data | reward | more)
    sizes = []
    with open_online("grpo", config) as loop:
        if threads:
            reference, streams = loop.reference, loop.streams

            def beside(part):
                sizes.append(len(part))
                reference.fill(samples_of(part))

            between = [lambda part: streams.fill_logprobs(samples_of(part))]
            loop.rollouts.stages = OverlappingStages({"reference": [beside], "actor": between}, "actor")
        loop.train()
    (weights,) = folder.glob("checkpoints/*2/model/model.safetensors")
    return weights.read_bytes(), sizes


def test_stages_beside_each_other_give_the_same_bits_as_one_after_the_other(tmp_path):
    after, _ = trained(tmp_path / "after", **{"rollout.prompts_per_stage": 2})
    beside, parts = trained(tmp_path / "beside", threads=True, **{"rollout.prompts_per_stage": 2})
    assert parts == [6, 3, 6, 3]  # completions: two prompts, then the third, in each step
    assert after == beside


def test_they_give_the_same_bits_as_whole_batches_where_micro_batches_are_the_same(tmp_path):
    alone = {"train.micro_batch_tokens": 1, "algo.importance_cap": 0.0}  # each completion in a pass of its own
    whole, _ = trained(tmp_path / "whole", **alone)
    parts, _ = trained(tmp_path / "parts", threads=True, **alone, **{"rollout.prompts_per_stage": 1})
    last = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[-1])
    assert whole == parts and last["grad_norm"] > 0


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"rollout.ahead": 1}, "leave it out with rollout.ahead"),
        ({"cluster.offload": ["policy"]}, "it works meanwhile"),
    ],
)
def test_what_cannot_be_combined_is_refused(other, reason):
    options = {"model.path": "pico", "data.train": ["x.jsonl"], "reward": ["gsm8k"], "rollout.prompts_per_stage": 1}
    with pytest.raises(UsageError, match=reason):
        from_mapping("grpo", ALGORITHMS["grpo"], options | other)
