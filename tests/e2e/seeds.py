"""`python -m tests.e2e.seeds docs/seeds.md` runs the cheap commands of seed_features.yaml and writes the page."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.commands import command

ROOT = Path(__file__).parents[2]
FEATURES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "seed_features.yaml").read_text("utf-8"))
SETUP = (  # what the commands name
    "posttrain sft configs/sft.yaml --train.max_steps 2 --output_dir runs/sft",
    "posttrain reward configs/reward.yaml --train.max_steps 1 --output_dir runs/rm",
    "posttrain grpo configs/grpo.yaml --train.max_steps 1 --output_dir runs/grpo",
    "posttrain export runs/sft my-model",
    "posttrain convert my-model my-core --target_format mcore --tensor_parallel_size 2",
)
DOCUMENTS = {
    "A": "MindRLHF and the PCL GRPO-Training-Suite",
    "B": "OpenRLHF of June 2024",
    "C": "MindSpeed-LLM",
    "D": "MindSpeed-RL",
}
PROGRAMS = ("posttrain ", "python ", "make ", "docker ", "-")  # what begins with one of these is code
HEAD = """# Features of MindRLHF, OpenRLHF and MindSpeed

This page compares posttrain with five documents: MindRLHF's two READMEs, OpenRLHF's README of June 2024, the
announcement of the PCL GRPO-Training-Suite, and a guide to MindSpeed-LLM and MindSpeed-RL. They name {total} features:
{works} work, {partly} in part. `python -m tests.e2e.seeds docs/seeds.md` runs the commands marked *runs* and writes
this page; it fails if one of them does. Every row names the test that keeps it. In part means what the row says: most
often that the hardware of the claim is not at hand.

The commands expect `runs/sft`, `runs/rm`, `runs/grpo`, `my-model` and `my-core`:

```bash
{setup}
```
"""


def page() -> str:
    """Returns the page."""
    counts = Counter("partly" if "partly" in entry else "works" for entry in FEATURES.values())
    setup = "\n".join(SETUP)
    parts = [HEAD.format(total=len(FEATURES), works=counts["works"], partly=counts["partly"], setup=setup)]
    for letter, name in DOCUMENTS.items():
        rows = [row(key, entry) for key, entry in FEATURES.items() if key.startswith(letter)]
        table = ["| | feature | command | result | test |", "|---|---|---|---|---|", *rows]
        parts.append("\n".join([f"## {name}", "", *table, ""]))
    return "\n".join(parts)


def row(key: str, entry: dict[str, Any]) -> str:
    shown, test = entry.get("run") or entry["do"], entry["test"]
    code = f"`{shown}`" if " " not in shown or shown.startswith(PROGRAMS) else shown
    results = ["runs"] if "run" in entry else [] if "partly" in entry else ["works"]
    results += [f"in part: {entry['partly']}"] if "partly" in entry else []
    return f"| {key} | {entry['feature']} | {code} | {'; '.join(results)} | [{Path(test).name}](../{test}) |"


def run_all(folder: Path) -> list[str]:
    """Runs the set-up and every cheap command in a folder; returns those that failed."""
    for name in ("examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    wanted = [*SETUP, *(entry["run"] for entry in FEATURES.values() if "run" in entry)]
    failed = []
    for text in dict.fromkeys(wanted):
        code = command(*shlex.split(text)[1:])
        print(f"exit {code}: {text}", file=sys.stderr, flush=True)
        if code:
            failed.append(text)
    return failed


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as place:
        problems = run_all(Path(place))
        os.chdir(ROOT)
    if problems:
        sys.exit("failed:\n" + "\n".join(problems))
    target.write_text(page(), encoding="utf-8")
