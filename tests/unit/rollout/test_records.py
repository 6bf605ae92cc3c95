"""Rollouts as lines of a file and back; files that a kill left incomplete; what a replay computes again."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError, UsageError
from posttrain.core.jsonl import as_line
from posttrain.core.types import Prompt, Sample
from posttrain.rollout import records
from posttrain.rollout.records import STREAMS, Rollout, as_row, from_row, unscored

NUMBER = st.floats(allow_nan=False, allow_infinity=False)
SINGLE = st.floats(width=32, allow_nan=False)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | NUMBER | st.text(), st.lists, max_leaves=4)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()})


@st.composite
def rollouts(draw):
    size = draw(st.integers(2, 8))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))])
    values = st.lists(SINGLE, min_size=size, max_size=size)
    stream = values.map(lambda found: np.where(mask, np.array(found, dtype=np.float32), np.float32(0)))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))
    tokens = np.array(ids, dtype=np.int32)
    origin = draw(st.text())
    sample = Sample(
        tokens=tokens,
        mask=mask,
        reward=draw(NUMBER),
        baseline=draw(NUMBER),
        group=draw(st.integers(0, 2**40)),
        version=draw(st.integers(0, 2**40)),
        finish=draw(st.sampled_from(["stop", "length", "error"])),
        origin=origin,
        **{name: draw(st.none() | stream) for name in STREAMS},
    )
    prompt = Prompt(
        tokens=tokens[: draw(st.integers(0, size))],
        messages=draw(st.lists(MESSAGE, max_size=2)),
        columns=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        origin=origin,
    )
    return Rollout(
        sample=sample,
        prompt=prompt,
        text=draw(st.text()),
        messages=draw(st.lists(MESSAGE, max_size=2)),
        turns=draw(st.integers(1, 9)),
        rewards=draw(st.dictionaries(st.text(), NUMBER, max_size=3)),
        failure=draw(st.text()),
        seconds=draw(st.integers(0, 10**9)) / 10**6,
    )


def plain(value):
    """Anything as values that can be compared, the bits of floats included."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@settings(max_examples=150, deadline=None)
@given(rollouts(), st.integers(0, 10**6))
def test_round_trip(rollout, step):
    quick = records.line_of(records.without_streams(rollout, step), records.streams(rollout.sample))
    for text in (as_line(as_row(rollout, step)), quick):
        [line] = text.encode().decode().split("\n")[:-1]
        row = json.loads(line)
        assert row["step"] == step and records.STEP.match(line.encode())[1] == b"%d" % step
        assert plain(from_row(row)) == plain(rollout)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4028235e38])
def test_numbers_that_json_does_not_know_come_back_too(odd):
    rollout = made(1)
    rollout.sample.logprobs = np.full(len(rollout.sample), odd, dtype=np.float32)
    line = records.line_of(records.without_streams(rollout, 1), records.streams(rollout.sample))
    mask = rollout.sample.mask
    assert from_row(json.loads(line)).sample.logprobs[mask].tobytes() == rollout.sample.logprobs[mask].tobytes()


def made(step, group=0, **options):
    sample = Sample(
        tokens=np.array([1, 2, 3], dtype=np.int32), mask=np.array([False, True, True]), group=group, finish="stop"
    )
    prompt = Prompt(tokens=np.array([1], dtype=np.int32), messages=[], origin=f"rows:{group}")
    return Rollout(sample=sample, prompt=prompt, text=f"answer {step}", **options)


@pytest.fixture
def run(tmp_path):
    written = records.RolloutWriter(tmp_path, 0)
    for step in (1, 2, 3):
        written.add([made(step, group) for group in (0, 1)], step)
    written.flush()
    return tmp_path


def steps(folder):
    return [(step, [rollout.sample.group for rollout in batch]) for step, batch in records.read_steps(folder)]


def test_batches_come_back_step_by_step(run):
    assert steps(run) == steps(run / records.FILE) == [(1, [0, 1]), (2, [0, 1]), (3, [0, 1])]
    assert records.last_step(run / records.FILE) == 3
    assert [number for number, _ in records.read_rows(run / records.FILE, only=2)] == [3, 4]


@pytest.mark.parametrize("lost", [1, 100])
def test_an_incomplete_batch_is_left_out(run, lost):
    file = run / records.FILE
    file.write_bytes(file.read_bytes()[:-lost])
    assert steps(run) == [(1, [0, 1]), (2, [0, 1])]


def test_resuming_drops_steps_that_are_done_again(run):
    file = run / records.FILE
    file.write_bytes(file.read_bytes()[:-50])  # a kill
    going_on = records.RolloutWriter(run, 1)
    going_on.add([made(2, 7)], 2)
    going_on.flush()
    assert steps(run) == [(1, [0, 1]), (2, [7])]
    assert [row["step"] for _, row in records.read_rows(file)] == [1, 1, 2]


def test_samples_may_change_after_they_are_added(tmp_path):
    written, rollout = records.RolloutWriter(tmp_path, 0), made(1)
    written.add([rollout], 1)
    rollout.sample.reward, rollout.text = 5.0, "later"
    written.flush()
    [(_, [read])] = records.read_steps(tmp_path)
    assert read.text == "answer 1" and read.sample.reward == 0.0


def test_a_line_that_is_no_rollout_is_reported_with_its_number(run, tmp_path):
    file = run / records.FILE
    for line, complaint in ((b"{}\n", "no step"), (b"hello\n", "Expecting value"), (b'{"step": 4}\n', "KeyError")):
        whole = file.read_bytes()
        file.write_bytes(whole + line)
        with pytest.raises(DataError, match=rf"{records.FILE}:7: not a recorded rollout: .*{complaint}"):
            steps(run)
        file.write_bytes(whole)
    with pytest.raises(UsageError, match="no recorded rollouts there"):
        steps(tmp_path / "elsewhere")


def test_a_replay_drops_what_is_computed_again():
    rollout = made(1, rewards={"old": 1.0, "environment": 0.5, "overlong": -1.0}, failure="old: error: no")
    ones = np.ones(3, dtype=np.float32)
    for name in STREAMS:
        setattr(rollout.sample, name, ones)
    rollout.sample.reward = 3.0
    again = unscored(rollout)
    assert again.rewards == {"environment": 0.5} and again.failure == "" and again.sample.reward == 0.0
    assert again.sample.logprobs is ones  # the sampler's, which cannot be computed again
    assert all(getattr(again.sample, name) is None for name in STREAMS if name != "logprobs")
    assert rollout.sample.reward == 3.0  # a copy
    assert unscored(made(1, failure="environment: no")).failure == "environment: no"


def test_a_recorded_rollout_is_one_line_for_every_reader():
    sample = Sample(tokens=np.array([1, 2], dtype=np.int32), mask=np.array([False, True]))
    said = "one\u2028two\x85three\x0bfour"
    rollout = Rollout(sample=sample, prompt=Prompt(tokens=np.array([1], dtype=np.int32), messages=[]), text=said)
    (line,) = as_line(as_row(rollout, 1)).splitlines()
    assert from_row(json.loads(line)).text == said
