"""Compare the logits of both sides of a conversion on fixed tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from posttrain.convert.conversion import convert
from posttrain.convert.families import family_of
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.source import SourceCheckpoint, open_source
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models.export import head_of, probe
from posttrain.models.loading import read_model


def verify_logits(source: SourceCheckpoint, out: Path, target: CheckpointLayout, scratch: Path) -> float:
    """Return the largest difference between the logits of both sides; raise if it exceeds rounding."""
    if not family_of(source.config).stock:
        raise UsageError(f"--verify logits: transformers has no implementation of {source.config['model_type']}")
    before = source.folder
    if source.layout.format != "hf":
        convert(source, scratch / "source", CheckpointLayout())
        before = scratch / "source"
    after = out if target.format == "hf" else scratch / "target"
    if target.format != "hf":
        written = open_source(out, target.format, None, None)
        try:
            convert(written, after, CheckpointLayout())
        finally:
            written.close()
    expected, found = (outputs(folder) for folder in (before, after))
    difference = float((expected - found).abs().max())
    if not difference <= 1e-5 * max(1.0, float(expected.abs().max())):
        raise PosttrainError(
            f"the logits of the converted model differ from those of {source.folder} by {difference:.3g}"
        )
    return difference


def outputs(folder: Path) -> torch.Tensor:
    return probe(read_model(str(folder), head_of(str(folder)), torch.float32).eval())
