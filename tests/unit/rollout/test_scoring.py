"""Rewards: weights, clipping, the overlong penalty; a failure is never reward 0."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config.checks import check
from posttrain.core.errors import RewardError, UsageError
from posttrain.core.types import Sample
from posttrain.rewards.base import Rewards, Verdict
from posttrain.rewards.verdict import NO_REWARD
from posttrain.rollout.records import Rollout, as_row, from_row, unscored
from posttrain.rollout.scoring import RolloutScorer
from posttrain.train.summary import rollout_metrics
from tests.unit.rollout.made import TOKENIZER, ids, online, prompt

CODE = """
def words(text): return len(text.split())
def letters(text):
    if text == "bad": raise ValueError("no letters")
    return len(text)
def wanted(text, ground_truth, finish, tokens, prompt, messages):
    told = (ground_truth, finish, tokens, prompt, messages[0]["content"])
    return 100.0 if told == ("g", "stop", 4, "<s><|user|>q<|end|><|assistant|>", "q") else 0.0
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "r.py"
    file.write_text(CODE)
    with Rewards([f"{file}:words", f"{file}:letters"], workers=1, max_failure_rate=0.5) as found:
        yield found


def rollout(text, **options):
    asked = prompt("q", ground_truth="g")
    said = np.array([*ids(text), TOKENIZER.eos_token_id], dtype=np.int32)
    tokens = np.concatenate([asked.tokens, said])
    sample = Sample(tokens=tokens, mask=np.arange(len(tokens)) >= len(asked.tokens), finish="stop")
    return Rollout(sample=sample, prompt=asked, text=text, **options)


def scorer(rewards, **options):
    return RolloutScorer(
        rewards, {}, online(reward__functions=("words", "letters"), rollout__max_tokens=20, **options), TOKENIZER
    )


def test_a_weighted_sum_and_its_parts(rewards):
    rollouts = [rollout("a bc"), rollout("d")]
    scorer(rewards, reward__weights=(2.0, 0.5)).score(rollouts)
    assert [r.sample.reward for r in rollouts] == [2 * 2 + 0.5 * 4, 2 * 1 + 0.5 * 1]
    assert [r.rewards for r in rollouts] == [{"r.words": 2, "r.letters": 4}, {"r.words": 1, "r.letters": 1}]
    assert all(r.seconds > 0 and not r.failure for r in rollouts)


def test_a_combining_function(tmp_path):
    """It runs last, gets all other rewards by name, including those of reward models, and its value is the reward."""
    file = tmp_path / "r.py"
    file.write_text(CODE + "def gated(rewards, text): return min(rewards.values()) if text != 'no' else -1\n")
    specs = [f"{file}:letters", "model:somewhere/judge", f"combine:{file}:gated"]
    with Rewards(specs, workers=1, max_failure_rate=0.5) as rewards:
        rewards.check(["ground_truth"])
        three = Verdict(value=3.0, kind="ok")
        asked = RolloutScorer(
            rewards, {1: lambda asked: [three] * len(asked)}, online(reward__functions=specs), TOKENIZER
        )
        rollouts = [rollout("ab"), rollout("abcdef"), rollout("no"), rollout("bad")]
        asked.score(rollouts)
    assert [r.sample.reward for r in rollouts[:3]] == [2.0, 3.0, -1.0]
    assert rollouts[0].rewards == {"r.letters": 2.0, "model.judge": 3.0, "r.gated": 2.0}
    assert "no letters" in rollouts[3].failure and "r.gated: error: not scored" in rollouts[3].failure


def test_the_environment_and_reward_models_count_too(rewards):
    rollouts = [rollout("a", rewards={"environment": 0.25}), rollout("b")]
    place = 1
    rewards_and_model = scorer(rewards, reward__weights=(1.0, 10.0))
    rewards_and_model.models = {place: lambda asked: [Verdict(value=7.0, kind="ok") for _ in asked]}
    rewards_and_model.score(rollouts)
    assert [r.sample.reward for r in rollouts] == [1 + 70 + 0.25, 1 + 70]


def test_a_reward_model_that_judged_a_part_early_does_not_judge_it_again(rewards):
    rollouts = [rollout("a"), rollout("b", failure="lost"), rollout("c")]
    asked = []

    def judge(some):
        asked.append([r.text for r in some])
        return [Verdict(value=7.0, kind="ok") for _ in some]

    scoring = scorer(rewards, reward__weights=(1.0, 10.0))
    scoring.models = {1: judge}
    scoring.score_by_model(1, rollouts[:2])  # rollout.prompts_per_stage
    scoring.score(rollouts)
    assert asked == [["a"], ["c"]] and [r.sample.reward for r in rollouts[::2]] == [71.0, 71.0]


def test_the_clip_holds_the_sum(rewards):
    rollouts = [rollout("a b c"), rollout("a")]
    scorer(rewards, reward__weights=(1.0, -2.0), reward__clip=3.0).score(rollouts)
    assert [r.sample.reward for r in rollouts] == [-3.0, -1.0]


@pytest.mark.parametrize(
    ("bounds", "expected"), [({"clip_min": -2.0, "clip_max": 5.0}, [-2.0, -1.0]), ({"clip_max": -2.0}, [-7.0, -2.0])]
)
def test_bounds_of_different_size(bounds, expected, rewards):
    rollouts = [rollout("a b c"), rollout("a")]
    scorer(rewards, reward__weights=(1.0, -2.0), **{f"reward__{name}": value for name, value in bounds.items()}).score(
        rollouts
    )
    assert [r.sample.reward for r in rollouts] == expected


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"clip": 3.0, "clip_min": 0.0}, r"reward\.clip is both bounds"),
        ({"clip_min": 1.0, "clip_max": 1.0}, r"reward\.clip_min is 1, not below reward\.clip_max, 1"),
        ({"clip_max": float("inf")}, r"reward\.clip_max is inf: it must be a finite number"),
    ],
)
def test_bounds_that_cannot_work(bounds, words):
    with pytest.raises(UsageError, match=words):
        config = online(**{f"reward__{name}": value for name, value in bounds.items()}, model__path="pico")
        check(config, data=False)


def slowly_scaled(batches, clip):
    """Each reward over the deviation of all rewards up to the end of its batch, then clipped."""
    for end in range(1, len(batches) + 1):
        seen = [reward for batch in batches[:end] for reward in batch]
        mean = sum(seen) / max(1, len(seen))
        deviation = (sum((reward - mean) ** 2 for reward in seen) / (len(seen) - 1)) ** 0.5 if len(seen) > 1 else 1.0
        deviation = 0.0 if len(set(seen)) == 1 else deviation  # not what rounding the mean leaves of it
        for reward in batches[end - 1]:
            scaled = reward / deviation if deviation > 0 else reward
            yield min(max(scaled, -clip), clip) if clip else scaled


REWARD = st.integers(-400, 400).map(lambda number: number / 10)


@given(st.lists(st.lists(REWARD, max_size=5), max_size=6), st.sampled_from([0.0, 1.5]), st.integers(0, 6))
def test_rewards_over_the_running_deviation(batches, clip, stopped_after):
    specs = ("model:somewhere/judge",)
    config = online(reward__functions=specs, reward__normalize="running", reward__clip=clip)
    given_out, found, examined = [], [], []
    with Rewards(specs) as rewards:
        scores = {0: lambda asked: [Verdict(value=value, kind="ok") for value in given_out[-1]]}
        running = RolloutScorer(rewards, scores, config, TOKENIZER)
        for number, batch in enumerate(batches):
            given_out.append(batch)
            rollouts = [rollout("a") for _ in batch]
            running.score(rollouts, training=False)  # an evaluation between: neither scaled nor remembered
            examined += [r.sample.reward for r in rollouts]
            running.score(rollouts)
            found += [r.sample.reward for r in rollouts]
            if number == stopped_after:  # a run that is resumed
                state = json.loads(json.dumps(running.state()))
                running = RolloutScorer(rewards, scores, config, TOKENIZER)
                running.load_state(state)
    assert found == pytest.approx(list(slowly_scaled(batches, clip)), rel=1e-9)
    assert examined == [reward for batch in batches for reward in batch]


@pytest.mark.parametrize("value", [0.1, 0.7, -1e-3, 1e6 + 0.1])
def test_rewards_that_are_all_alike_have_no_deviation(value):
    specs = ("model:somewhere/judge",)
    with Rewards(specs) as rewards:
        running = RolloutScorer(
            rewards,
            {0: lambda asked: [Verdict(value=value, kind="ok")] * len(asked)},
            online(reward__functions=specs, reward__normalize="running"),
            TOKENIZER,
        )
        for size in (6, 3, 7):
            rollouts = [rollout("a") for _ in range(size)]
            running.score(rollouts)
            assert [r.sample.reward for r in rollouts] == [value] * size


def test_failures_are_not_in_the_running_deviation(rewards):
    rollouts = [rollout("a"), rollout("bad"), rollout("a b c d")]
    scorer(rewards, reward__normalize="running", reward__weights=(1.0, 0.0)).score(rollouts)
    assert [r.sample.reward for r in rollouts if not r.failure] == pytest.approx([1 / 4.5**0.5, 4 / 4.5**0.5])


def test_a_failure_is_never_a_zero(rewards):
    bad, good, lost = rollout("bad"), rollout("good"), rollout("lost", failure="environment: no")
    bad.sample.reward = good.sample.reward = 77.0
    scorer(rewards).score([bad, good, lost])
    assert bad.failure.startswith("r.letters: error:") and "no letters" in bad.failure
    assert bad.rewards == {"r.words": 1.0} and bad.sample.finish == "stop"  # how it ended is another matter
    assert good.sample.reward == 1 + 4
    assert lost.rewards == {} and lost.failure == "environment: no"  # not even asked
    with pytest.raises(RewardError, match="no letters") as stopped:
        scorer(rewards).score([rollout("bad")])
    assert "no letters" in stopped.value.rollouts[0].failure  # to be recorded


def test_functions_get_the_columns_and_the_completion(tmp_path):
    (tmp_path / "r.py").write_text(CODE)
    with Rewards([f"{tmp_path / 'r.py'}:wanted"], workers=1) as rewards:
        asked = rollout("abc")
        RolloutScorer(rewards, {}, online(reward__functions=("wanted",)), TOKENIZER).score([asked])
    assert asked.sample.reward == 100.0


@given(st.integers(1, 300), st.integers(1, 100), st.floats(0.1, 4), st.integers(0, 400))
def test_the_overlong_penalty_is_that_of_dapo(longest, buffer, whole, tokens):
    """arXiv:2503.14476, eq. 13, times the penalty factor."""
    buffer = min(buffer, longest)
    tokens = min(tokens, longest)
    config = online(rollout__max_tokens=longest, reward__overlong_tokens=buffer, reward__overlong_penalty=whole)
    if tokens <= longest - buffer:
        expected = 0.0
    elif tokens <= longest:
        expected = ((longest - buffer) - tokens) / buffer
    else:
        expected = -1.0
    with Rewards([]) as none:
        assert RolloutScorer(none, {}, config, TOKENIZER).overlong_penalty(tokens) == pytest.approx(-expected * whole)


def test_the_penalty_is_a_reward_of_its_own_and_counts_the_tokens_of_the_environment(rewards):
    rollouts = [rollout("a" * 9), rollout("a" * 14), rollout("a" * 14)]
    rollouts[2].sample.mask[-10:-5] = False  # of another's tokens
    scorer(rewards, reward__overlong_tokens=10, reward__overlong_penalty=2.0).score(rollouts)
    assert "overlong" not in rollouts[0].rewards
    assert [r.rewards["overlong"] for r in rollouts[1:]] == [-1.0, -1.0]
    assert rollouts[1].sample.reward == 1 + 14 - 1


def test_early_scoring_ends_if_generation_fails(rewards):
    with pytest.raises(MemoryError), scorer(rewards).score_early(4, rewards.timeout_budget(4)) as early:
        early.add(rollout("a b"))
        raise MemoryError("no room")
    early.thread.join(60)
    assert not early.thread.is_alive()


def test_none_means_that_a_reward_does_not_apply(tmp_path):
    """Sums have the other rewards; a completion without any has no signal; metrics are over those that have it."""
    file = tmp_path / "r.py"
    file.write_text(
        CODE + "def long(text): return None if len(text) < 3 else 1.0\n"
        "def many(completions): return [None if t == 'x' else 5.0 for t in completions]\n"
    )
    with Rewards([f"{file}:long", f"{file}:many"], workers=1, max_failure_rate=0.0) as rewards:
        config = online(reward__functions=("long", "many"), reward__weights=(1.0, 2.0))
        judge = RolloutScorer(rewards, {}, config, TOKENIZER)
        rollouts = [rollout("abc"), rollout("ab"), rollout("x"), rollout("abcd")]
        judge.score(rollouts)
    assert [r.sample.reward for r in rollouts] == [11.0, 10.0, 0.0, 11.0]
    assert [r.failure for r in rollouts] == ["", "", NO_REWARD, ""]
    assert [r.not_applicable for r in rollouts] == [[], ["r.long"], ["r.long", "r.many"], []]
    assert [judge.first_reward(r) for r in rollouts] == [1.0, None, None, 1.0]
    again = from_row(json.loads(json.dumps(as_row(rollouts[1], 1))))
    assert again.not_applicable == ["r.long"] and unscored(again).not_applicable == []
    assert [value for _, value in judge.terms(rollouts[1])][1:] == [5.0, 0.0, 0.0]
    assert math.isnan(judge.terms(rollouts[1])[0][1])
    metrics = rollout_metrics(rollouts, 0)
    assert metrics["failures"] == 0 and metrics["no_reward"] == 1
    assert metrics["rewards/r.long"] == 1.0 and metrics["rewards/r.long_applies"] == pytest.approx(2 / 3)
    assert metrics["rewards/r.many"] == 5.0 and "rewards/r.many_applies" not in metrics


def test_a_combining_function_sees_none(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "def some(text): return None if text == 'b' else 3\n"
        "def both(rewards): return -1 if rewards['r.some'] is None else rewards['r.some']\n"
    )
    specs = [f"{file}:some", f"combine:{file}:both"]
    with Rewards(specs, workers=1) as rewards:
        rollouts = [rollout("a"), rollout("b")]
        RolloutScorer(rewards, {}, online(reward__functions=specs), TOKENIZER).score(rollouts)
    assert [r.sample.reward for r in rollouts] == [3.0, -1.0] and not any(r.failure for r in rollouts)
