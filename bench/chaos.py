"""Kill processes of a run at random and compare its end with that of an undisturbed run: `python -m bench chaos`.

A GRPO run of pico with two sharded learners, a rollout worker and reward children is killed about once a minute: its
trainer, a learner, the rollout worker, or a reward child. A trainer that was killed is started again with --resume, as
a scheduler would do; all else recovers by itself. At the end weights, optimizer, rollouts and metrics must equal those
of a run of the same length without kills, bit for bit.

Effective time is the time of the steps that counted, without kills, divided by the time with kills.

BENCH_CHAOS_STEPS    steps of the run (600)
BENCH_CHAOS_SECONDS  mean seconds between two kills (60)
BENCH_CHAOS_SEED     seed of the kills (0)
BENCH_CHAOS_RAY      address of a Ray cluster on this machine to place workers on; empty: processes
BENCH_CHAOS_FOLDER   where to keep the runs; empty: a temporary directory
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkpoints.checkpoint import newest_valid, step_of
from posttrain.core.files import file_sha256
from posttrain.core.metrics_sinks import is_wall_clock
from posttrain.sandbox.reaper import descendants

STEPS = int(os.environ.get("BENCH_CHAOS_STEPS", "600"))
SECONDS = float(os.environ.get("BENCH_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("BENCH_CHAOS_SEED", "0"))
RAY = os.environ.get("BENCH_CHAOS_RAY", "")
LEARNERS, ROLLOUT_WORKERS = 2, 1
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 600.0  # without a new step
FORK_SERVER = "posttrain.cluster.fork_server"  # its forks have its command line and a log each
REWARD = "def score(text):\n    return float(sum(map(ord, text)) % 7)\n"


@dataclass(slots=True)
class Kill:
    """A kill, and the time until a step was finished that had not been finished before it."""

    role: str
    step: int  # the last one before it
    at: float
    recovery: float | None = None


def measure_chaos() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.environ.get("BENCH_CHAOS_FOLDER", "") or name)
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs(folder)
        quiet, _ = train(folder, "quiet", kill=False)
        print(f"undisturbed: {STEPS} steps in {quiet:.0f} s", flush=True)
        disturbed, kills = train(folder, "killed", kill=True)
        report(folder, quiet, disturbed, kills)
        differences = compare(folder / "quiet", folder / "killed")
    for difference in differences:
        print(f"DIFFERS: {difference}")
    if differences:
        sys.exit(1)
    print("weights, optimizer, rollouts and metrics are equal bit for bit")


def write_inputs(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(10) for b in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def command(folder: Path, name: str) -> list[str]:
    workers = ["--cluster.devices", str(LEARNERS + ROLLOUT_WORKERS)]
    workers += ["--cluster.rollout_devices", str(ROLLOUT_WORKERS), "--cluster.max_restarts", "1000"]
    workers += ["--cluster.ray_address", RAY] if RAY else []
    return [
        *(sys.executable, "-m", "posttrain", "grpo", "--model", "pico", "--quiet", *workers),
        *("--data", str(folder / "prompts.jsonl"), "--reward", f"{folder / 'reward.py'}:score"),
        *("--reward.workers", "2", "--rollout.samples_per_prompt", "4", "--rollout.max_tokens", "16"),
        *("--train.batch_size", "4", "--train.learning_rate", "1e-3", "--train.max_steps", str(STEPS)),
        *("--save.every_steps", "10", "--output_dir", str(folder / name)),
    ]


def train(folder: Path, name: str, *, kill: bool) -> tuple[float, list[Kill]]:
    """Run until all steps are done; returns the seconds that it took, and the kills."""
    chance, run, kills = random.Random(SEED), folder / name, list[Kill]()
    started = time.monotonic()
    next_kill, last_step, stepped = started + pause(chance), 0, started
    trainer = start_trainer(folder, name)
    try:
        while (code := trainer.poll()) != 0:
            now, step = time.monotonic(), last_logged_step(run)
            if step > last_step:
                last_step, stepped = step, now
                for each in kills:
                    each.recovery = each.recovery or now - each.at
            if now - stepped > PATIENCE_SECONDS:
                raise RuntimeError(f"no step after {last_step} for {PATIENCE_SECONDS:.0f} s: see {folder / name}.log")
            if code == -signal.SIGKILL:
                trainer = start_trainer(folder, name)
            elif code is not None:
                raise RuntimeError(f"the run ended with exit code {code}: see {folder / name}.log")
            elif kill and now >= next_kill:
                next_kill = now + pause(chance)
                kills.append(Kill(kill_one(trainer.pid, chance), last_step, now))
                print(f"{now - started:6.0f} s, step {last_step}: killed {kills[-1].role}", flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        trainer.kill()
    return time.monotonic() - started, kills


def start_trainer(folder: Path, name: str) -> subprocess.Popen[bytes]:
    resume = ["--resume"] if (folder / name / "config.yaml").exists() else []
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command(folder, name), *resume], stdout=log, stderr=subprocess.STDOUT)


def kill_one(trainer: int, chance: random.Random) -> str:
    """Kill a process of a role chosen at random; returns the role."""
    processes = processes_of(trainer)
    role = chance.choice(sorted(processes))
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(chance.choice(processes[role]), signal.SIGKILL)
    return role


def pause(chance: random.Random) -> float:
    return SECONDS * chance.uniform(0.5, 1.5)


def processes_of(trainer: int) -> dict[str, list[int]]:
    """Return the processes of a run that may be killed, by role; workers of Ray are children of its own processes."""
    found = defaultdict(list, {"trainer": [trainer]})
    everything = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    for process in everything if RAY else descendants(trainer):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            output = str(Path(f"/proc/{process}/fd/1").readlink())
        except OSError:  # it has ended
            continue
        if "posttrain.rewards.child" in words:
            role = "reaper" if any(word.endswith("reaper.py") for word in words) else "reward child"
            found[role].append(process)
        elif FORK_SERVER in words or words[0].startswith("ray::"):
            number = output.rpartition("worker-")[2].partition(".log")[0]
            if number.isdigit():
                found["learner" if int(number) < LEARNERS else "rollout worker"].append(process)
    return found


def last_logged_step(run: Path) -> int:
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError, KeyError):  # not there yet, or half a line
        return 0


def report(folder: Path, quiet: float, disturbed: float, kills: list[Kill]) -> None:
    steps = [step_seconds(row) for row in rows(folder / "killed")]
    print(f"with {len(kills)} kills: {disturbed:.0f} s; a step takes {statistics.median(steps):.2f} s (median)")
    print(f"effective time: {quiet / disturbed:.2f} of the undisturbed run; ", end="")
    print(f"{sum(steps) / disturbed:.2f} of the time was spent in steps that counted")
    print("| role | kills | seconds until a new step, median | longest |\n|---|---|---|---|")
    for role in sorted({kill.role for kill in kills}):
        times = [kill.recovery for kill in kills if kill.role == role and kill.recovery is not None]
        if times:
            print(f"| {role} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |")


def step_seconds(row: dict[str, float]) -> float:
    return sum(value for name, value in row.items() if name.startswith("time/") and name != "time/load")


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def compare(expected: Path, found: Path) -> list[str]:
    """Return what differs between two finished runs."""
    checkpoints = [newest_valid(run / "checkpoints") for run in (expected, found)]
    if None in checkpoints or step_of(checkpoints[0]) != STEPS or step_of(checkpoints[1]) != STEPS:  # type: ignore[arg-type]
        return [f"the newest checkpoints are {checkpoints}"]
    files = [{str(p.relative_to(c)): file_sha256(p) for p in c.rglob("*") if p.is_file()} for c in checkpoints if c]
    names = {name for name in files[0] | files[1] if files[0].get(name) != files[1].get(name)}
    differences = sorted(names - {"state.json", "manifest.json"})  # which name the run directory
    if [metrics(row) for row in rows(expected)] != [metrics(row) for row in rows(found)]:
        differences.append("metrics.jsonl")
    if rollouts(expected) != rollouts(found):
        differences.append("rollouts.jsonl")
    return differences


def metrics(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not is_wall_clock(name) and "seconds" not in name}


def rollouts(run: Path) -> list[dict[str, object]]:
    lines = (run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) | {"seconds": 0} for line in lines]
