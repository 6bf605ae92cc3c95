"""Measure the accuracy of a small chat model before training, after SFT, GRPO and on-policy distillation: greedy.

    PYTHONPATH=. python bench/learn.py gsm8k MODEL_DIR GSM8K_DIR OUT [--grpo_steps 60] [--until SECONDS]
    PYTHONPATH=. python bench/learn.py countdown MODEL_DIR COUNTDOWN_DIR OUT
    PYTHONPATH=. python bench/learn.py gsm8k MODEL_DIR GSM8K_DIR OUT --recipe distillation --results FILE.jsonl --test

The recipe `trl`, the default, is the same work as the measurement of TRL: the same prompts, SFT for 3 epochs at 3e-4
with 64 examples per step, then GRPO with 64 prompts x 8 completions of at most 256 tokens, scored by the number after
`####`. Seconds count from the start of the process.

With the recipe `distillation` (or --opd_steps) the GRPO result, or --teacher, then teaches a second copy of the SFT
model, once for each of --opd_rate, until its accuracy is that of GRPO. It fits into 9 minutes on an H200 with
SmolLM2-135M: every part ends in time for the next. With --held_out all accuracies but those of --test are of rows split
off the training data, which nothing was trained on, so that recipes can be chosen without the test rows. `training`
seconds are those of the steps alone: completions, rewards, update. A level counts as reached at a look that is at least
as high, if the next one is, too. --results gets a line as soon as something was measured.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

START = time.time()

GRPO = {
    "train": {"batch_size": 128, "micro_batch_tokens": 65536},
    "rollout": {"samples_per_prompt": 16},
    "reward": {"workers": 8},
}
RECIPES = {
    "trl": {
        "sft_rate": 3e-4,
        "grpo_steps": 60,
        "grpo_rate": 5e-6,
        "until": 380.0,
        "held_out": 0,
        "look_every": 0,
        "opd_steps": 0,
        "opd_until": math.inf,
        "sft": {},
        "grpo": {},
    },
    # One step of GRPO: 2 s; of distillation: less than 1 s; a look at 1,000 rows: 5 s.
    "distillation": {
        "sft_rate": 1.5e-3,
        "grpo_steps": 90,
        "grpo_rate": 6e-5,
        "until": 270.0,
        "held_out": 1000,
        "look_every": 20,
        "opd_steps": 60,
        "opd_until": 470.0,
        "sft": {"train": {"batch_size": 128, "weight_decay": 0.1}},
        "grpo": GRPO,
    },
}
END = 530.0
"""Seconds from the start after which no further evaluation on test rows begins."""

RULE = '''import re


def right(text, ground_truth):
    """Return 1 if the number after the last #### is the example's, else 0."""
    found = re.findall(r"####\\s*\\$?(-?[\\d,]*\\.?\\d+)", text)
    return float(bool(found) and found[-1].replace(",", "").rstrip(".") == ground_truth)
'''


results_file: Path | None = None


def report(text: str, **figures: float | str) -> None:
    """Print a result and append it, with its figures, to the file of results."""
    seconds = time.time() - START
    print(f"RESULT {text} ({seconds:.0f} s from the start)", flush=True)
    if results_file is not None:
        with results_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": round(seconds, 1), "text": text, **figures}) + "\n")


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


def write_rows(task, source: Path, out: Path, held_out: int, count: int = 0) -> None:
    """Write prompts and conversations of each split; `held_out`: the number of rows split off the training data.

    `count`: how many rows of each split are used, the first ones; 0: all.
    """
    out.mkdir(parents=True, exist_ok=True)
    splits = {split: list(task(source, split))[: count or None] for split in ("train", "test")}
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
        figures = {"steps": self.trainer.step, "accuracy": accuracy, "training_seconds": self.seconds}
        report(f"{self.name} after {self.trainer.step} steps: {shown}", run=self.name, **figures)
        return accuracy

    def step(self) -> None:
        began = time.time()
        metrics = self.trainer.train_step(self.trainer.make_experience())
        self.seconds += time.time() - began
        done = self.trainer.step
        if done % 4 == 0 or done == 1:
            names = ("reward", "divergence", "length", "entropy", "sampler_kl", "no_signal")
            shown = " ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
            figures = {name: metrics[name] for name in names if name in metrics} | {"training_seconds": self.seconds}
            report(f"{self.name} step {done}: {shown} ({self.seconds:.1f} s of training)", run=self.name, **figures)

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


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is not given is as the recipe has it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["gsm8k", "countdown"])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="trl")
    parser.add_argument("--results", type=Path, help="file that results are appended to; default: OUT/results.jsonl")
    parser.add_argument("--grpo_steps", type=int)
    parser.add_argument("--until", type=float, help="seconds from the start after which GRPO ends")
    parser.add_argument("--grpo_rate", type=float)
    parser.add_argument("--sft_rate", type=float)
    parser.add_argument("--base", action="store_true", help="also evaluate the model as it comes")
    parser.add_argument("--sft", type=json.loads, help="other options of SFT, as JSON")
    parser.add_argument("--grpo", type=json.loads, help="other options of GRPO, as JSON")
    parser.add_argument("--start", default="", help="a model that SFT has already made: GRPO alone")
    parser.add_argument("--look_every", type=int, help="also evaluate every N steps; 0: only at the end")
    parser.add_argument("--held_out", type=int, help="evaluate on N rows split off the training data")
    parser.add_argument("--rows", type=int, default=0, help="use only the first N rows of each split; 0: all")
    parser.add_argument("--test", action="store_true", help="with --held_out: also evaluate the results on test rows")
    parser.add_argument("--opd_steps", type=int, help="then distil for at most N steps; 0: do not")
    parser.add_argument("--opd_rate", type=float, nargs="+", default=[1e-4, 3e-4], help="a run for each learning rate")
    parser.add_argument("--opd_look_every", type=int, default=6, help="evaluate distillation every N steps")
    parser.add_argument("--opd", type=json.loads, default={}, help="other options of distillation, as JSON")
    parser.add_argument("--opd_until", type=float, help="seconds from the start after which distillation ends")
    parser.add_argument("--teacher", default="", help="teacher of distillation; default: the result of GRPO")
    parser.add_argument("--goal", type=float, default=0.0, help="with --teacher: accuracy to reach, without GRPO")
    options = parser.parse_args(given)
    if options.goal and not options.teacher:
        parser.error("--goal needs --teacher")
    for name, value in RECIPES[options.recipe].items():
        chosen = getattr(options, name)
        if isinstance(value, dict):
            setattr(options, name, merged(value, chosen or {}))
        elif chosen is None:
            setattr(options, name, value)
    return options


class Trainers:
    """Makes the trainers of one task: the same prompts, reward and evaluation for all."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, options.out / "data"
        task = gsm8k if options.task == "gsm8k" else countdown
        write_rows(task, options.data, self.rows, options.held_out, options.rows)
        self.judge = f"{self.rows}/rule.py:right" if options.task == "gsm8k" else "countdown"
        self.split = "held-out" if options.held_out else "test"

    def sft(self, model: str) -> str:
        """Train on the solutions, and return the folder of the model."""
        from posttrain import sft

        options = self.options
        wanted = {
            "model": {"path": model},
            "data": {"train": [str(self.rows / "train-chat.jsonl")], "max_length": 640},
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
        return str(trained.folder)

    def online(self, cls, model: str, name: str, wanted: dict, split: str = ""):
        config = {"output_dir": str(self.options.out / name), "quiet": True, "rollout": {"max_tokens": 256}}
        config |= {"reward": {"workers": 4}, "save": {"every_steps": 0}}
        return cls(
            model,
            reward=self.judge,
            data=str(self.rows / "train-prompts.jsonl"),
            eval_data=str(self.rows / f"{split or self.split}-prompts.jsonl"),
            config=merged(config, wanted),
        )

    def grpo(self, model: str, name: str, steps: int, split: str = ""):
        from posttrain import GRPOTrainer

        rate = self.options.grpo_rate
        train = {"batch_size": 64, "learning_rate": rate, "micro_batch_tokens": 32768, "max_steps": steps}
        wanted = {"train": train, "rollout": {"samples_per_prompt": 8}}
        return self.online(GRPOTrainer, model, name, merged(wanted, self.options.grpo), split)

    def opd(self, model: str, teacher: str, name: str, rate: float):
        from posttrain import OPDTrainer

        train = {"batch_size": 256, "learning_rate": rate, "micro_batch_tokens": 65536}
        wanted = {"train": train | {"max_steps": self.options.opd_steps}, "rollout": {"samples_per_prompt": 1}}
        wanted["algo"] = {"teacher": teacher}
        return self.online(OPDTrainer, model, name, merged(wanted, self.options.opd))


def main() -> None:
    global results_file
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    results_file = options.results or options.out / "results.jsonl"
    trainers = Trainers(options)
    if options.base:
        with trainers.grpo(options.model, "base", 1) as run:
            report(f"base: {100 * run.evaluate()['eval/accuracy']:.2f}%")
    model = options.start or trainers.sft(options.model)
    results, goal, rewarded = {"sft": model}, options.goal, None
    if not goal:
        with trainers.grpo(model, "grpo", options.grpo_steps) as run:
            rewarded = Course("grpo", run)
            rewarded.run(options.grpo_steps, options.look_every, options.until)
            goal = rewarded.looks[-1][1]
            results["grpo"] = str(run.save()) if options.opd_steps or options.test else ""
            print_times(run)
    for rate in options.opd_rate if options.opd_steps else ():
        name = f"opd-{rate:g}"
        if time.time() - START > options.opd_until:
            report(f"{name}: no time left")
            continue
        with trainers.opd(model, options.teacher or results["grpo"], name, rate) as run:
            taught = Course(name, run)
            taught.run(options.opd_steps, options.opd_look_every, options.opd_until, goal)
            results[name] = str(run.save())
            print_times(run)
        compare(rewarded, taught, goal)
    for name, path in results.items() if options.test else ():
        if time.time() - START > END:
            report(f"{name} on the test rows: no time left")
            continue
        with trainers.grpo(path, f"test-{name}", 1, "test") as run:
            accuracy = 100 * run.evaluate()["eval/accuracy"]
            report(f"{name} on the test rows: {accuracy:.2f}%", run=name, test_accuracy=accuracy)


def print_times(run) -> None:
    """Print the parts of the last step's time."""
    last = json.loads((run.output_dir / "metrics.jsonl").read_text().splitlines()[-1])
    print({name: value for name, value in last.items() if name.startswith("time/") or name == "memory_gib"}, flush=True)


def compare(rewarded: Course | None, taught: Course, goal: float) -> None:
    """Report after how many seconds of training distillation reached the accuracy of GRPO, and GRPO itself."""
    start = taught.looks[0][1]
    if goal <= start:
        report(f"{taught.name}: nothing to reach, the student began at {start:.2f}%, the goal is {goal:.2f}%")
        return
    seconds = taught.reached(goal)
    if seconds is None:
        best = max(accuracy for _, accuracy in taught.looks)
        missed = f"{taught.name} did not reach {goal:.2f}% in {taught.seconds:.1f} s of training"
        report(f"{missed}; its best look: {best:.2f}%", run=taught.name, goal=goal, best=best)
        return
    report(f"{taught.name} reached {goal:.2f}% after {seconds:.1f} s of training", run=taught.name, goal=goal)
    if rewarded is not None and rewarded.seconds:
        first = next(spent for spent, accuracy in rewarded.looks if accuracy >= goal)
        share = f"{100 * seconds / rewarded.seconds:.0f}% of all of grpo's {rewarded.seconds:.1f} s"
        shown = f"that is {share}; grpo was first at {goal:.2f}% after {first:.1f} s"
        report(shown, run=taught.name, share=seconds / rewarded.seconds, grpo_first=first)


if __name__ == "__main__":
    main()
