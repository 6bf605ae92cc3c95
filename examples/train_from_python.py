"""Run two trainers one after the other from Python, then export a Hugging Face model directory.

From the top of the repository: python examples/train_from_python.py [DIRECTORY]
"""

from __future__ import annotations

import sys
from pathlib import Path

import posttrain

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/from-python")
train = {"batch_size": 4, "learning_rate": 1e-3}

# Options are those of the command line; sections are dicts.
sft = posttrain.sft(
    "pico",
    "examples/data/chat.jsonl",
    max_steps=20,
    train=train,
    output_dir=folder / "sft",
    quiet=True,
)
print(f"sft: loss {sft.metrics['loss']:.3f} after {sft.steps} steps")

# A run directory can be used as a model: training starts from its newest valid checkpoint.
dpo = posttrain.dpo(
    sft.output_dir,
    "examples/data/pairs.jsonl",
    max_steps=10,
    train=train,
    algo={"beta": 0.2},
    output_dir=folder / "dpo",
    quiet=True,
)
print(f"dpo: margin {dpo.metrics['margin']:.3f}, accuracy {dpo.metrics['accuracy']:.2f}")

report = posttrain.export(dpo.output_dir, folder / "model")
print(f"exported {report['parameters']:,} parameters to {report['out']}")
