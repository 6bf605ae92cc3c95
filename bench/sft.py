"""Supervised training on ragged rows: our packed learner against a padded loop with full logits."""

import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from posttrain.algos.sft import SFT
from posttrain.config import ModelConfig, UpdateConfig
from posttrain.learner import Learner
from posttrain.models.pico import build_tokenizer
from posttrain.types import Objective, Sample, count

ROUNDS = 3
VOCABULARY = 16_384
ROWS = 32
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def measure_sft() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(**SHAPE, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer: PreTrainedTokenizerFast = build_tokenizer()
        tokenizer.save_pretrained(folder)
        rows = ragged_rows()
        tokens = sum(len(row) for row in rows)
        steps = {"packed (ours)": ours(folder, rows), "padded, full logits": padded(folder, rows)}
        losses = {name: step() for name, step in steps.items()}  # warm-up, and the proof that the work is the same
        seconds = {name: min(timed(step) for _ in range(ROUNDS)) for name, step in steps.items()}
    first, second = losses.values()
    assert abs(first - second) < 1e-4 * abs(second), losses
    for name in steps:
        print(f"sft {tokens:,} tokens in {ROWS} rows, {name}: {tokens / seconds[name]:,.0f} tokens/s")
    print(f"sft ratio: {seconds['padded, full logits'] / seconds['packed (ours)']:.2f}x")


def ragged_rows() -> list[Sample]:
    """A long question and a shorter answer, as instruction data has; only the answer counts."""
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(32, 385, ROWS):
        tokens = rng.integers(10, VOCABULARY, length).astype(np.int32)
        rows.append(Sample(tokens=tokens, mask=np.arange(length) >= int(length * rng.uniform(0.3, 0.7))))
    return rows


def timed(step) -> float:
    started = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ours(folder: str, rows: list[Sample]):
    learner = Learner(ModelConfig(path=folder, dtype="float32"), UpdateConfig(tokens_per_device=4096))
    algo = SFT(SFT.Config())
    objective = Objective(request=algo.request(len), loss=algo.loss, unit="token")
    denominator, tokens = count(rows, "token"), sum(map(len, rows))

    def step() -> float:
        sums = learner.forward_backward(rows, objective, denominator, tokens)
        learner.step(1e-4)
        return sums["loss"][0] / denominator

    return step


def padded(folder: str, rows: list[Sample]):
    """What most training loops do: micro-batches of 8 rows padded to the longest, cross-entropy on all logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    denominator = count(rows, "token")

    def step() -> float:
        total = 0.0
        for first in range(0, len(rows), 8):
            part = rows[first : first + 8]
            width = max(map(len, part))
            ids = torch.zeros(len(part), width, dtype=torch.long)
            labels = torch.full_like(ids, -100)
            seen = torch.zeros_like(ids)
            for i, row in enumerate(part):
                ids[i, : len(row)] = torch.as_tensor(row.tokens)
                labels[i, : len(row)] = torch.where(torch.as_tensor(row.mask), torch.as_tensor(row.tokens), -100)
                seen[i, : len(row)] = 1
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / denominator).backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / denominator

    return step
