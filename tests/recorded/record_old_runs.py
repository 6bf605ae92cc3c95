"""Makes old_runs/*.tar.xz, unfinished runs as the previous version leaves them, and records how it finishes them.

    python -m tests.recorded.record_old_runs NUMBERS.json

It was run once, with the code of commit b6c8b3a. With any other code the result would prove nothing.
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
from tests.recorded.cases import FOLDER, numbers_of_run, prepare, read_numbers, run, write_numbers
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
# verb -> options, the signal that ends the run, the step after which it is sent
RUNS = {"sft": ([*COMMON, *SFT], signal.SIGTERM, 2), "grpo": ([*COMMON, *GRPO], signal.SIGKILL, 3)}
FINISH = {verb: f"posttrain {verb} --resume --out run --quiet" for verb in RUNS}
"""Commands that finish a run; all other settings come from the run's own configuration."""


def unfinished(verb):
    """Starts a run in the current directory and ends it in the middle."""
    options, ending, steps = RUNS[verb]
    process = start(verb, *options)
    wait_until(lambda: len(rows_of(Path("run/metrics.jsonl"))) >= steps, process)
    process.send_signal(ending)
    process.communicate()
    assert process.returncode, "it had finished already: run this again"
    log = Path("run/logs/run.log")
    log.write_text(log.read_text(encoding="utf-8").replace(f"{FOLDER.parents[1]}/", ""), encoding="utf-8")


def main(numbers_file):
    torch.set_num_threads(1)
    file = Path(numbers_file).resolve()
    numbers = read_numbers(file)
    numbers["old_runs"] = {}
    (FOLDER / "old_runs").mkdir(exist_ok=True)
    for verb in RUNS:
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
            print(verb, "stopped with", *sorted(path.name for path in Path("run/checkpoints").iterdir()))
            run([FINISH[verb]])
            numbers["old_runs"][verb] = numbers_of_run(place / "run")
    write_numbers(numbers, file)


def without_owner(entry):
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(*sys.argv[1:])
