"""Measure the accuracy of a small chat model before training, after SFT and after GRPO: greedy, all test examples.

    python bench/learn.py gsm8k MODEL_DIR GSM8K_DIR OUT [--grpo_steps 60] [--until SECONDS]
    python bench/learn.py countdown MODEL_DIR COUNTDOWN_DIR OUT

GSM8K is the same work as the measurement of TRL: the same prompts, SFT for 3 epochs at 3e-4 with 64 examples per step,
then GRPO with 64 prompts x 8 completions of at most 256 tokens, scored by the number after `####`. Seconds count from
the start of the process.
"""

import argparse
import json
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


def write_rows(task, source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = list(task(source, split))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["gsm8k", "countdown"])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--grpo_steps", type=int, default=60)
    parser.add_argument("--until", type=float, default=380.0)
    parser.add_argument("--grpo_rate", type=float, default=5e-6)
    parser.add_argument("--sft_rate", type=float, default=3e-4)
    parser.add_argument("--base", action="store_true", help="also evaluate the model as it comes")
    parser.add_argument("--sft", type=json.loads, default={}, help="other options of SFT, as JSON")
    parser.add_argument("--grpo", type=json.loads, default={}, help="other options of GRPO, as JSON")
    parser.add_argument("--start", default="", help="a model that SFT has already made: GRPO alone")
    parser.add_argument("--look_every", type=int, default=0, help="also evaluate every N steps; 0: only at the end")
    options = parser.parse_args()
    from posttrain import GRPOTrainer, sft

    rows = options.out / "data"
    write_rows(gsm8k if options.task == "gsm8k" else countdown, options.data, rows)
    judge = f"{rows}/rule.py:right" if options.task == "gsm8k" else "countdown"
    rollout = {"samples_per_prompt": 8, "max_tokens": 256}
    train = {"batch_size": 64, "learning_rate": options.grpo_rate, "micro_batch_tokens": 32768}

    def grpo(model: str, name: str, steps: int) -> GRPOTrainer:
        config = {"output_dir": str(options.out / name), "rollout": rollout, "quiet": True}
        config |= {"train": train | {"max_steps": steps}, "rewards": {"workers": 4}, "save": {"every_steps": 0}}
        return GRPOTrainer(
            model,
            rewards=judge,
            data=str(rows / "train-prompts.jsonl"),
            eval_data=str(rows / "test-prompts.jsonl"),
            config=merged(config, options.grpo),
        )

    if options.base:
        with grpo(options.model, "base", 1) as trainer:
            report(f"base: {100 * trainer.evaluate()['eval/accuracy']:.2f}%")
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
    with grpo(model, "grpo", options.grpo_steps) as trainer:
        began = time.time()
        report(f"after sft: {100 * trainer.evaluate()['eval/accuracy']:.2f}%; evaluated in {time.time() - began:.0f} s")
        examined, done = time.time() - began, 0
        while done < options.grpo_steps and time.time() - START + 1.2 * examined < options.until:
            metrics = trainer.train_step(trainer.make_experience())
            done += 1
            if done % 4 == 0 or done == 1:
                shown = " ".join(
                    f"{name} {metrics[name]:.4g}" for name in ("reward", "length", "entropy", "sampler_kl", "no_signal")
                )
                report(f"grpo step {done}: {shown}")
            if options.look_every and done % options.look_every == 0:
                report(f"grpo step {done}: {100 * trainer.evaluate()['eval/accuracy']:.2f}%")
        report(f"after grpo, {done} steps: {100 * trainer.evaluate()['eval/accuracy']:.2f}%")
        lines = (trainer.folder / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        print({name: value for name, value in last.items() if name.startswith("time/") or name == "memory_gib"})


if __name__ == "__main__":
    main()
