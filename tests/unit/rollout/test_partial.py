"""Partial rollouts with a real engine: nothing is lost, tokens have the weights that are recorded, age is bounded."""

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain import GRPOTrainer
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.metrics_sinks import is_wall_clock
from posttrain.core.types import Prompt, Sample
from posttrain.engines.base import GenerationRequest, Sampling, check_samples
from posttrain.rollout.partial import CompletionInProgress, PromptInProgress, from_rows, rows_of, with_versions
from posttrain.rollout.records import Rollout, as_row, from_row
from posttrain.rollout.scoring import EarlyScoring
from posttrain.sandbox.supervisor import RunStoppedError
from posttrain.train.learner import Learner

QUESTIONS = str(Path(__file__).parents[3] / "examples/data/questions.jsonl")
STEPS = 4


def score(prompt, completion, **columns):
    return float(len(completion) % 5)


def trainer(folder, **rollout):
    partial = {"partial_prompts": 3, "partial_tokens": 3, "max_staleness": 2}
    config = {
        "rollout": {"max_tokens": 30, "samples_per_prompt": 2, "stop": ["e", "t"]} | partial | rollout,
        "train": {"batch_size": 3, "learning_rate": 1e-3, "max_steps": STEPS},
        "quiet": True,
        "output_dir": str(folder),
    }
    return GRPOTrainer("pico", score, QUESTIONS, config)


def test_each_token_has_the_weights_that_are_recorded(tmp_path):
    """Log-probabilities are those of the moment at which a token was sampled; prompts come once, none too old."""
    logprobs_by = {}  # version -> weights
    groups, mixed = [], 0
    with trainer(tmp_path / "run") as run:
        learner = run._loop.policy.workers.host.objects["actor"]
        for step in range(STEPS):
            logprobs_by[step] = Learner(ModelConfig(path="pico"), TrainConfig(), trainable=False, seed=0)
            logprobs_by[step].set_weights(learner.weights())
            rollouts = run.make_experience()
            assert len(rollouts) == 6
            groups += dict.fromkeys(rollout.sample.group for rollout in rollouts)
            for sample in (rollout.sample for rollout in rollouts):
                spans = sample.version_spans or ((sample.version, int(sample.mask.sum())),)
                versions = [version for version, _ in spans]
                assert versions == sorted(set(versions)), "in order, each once"
                assert (versions[0], versions[-1]) == (sample.version, sample.newest)
                assert step - 2 <= versions[0] <= versions[-1] <= step, "rollout.max_staleness"
                assert sum(tokens for _, tokens in spans) == sample.mask.sum()
                mixed += len(spans) > 1
                ends = np.cumsum([0, *(tokens for _, tokens in spans)]) + np.flatnonzero(sample.mask)[0]
                for version, start, end in zip(versions, ends[:-1], ends[1:], strict=True):
                    (expected,) = logprobs_by[version].logprobs([sample])
                    np.testing.assert_allclose(sample.logprobs[start:end], expected[start:end], atol=1e-5)
            metrics = run.train_step(rollouts)
            assert metrics["mixed_versions"] == np.mean([bool(r.sample.version_spans) for r in rollouts])
        waiting = [prompt.position for prompt in run._loop.rollouts.in_progress]
    assert mixed > 0, "some were cut off"
    assert len(groups) == STEPS * 3 and sorted(groups + waiting) == list(range(len(groups + waiting))), "each once"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_that_is_complete_from_the_beginning_can_be_saved(tmp_path, steps):
    """All completions end in the first part: the next step has its batch without generating anything."""
    with trainer(tmp_path / "run", max_tokens=3) as run:
        for _ in range(steps):
            groups = {rollout.sample.group for rollout in run.make_experience()}
        rollouts = run._loop.rollouts
        rows = rollouts.state_in_progress()
        assert groups == set(range(3 * steps - 3, 3 * steps)) and len(rows) == (6 if steps == 1 else 0)


def test_a_stop_while_a_batch_is_scored_early_trains_each_prompt_once(tmp_path, monkeypatch):
    def stop(early):
        early.queue.put(None)
        raise RunStoppedError("stopped")

    with trainer(tmp_path / "run", ahead=1) as run:
        rollouts = run._loop.rollouts
        run.make_experience()
        rollouts.wait()
        with monkeypatch.context() as patch:
            patch.setattr(EarlyScoring, "finish", stop)
            rollouts.batches.popleft()  # the batch ahead, as if it had been trained on
            rollouts.start_batch(1)
            rollouts.wait()
        batch = {row["group"] for row in rollouts.state()}
        waiting = {prompt.position for prompt in rollouts.in_progress}
        assert batch and not batch & waiting, "a prompt of the batch that is kept would be trained on again"
        assert len(batch | waiting) == rollouts.stream.position - 6, "two batches before; no prompt is lost"


def run_of(folder, **rollout):
    with trainer(folder, **rollout) as run:
        run.train()
        weights = {name: tensor.clone() for name, tensor in run._loop.policy.workers.host.objects["actor"].weights()}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return weights, [{key: value for key, value in row.items() if not is_wall_clock(key)} for row in rows]


def test_staleness_0_equals_the_synchronous_run_bit_for_bit(tmp_path):
    weights, metrics = run_of(tmp_path / "partial", max_staleness=0)
    plain, expected = run_of(tmp_path / "plain", partial_prompts=0)
    for row in metrics:
        assert row.pop("mixed_versions", 0.0) == 0.0
    assert metrics == expected and metrics[-1]["staleness"] == 0.0
    assert all(np.array_equal(weights[name], plain[name]) for name in plain)


def test_a_completion_that_is_cut_off_continues_as_if_it_were_not():
    """With the same weights, at any cut, with a stop text across a cut, and with speculative decoding."""
    learner = Learner(ModelConfig(path="pico"), TrainConfig(), trainable=False, seed=0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 200, 4 + number).astype(np.int32) for number in range(6)]
    for sampling in (Sampling(max_tokens=30), Sampling(max_tokens=30, stop_texts=("e",), top_p=0.9)):
        requests = [GenerationRequest(prompt=prompt, seed=number) for number, prompt in enumerate(prompts)]
        whole = learner.generate(requests, sampling)
        for cut in (1, 7):
            limited = [GenerationRequest(prompt=r.prompt, seed=r.seed, token_limit=cut) for r in requests]
            first = learner.generate(limited, sampling)
            assert all(sample.mask.sum() <= cut for sample in first)
            open_ones = [i for i, sample in enumerate(first) if sample.finish != "stop"]
            rest = []
            for i in open_ones:
                begun = first[i].tokens[first[i].mask], first[i].logprobs[first[i].mask]
                rest.append(GenerationRequest(prompt=prompts[i], seed=i, begun=begun))
            continued = learner.generate(rest, sampling)
            check_samples(rest, continued, sampling, learner.runner.vocabulary_size, "the engine")
            for i, sample in zip(open_ones, continued, strict=True):
                assert sample.tokens.tolist() == whole[i].tokens.tolist()
                np.testing.assert_allclose(sample.logprobs, whole[i].logprobs, atol=1e-5)
                np.testing.assert_array_equal(sample.logprobs[sample.mask][:cut], rest[open_ones.index(i)].begun[1])


def made(tokens, version=0, finish="length"):
    mask = np.arange(2 + tokens) >= 2
    logprobs = np.where(mask, np.float32(-0.1) * np.arange(2 + tokens, dtype=np.float32), np.float32(0))
    ids = np.arange(2 + tokens, dtype=np.int32)
    return Sample(tokens=ids, mask=mask, logprobs=logprobs, version=version, newest=version, finish=finish, group=7)


def test_spans_of_versions():
    first = with_versions(made(3), None, 4)
    assert (first.version, first.newest, first.version_spans) == (4, 4, ())
    same = with_versions(made(5), first, 4)
    assert (same.version, same.newest, same.version_spans) == (4, 4, ())
    later = with_versions(made(9), same, 6)
    assert (later.version, later.newest, later.version_spans) == (4, 6, ((4, 5), (6, 4)))
    last = with_versions(made(10), later, 7)
    assert last.version_spans == ((4, 5), (6, 4), (7, 1))
    prompt = Prompt(tokens=np.arange(2, dtype=np.int32), messages=[], columns={}, origin="file:1")
    row = json.loads(json.dumps(as_row(Rollout(sample=last, prompt=prompt, text="x"), 3)))
    assert row["version_spans"] == [[4, 5], [6, 4], [7, 1]] and from_row(row).sample.version_spans == last.version_spans


def test_prompts_in_progress_are_the_same_after_a_resume():
    prompt = Prompt(tokens=np.arange(2, dtype=np.int32), messages=[], columns={"a": 1}, origin="file:1")
    done = made(4, finish="stop")
    open_ = with_versions(made(6), with_versions(made(2), None, 1), 2)
    completions = [
        CompletionInProgress(11, done, Rollout(sample=done, prompt=prompt, text="x")),
        CompletionInProgress(12, open_),
    ]
    (found,) = from_rows(json.loads(json.dumps(rows_of([PromptInProgress(7, prompt, 1, completions)]))))
    assert (found.position, found.version, found.prompt.columns) == (7, 1, {"a": 1}) and not found.is_complete
    assert [each.seed for each in found.completions] == [11, 12]
    assert [each.rollout is not None for each in found.completions] == [True, False]
    assert found.completions[1].sample.version_spans == ((1, 2), (2, 4))
    for before, after in zip(completions, found.completions, strict=True):
        assert after.sample.tokens.tobytes() == before.sample.tokens.tobytes()
        assert after.sample.logprobs.tobytes() == before.sample.logprobs.tobytes()


def test_a_completion_of_another_beginning_is_refused():
    request = GenerationRequest(prompt=np.arange(2, dtype=np.int32), begun=(np.array([9]), np.zeros(1)))
    with pytest.raises(Exception, match="does not continue the completion that was begun"):
        check_samples([request], [made(4)], Sampling(max_tokens=9), 100, "an engine")
