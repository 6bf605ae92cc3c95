"""Profiles some steps of a run with torch's profiler: a trace per chosen rank, and a page of what takes longest.

Traces can be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, supported_activities

from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from posttrain.train.learner_group import LearnerGroup
    from posttrain.train.run import Run

MOST_EXPENSIVE = 10
BACKWARD = ", backward"
# What operators are, in words, by a part of their name; the first that fits counts.
MEANINGS = (
    (("evaluate_function", "accumulategrad"), "the order of the backward pass, and adding up gradients"),
    (("nccl", "gloo", "c10d", "all_reduce", "all_gather", "reduce_scatter"), "communication between ranks"),
    (("flash", "attention"), "attention"),
    (("mm", "matmul", "gemm", "linear", "cutlass", "dot"), "matrix product"),
    (("embedding", "index", "gather", "scatter"), "reading or writing rows by index, such as embeddings"),
    (("softmax", "logsumexp", "cross_entropy", "nll"), "softmax and losses"),
    (("norm", "rsqrt"), "normalisation"),
    (("memcpy", "copy", "_to_copy", "contiguous", "clone", "aten::cat", "catarray"), "copying or converting tensors"),
    (("memset", "fill", "zero", "empty", "resize"), "allocating or clearing memory"),
    (("adam", "lerp", "addcdiv", "addcmul", "_foreach"), "the optimizer"),
    (("silu", "gelu", "sigmoid", "exp", "mul", "add", "sub", "div", "pow", "neg", "where"), "elementwise arithmetic"),
    (("sum", "mean", "max", "min", "cumsum"), "sums and other reductions"),
    (("bitwise", "floor", "eq", "ge", "lt"), "elementwise arithmetic"),
    (
        ("select", "slice", "view", "transpose", "reshape", "expand", "split", "narrow"),
        "views of tensors, without copying",
    ),
    (("sort", "topk", "multinomial"), "sorting or sampling"),
    (("synchronize", "item", "_local_scalar_dense"), "waiting for the device"),
)


class WorkerProfile:
    """The profiler of one worker."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints when it starts and stops
        self.profile = profile(activities=supported_activities())  # of the host and of its accelerator
        self.profile.start()

    def stop(self, file: Path) -> list[dict[str, Any]]:
        """Write the trace, and return time and calls of each operator, the most expensive first."""
        self.profile.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        self.profile.export_chrome_trace(str(file))
        rows = [
            {
                "name": event.key,
                "cpu_ms": event.self_cpu_time_total / 1000,
                "device_ms": event.self_device_time_total / 1000,
                "calls": event.count,
            }
            for event in self.profile.key_averages()
        ]
        on_device = any(row["device_ms"] for row in rows)
        return sorted(rows, key=lambda row: -row["device_ms" if on_device else "cpu_ms"])


class StepProfiler:
    """Starts and stops the profilers of the chosen ranks at the right steps, if train.profile_steps is set."""

    def __init__(self, run: Run, policy: LearnerGroup, done: int) -> None:
        """`done`: number of steps that were finished before. The next one is profiled only if no others follow."""
        config = run.config.train
        self.run, self.policy = run, policy
        self.ranks = config.profile_ranks if config.profile_steps else ()
        if outside := [rank for rank in self.ranks if not 0 <= rank < policy.workers.size]:
            raise UsageError(
                f"train.profile_ranks: there is no rank {outside[0]}; the policy has {policy.workers.size}, from 0"
            )
        left = run.data.steps - done
        count = min(config.profile_steps, left)
        self.first = done + 1 + (left > count)
        self.last = self.first + count - 1

    def before(self, finished: int) -> None:
        """Start before the first profiled step."""
        if finished + 1 == self.first <= self.last:
            self.policy.start_profile(self.ranks)

    def after(self, finished: int) -> None:
        """Stop after the last one, and write the page."""
        if finished != self.last or self.first > self.last:
            return
        folder = self.run.directory.path / "profile"
        found = self.policy.stop_profile({rank: folder / f"rank-{rank}.json" for rank in self.ranks})
        page = folder / "profile.md"
        page.write_text(page_text(found, self.first, self.last), encoding="utf-8")
        self.run.log.message(f"profile of steps {self.first} to {self.last}: {page}")


def page_text(found: dict[int, list[dict[str, Any]]], first: int, last: int) -> str:
    """Return the page: for each rank the ten most expensive operators, with what they are in words."""
    lines = [f"# Profile of steps {first} to {last}", ""]
    for rank, rows in found.items():
        column = "device_ms" if any(row["device_ms"] for row in rows) else "cpu_ms"
        total = sum(row[column] for row in rows) or 1.0
        place = "device" if column == "device_ms" else "CPU"
        lines += [
            f"## Rank {rank}: {total:,.0f} ms of {place} time in operators",
            "",
            f"{summary(rows, column, total)}.",
            "",
            "The ten operators that take the longest:",
            "",
            "| | what | operator | time | share | calls |",
            "|---|---|---|---|---|---|",
        ]
        for number, row in enumerate(rows[:MOST_EXPENSIVE], start=1):
            name = row["name"].replace("|", " ").replace("`", " ")[:80]
            share = f"{row[column] / total:.1%}"
            lines.append(
                f"| {number} | {meaning(name)} | `{name}` | {row[column]:,.1f} ms | {share} | {row['calls']:,} |"
            )
        lines += ["", f"Trace: [rank-{rank}.json](rank-{rank}.json), for ui.perfetto.dev or chrome://tracing.", ""]
    lines.append(
        "Times are those of the operators themselves, without what they call. Time between operators, such as that of "
        "Python and of waiting for data, is not in them: the trace shows it as gaps."
    )
    return "\n".join(lines) + "\n"


def summary(rows: list[dict[str, Any]], column: str, total: float) -> str:
    """Return the share of each kind of operator in one sentence, the largest first; below 1% together."""
    kinds: dict[str, float] = {}
    for row in rows:
        kind = meaning(row["name"]).removesuffix(BACKWARD)
        kinds[kind] = kinds.get(kind, 0.0) + row[column] / total
    shown = sorted(((share, kind) for kind, share in kinds.items() if share >= 0.01), reverse=True)
    parts = [f"{kind} {share:.0%}" for share, kind in shown]
    rest = 1 - sum(share for share, _ in shown)
    return "Of it: " + "; ".join([*parts, *([f"everything else {rest:.0%}"] if rest >= 0.005 else [])])


def meaning(name: str) -> str:
    """Say in words what an operator or kernel does."""
    plain = name.lower()
    backward = "backward" in plain
    for parts, words in MEANINGS:
        if any(part in plain for part in parts):
            return words + BACKWARD * backward
    return "other" + BACKWARD * backward
