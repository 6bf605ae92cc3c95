"""README from top to bottom, as a new user types it: each command runs in one directory and prints what it promises."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.e2e.commands import command, rows_of
from tests.e2e.test_docs import ROOT, blocks, text_of

# Not run: they set up, test and install this repository.
SET_UP = re.compile(r"make test|pip install")
CLOSE = 5.0  # percentage points between the figures of README and those of another machine


class Session:
    """Runs commands and remembers what each printed; keys are the commands without their options."""

    def __init__(self, capture):
        self.capture, self.printed = capture, {}

    def run(self, line):
        words = shlex.split(line, comments=True)
        if not words or SET_UP.match(line):
            return
        words = ["posttrain", "demo"] if words == ["make", "demo"] else words
        assert words[0] == "posttrain", f"README shows {line}: neither run nor left out by this test"
        assert command(*words[1:]) == 0, line
        options = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
        self.remember(" ".join(words[1:options]))

    def run_python(self, number, body):
        file = Path(f"readme_{number}.py")
        file.write_text(body, encoding="utf-8")
        runpy.run_path(str(file), run_name="__main__")
        self.remember("python")

    def remember(self, name):
        out, err = self.capture.readouterr()
        while name in self.printed:
            name += "'"
        self.printed[name] = out
        assert "warning" not in err and "\ufffd" not in out, f"{name}: {out}{err}"


@pytest.fixture
def session(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    found = Session(capfd)
    for number, (language, body) in enumerate(blocks("README.md", "bash", "console", "python")):
        if language == "python":
            found.run_python(number, body)
            continue
        for line in body.replace("\\\n", " ").splitlines():
            found.run(line)
    return found


def percents(text):
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


@pytest.mark.slow
def test_readme_from_top_to_bottom(session):
    printed = session.printed
    assert list(printed) == [
        "demo", "chat runs/demo-001/grpo", "samples runs/demo-001/grpo",
        "eval runs/demo-001/grpo runs/demo-001/data/held-out.jsonl", "sft", "chat runs/sft", "grpo", "python", "doctor",
    ]  # fmt: skip
    # The demo: the figures that README gives.
    stages = [percents(line) for line in printed["demo"].splitlines() if line.startswith("│")]
    told = percents(re.search(r"On 500\s+held-out sums.*?before training\)", text_of("README.md"), re.DOTALL)[0])
    none, sft, dpo, grpo, ranked, unranked = told
    promised = [[none, sft], [unranked, ranked], [sft, dpo], [dpo, grpo]]
    assert len(stages) == 4
    for measured, figures in zip(stages, promised, strict=True):
        assert measured == pytest.approx(figures, abs=CLOSE) and measured[0] < measured[1]
    # Chat, recorded completions and evaluation of its models.
    assert printed["chat runs/demo-001/grpo"].strip() == "7+8=15;2+4+1=7;75"
    assert re.search(r"\n +30  \d\d\+\d\d= .*;\d+ .*right\.right 1 ", printed["samples runs/demo-001/grpo"])
    evaluated = printed["eval runs/demo-001/grpo runs/demo-001/data/held-out.jsonl"]
    better = re.search(r"accuracy: runs/demo-001/grpo - runs/demo-001/sft = \+(0\.\d+) .* p = (\S+)", evaluated)
    assert float(better[1]) > 0.1 and float(better[2]) < 0.01
    # Training: losses fall, rewards rise, and the models say what they have learned.
    losses = [row["loss"] for row in rows_of(Path("runs/sft/metrics.jsonl"))]
    assert len(losses) == 60 and losses[0] > 5 and losses[-1] < 0.2 and f"loss {losses[-1]:.4g}" in printed["sft"]
    assert printed["chat runs/sft"].strip() == "Hello. What shall we add up today?"
    rewards = [row["reward"] for row in rows_of(Path("runs/grpo/metrics.jsonl"))]
    assert len(rewards) == 20 and sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.08
    assert re.search(r"^step 20/20  eta 0:00  reward 0\.\d+  length 1\d ", printed["grpo"], re.MULTILINE)
    preferred, completion = printed["python"].splitlines()[-2:]
    assert percents(preferred)[0] > 80 and completion == "7+8=15;2+4+1=7;75"
    assert "posttrain" in printed["doctor"]
    assert all(Path(f"runs/{run}/checkpoints").is_dir() for run in ("demo-001/grpo", "sft", "grpo", "dpo-001"))
