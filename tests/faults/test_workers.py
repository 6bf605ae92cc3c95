"""Runs that lose a worker: it is named, nothing is lost or done twice, and no process is left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import GRPOTrainer, SFTTrainer
from posttrain.checkpoints import checkpoint
from posttrain.cli.main import main

ROOT = Path(__file__).parents[2]
SECONDS = 300  # generous: the machine may be busy

# A trainer of the user's own, defined in the script that is run, which ends the process of rank 1 in its fourth step.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from posttrain.algorithms.base import register
from posttrain.algorithms.sft import SFT
from posttrain.cli.main import main

@register("frail", help="SFT that may die")
class Frail(SFT):
    steps = 0

    def assign_credit(self, samples):  # called by the controller, once a step
        self.steps += 1
        if self.steps == 4:  # a run that goes on does not count so far any more
            Path("fault").touch()
        return super().assign_credit(samples)

    def loss(self, out, batch):
        if Path("fault").exists() and dist.get_rank() == 1:
            Path("fault").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(out, batch)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
OPTIONS = [
    "--model.path",
    "pico",
    "--data.train",
    str(ROOT / "examples/data/chat.jsonl"),
    "--train.batch_size",
    "4",
]
OPTIONS += ["--steps", "5", "--save.every_steps", "2", "--train.learning_rate", "1e-3"]


def run(folder, *args):
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "script.py", *map(str, args)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], round(row["loss"], 5)) for row in rows]


def processes_of(folder):
    """Those that run in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_lost_learner_is_named_and_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    assert main(["sft", *OPTIONS, "--out", str(tmp_path / "alone"), "--quiet"]) == 0
    done = run(tmp_path, "frail", *OPTIONS, "--out", "two", "--cluster.devices", 2, "--cluster.limits", 1, SECONDS)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == losses(tmp_path / "alone")
    assert [step for step, _ in losses(tmp_path / "two")] == [1, 2, 3, 4, 5]
    said = " ".join(done.stderr.split())
    assert "actor worker, rank 1 (on " in said and ", step 4)" in said and "SIGKILL" in said, done.stderr
    assert "two/logs/worker-1.log" in said and "Resume from step 2" in said and "restarting" in said
    log = (tmp_path / "two/logs/worker-0.log").read_text()
    assert log.count("--- worker process") == 2 and "most recent call first" in log
    assert not processes_of(tmp_path)


def score(prompt, completion, **columns):
    return float(len(completion) % 5)


def grpo(folder, rollout=(), **cluster):
    config = {
        "rollout": {"max_tokens": 6, "samples_per_prompt": 3} | dict(rollout),
        "eval": {"max_rows": 3},
        "update": {"rows_per_step": 3, "learning_rate": 1e-3},
        "cluster": cluster,
        "steps": 3,
        "quiet": True,
        "out": str(folder),
    }
    rows = str(ROOT / "examples/data/questions.jsonl")
    return GRPOTrainer("pico", score, rows, config, eval_data=rows)


def test_lost_rollout_workers_are_replaced_and_the_completions_stay_the_same(tmp_path, caplog):
    layout = {"devices": 3, "layout": ["rollout.devices=2"], "limits": [0, SECONDS]}
    with grpo(tmp_path / "alone") as alone, grpo(tmp_path / "apart", **layout) as apart:
        slots = apart._loop.rollout_workers.slots
        for step in range(3):
            expected, found = alone.make_experience(), apart.make_experience()
            assert [r.text for r in found] == [r.text for r in expected]
            assert [r.sample.group for r in found] == [r.sample.group for r in expected], "each prompt once"
            for one, other in zip(found, expected, strict=True):
                assert one.sample.logprobs == pytest.approx(other.sample.logprobs, abs=1e-5)
            metrics, expected = apart.train_step(found), alone.train_step(expected)
            assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            members = apart._loop.rollout_workers.connected
            assert metrics["sync_bytes"] > len(members) * 900_000 * 4 > 0, "all weights to each"
            held = max(report.memory_gib for report in apart._loop.policy.workers.call("rank_report"))
            assert 0.1 < metrics["memory_gib"] <= held + 0.001, "of the learner's process, not of this one"
            lost = slots[1 - step % 2].pool
            if step == 1:
                slots[1].starting.join(SECONDS)  # a new one, which joins at the next update
            if step == 0:
                lost.channels[0].process.kill()
            elif step == 1:
                lost.channels[0].process.send_signal(signal.SIGSTOP)
                lost.timeout_seconds = 2.0
        assert slots[1] in members, "it has joined"
        measured, expected = apart.evaluate(), alone.evaluate()
        assert measured["eval/reward"] == expected["eval/reward"]
    assert caplog.text.count("the worker is replaced") == 2
    assert "SIGKILL" in caplog.text and "does not answer a ping" in caplog.text


def test_each_rank_hashes_what_it_saves_and_the_controller_reads_no_weights(tmp_path, monkeypatch):
    read = []
    plain = checkpoint.file_sha256
    monkeypatch.setattr(checkpoint, "file_sha256", lambda path, **how: read.append(path.name) or plain(path, **how))
    rows = str(ROOT / "examples/data/chat.jsonl")
    train = {"batch_size": 4, "max_steps": 2}
    config = {"train": train, "save": {"every_steps": 1}, "cluster": {"devices": 2}, "quiet": True}
    with SFTTrainer("pico", rows, config | {"output_dir": str(tmp_path / "run")}) as trainer:
        trainer.train()
    assert "state.json" in read and not [name for name in read if name.endswith(".safetensors")]
    newest = checkpoint.newest_valid(tmp_path / "run/checkpoints")
    files = json.loads((newest / "manifest.json").read_text())["files"]
    assert {"model/model-00001-of-00002.safetensors", "model/model-00002-of-00002.safetensors"} < files.keys()
    assert [name for name in read if name.endswith(".safetensors")], "verifying reads them"


def test_results_do_not_depend_on_which_worker_takes_a_prompt(tmp_path, caplog):
    """Bit for bit: one worker does everything in order; with two, one of which is lost, timing decides."""
    one = {"devices": 2, "layout": ["rollout.devices=1"], "limits": [0, SECONDS]}
    two = {"devices": 3, "layout": ["rollout.devices=2"], "limits": [0, SECONDS]}
    with grpo(tmp_path / "one", **one) as in_order, grpo(tmp_path / "two", **two) as shared:
        alone, both = in_order._loop.rollout_workers, shared._loop.rollout_workers
        alone.shares = both.shares  # the same parts
        for step in range(3):
            if step == 1:
                both.slots[0].pool.channels[0].process.kill()
            expected, found = in_order.make_experience(), shared.make_experience()
            for other, sample in ((a.sample, b.sample) for a, b in zip(expected, found, strict=True)):
                assert sample.tokens.tobytes() == other.tokens.tobytes()
                assert sample.logprobs.tobytes() == other.logprobs.tobytes()
                assert (sample.group, sample.version, sample.reward) == (other.group, other.version, other.reward)
            expected, found = in_order.train_step(expected), shared.train_step(found)
            assert {name: found[name] for name in ("loss", "grad_norm", "reward", "sampler_kl")} == {
                name: expected[name] for name in ("loss", "grad_norm", "reward", "sampler_kl")
            }
        assert found["rollout_workers_lost"] == 1
        assert "rollout_workers_lost" not in expected


def test_inflight_updates_and_a_lost_worker(tmp_path, caplog):
    """When weights arrive depends on timing; versions must be right and no completion may be missing."""
    layout = {"devices": 2, "layout": ["rollout.devices=1"], "limits": [0, SECONDS]}
    rollout = {"ahead": 1, "engine": ["local", "inflight"], "max_tokens": 60, "samples_per_prompt": 4}
    with grpo(tmp_path / "run", rollout, **layout) as trainer:
        inside, groups = trainer._loop, []
        for step in range(1, 6):
            rollouts = trainer.make_experience()
            groups += dict.fromkeys(rollout.sample.group for rollout in rollouts)
            for rollout in rollouts:
                first, last = rollout.sample.version, rollout.sample.newest
                assert step - 2 <= first <= last <= step - 1, "at most one update older"
            metrics = trainer.train_step(rollouts)
            assert metrics["staleness"] <= 1 and 0 <= metrics["mixed_versions"] <= 1
            assert metrics.get("sampler_kl", 0.0) + metrics.get("policy_drift", 0.0) < 1
            if step == 2:
                inside.rollout_workers.slots[0].pool.channels[0].process.kill()
        assert groups == list(range(15)), "each prompt once"
    assert caplog.text.count("the worker is replaced") == 1
