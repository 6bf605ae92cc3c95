"""Measure the accuracy of a small chat model before training, after SFT, GRPO and on-policy distillation: greedy.

    python bench/learn.py gsm8k MODEL_DIR GSM8K_DIR OUT [--grpo_steps 60] [--until SECONDS]
    python bench/learn.py countdown MODEL_DIR COUNTDOWN_DIR OUT
    python bench/learn.py gsm8k MODEL_DIR GSM8K_DIR OUT --held_out 1000 --look_every 10 --opd_steps 60 [--test]

GSM8K is the same work as the measurement of TRL: the same prompts, SFT for 3 epochs at 3e-4 with 64 examples per step,
then GRPO with 64 prompts x 8 completions of at most 256 tokens, scored by the number after `####`. Seconds count from
the start of the process.

With --opd_steps the GRPO result (or --teacher) then teaches a second copy of the SFT model, until its accuracy is that
of GRPO. With --held_out all accuracies but those of --test are of rows split off the training data, which nothing was
trained on, so that recipes can be chosen without the test rows. `training` seconds are those of the steps alone:
completions, rewards, update. A level counts as reached at a look that is at least as high, if the next one is, too.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

START = time.time()

RULE = '''import re


def right(text, ground_truth):
    """Return 1 if the number after the last #### is the example's, else 0."""
    found = re.findall(r"####\\s*\\$?(-?[\\d,]*\\.?\\d+)", text)
    return float(bool(found) and found[-1].replace(",", "").rstrip(".") == ground_truth)
'''


def report(text: str) -> None:
    print(f"RESULT {text} ({time.time() - START:.0f} s from the start)", flush=True)


def gsm8k(folder: Path, split: str):
    """Return (prompt, completion, columns for the reward) of each example."""
    system = {"role": "system", "content": "You solve grade-school maths problems step by step."}
    for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question = {"role": "user", "content": row["question"] + "\nEnd with a line '#### <number>'."}
        truth = row["answer"].split("####")[1].strip().replace(",", "")
        yield [system, question], re.sub(r"<<.*?>>", "", row["answer"]), {"ground_truth": truth}


def countdown(folder: Path, split: str):
    """Return the same for examples in verl's format: numbers, a target, and a worked solution."""
    import pyarrow.parquet

    for row in pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist():
        yield row["prompt"], row["answer"], {"ground_truth": row["reward_model"]["ground_truth"]}


def write_rows(task, source: Path, out: Path, held_out: int) -> None:
    """Write prompts and conversations of each split; `held_out`: the number of rows split off the training data."""
    out.mkdir(parents=True, exist_ok=True)
    splits = {split: list(task(source, split)) for split in ("train", "test")}
    kept = len(splits["train"]) - held_out
    splits |= {"train": splits["train"][:kept], "held-out": splits["train"][kept:]}
    for split, rows in splits.items():
        asked = [{"prompt": prompt, **columns} for prompt, _, columns in rows]
        taught = [{"messages": [*prompt, {"role": "assistant", "content": answer}]} for prompt, answer, _ in rows]
        for name, lines in ((f"{split}-prompts", asked), (f"{split}-chat", taught)):
            (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (out / "rule.py").write_text(RULE, encoding="utf-8")


def merged(first: dict, second: dict) -> dict:
    """Merge two configurations section by section; the second takes precedence."""
    return first | {
        key: merged(first[key], value) if isinstance(first.get(key), dict) else value for key, value in second.items()
    }


class Course:
    """A run that is trained step by step and evaluated now and then; keeps the seconds of its steps and its looks."""

    def __init__(self, name: str, trainer) -> None:
        self.name, self.trainer = name, trainer
        self.seconds, self.looks, self.evaluation_seconds = 0.0, [], 0.0

    def look(self) -> float:
        """Evaluate, and return the accuracy in percent."""
        began = time.time()
        accuracy = 100 * self.trainer.evaluate()["eval/accuracy"]
        self.evaluation_seconds = time.time() - began
        self.looks.append((self.seconds, accuracy))
        shown = f"{accuracy:.2f}%, training {self.seconds:.1f} s, evaluated in {self.evaluation_seconds:.1f} s"
        report(f"{self.name} after {self.trainer.step} steps: {shown}")
        return accuracy

    def step(self) -> None:
        began = time.time()
        metrics = self.trainer.train_step(self.trainer.make_experience())
        self.seconds += time.time() - began
        done = self.trainer.step
        if done % 4 == 0 or done == 1:
            names = ("reward", "divergence", "length", "entropy", "sampler_kl", "no_signal")
            shown = " ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
            report(f"{self.name} step {done}: {shown} ({self.seconds:.1f} s of training)")

    def run(self, steps: int, look_every: int, until: float, goal: float = math.inf) -> None:
        """Train until the steps are done, the time is up, or the goal is reached."""
        self.look()
        while self.trainer.step < steps and time.time() - START + 1.2 * self.evaluation_seconds < until:
            self.step()
            if look_every and self.trainer.step % look_every == 0 and self.trainer.step < steps:
                self.look()
                if self.reached(goal) is not None:
                    return
        self.look()

    def reached(self, goal: float) -> float | None:
        """Return the seconds of training after which the goal was first reached at two looks in a row."""
        for i, (seconds, accuracy) in enumerate(self.looks):
            confirmed = i + 1 < len(self.looks) and self.looks[i + 1][1] >= goal
            if accuracy >= goal and confirmed:
                return seconds
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["gsm8k", "countdown"])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--grpo_steps", type=int, default=60)
    parser.add_argument("--until", type=float, default=380.0, help="seconds from the start after which GRPO ends")
    parser.add_argument("--grpo_rate", type=float, default=5e-6)
    parser.add_argument("--sft_rate", type=float, default=3e-4)
    parser.add_argument("--base", action="store_true", help="also evaluate the model as it comes")
    parser.add_argument("--sft", type=json.loads, default={}, help="other options of SFT, as JSON")
    parser.add_argument("--grpo", type=json.loads, default={}, help="other options of GRPO, as JSON")
    parser.add_argument("--start", default="", help="a model that SFT has already made: GRPO alone")
    parser.add_argument("--look_every", type=int, default=0, help="also evaluate every N steps; 0: only at the end")
    parser.add_argument("--held_out", type=int, default=0, help="evaluate on N rows split off the training data")
    parser.add_argument("--test", action="store_true", help="with --held_out: also evaluate the results on test rows")
    parser.add_argument("--opd_steps", type=int, default=0, help="then distil for at most N steps; 0: do not")
    parser.add_argument("--opd_rate", type=float, default=1e-4)
    parser.add_argument("--opd_look_every", type=int, default=2, help="evaluate distillation every N steps")
    parser.add_argument("--opd", type=json.loads, default={}, help="other options of distillation, as JSON")
    parser.add_argument("--opd_until", type=float, default=math.inf, help="seconds after which distillation ends")
    parser.add_argument("--teacher", default="", help="teacher of distillation; default: the result of GRPO")
    parser.add_argument("--goal", type=float, default=0.0, help="with --teacher: accuracy to reach, without GRPO")
    options = parser.parse_args()
    if options.goal and not options.teacher:
        parser.error("--goal needs --teacher")
    from posttrain import GRPOTrainer, OPDTrainer, sft

    rows = options.out / "data"
    write_rows(gsm8k if options.task == "gsm8k" else countdown, options.data, rows, options.held_out)
    judge = f"{rows}/rule.py:right" if options.task == "gsm8k" else "countdown"
    looked_at = "held-out" if options.held_out else "test"

    def trainer(cls, model: str, name: str, wanted: dict, split: str = looked_at):
        config = {"output_dir": str(options.out / name), "quiet": True, "rollout": {"max_tokens": 256}}
        config |= {"reward": {"workers": 4}, "save": {"every_steps": 0}}
        return cls(
            model,
            reward=judge,
            data=str(rows / "train-prompts.jsonl"),
            eval_data=str(rows / f"{split}-prompts.jsonl"),
            config=merged(config, wanted),
        )

    def grpo(model: str, name: str, steps: int, split: str = looked_at):
        train = {"batch_size": 64, "learning_rate": options.grpo_rate, "micro_batch_tokens": 32768, "max_steps": steps}
        wanted = {"train": train, "rollout": {"samples_per_prompt": 8}}
        return trainer(GRPOTrainer, model, name, merged(wanted, options.grpo), split)

    if options.base:
        with grpo(options.model, "base", 1) as run:
            report(f"base: {100 * run.evaluate()['eval/accuracy']:.2f}%")
    model = options.start
    if not model:
        wanted = {
            "model": {"path": options.model},
            "data": {"train": [str(rows / "train-chat.jsonl")], "max_length": 640},
            "train": {
                "epochs": 3,
                "batch_size": 64,
                "learning_rate": options.sft_rate,
                "warmup_steps": 20,
                "min_lr_ratio": 0.0,
                "micro_batch_tokens": 32768,
            },
            "save": {"every_steps": 0},
            "output_dir": str(options.out / "sft"),
            "quiet": True,
        }
        trained = sft(**merged(wanted, options.sft))
        report(f"sft, {trained.steps} steps, loss {trained.metrics['loss']:.3f}")
        model = str(trained.folder)
    results, goal, teacher = {"sft": model}, options.goal, options.teacher
    rewarded = None
    if not goal:
        with grpo(model, "grpo", options.grpo_steps) as run:
            rewarded = Course("grpo", run)
            rewarded.run(options.grpo_steps, options.look_every, options.until)
            goal = rewarded.looks[-1][1]
            results["grpo"] = str(run.save()) if options.opd_steps or options.test else ""
            last = json.loads((run.output_dir / "metrics.jsonl").read_text().splitlines()[-1])
            print({name: value for name, value in last.items() if name.startswith("time/") or name == "memory_gib"})
    if options.opd_steps:
        train = {"batch_size": 256, "learning_rate": options.opd_rate, "micro_batch_tokens": 32768}
        wanted = {"train": train | {"max_steps": options.opd_steps}, "rollout": {"samples_per_prompt": 1}}
        wanted["algo"] = {"teacher": teacher or results["grpo"]}
        with trainer(OPDTrainer, model, "opd", merged(wanted, options.opd)) as run:
            taught = Course("opd", run)
            taught.run(options.opd_steps, options.opd_look_every, options.opd_until, goal)
            results["opd"] = str(run.save())
            last = json.loads((run.output_dir / "metrics.jsonl").read_text().splitlines()[-1])
            print({name: value for name, value in last.items() if name.startswith("time/") or name == "memory_gib"})
        compare(rewarded, taught, goal)
    if options.test:
        for name, path in results.items():
            with grpo(path, f"test-{name}", 1, "test") as run:
                report(f"{name} on the test rows: {100 * run.evaluate()['eval/accuracy']:.2f}%")


def compare(rewarded: Course | None, taught: Course, goal: float) -> None:
    """Report after how many seconds of training distillation reached the accuracy of GRPO, and GRPO itself."""
    seconds = taught.reached(goal)
    if seconds is None:
        best = max(accuracy for _, accuracy in taught.looks)
        report(f"opd did not reach {goal:.2f}% in {taught.seconds:.1f} s of training; its best look: {best:.2f}%")
        return
    report(f"opd reached {goal:.2f}% after {seconds:.1f} s of training")
    if rewarded is not None:
        first = next(spent for spent, accuracy in rewarded.looks if accuracy >= goal)
        share = f"{100 * seconds / rewarded.seconds:.0f}% of all of grpo's {rewarded.seconds:.1f} s"
        report(f"that is {share}; grpo was first at {goal:.2f}% after {first:.1f} s")


if __name__ == "__main__":
    main()
