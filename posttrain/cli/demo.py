"""`posttrain demo`: teach a toy model two-digit sums, by imitation, then by preference, and show what changed.

The teacher whom the model imitates is wrong in one sum of five, as data of the world is. Imitation copies that;
preferring right answers to wrong ones mends it. Answers are sampled at temperature 1, so that the model shows all it
believes and not only its first choice.
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

from posttrain.cli.curve import draw_curve
from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.core.logging import quiet_libraries
from posttrain.data.dataset import Encoder, load_dataset
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.train.launch import train
from posttrain.train.learner import Learner
from posttrain.train.run_directory import RunDirectory

HELD_OUT = 500
PROMPT = {"add_generation_prompt": True, "return_dict": False}
WRONG_LESSONS = 0.2


@dataclass(frozen=True, slots=True)
class Sum:
    """A question the model is asked; it answers in steps, as at school: ones, tens with the carry, result."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    def worked(self, slip: int = 0) -> str:
        """The answer in steps. A slip in the ones is carried through to the result, as a pupil would."""
        ones = self.a % 10 + self.b % 10 + slip
        carry = ones // 10
        tens = self.a // 10 + self.b // 10 + carry
        return f"{self.a % 10}+{self.b % 10}={ones};{self.a // 10}+{self.b // 10}+{carry}={tens};{tens}{ones % 10}"

    def is_right(self, said: str) -> bool:
        return said.rpartition(";")[2] == str(self.a + self.b)


def run_demo(out: str, seed: int) -> int:
    """SFT, a reward model, DPO, GRPO; accuracy on held-out sums before and after each."""
    quiet_libraries()
    torch.set_num_threads(1)  # pico is too small to share; two threads on two busy cores are many times slower
    started = time.monotonic()
    console = Console()
    with RunDirectory.open(out, "demo", resume=False) as folder:
        root = folder.path
        rng = random.Random(seed)
        sums = [Sum(a, b) for a in range(10, 100) for b in range(10, 100)]
        rng.shuffle(sums)
        held_out, lessons = sums[:HELD_OUT], sums[HELD_OUT:]
        table = Table("stage", "held-out figure", "before", "after", "seconds", title="what each stage changed")

        def stage(title: str) -> float:
            console.rule(title)
            return time.monotonic()

        began = stage("1. supervised fine-tuning: imitate a teacher who errs in one sum of five")
        before = answers("pico", held_out, seed)
        taught = [(s, slipped(s, rng) if rng.random() < WRONG_LESSONS else s.worked()) for s in lessons]
        rows = write_rows(root / "data/sft.jsonl", (chat(s, said) for s, said in taught))
        sft = train("sft", **common(root / "sft", "pico", rows, seed), **SFT_OPTIONS).folder
        after = answers(str(sft), held_out, seed)
        sft_accuracy = accuracy(held_out, after)
        table.add_row("sft", "right answers", *shares(accuracy(held_out, before), sft_accuracy), seconds(began))

        began = stage("2. reward model: tell right answers from wrong ones")
        pairs = write_rows(root / "data/pairs.jsonl", (pair(s, slipped(s, rng)) for s in lessons))
        unseen = write_rows(root / "data/held-out-pairs.jsonl", (pair(s, slipped(s, rng)) for s in held_out))
        judge = train("reward", **common(root / "reward", str(sft), pairs, seed), **REWARD_OPTIONS).folder
        ranked = ranked_right(str(sft), unseen, seed), ranked_right(str(judge), unseen, seed)
        table.add_row("reward", "pairs ranked right", *shares(*ranked), seconds(began))

        began = stage("3. DPO: prefer right answers to the model's own mistakes")
        tried = lessons[:2500]
        mistakes = [
            (s, said) for s, said in zip(tried, answers(str(sft), tried, seed), strict=True) if not s.is_right(said)
        ]
        own = write_rows(root / "data/mistakes.jsonl", (pair(s, said or "?") for s, said in mistakes))
        dpo = train("dpo", **common(root / "dpo", str(sft), own, seed), **DPO_OPTIONS).folder
        dpo_accuracy = accuracy(held_out, answers(str(dpo), held_out, seed))
        table.add_row("dpo", "right answers", *shares(sft_accuracy, dpo_accuracy), seconds(began))

        began = stage("4. GRPO: learn from its own answers, by a rule that knows the sum")
        asked_rows = write_rows(root / "data/questions.jsonl", (question(s) for s in lessons))
        rule = root / "right.py"
        rule.write_text(RULE, encoding="utf-8")
        options = common(root / "grpo", str(dpo), asked_rows, seed) | {"reward": [f"{rule}:right"]}
        grpo = train("grpo", **options, **GRPO_OPTIONS).folder
        final = answers(str(grpo), held_out, seed)
        table.add_row("grpo", "right answers", *shares(dpo_accuracy, accuracy(held_out, final)), seconds(began))
        rewards = [json.loads(line)["reward"] for line in (grpo / "metrics.jsonl").read_text().splitlines()]
        draw_curve(console, rewards, root / "reward.svg")

        console.rule("conversations with the same three questions")
        for number in range(3):
            asked = held_out[number]
            verdict = "right" if asked.is_right(final[number]) else "wrong"
            console.print(f"  {asked.question}", highlight=False)
            console.print(f"    before  {printable(before[number])}", highlight=False, markup=False)
            console.print(f"    after   {printable(final[number])}  ({verdict})", highlight=False, markup=False)
        console.print(table)
        console.print(f"{time.monotonic() - started:.0f} seconds in all. Run folder: {root}", highlight=False)
        console.print(f"answers it learnt from: posttrain samples {root}/grpo", highlight=False, markup=False)
        console.print(f"next: posttrain export {root}/grpo my-model", highlight=False, markup=False)
    return 0


SFT_OPTIONS: dict[str, Any] = {
    "train": {"max_steps": 300, "batch_size": 64, "learning_rate": 3e-3, "warmup_steps": 20, "min_lr_ratio": 0.02},
}
REWARD_OPTIONS: dict[str, Any] = {
    "train": {"max_steps": 160, "batch_size": 32, "learning_rate": 5e-4, "warmup_steps": 30},
}
DPO_OPTIONS: dict[str, Any] = {
    "train": {"max_steps": 60, "batch_size": 32, "learning_rate": 2e-4},
    "algo": {"pref_ftx": 1.0},
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
RULE = '''def right(text, answer):
    """1 if the last part of the worked answer is the sum, else 0."""
    return float(text.rpartition(";")[2] == answer)
'''


def common(out: Path, model: str, rows: Path, seed: int) -> dict[str, Any]:
    chosen = {"output_dir": str(out), "model": {"path": model}, "seed": seed}
    return chosen | {"data": {"train": [str(rows)]}, "save": {"every_steps": 0}}


def chat(asked: Sum, said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked.question}, {"role": "assistant", "content": said}]}


def question(asked: Sum) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": asked.question}], "answer": str(asked.a + asked.b)}


def pair(asked: Sum, wrong: str) -> dict[str, Any]:
    return {"prompt": asked.question, "chosen": asked.worked(), "rejected": wrong}


def slipped(asked: Sum, rng: random.Random) -> str:
    """An answer with the ones miscounted."""
    ones = asked.a % 10 + asked.b % 10
    return asked.worked(rng.choice([other - ones for other in range(19) if other != ones]))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answers(model: str, asked: Sequence[Sum], seed: int) -> list[str]:
    """Answers sampled at temperature 1, each from its own seed."""
    learner = Learner(ModelConfig(path=model), TrainConfig(), trainable=False)
    tokenizer: Any = learner.tokenizer
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": s.question}], **PROMPT) for s in asked]
    requests = [GenerationRequest(prompt=np.array(p, dtype=np.int32), seed=seed + i) for i, p in enumerate(prompts)]
    sampling = Sampling(max_tokens=24, stop_ids=(tokenizer.eos_token_id,))
    samples = LocalEngine(learner.runner, tokenizer, slots=256).generate(requests, sampling)
    return [tokenizer.decode(sample.tokens[sample.mask], skip_special_tokens=True) for sample in samples]


def ranked_right(model: str, pairs: Path, seed: int) -> float:
    """Share of pairs whose right answer a reward model scores higher; without a score head, with a random one."""
    judge = Learner(ModelConfig(path=model), TrainConfig(), head="score", trainable=False, seed=seed)
    encoder = Encoder(judge.tokenizer, DataConfig(), "pair", len(judge.tokenizer))
    scores = judge.scores([sample for row in load_dataset([str(pairs)], encoder).rows for sample in row])
    return sum(right > wrong for right, wrong in zip(scores[0::2], scores[1::2], strict=True)) / (len(scores) // 2)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in text)


def accuracy(asked: Sequence[Sum], said: Sequence[str]) -> float:
    return sum(s.is_right(text) for s, text in zip(asked, said, strict=True)) / len(asked)


def shares(before: float, after: float) -> tuple[str, str]:
    return f"{before:.1%}", f"{after:.1%}"


def seconds(began: float) -> str:
    return f"{time.monotonic() - began:.0f}"
