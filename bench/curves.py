"""Measure throughput of generation by batch size and length, and memory of a training pass by length and vocabulary.

    python -m bench curves                 measures, writes docs/performance.json and draws docs/performance.png
    python -m bench curves --redraw        draws it again from the numbers; needs no GPU

On a GPU the shape of Qwen2-0.5B. On a CPU a small shape, throughput only (torch does not count its allocations there),
and nothing is written without --picture. Generation is timed as further tokens at a given length: by two calls that
differ in the number of new tokens, so that the time for prompts cancels out.
"""

import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import common
from bench.common import GPU, SHAPES, Options
from bench.generate import requests_of
from posttrain.core.types import Objective, Sample, count_units
from posttrain.engines.base import Sampling
from posttrain.engines.local import LocalEngine
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner
from posttrain.train.learner import Learner

BATCHES, LENGTHS = ((512, 64, 8, 1), (256, 2048, 8192)) if GPU else ((16, 4, 1), (64, 256))
FEW, MORE = (16, 128) if GPU else (4, 16)  # new tokens that are not counted, and those that are
VOCABULARIES, TOKENS = (32_768, 65_536, 151_936), (8192, 16_384, 32_768)
Rows = list[dict[str, float]]


def measure_curves(options: Options) -> None:
    page = Path(__file__).parents[1] / "docs" / "performance.png"
    picture = options.picture or (page if GPU or options.redraw else None)
    if options.redraw:
        assert picture is not None
        draw(json.loads(picture.with_suffix(".json").read_text(encoding="utf-8")), picture)
        return
    name = options.chosen("0.5b")[0]
    found: dict[str, Any] = {
        "shape": name,
        "device": torch.cuda.get_device_name() if GPU else "a CPU, one thread",
        "versions": common.versions(),
        "date": time.strftime("%Y-%m-%d"),
        "generation": generation(name),
        "memory": memory(name, options) if GPU else [],
    }
    if not GPU:
        print("curves: memory is measured on a GPU only")
    if picture is not None:
        picture.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw(found, picture)


# Speed


def generation(name: str) -> Rows:
    model = common.random_weights(SHAPES[name], positions=max(LENGTHS) + 256)
    model.set_attn_implementation(attention.NAME)
    rows: Rows = []
    for length in LENGTHS:
        # The engine's cache is as long as is needed here.
        engine = LocalEngine(ModelRunner.from_model(model), None, slots=max(BATCHES))
        for batch in BATCHES:
            rate = rate_at(engine, name, batch, length)
            print(f"generation {name}, {batch} sequences of {length} tokens: {rate:,.0f} tokens/s", flush=True)
            rows.append({"batch": batch, "length": length, "tokens_per_second": round(rate, 1)})
        del engine
        common.free()
    return rows


def rate_at(engine: LocalEngine, name: str, batch: int, length: int) -> float:
    """Return tokens per second of sequences that end with `length` tokens."""
    work = requests_of(SHAPES[name], batch, 0, count=batch, prompt=length - FEW - MORE)  # one prompt for all
    long, short = Sampling(max_tokens=FEW + MORE), Sampling(max_tokens=FEW)
    engine.generate(work, long)  # room, kernels and graphs
    seconds = [common.timed(lambda s=s: engine.generate(work, s)) for s in (long, short, long, short)]
    return batch * MORE / (min(seconds[0::2]) - min(seconds[1::2]))


# Memory


def memory(name: str, options: Options) -> Rows:
    rows: Rows = []
    for vocabulary in VOCABULARIES:
        shape = replace(SHAPES[name], vocabulary=vocabulary)
        with common.saved_model(shape) as folder:
            policy = common.learner(folder, replace(options, micro_batch_tokens=max(TOKENS)))
        _, wanted = common.objective("sft")
        peak_of_a_pass(policy, wanted, min(TOKENS))  # builds kernels, and tries them out
        for tokens in TOKENS:
            gib = peak_of_a_pass(policy, wanted, tokens) / 2**30
            print(f"memory of a pass, vocabulary {vocabulary:,}, {tokens:,} tokens: {gib:.2f} GiB", flush=True)
            rows.append({"vocabulary": vocabulary, "tokens": tokens, "gib": round(gib, 3)})
        del policy
        gc.collect()
    for vocabulary, slope in slopes(rows).items():
        print(f"memory of a pass, vocabulary {vocabulary:,}: {slope:.3f} MiB a token")
    return rows


def peak_of_a_pass(policy: Learner, wanted: Objective, tokens: int) -> int:
    """Return the bytes that forward and backward over one sample allocate in addition."""
    sample = Sample(tokens=np.full(tokens, 11, dtype=np.int32), mask=np.arange(tokens) > 0)
    common.free()
    before = torch.cuda.memory_allocated()
    policy.forward_backward([sample], wanted, count_units([sample], wanted.unit), tokens)
    most = torch.cuda.max_memory_allocated()
    policy.discard()
    return most - before


def slopes(rows: Rows) -> dict[int, float]:
    """Return MiB per additional token for each vocabulary size."""
    found = {}
    for vocabulary in sorted({int(row["vocabulary"]) for row in rows}):
        points = [(row["tokens"], row["gib"] * 1024) for row in rows if row["vocabulary"] == vocabulary]
        found[vocabulary] = float(np.polyfit(*np.array(points).T, 1)[0])
    return found


# The picture


def draw(found: dict[str, Any], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator, ScalarFormatter

    panels = 2 if found["memory"] else 1
    figure, axes = plt.subplots(1, panels, figsize=(4.5 * panels, 3.4), layout="constrained", squeeze=False)
    speed = axes[0][0]
    for length in sorted({row["length"] for row in found["generation"]}):
        rows = sorted((r for r in found["generation"] if r["length"] == length), key=lambda row: row["batch"])
        rates = [row["tokens_per_second"] for row in rows]
        speed.plot([row["batch"] for row in rows], rates, "o-", label=f"{length:,.0f} tokens")
    speed.set(xscale="log", yscale="log", xlabel="sequences at once", ylabel="tokens/s", title="Generation")
    speed.set_xticks(sorted({row["batch"] for row in found["generation"]}))
    speed.xaxis.set_major_formatter(ScalarFormatter())
    speed.xaxis.set_minor_locator(NullLocator())
    speed.legend(title="length")
    if found["memory"]:
        draw_memory(found["memory"], axes[0][1])
    for panel in axes[0]:
        panel.grid(alpha=0.3)
    figure.suptitle(f"{found['shape']} on {found['device']}, {found['versions']}", fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    print(f"drawn: {picture}")


def draw_memory(found: Rows, panel: Any) -> None:
    for vocabulary in sorted({row["vocabulary"] for row in found}):
        rows = sorted((r for r in found if r["vocabulary"] == vocabulary), key=lambda row: row["tokens"])
        panel.plot([r["tokens"] for r in rows], [r["gib"] for r in rows], "o-", label=f"{vocabulary:,.0f}")
    panel.set(xlabel="tokens of a pass", ylabel="GiB", title="Memory of a training pass")
    panel.set(xlim=(0, None), ylim=(0, None))
    panel.legend(title="vocabulary")
