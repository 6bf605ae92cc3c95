"""Unfinished runs of the previous version resume with the numbers it would compute, and other commands read them."""

import json
import tarfile

import pytest

from tests.e2e.commands import command, rows_of
from tests.recorded.cases import FOLDER, prepare, read_numbers, run
from tests.recorded.compare import TOLERANCE, differences
from tests.recorded.record_old_runs import FINISH, PIPELINES, PLACE, move_seals, numbers_of_old

RECORDED = read_numbers()["old_runs"]


@pytest.fixture(params=[verb for verb in FINISH if verb not in PIPELINES])
def verb(request, tmp_path, monkeypatch):
    """Unpacks an unfinished run of this verb into `run`, with its model and data next to it."""
    prepare(tmp_path, [])
    with tarfile.open(FOLDER / "old_runs" / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    move_seals(PLACE, str(tmp_path))
    return request.param


def test_resumes_with_equal_numbers(verb, exact, tmp_path):
    begun = len(rows_of(tmp_path / "run/metrics.jsonl"))
    recorded = RECORDED[verb]
    assert 0 < begun < len(recorded["metrics"])
    run([FINISH[verb]])
    found = differences(recorded, numbers_of_old(verb), 0 if exact else TOLERANCE)
    assert not found, "\n".join(["differs from the previous version:", *found[:20]])


@pytest.mark.parametrize("verb", PIPELINES, indirect=True)
def test_a_pipeline_resumes_with_equal_numbers(verb, exact, tmp_path, capsys):
    """Nothing that is done is done again: settings in old seals are compared under the names they have now."""
    done = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.done.json"))
    run([FINISH[verb]])
    assert len(done) == 10 and capsys.readouterr().out.count(": done before;") == len(done)
    found = differences(RECORDED[verb], numbers_of_old(verb), 0 if exact else TOLERANCE)
    assert not found, "\n".join(["differs from the previous version:", *found[:20]])


def test_its_model_generates_and_is_exported(verb, exact, tmp_path):
    run(
        [
            "posttrain generate run examples/data/questions.jsonl --out completions.jsonl --temperature 0 --quiet",
            "posttrain export run exported",
            "posttrain export run averaged --ema",
            "posttrain generate exported examples/data/questions.jsonl --out again.jsonl --temperature 0 --quiet",
            "posttrain inspect run",
        ]
    )
    completions, again = (
        [row["tokens"] for row in rows_of(tmp_path / name)] for name in ("completions.jsonl", "again.jsonl")
    )
    assert len(completions) == 6 and completions == again


@pytest.mark.parametrize("verb", ["grpo"], indirect=True)
def test_its_samples_are_shown(verb, tmp_path, capsys):
    recorded = rows_of(tmp_path / "run/rollouts.jsonl")
    newest = [row for row in recorded if row["step"] == recorded[-1]["step"]]
    assert command("samples", "run") == 0
    capsys.readouterr()
    assert command("samples", "run", "--json", "--best", 2, "--worst", 1) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rewards = sorted((row["reward"] for row in newest), reverse=True)
    assert [row["reward"] for row in shown] == [*rewards[:2], rewards[-1]]


@pytest.mark.parametrize("verb", ["grpo"], indirect=True)
def test_its_rollouts_are_replayed(verb, tmp_path):
    """Step 3 was under way when it was killed, but its rollouts were recorded."""
    run(
        [
            "posttrain grpo --model.path model --data.train examples/data/questions.jsonl --data.max_tokens 128 "
            "--reward data/rewards.py:digits --rollout.samples_per_prompt 3 --rollout.max_tokens 8 "
            "--steps 2 --update.rows_per_step 4 --rollout.replay run --out replayed --quiet"
        ]
    )
    old, new = (rows_of(tmp_path / name / "rollouts.jsonl") for name in ("run", "replayed"))
    assert [row["tokens"] for row in new] == [row["tokens"] for row in old[: len(new)]]
