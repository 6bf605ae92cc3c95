"""Batches of scored rollouts: groups, seeds, dynamic sampling, failures, baselines, batches ahead, and their state."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from posttrain.core.errors import DataError
from posttrain.data.dataset import ExampleStream
from posttrain.data.prompts import PromptStore
from posttrain.engines.base import seed_for
from posttrain.rewards.base import Rewards
from posttrain.rollout.rollouts import Rollouts, by_group, has_signal
from posttrain.rollout.scoring import RolloutScorer
from tests.unit.rollout.made import SAMPLING, TOKENIZER, FakeGenerator, online, prompt

CODE = """
def number(text):
    return float(text)

def hard(text, question):
    if text == "3":
        raise ValueError("three is too much")
    return float(text) if question in "02468" else 0.0
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "r.py"
    file.write_text(CODE)
    options = {"workers": 1, "max_failure_rate": 0.9}
    with Rewards([f"{file}:number"], **options) as number, Rewards([f"{file}:hard"], **options) as hard:
        yield {"number": number, "hard": hard}


def digit(request):
    """A number from 0 to 3 that the seed decides."""
    return f"{request.seed % 4}<|end|>"


def rollouts(rewards, generator=None, rows=10, reward="number", update=None, **options):
    given = {"train__batch_size": 2, "rollout__samples_per_prompt": 3, "reward__functions": (reward,)}
    config = online(**given | options)
    stream = ExampleStream(PromptStore([prompt(str(n)) for n in range(rows)]), 2, config.seed, shuffle=False)
    scorer = RolloutScorer(rewards[reward], {}, config, TOKENIZER)
    generator = generator or FakeGenerator(digit)
    return Rollouts(
        generator, scorer, stream, config, SAMPLING, TOKENIZER, update_weights=update or generator.update_weights
    )


def groups(batch):
    return [rollout.sample.group for rollout in batch]


def asked(batch):
    return [rollout.prompt.messages[0]["content"] for rollout in batch]


def test_groups_are_neighbours_and_every_completion_has_its_own_seed(rewards):
    generator = FakeGenerator(digit)
    made = rollouts(rewards, generator)
    first, second = made.next_batch(0), made.next_batch(0)
    assert groups(first) == [0, 0, 0, 1, 1, 1] and groups(second) == [2, 2, 2, 3, 3, 3]
    assert asked(first) == ["0", "0", "0", "1", "1", "1"]
    assert [rollout.sample.origin for rollout in second] == ["rows.jsonl:2"] * 3 + ["rows.jsonl:3"] * 3
    seeds = [request.seed for request in generator.requests]
    assert len(set(seeds)) == 12
    assert seeds == [seed_for(0, position, k) for position in range(4) for k in range(3)]
    assert [rollout.sample.reward for rollout in first + second] == [seed % 4 for seed in seeds]
    assert generator.versions == [0, 0]


def test_completions_are_scored_while_others_are_generated(rewards):
    """The last completion is finished only when the first ones have been scored."""
    generator, early = FakeGenerator(digit), []
    generate = generator.generate

    def slow(requests, sampling, on_completion):
        samples = generate(requests, sampling)
        for index in reversed(range(1, len(samples))):
            on_completion(index, samples[index])
        deadline = time.monotonic() + 60
        while sum(rollout.early_verdicts is not None for rollout in early) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [rollout.early_verdicts is not None for rollout in early] == [True] * 6 + [False]
        return samples

    generator.generate = slow
    made = rollouts(rewards, generator, rollout__samples_per_prompt=4)
    begin = made.scorer.score_early

    @contextmanager
    def watched(count, budget):
        with begin(count, budget) as found:
            add, found.add = found.add, lambda rollout: (early.append(rollout), add(rollout))
            yield found

    made.scorer.score_early = watched
    batch = made.next_batch(0)
    expected = rollouts(rewards, rollout__samples_per_prompt=4).next_batch(0)
    assert [(r.sample.reward, r.rewards) for r in batch] == [(r.sample.reward, r.rewards) for r in expected]
    assert {id(rollout) for rollout in early} < {id(rollout) for rollout in batch}
    assert all(rollout.early_verdicts is None for rollout in batch), "a replay asks again"


def test_another_seed_of_the_run_gives_other_seeds():
    some = [[seed_for(run, position, k) for position in range(50) for k in range(8)] for run in range(3)]
    assert len({seed for seeds in some for seed in seeds}) == 3 * 400
    assert all(0 <= seed < 2**63 for seeds in some for seed in seeds)


def test_dynamic_sampling_keeps_groups_with_signal(rewards):
    """Every completion of an odd prompt has reward 0."""
    generator = FakeGenerator(digit)
    made = rollouts(
        rewards,
        generator,
        reward="hard",
        rollout__dynamic_sampling=True,
        rollout__dynamic_sampling_max_batches=4,
        rollout__samples_per_prompt=4,
    )
    batch = made.next_batch(0)
    assert all(has_signal(group) for group in by_group(batch))
    assert {int(question) % 2 for question in asked(batch)} == {0}
    assert len(list(by_group(batch))) == 2 and groups(batch) == sorted(groups(batch))
    assert made.stream.position == len(generator.requests) // 4  # prompts that were asked are used up


def test_dynamic_sampling_gives_up(rewards):
    generator = FakeGenerator(lambda _: "1<|end|>")
    made = rollouts(rewards, generator, rollout__dynamic_sampling=True, rollout__dynamic_sampling_max_batches=3)
    batch = made.next_batch(0)
    assert len(generator.requests) == 3 * 2 * 3  # three batches of two prompts with three answers
    assert groups(batch) == [4, 4, 4, 5, 5, 5]  # the last, so that the log can say that there is no signal


def test_without_dynamic_sampling_groups_stay(rewards):
    batch = rollouts(rewards, FakeGenerator(lambda _: "1<|end|>")).next_batch(0)
    assert len(batch) == 6 and not any(has_signal(group) for group in by_group(batch))


def test_failures_are_marked_and_no_signal(rewards):
    batch = rollouts(rewards, reward="hard", rollout__samples_per_prompt=16).next_batch(0)
    texts = {rollout.text for rollout in batch}
    assert texts == {"0", "1", "2", "3"}
    for rollout in batch:
        assert bool(rollout.failure) == (rollout.text == "3")
    failed_or_one = [rollout for rollout in batch if rollout.text in "13" and rollout.sample.group == 0]
    assert len({rollout.text for rollout in failed_or_one}) == 2
    assert not has_signal(failed_or_one) and has_signal([r for r in batch if r.sample.group == 0])


def test_the_greedy_completion_is_the_baseline(rewards):
    def words(request):
        return f"{9 - request.group}<|end|>" if generator.samplings[-1].temperature == 0 else digit(request)

    generator = FakeGenerator(words)
    made = rollouts(rewards, generator)
    made.greedy_baseline = True
    batch = made.next_batch(0)
    assert [rollout.sample.baseline for rollout in batch] == [9, 9, 9, 8, 8, 8]
    assert len(batch) == 6 and len(generator.requests) == 6 + 2
    assert [sampling.temperature for sampling in generator.samplings] == [1.0, 0.0]


def test_a_group_without_baseline_has_failed(rewards):
    generator = FakeGenerator(lambda request: "3<|end|>" if generator.samplings[-1].temperature == 0 else "2<|end|>")
    made = rollouts(rewards, generator, reward="hard")
    made.greedy_baseline = True
    assert all("three is too much" in rollout.failure for rollout in made.next_batch(0))


def trained(made, steps):
    """As the loop does: take, train, and the weights have a new version."""
    batches = []
    for step in range(1, steps + 1):
        batches.append(made.next_batch(step - 1))
    return batches


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_batches_ahead_are_as_old_as_agreed(rewards, ahead):
    weights = FakeGenerator(digit)
    seen = []
    made = rollouts(rewards, weights, update=seen.append, rollout__ahead=ahead)
    batches = trained(made, 6)
    staleness = [step - batch[0].sample.version for step, batch in enumerate(batches)]
    assert staleness == [min(step, ahead) for step in range(6)]
    assert {rollout.sample.version for rollout in batches[4]} == {4 - ahead}
    assert seen[:6] == [0] * (1 + ahead) + list(
        range(1, 6 - ahead)
    )  # the sampler had the weights that the version says
    assert [groups(batch)[0] for batch in batches] == [0, 2, 4, 6, 8, 10]


def test_batches_are_generated_one_at_a_time(rewards):
    """They share the sampler's weights, which must not change while it works, and the stream of prompts."""
    generator = FakeGenerator(digit)
    busy, never = threading.Lock(), threading.Event()
    generate = generator.generate

    def alone(requests, sampling, **told):
        with busy:
            never.wait(0.02)  # long enough for another thread to begin, if it may
            return generate(requests, sampling, **told)

    def update(version):
        assert not busy.locked()

    generator.generate = alone
    batches = trained(rollouts(rewards, generator, update=update, rollout__ahead=2), 4)
    assert [groups(batch)[0] for batch in batches] == [0, 2, 4, 6]


def test_a_batch_in_progress_takes_the_newest_weights(rewards):
    """Batch n is complete only after weights of version n came, which are brought before it is waited for."""
    generator, news, brought, made_so_far = FakeGenerator(digit), threading.Condition(), [], iter(range(9))
    generate = generator.generate

    def slow(requests, sampling, on_completion):
        number = next(made_so_far)
        with news:
            assert news.wait_for(lambda: brought[-1] >= number, 60)
            samples = generate(requests, sampling)
            for sample in samples:
                sample.version, sample.newest = 100 + number, brought[-1]
            return samples

    def update(version):
        with news:
            brought.append(version)
            news.notify_all()

    generator.generate = slow
    made = rollouts(rewards, generator, update=update, rollout__ahead=1, rollout__inflight_updates=True)
    batches = trained(made, 4)
    update(4)
    made.wait()  # the batch that is not taken
    found = [(batch[0].sample.version, batch[0].sample.newest) for batch in batches]
    assert found == [(100, 0), (101, 1), (102, 2), (103, 3)], "the versions that the sampler recorded"


def test_two_runs_ahead_are_equal(rewards):
    one, other = (trained(rollouts(rewards, rollout__ahead=2), 5) for _ in range(2))
    for batch, same in zip(one, other, strict=True):
        assert [(r.text, r.sample.group, r.sample.version) for r in batch] == [
            (r.text, r.sample.group, r.sample.version) for r in same
        ]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_state_loses_no_prompt_and_repeats_none(rewards, ahead):
    whole = trained(rollouts(rewards, rollout__ahead=ahead), 6)
    before = rollouts(rewards, rollout__ahead=ahead)
    first = trained(before, 3)
    rows = json.loads(json.dumps(before.state()))
    after = rollouts(rewards, rollout__ahead=ahead)
    after.load_state(rows)
    after.stream.position = before.stream.position
    rest = []
    for step in (4, 5, 6):
        rest.append(after.next_batch(step - 1))
    for batch, same in zip(whole, first + rest, strict=True):
        for one, other in zip(batch, same, strict=True):
            assert one.sample.tokens.tolist() == other.sample.tokens.tolist()
            assert one.sample.logprobs.tolist() == other.sample.logprobs.tolist()
            for name in ("group", "version", "reward", "finish", "origin"):
                assert getattr(one.sample, name) == getattr(other.sample, name)
            assert (one.text, one.rewards, one.prompt.columns) == (other.text, other.rewards, other.prompt.columns)


@pytest.mark.parametrize("slow_training", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_position_is_that_of_the_batch_that_was_returned(rewards, ahead, dynamic, slow_training):
    """Batches ahead have used later prompts already: how many depends on timing; and a checkpoint keeps them apart."""
    options = {"reward": "hard", "rollout__dynamic_sampling": dynamic, "rollout__dynamic_sampling_max_batches": 4}

    def positions(made, steps):
        for step in steps:
            made.next_batch(step)
            if slow_training:
                made.wait()  # training takes so long that all batches ahead are finished
            yield made.position

    expected = list(positions(rollouts(rewards, **options), range(6)))  # on-policy: the position of the stream
    assert expected == sorted(set(expected)) and (dynamic or expected == [2, 4, 6, 8, 10, 12])
    before, after = (rollouts(rewards, rollout__ahead=ahead, **options) for _ in range(2))
    found = list(positions(before, range(3)))
    after.load_state(json.loads(json.dumps(before.state())))
    after.stream.position = before.stream.position
    assert found + list(positions(after, range(3, 6))) == expected


def test_pending_batches_of_an_old_checkpoint_have_the_position_of_their_last_prompt(rewards):
    before, after = (rollouts(rewards, rollout__ahead=1) for _ in range(2))
    before.next_batch(0)
    after.load_state([{key: value for key, value in row.items() if key != "position"} for row in before.state()])
    after.stream.position = before.stream.position
    after.next_batch(1)
    assert after.position == 4


def test_an_error_of_a_batch_ahead_is_raised_by_next_batch(rewards):
    def words(request):
        if request.group >= 2:
            raise DataError("the engine is broken")
        return digit(request)

    made = rollouts(rewards, FakeGenerator(words), rollout__ahead=1)
    assert len(made.next_batch(0)) == 6
    with pytest.raises(DataError, match="the engine is broken"):
        made.next_batch(0)


def test_a_replay_is_scored_again_and_ends_with_its_record(rewards):
    recorded = rollouts(rewards)
    batch = recorded.next_batch(0)
    batch[0].sample.advantages = np.ones(len(batch[0].sample), dtype=np.float32)
    generator = FakeGenerator(digit)
    again = rollouts(rewards, generator, reward="hard", rollout__replay="elsewhere")
    again.recorded = iter([(1, batch)])
    replayed = again.next_batch(0)
    assert not generator.requests
    for old, new in zip(batch, replayed, strict=True):
        assert old.sample.tokens is new.sample.tokens and list(new.rewards) in (["r.hard"], [])
        even = new.prompt.messages[0]["content"] == "0"
        assert new.failure if new.text == "3" else new.sample.reward == (float(new.text) if even else 0.0)
        assert new.sample.advantages is None
    with pytest.raises(DataError, match="elsewhere: there are fewer recorded batches than steps"):
        again.next_batch(0)


class Environment:
    """Generates with another Rollouts, and records which calls were greedy."""

    def __init__(self):
        self.played = []

    def play(self, prompts, seeds, *, greedy=False):
        self.played.append((len(prompts), greedy))
        return [
            replace(rollout, rewards={"environment": 0.5})
            for rollout in self.rollouts.generate(prompts, seeds, greedy=greedy)
        ]


def test_an_environment_plays_all_episodes_including_greedy_ones(rewards):
    made, environment = rollouts(rewards), Environment()
    environment.rollouts = rollouts(rewards, FakeGenerator(lambda _: "2<|end|>"))
    made.episodes, made.greedy_baseline = environment, True
    batch = made.next_batch(0)
    assert environment.played == [(6, False), (2, True)]
    assert {(rollout.sample.reward, rollout.sample.baseline) for rollout in batch} == {(2.5, 2.5)}
    assert not made.generator.requests


def even_solved(request):
    """Prompts 0, 4, 8 are always solved, 2 and 6 never; the others depend on the seed."""
    text = TOKENIZER.decode(request.prompt[2:3])
    if int(text) % 2:
        return f"{request.seed % 2}<|end|>"
    return "1<|end|>" if int(text) % 4 == 0 else "0<|end|>"


@pytest.mark.parametrize("dynamic", [False, True])
def test_prompts_without_signal_are_left_out_for_some_epochs(rewards, dynamic):
    options = {"rollout__skip_epochs": 1, "rollout__dynamic_sampling": dynamic, "rollout__samples_per_prompt": 8}
    made = rollouts(rewards, FakeGenerator(even_solved), **options)
    taken, skipped = [], 0
    for step in range(13):
        batch = made.next_batch(step)
        taken += sorted({(rollout.sample.group, rollout.prompt.messages[0]["content"]) for rollout in batch})
        skipped += made.skipped
    by_epoch = [[int(text) for position, text in taken if position // 10 == epoch] for epoch in range(3)]
    if dynamic:  # groups without signal are replaced, and remembered
        assert all(number % 2 for epoch in by_epoch for number in epoch)
        generated = {request.group for request in made.generator.requests}
        assert {0, 2, 4, 6, 8} <= generated and not {10, 12, 14, 16, 18} & generated
    else:
        assert by_epoch[0] == list(range(10))
        assert by_epoch[1] == [1, 3, 5, 7, 9], "left out in the next epoch"
        assert by_epoch[2] == list(range(10)), "and tried again after it"
    assert skipped > 0


def test_difficult_and_easy_prompts_are_rarer(rewards):
    made = rollouts(
        rewards,
        FakeGenerator(even_solved),
        rollout__prompt_sampling="difficulty",
        rollout__samples_per_prompt=8,
        train__batch_size=5,
    )
    taken = [int(text) for step in range(40) for text in asked(made.next_batch(step))[::8]]
    later = taken[10:]
    assert sum(number % 2 for number in later) > 0.8 * len(later) and any(number % 2 == 0 for number in later)


def test_all_prompts_without_signal_are_still_used(rewards):
    made = rollouts(rewards, FakeGenerator(lambda _: "1<|end|>"), rollout__skip_epochs=100)
    assert [len(made.next_batch(step)) for step in range(12)] == [6] * 12


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_choice_of_prompts_is_the_uninterrupted_one(rewards, ahead, dynamic):
    options = {
        "rollout__skip_epochs": 1,
        "rollout__prompt_sampling": "difficulty",
        "rollout__ahead": ahead,
        "rollout__dynamic_sampling": dynamic,
        "rollout__samples_per_prompt": 4,
    }
    whole = rollouts(rewards, FakeGenerator(even_solved), **options)
    expected = [groups(whole.next_batch(step)) for step in range(16)]
    for stop in (3, 9):
        first = rollouts(rewards, FakeGenerator(even_solved), **options)
        for step in range(stop):
            first.next_batch(step)
        rows, visits = json.loads(json.dumps(first.state())), json.loads(json.dumps(first.history.visits))
        resumed = rollouts(rewards, FakeGenerator(even_solved), **options)
        resumed.load_state(rows)
        resumed.history.load(visits)
        resumed.stream.position = rows[-1]["position"] if rows else first.position
        assert [groups(resumed.next_batch(step)) for step in range(stop, 16)] == expected[stop:]
