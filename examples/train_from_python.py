"""Two trainers one after the other from Python, then the result as a plain Hugging Face folder.

From the top of the repository: python examples/train_from_python.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import posttrain
from posttrain.models.export import export

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/from-python")
train = {"batch_size": 4, "learning_rate": 1e-3}

# Options are those of the command line, section by section.
sft = posttrain.sft(
    model="pico",
    data="examples/data/chat.jsonl",
    train=train | {"max_steps": 20},
    output_dir=str(folder / "sft"),
    quiet=True,
)
print(f"sft: loss {sft.metrics['loss']:.3f} after {sft.steps} steps")

# A run folder is a model path: training goes on from its newest valid checkpoint.
dpo = posttrain.dpo(
    model=str(sft.folder),
    data="examples/data/pairs.jsonl",
    train=train | {"max_steps": 10},
    algo={"beta": 0.2},
    output_dir=str(folder / "dpo"),
    quiet=True,
)
print(f"dpo: margin {dpo.metrics['margin']:.3f}, accuracy {dpo.metrics['accuracy']:.2f}")

report = export(str(dpo.folder), folder / "model")
print(f"exported {report['parameters']:,} parameters to {report['out']}")
