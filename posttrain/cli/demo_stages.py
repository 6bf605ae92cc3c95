"""The stages of `posttrain demo`: a toy model learns two-digit sums by SFT, a reward model, DPO and GRPO.

One in five training examples of SFT has a wrong answer, as real data has. SFT imitates these errors; DPO and GRPO
correct them. Completions are sampled at temperature 1, so that they show the model's whole distribution instead of its
most likely completion.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.core.logging import quiet_libraries
from posttrain.data.dataset import Encoder, load_dataset
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.plots.files import write_charts
from posttrain.plots.runs import open_runs, panels_of
from posttrain.plots.terminal import draw_panel
from posttrain.train.launch import train
from posttrain.train.learner import Learner
from posttrain.train.run_directory import RunDirectory

HELD_OUT = 500  # sums
PROMPT = {"add_generation_prompt": True, "return_dict": False}
WRONG_LESSONS = 0.2  # share of the training examples


@dataclass(frozen=True, slots=True)
class Sum:
    """A prompt with its worked solution: the ones, the tens with the carry, the result."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    def worked(self, slip: int = 0) -> str:
        """Return the solution in steps. A slip in the ones is carried through to the result."""
        ones = self.a % 10 + self.b % 10 + slip
        carry = ones // 10
        tens = self.a // 10 + self.b // 10 + carry
        return f"{self.a % 10}+{self.b % 10}={ones};{self.a // 10}+{self.b // 10}+{carry}={tens};{tens}{ones % 10}"

    def is_right(self, text: str) -> bool:
        """Whether the last part of a completion is the sum."""
        return text.rpartition(";")[2] == str(self.a + self.b)


def run_demo(out: str, seed: int) -> int:
    """Run SFT, a reward model, DPO and GRPO, and print the accuracy on held-out sums before and after each."""
    quiet_libraries()
    torch.set_num_threads(1)  # pico is too small for two threads; on busy cores they are many times slower
    started = time.monotonic()
    with RunDirectory.open(out, "demo", resume=False) as folder:
        demo = Demo(folder.path, seed)
        before = sample_completions("pico", demo.held_out, seed)
        sft, sft_accuracy = demo.train_sft(accuracy(demo.held_out, before))
        demo.train_reward_model(sft)
        dpo, dpo_accuracy = demo.train_dpo(sft, sft_accuracy)
        after = demo.train_grpo(dpo, dpo_accuracy)
        demo.print_completions(before, after)
        console, root = demo.console, demo.root
        console.print(demo.table)
        console.print(f"{time.monotonic() - started:.0f} seconds in total. Run directory: {root}", highlight=False)
        console.print(f"completions it was trained on: posttrain samples {root}/grpo", highlight=False, markup=False)
        console.print(f"ask it: posttrain chat {root}/grpo --ask '27+48='", highlight=False, markup=False)
        console.print(f"next: posttrain export {root}/grpo my-model", highlight=False, markup=False)
    return 0


class Demo:
    """The data of the demo and its stages, each of which writes its files, trains, and adds a row to the table."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed, self.rng = root, seed, random.Random(seed)
        sums = [Sum(a, b) for a in range(10, 100) for b in range(10, 100)]
        self.rng.shuffle(sums)
        self.held_out, self.lessons = sums[:HELD_OUT], sums[HELD_OUT:]
        self.console = Console()
        self.table = Table("stage", "held-out figure", "before", "after", "seconds", title="what each stage changed")

    def train_sft(self, before: float) -> tuple[str, float]:
        """Train pico; return the run directory and the accuracy."""
        began = self.start_stage("1. supervised fine-tuning: imitate examples of which one in five is wrong")
        rng = self.rng
        solutions = [(s, slipped(s, rng) if rng.random() < WRONG_LESSONS else s.worked()) for s in self.lessons]
        rows = self.write("sft.jsonl", (chat(s, solution) for s, solution in solutions))
        model = self.train("sft", "pico", rows, SFT_OPTIONS)
        after = accuracy(self.held_out, sample_completions(model, self.held_out, self.seed))
        self.add_row("sft", "right completions", before, after, began)
        return model, after

    def train_reward_model(self, sft: str) -> None:
        began = self.start_stage("2. reward model: score right completions above wrong ones")
        pairs = self.write("pairs.jsonl", (preference_pair(s, slipped(s, self.rng)) for s in self.lessons))
        unseen = self.write("held-out-pairs.jsonl", (preference_pair(s, slipped(s, self.rng)) for s in self.held_out))
        model = self.train("reward", sft, pairs, REWARD_OPTIONS)
        before, after = (ranked_right(path, unseen, self.seed) for path in (sft, model))
        self.add_row("reward", "pairs ranked right", before, after, began)

    def train_dpo(self, sft: str, before: float) -> tuple[str, float]:
        """Train the SFT model; return the run directory and the accuracy."""
        began = self.start_stage("3. DPO: prefer right completions to the model's own mistakes")
        tried = self.lessons[:2500]
        texts = sample_completions(sft, tried, self.seed)
        mistakes = [(s, text) for s, text in zip(tried, texts, strict=True) if not s.is_right(text)]
        rows = self.write("mistakes.jsonl", (preference_pair(s, text or "?") for s, text in mistakes))
        model = self.train("dpo", sft, rows, DPO_OPTIONS)
        after = accuracy(self.held_out, sample_completions(model, self.held_out, self.seed))
        self.add_row("dpo", "right completions", before, after, began)
        return model, after

    def train_grpo(self, dpo: str, before: float) -> list[str]:
        """Train the DPO model and plot the reward; return its completions of the held-out sums."""
        began = self.start_stage(
            "4. GRPO: learn from its own completions, with a reward function that computes the sum"
        )
        rows = self.write("questions.jsonl", (question(s) for s in self.lessons))
        self.write("held-out.jsonl", (question(s) for s in self.held_out))
        function = self.root / "right.py"
        function.write_text(REWARD_FUNCTION, encoding="utf-8")
        model = self.train("grpo", dpo, rows, GRPO_OPTIONS | {"reward": [f"{function}:right"]})
        after = sample_completions(model, self.held_out, self.seed)
        self.add_row("grpo", "right completions", before, accuracy(self.held_out, after), began)
        (rewards,) = panels_of(open_runs([model]), ["reward"])
        draw_panel(self.console, rewards)
        write_charts([rewards], self.root / "reward.svg")
        self.console.print(f"picture: {self.root / 'reward.svg'}", highlight=False, markup=False)
        return after

    def print_completions(self, before: Sequence[str], after: Sequence[str]) -> None:
        """Print what the first and the last model generate for three held-out sums."""
        self.console.rule("completions of the same three prompts")
        for s, first, last in list(zip(self.held_out, before, after, strict=True))[:3]:
            verdict = "right" if s.is_right(last) else "wrong"
            self.console.print(f"  {s.question}", highlight=False)
            self.console.print(f"    before  {printable(first)}", highlight=False, markup=False)
            self.console.print(f"    after   {printable(last)}  ({verdict})", highlight=False, markup=False)

    def start_stage(self, title: str) -> float:
        """Print the title of a stage; return the time."""
        self.console.rule(title)
        return time.monotonic()

    def train(self, verb: str, model: str, rows: Path, options: dict[str, Any]) -> str:
        """Train on a file; return the run directory."""
        common = {"output_dir": str(self.root / verb), "model": {"path": model}, "seed": self.seed}
        common |= {"data": {"train": [str(rows)]}, "save": {"every_steps": 0}}
        return str(train(verb, **common, **options).output_dir)

    def write(self, name: str, rows: Iterable[dict[str, Any]]) -> Path:
        """Write a file of the demo's data."""
        path = self.root / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def add_row(self, stage: str, figure: str, before: float, after: float, began: float) -> None:
        self.table.add_row(stage, figure, f"{before:.1%}", f"{after:.1%}", f"{time.monotonic() - began:.0f}")


SFT_OPTIONS: dict[str, Any] = {
    "train": {"max_steps": 300, "batch_size": 64, "learning_rate": 3e-3, "warmup_steps": 20, "min_lr_ratio": 0.02},
}
REWARD_OPTIONS: dict[str, Any] = {
    "train": {"max_steps": 160, "batch_size": 32, "learning_rate": 5e-4, "warmup_steps": 30},
}
DPO_OPTIONS: dict[str, Any] = {
    "train": {"max_steps": 60, "batch_size": 32, "learning_rate": 2e-4},
    "algo": {"sft_coef": 1.0},
}

GRPO_OPTIONS: dict[str, Any] = {
    "train": {
        "max_steps": 30,
        "batch_size": 32,
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine",
        "warmup_steps": 3,
    },
    "rollout": {"samples_per_prompt": 8, "max_tokens": 24},
}
REWARD_FUNCTION = '''def right(text, answer):
    """1 if the last part of the worked answer is the sum, else 0."""
    return float(text.rpartition(";")[2] == answer)
'''


def chat(s: Sum, solution: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": s.question}, {"role": "assistant", "content": solution}]}


def question(s: Sum) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": s.question}], "answer": str(s.a + s.b)}


def preference_pair(s: Sum, wrong: str) -> dict[str, Any]:
    return {"prompt": s.question, "chosen": s.worked(), "rejected": wrong}


def slipped(s: Sum, rng: random.Random) -> str:
    """Return a solution with an error in the ones."""
    ones = s.a % 10 + s.b % 10
    return s.worked(rng.choice([other - ones for other in range(19) if other != ones]))


def sample_completions(model: str, sums: Sequence[Sum], seed: int) -> list[str]:
    """Return completions sampled at temperature 1, each with its own seed."""
    learner = Learner(ModelConfig(path=model), TrainConfig(), trainable=False)
    tokenizer: Any = learner.tokenizer
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": s.question}], **PROMPT) for s in sums]
    requests = [GenerationRequest(prompt=np.array(p, dtype=np.int32), seed=seed + i) for i, p in enumerate(prompts)]
    sampling = Sampling(max_tokens=24, stop_ids=(tokenizer.eos_token_id,))
    samples = LocalEngine(learner.runner, tokenizer, slots=256).generate(requests, sampling)
    return [tokenizer.decode(sample.tokens[sample.mask], skip_special_tokens=True) for sample in samples]


def ranked_right(model: str, pairs: Path, seed: int) -> float:
    """Return the share of pairs whose right completion scores higher; a missing score head is initialised randomly."""
    learner = Learner(ModelConfig(path=model), TrainConfig(), head="score", trainable=False, seed=seed)
    encoder = Encoder(learner.tokenizer, DataConfig(), "pair", len(learner.tokenizer))
    scores = learner.scores(list(load_dataset([str(pairs)], encoder).samples()))
    return sum(right > wrong for right, wrong in zip(scores[0::2], scores[1::2], strict=True)) / (len(scores) // 2)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in text)


def accuracy(sums: Sequence[Sum], texts: Sequence[str]) -> float:
    return sum(s.is_right(text) for s, text in zip(sums, texts, strict=True)) / len(sums)
