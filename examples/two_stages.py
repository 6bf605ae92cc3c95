"""Teach a model an environment in two stages: SFT on demonstrations, then GRPO. The scripts of the tasks use this.

Accuracy is printed before training, after SFT and after GRPO, sampled at temperature 1 as in training.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def options(about: str) -> argparse.ArgumentParser:
    """Return the options that the tasks share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="pico", help="model directory; pico only shows that the script works")
    parser.add_argument("--out", type=Path, default=Path("runs/task"), help="directory of data and runs")
    parser.add_argument("--demonstrations", type=int, default=4000)
    parser.add_argument("--sft_rate", type=float, default=3e-4, help="learning rate of SFT, one epoch")
    parser.add_argument("--grpo_rate", type=float, default=1e-5, help="learning rate of GRPO")
    parser.add_argument("--steps", type=int, default=80, help="most steps of GRPO")
    parser.add_argument("--target", type=float, default=0.95, help="stop GRPO at this accuracy")
    parser.add_argument("--max_seconds", type=float, default=math.inf, help="stop GRPO after this time, of both stages")
    parser.add_argument("--look_every", type=int, default=10, help="steps of GRPO between two measurements")
    parser.add_argument("--credit", default="conversation", help="algo.credit: conversation, turn or step_group")
    parser.add_argument("--turn_discount", type=float, default=1.0, help="algo.turn_discount: 0 credits a turn alone")
    parser.add_argument("--scale_by_std", action=argparse.BooleanOptionalAction, default=True, help="algo.scale_by_std")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step of GRPO")
    parser.add_argument("--samples", type=int, default=16, help="episodes of each prompt")
    parser.add_argument("--held_out", type=int, default=200, help="episodes of a measurement")
    parser.add_argument("--max_tokens", type=int, default=320, help="longest episode, all turns together")
    parser.add_argument("--workers", type=int, default=8, help="processes of the environment")
    return parser


def write(path: Path, rows: Iterable[Row]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def train(
    chosen: argparse.Namespace,
    environment: str,
    demonstrations: Iterable[Row],
    prompts: Iterable[Row],
    held_out: Iterable[Row],
    solved: Callable[[Sequence[Any]], float] | None = None,
) -> dict[str, float]:
    """Run both stages; return the accuracy before, between and after them.

    `demonstrations`: conversations for SFT; `prompts`, `held_out`: for episodes of training and of measurement.
    `solved`: the accuracy of rollouts; by default the share with a reward above 0.5.
    """
    from posttrain import GRPOTrainer, sft

    started, found = time.monotonic(), dict[str, float]()
    out: Path = chosen.out
    asked = write(out / "prompts.jsonl", prompts)
    measured = write(out / "held-out.jsonl", held_out)
    taught = write(out / "demonstrations.jsonl", demonstrations)

    def report(name: str, metrics: dict[str, float]) -> float:
        found[name] = metrics["eval/solved" if solved else "eval/accuracy"]
        seconds = time.monotonic() - started
        print(f"{name}: accuracy {found[name]:.3f}, reward {metrics['eval/reward']:.3f} ({seconds:.0f} s)", flush=True)
        return found[name]

    def trainer(model: str, name: str) -> GRPOTrainer:
        return GRPOTrainer(
            model,
            data=asked,
            eval_data=measured,
            metrics={"solved": solved} if solved else {},
            config={
                "rollout": {
                    "environment": environment,
                    "environment_workers": chosen.workers,
                    "environment_schedule": "lock_step",  # these environments take no time
                    "samples_per_prompt": chosen.samples,
                    "max_tokens": chosen.max_tokens,
                },
                "algo": {name: getattr(chosen, name) for name in ("credit", "turn_discount", "scale_by_std")},
                "train": {
                    "batch_size": chosen.prompts,
                    "learning_rate": chosen.grpo_rate,
                    "max_steps": chosen.steps,
                    "warmup_steps": 5,
                },
                "eval": {"temperature": 1.0},
                "save": {"every_steps": 0},
                "output_dir": str(out / name),
                "quiet": True,
            },
        )

    with trainer(chosen.model, "before") as before:
        report("before training", before.evaluate())
    first = sft(
        chosen.model,
        taught,
        train={"batch_size": 64, "learning_rate": chosen.sft_rate, "warmup_steps": 5},
        save={"every_steps": 0},
        output_dir=out / "sft",
        quiet=True,
    )
    print(f"sft: loss {first.metrics['loss']:.3f} after {first.steps} steps", flush=True)
    with trainer(str(first.output_dir), "grpo") as policy:
        report("after sft", policy.evaluate())
        for step in range(1, chosen.steps + 1):
            metrics = policy.train_step(policy.make_experience())
            shown = " ".join(
                f"{name} {metrics[name]:.3f}" for name in ("reward", "solved", "entropy") if name in metrics
            )
            print(f"grpo step {step}: {shown}", flush=True)
            ends = step == chosen.steps or time.monotonic() - started > chosen.max_seconds
            if ends or step % chosen.look_every == 0:
                accuracy = report(f"after grpo, {step} steps", policy.evaluate())
                if ends or accuracy >= chosen.target:
                    break
    return found
