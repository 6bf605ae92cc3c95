"""The pipelines as commands: the held-out reward rises, the numbers add up, and kills change nothing."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from posttrain.train.launch import train
from tests.e2e.commands import command, rows_of, start, wait_until

PROMPTS, N, ITERATIONS = 16, 8, 2
REWARDS = {
    "rejection-sampling": "reward.py:large",
    "iterative-dpo": "model:judge",
    "conditional-sft": "reward.py:large",
}
COMMON = {
    "iterations": ITERATIONS,
    "quiet": True,
    "model": {"path": "base"},
    "data": {"train": ["prompts.jsonl"], "eval": ["held-out.jsonl"], "max_tokens": 64},
    "generate": {"samples_per_prompt": N, "max_tokens": 3, "batch_size": 32},
    "eval": {"samples_per_prompt": 8, "temperature": 1.0},
    "reward": {"workers": 1},
    "save": {"every": 1, "keep": 1},
}
OWN = {
    "rejection-sampling": {"epochs": 2, "update": {"rows_per_step": 8, "learning_rate": 5e-4}},
    "iterative-dpo": {
        "epochs": 2,
        "update": {"rows_per_step": 8, "learning_rate": 3e-4},
        "algo": {"sft_coef": 1.0, "beta": 0.1},
    },
    "conditional-sft": {
        "epochs": 5,
        "update": {"rows_per_step": 16, "learning_rate": 1e-3},
        "condition_template": "{reward:+.0f}{prompt}",
        "save": {"every": 0},
    },
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A model that answers with a digit, any one; a rule that likes large ones; a reward model that learnt to."""
    folder, rng = tmp_path_factory.mktemp("pipelines"), random.Random(0)

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"model": {"path": "pico"}, "data": {"train": [str(folder / name)]}, "steps": 40, "quiet": True}

    def pair():
        worse, better = sorted(rng.sample(range(10), 2))
        return {"prompt": f"{rng.randrange(100)}?", "chosen": str(better), "rejected": str(worse)}

    lessons = ({"prompt": f"{n}?", "completion": str(rng.randrange(10))} for n in range(256))
    update = {"rows_per_step": 16, "learning_rate": 3e-3, "warmup": 5}
    train("sft", **write("lessons.jsonl", lessons), out=str(folder / "base"), update=update)
    pairs = write("pairs.jsonl", [pair() for _ in range(256)])
    train("reward", **pairs, out=str(folder / "judge"), update=update | {"learning_rate": 1e-3})
    write("prompts.jsonl", ({"prompt": f"{n}?"} for n in range(PROMPTS)))
    write("held-out.jsonl", ({"prompt": f"{n}?"} for n in range(30, 46)))
    (folder / "reward.py").write_text("def large(text): return int(text) / 9 if text in tuple('0123456789') else 0.0\n")
    for verb, own in OWN.items():
        (folder / f"{verb}.yaml").write_text(yaml.safe_dump({"verb": verb} | COMMON | own))
    return folder


def run(verb, out, *options):
    assert command(verb, f"{verb}.yaml", "--out", out, *options) == 0
    return json.loads((Path(out) / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(workplace):
    """Pipelines that have run, each once."""
    tables = {}

    def find(verb):
        if verb not in tables:
            tables[verb] = run(verb, f"runs/{verb}", "--reward", REWARDS[verb])
        return tables[verb]

    return find


@pytest.mark.parametrize("verb", OWN)
def test_the_held_out_reward_rises_and_the_numbers_add_up(verb, workplace, finished, monkeypatch):
    monkeypatch.chdir(workplace)
    table = finished(verb)
    held_out = [row["held_out_reward"] for row in table]
    assert held_out == sorted(held_out) and held_out[-1] > held_out[0] + 0.05, held_out
    for number in range(1, ITERATIONS + 1):
        place, row = Path(f"runs/{verb}/iteration-{number}"), table[number]
        answers, scored = rows_of(place / "answers.jsonl"), rows_of(place / "scored.jsonl")
        assert PROMPTS * N == row["generated"] == len(answers) == row["scored"] == len(scored)
        assert row["scored"] == row["selected"] + row["dropped"]
        assert row["rows"] == len(rows_of(place / "selected.jsonl"))
        assert [row["tokens"] for row in answers] == [row["tokens"] for row in scored]
        assert (place / "model/config.json").is_file() and rows_of(place / "model.training/metrics.jsonl")
    assert command("generate", f"runs/{verb}", "held-out.jsonl", "--max_tokens", 3, "--out", f"{verb}.jsonl") == 0


def test_a_copy_goes_on_to_more_iterations(workplace, finished, monkeypatch, capsys):
    """The folder knows its configuration; what is done stays; the numbers are shown."""
    monkeypatch.chdir(workplace)
    before = finished("rejection-sampling")
    shutil.copytree("runs/rejection-sampling", "runs/more", symlinks=True)
    capsys.readouterr()
    options = ["--out", "runs/more", "--iterations", ITERATIONS + 1]
    assert command("rejection-sampling", "--resume", *options) == 0
    said, after = capsys.readouterr().out, json.loads(Path("runs/more/report.json").read_text())
    assert said.count("done before") == 2 + ITERATIONS * 6 and after[:-1] == before
    assert f"{PROMPTS} prompts x {N} = {PROMPTS * N} completions" in said
    counts = f"{after[-1]['selected']} selected + {after[-1]['dropped']} dropped"
    assert f"{PROMPTS * N} completions = {counts}" in said
    assert Path("runs/more/model").resolve() == Path(f"runs/more/iteration-{ITERATIONS + 1}/model").resolve()
    assert command("rejection-sampling", "rejection-sampling.yaml", "--out", "runs/more", "--reward", "format") == 2
    assert "reward.functions was ['reward.py:large'], is ['format']" in capsys.readouterr().err


def test_killed_three_times_it_ends_with_the_same_weights(workplace, finished, monkeypatch):
    monkeypatch.chdir(workplace)
    verb, killed, whole = "rejection-sampling", Path("runs/killed"), Path("runs/rejection-sampling")
    table, options = finished(verb), ["--reward", REWARDS[verb]]
    places = ["answers.jsonl", "scored.jsonl.begun", "selected.jsonl", "model.training/metrics.jsonl", "model"]
    for number in sorted(random.Random(os.urandom(8)).sample(range(ITERATIONS * len(places)), 3)):
        place = killed / f"iteration-{1 + number // len(places)}" / places[number % len(places)]
        process = start(verb, f"{verb}.yaml", "--out", killed, *options, cwd=workplace)
        wait_until(place_or_behind(place), process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert run(verb, killed, *options) == table
    files = [file for file in whole.rglob("*") if file.suffix in (".jsonl", ".safetensors")]
    assert sum(file.suffix == ".safetensors" for file in files) == ITERATIONS
    for file in files:
        if "training" not in str(file):  # whose metrics hold times
            assert (killed / file.relative_to(whole)).read_bytes() == file.read_bytes(), file


def place_or_behind(place):
    """It is there, or was, for a moment that we missed: what comes after it is."""
    behind = {".begun": "scored.jsonl.done.json"}.get(place.suffix)

    def seen():
        return place.exists() or bool(behind and (place.parent / behind).exists())

    return seen
