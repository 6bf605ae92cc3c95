"""Rewards of a file of answers: parts, weights, normalisation, failures; functions and reward models together."""

import json
import math

import numpy as np
import pytest

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import DataError, RewardError, UsageError
from posttrain.core.progress import ProgressDisplay
from posttrain.inference.completion_files import new_file, read_completions, write_rows
from posttrain.inference.score import (
    PartialScores,
    ScoreProgress,
    Scoring,
    load_models,
    reward_model_input,
    score,
    score_file,
    statistics,
)
from posttrain.rewards.base import Rewards
from posttrain.train.launch import train
from posttrain.train.reward_model import RewardModel

CODE = """
def length(text): return float(len(text))
def picky(text):
    if "b" in text:
        raise ValueError("no b, please")
    return 1.0
def largest(rewards):
    return max(rewards.values())
"""


@pytest.fixture
def answers(tmp_path):
    (tmp_path / "rewards.py").write_text(CODE)
    texts = ["", "a", "bb", "cccccc"]
    rows = [
        {"index": n // 2, "prompt": [{"role": "user", "content": "say"}], "completion": text, "tokens": [1, 2]}
        for n, text in enumerate(texts)
    ]
    write_rows(tmp_path / "answers.jsonl", rows)
    return read_completions(str(tmp_path / "answers.jsonl"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    row = {"prompt": "say", "chosen": "a", "rejected": "b"}
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    options = {"model": {"path": "pico"}, "data": {"train": [str(folder / "pairs.jsonl")]}, "steps": 2, "quiet": True}
    return str(train("reward", out=str(folder / "run"), **options).output_dir)


def test_parts_and_weights(answers, tmp_path):
    with Rewards([f"{tmp_path}/rewards.py:length", "format"], [0.5, 2.0]) as rewards:
        scored = score(answers, rewards, {})
    assert [row["reward"] for row in scored.rows] == [0, 0.5, 1, 3]
    assert scored.rows[3]["rewards"] == {"rewards.length": 6.0, "format": 0.0} and scored.failed == 0
    assert [{**row, "reward": 0} for row in scored.rows] == [  # all the rest stays as it was
        {**answer.row, "reward": 0, "rewards": row["rewards"], "failure": ""}
        for answer, row in zip(answers, scored.rows, strict=True)
    ]


def test_normalised_over_the_set_without_those_that_failed(answers, tmp_path):
    specs = [f"{tmp_path}/rewards.py:length", f"{tmp_path}/rewards.py:picky"]
    with Rewards(specs, max_failure_rate=0.3) as rewards:
        scored = score(answers, rewards, {}, normalize=True)
    raw = np.array([1.0, 2.0, 7.0])
    expected = (raw - raw.mean()) / raw.std()
    kept = [row for row in scored.rows if row["reward"] is not None]
    assert [row["reward"] for row in kept] == pytest.approx(expected)
    assert [row["raw_reward"] for row in kept] == list(raw)
    failed = scored.rows[2]
    assert failed["reward"] is None and failed["raw_reward"] is None and "no b, please" in failed["failure"]
    assert failed["rewards"] == {"rewards.length": 2.0} and scored.failed == 1
    assert list(scored.faults.values()) == [1] and "no b, please" in next(iter(scored.faults))


def test_too_many_failures_end_it(answers, tmp_path):
    with (
        Rewards([f"{tmp_path}/rewards.py:picky"], max_failure_rate=0.2) as rewards,
        pytest.raises(RewardError, match="1 of 4"),
    ):
        score(answers, rewards, {})


def test_statistics():
    assert statistics([0.1] * 3) == (0.1, 0.0)
    assert statistics([1.0, 3.0]) == (2.0, 1.0)
    assert all(math.isnan(value) for value in statistics([]))


def test_equal_rewards_are_all_0_when_normalised(answers):
    with Rewards(["format"]) as rewards:
        assert {row["reward"] for row in score(answers, rewards, {}, normalize=True).rows} == {0.0}


def test_reward_models_beside_functions(answers, tmp_path, reward_model):
    with Rewards([f"model:{reward_model}", f"{tmp_path}/rewards.py:length"], [2.0, 1.0]) as rewards:
        models = load_models(rewards, ModelConfig(), DataConfig())
        rows = score(answers, rewards, models).rows
    name = rewards.names[0]
    alone = [models[0].score([reward_model_input(models[0], answer)])[0].value for answer in answers]
    assert [row["rewards"][name] for row in rows] == pytest.approx(alone, abs=1e-5)
    assert len(set(alone)) == len(alone)  # it reads the answers
    totals = [2 * value + len(answer.text) for value, answer in zip(alone, answers, strict=True)]
    assert [row["reward"] for row in rows] == pytest.approx(totals, abs=1e-4)


def test_a_function_combines_what_reward_models_and_others_said(answers, tmp_path, reward_model):
    specs = [f"model:{reward_model}", f"{tmp_path}/rewards.py:length", f"combine:{tmp_path}/rewards.py:largest"]
    with Rewards(specs) as rewards:
        rows = score(answers, rewards, load_models(rewards, ModelConfig(), DataConfig())).rows
    for row in rows:
        *said, last = row["rewards"].values()
        assert len(said) == 2 and row["reward"] == last == max(said)


def test_a_reward_model_sees_what_it_was_trained_on(answers, reward_model):
    model = RewardModel.load(ModelConfig(path=reward_model), DataConfig())
    examples = [reward_model_input(model, answer) for answer in answers]
    (sample,) = model.encoder.encode(examples[3])
    text = model.encoder.tokenizer.decode(sample.tokens)
    assert text == "<s><|user|>say<|end|><|assistant|>cccccc<|end|>"
    assert model.score(examples)[3].value == pytest.approx(model.model.scores([sample])[0], abs=1e-5)


def test_what_a_reward_model_cannot_read_is_a_failure(answers, reward_model):
    model = RewardModel.load(ModelConfig(path=reward_model), DataConfig(max_length=12, on_overlong="drop"))
    verdicts = model.score([reward_model_input(model, answer) for answer in answers])
    assert [verdict.value is None for verdict in verdicts] == [False, False, False, True]
    assert verdicts[3].kind == "error" and "max_tokens = 12" in verdicts[3].reason


def test_what_is_no_reward_model_is_refused():
    with Rewards(["model:pico"]) as rewards, pytest.raises(UsageError, match="no score head"):
        load_models(rewards, ModelConfig(), DataConfig())


def test_files_are_not_lost(tmp_path):
    file = tmp_path / "rows.jsonl"
    said = "é\x85\u2028\x9b\x7f\n"
    write_rows(file, [{"a": said, "b": "\ud800"}])
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["a"] == said and "é" in line
    write_rows(file, [{"a": 1}, {"a": 2}])
    assert [json.loads(line)["a"] for line in file.read_text().splitlines()] == [1, 2]
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UsageError, match="already"):
        new_file(str(file), False, ["other"])
    assert new_file(str(file), True, ["other"]) == file
    with pytest.raises(UsageError, match="is also the input"):
        new_file(str(file), True, ["other", str(file)])
    with pytest.raises(UsageError, match="name a file to write"):
        new_file(str(tmp_path), False, ["other"])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        read_completions(str(tmp_path / "empty.jsonl"))


COUNTING = """
from pathlib import Path
def count(text):
    with (Path(__file__).parent / "asked.txt").open("a") as file:
        file.write(text + "\\n")
    return len(text) / 7
"""


def test_killed_while_judges_are_asked_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.inference.score.BATCH_SIZE", 4)
    (tmp_path / "counting.py").write_text(COUNTING)
    write_rows(tmp_path / "a.jsonl", [{"prompt": "say", "completion": "x" * n} for n in range(10)])
    config = Scoring(file=f"{tmp_path}/a.jsonl", out=f"{tmp_path}/s.jsonl", reward=(f"{tmp_path}/counting.py:count",))
    score_file(config)
    whole = (tmp_path / "s.jsonl").read_bytes()
    (tmp_path / "s.jsonl").unlink()
    (tmp_path / "asked.txt").unlink()

    def killed(done, total):
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_file(config, killed)
    (begun,) = tmp_path.glob("*.begun")
    with begun.open("a") as file:  # and a torn line
        file.write('[[{"value": 3')
    assert not (tmp_path / "s.jsonl").exists()
    score_file(config)
    assert (tmp_path / "s.jsonl").read_bytes() == whole and not begun.exists()
    assert sorted((tmp_path / "asked.txt").read_text().split()) == ["x" * n for n in range(1, 10)]  # each once


def test_what_was_begun_for_another_question_is_of_no_use(tmp_path):
    PartialScores(tmp_path / "b", "one").add([[None]])
    assert PartialScores(tmp_path / "b", "one").verdicts == [[[None]]]
    assert PartialScores(tmp_path / "b", "other").verdicts == []
    assert PartialScores(tmp_path / "b", "one").verdicts == []


def test_progress_counts_the_time_of_this_process_alone(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr("posttrain.inference.score.time.monotonic", lambda: now)
    with ProgressDisplay() as display:
        progress = ScoreProgress(display)
        progress.report(600, 1000)  # scored by an earlier process
        now = 110.0
        progress.report(800, 1000)
        progress.report(1000, 1000)
    assert capsys.readouterr().out == "800 of 1,000 scored  eta 0:10\n"
