"""Makes old_runs/*.tar.xz, unfinished runs as the previous version leaves them, and records how it finishes them.

    python -m tests.recorded.record_old_runs NUMBERS.json [VERB ...]

It was run once for each verb, with the code of commit b6c8b3a. With any other code the result would prove nothing.
"""

import contextlib
import os
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from tests.e2e.commands import rows_of, start, wait_until
from tests.recorded.cases import FOLDER, numbers_of, numbers_of_run, prepare, read_numbers, run, write_numbers
from tests.tiny import tiny_folder

SMALL = {"hidden_size": 16, "intermediate_size": 24}
COMMON = [
    *("--model.path", "model", "--update.rows_per_step", "4", "--update.learning_rate", "3e-3"),
    *("--update.schedule", "cosine:0.05", "--update.warmup", "0.25", "--update.ema_decay", "0.9"),
    *("--update.betas", "0.9", "0.99", "--eval.every", "2", "--save.every", "2", "--save.keep", "1"),
    *("--save.keep_gigabytes", "1", "--cluster.limits", "0", "900", "--out", "run"),
]
SFT = ["--data.train", "examples/data/chat.jsonl", "--data.eval", "0.2", "--data.max_tokens", "128", "--steps", "8"]
GRPO = [
    *("--data.train", "examples/data/questions.jsonl", "--data.eval", "examples/data/questions.jsonl"),
    *("--data.max_tokens", "128", "--eval.max_rows", "2", "--steps", "6", "--algo.kl", "0.05"),
    *("--reward", "data/rewards.py:spread", "gsm8k", "--rewards.weights", "1", "0.5", "--rewards.limits", "20", "2"),
    *("0.5", "--rewards.normalize", "running", "--rewards.overlong", "3", "0.5", "--rewards.workers", "1"),
    *("--rollout.samples_per_prompt", "3", "--rollout.max_tokens", "8", "--rollout.ahead", "1"),
    *("--rollout.engine", "local"),
]
PIPELINE = [
    *("--model.path", "model", "--data.train", "examples/data/questions.jsonl", "--data.eval"),
    *("examples/data/questions.jsonl", "--data.max_tokens", "128", "--iterations", "2", "--prompts", "4"),
    *("--reward", "data/rewards.py:spread", "gsm8k", "--score.weights", "1", "0.5", "--score.timeout_seconds", "20"),
    *("--score.memory_gib", "2", "--score.workers", "1", "--score.max_failure_rate", "0.5", "--generate.n", "3"),
    *("--generate.max_tokens", "8", "--generate.batch", "6", "--generate.engine", "local", "--eval.n", "2"),
    *("--eval.temperature", "0.7", "--algo.loss", "ipo", "--algo.pref_ftx", "0.5", "--algo.length_normalize"),
    *("--update.rows_per_step", "2", "--update.learning_rate", "3e-3", "--update.schedule", "linear:0.2"),
    *("--epochs", "2", "--out", "run"),
]
# verb -> options, the signal that ends the run, and when: after a step, or when a file is there
RUNS: dict[str, tuple[list[str], signal.Signals, int | str]] = {
    "sft": ([*COMMON, *SFT], signal.SIGTERM, 2),
    "grpo": ([*COMMON, *GRPO], signal.SIGKILL, 3),
    "iterative-dpo": (PIPELINE, signal.SIGKILL, "iteration-2/scored.jsonl.done.json"),
}
PIPELINES = ("iterative-dpo",)
PLACE = "/place"
"""What stands in an archive for the directory that it was made in."""
FINISH = {verb: f"posttrain {verb} --resume --out run --quiet" for verb in RUNS}
"""Commands that finish a run; all other settings come from the run's own configuration."""


def unfinished(verb):
    """Starts a run in the current directory and ends it in the middle."""
    options, ending, reached = RUNS[verb]
    process = start(verb, *options)
    if isinstance(reached, str):
        wait_until(Path("run", reached).exists, process)
    else:
        wait_until(lambda: len(rows_of(Path("run/metrics.jsonl"))) >= reached, process)
    process.send_signal(ending)
    process.communicate()
    assert process.returncode, "it had finished already: run this again"
    for log in Path("run").rglob("run.log"):
        log.write_text(log.read_text(encoding="utf-8").replace(f"{FOLDER.parents[1]}/", ""), encoding="utf-8")
    move_seals(str(Path.cwd()), PLACE)


def move_seals(old, new):
    """Replaces the directory in the names of files that stages of a pipeline read."""
    for seal in Path("run").rglob("*.done.json"):
        seal.write_text(seal.read_text(encoding="utf-8").replace(f"{old}/", f"{new}/"), encoding="utf-8")


def numbers_of_old(verb):
    """Collects the numbers of the run in the current directory."""
    return numbers_of(Path.cwd()) if verb in PIPELINES else numbers_of_run(Path("run"))


def main(numbers_file, *verbs):
    torch.set_num_threads(1)
    file = Path(numbers_file).resolve()
    numbers = read_numbers(file)
    numbers.setdefault("old_runs", {})
    (FOLDER / "old_runs").mkdir(exist_ok=True)
    for verb in verbs or RUNS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            place = Path(folder, "place")
            prepare(place, [])
            tiny_folder("llama", place, **SMALL).rename(place / "model")
            os.chdir(place)
            unfinished(verb)
            with tarfile.open(FOLDER / "old_runs" / f"{verb}.tar.xz", "w:xz", preset=9) as archive:
                for name in ("model", "run"):
                    archive.add(name, filter=without_owner)
            print(verb, "stopped with", *sorted(path.name for path in Path("run").rglob("step-*")))
            move_seals(PLACE, str(place))
            run([FINISH[verb]])
            numbers["old_runs"][verb] = numbers_of_old(verb)
    write_numbers(numbers, file)


def without_owner(entry):
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(*sys.argv[1:])
