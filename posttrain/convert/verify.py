"""Both sides of a conversion computed on fixed tokens and compared."""

from __future__ import annotations

from pathlib import Path

import torch

from posttrain.convert.conversion import convert
from posttrain.convert.families import family_of
from posttrain.convert.megatron import Layout
from posttrain.convert.source import Source, open_source
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models.export import head_of, probe
from posttrain.models.loading import read_model


def verify_logits(source: Source, out: Path, target: Layout, scratch: Path) -> float:
    """The largest difference of logits, the same weights being read from both sides; more than rounding is an error."""
    if not family_of(source.config).stock:
        raise UsageError(f"--verify logits: transformers has no code for {source.config['model_type']}")
    before = source.folder
    if source.layout.format != "hf":
        convert(source, scratch / "source", Layout())
        before = scratch / "source"
    after = out if target.format == "hf" else scratch / "target"
    if target.format != "hf":
        written = open_source(out, target.format, None, None)
        try:
            convert(written, after, Layout())
        finally:
            written.close()
    expected, found = (outputs(folder) for folder in (before, after))
    difference = float((expected - found).abs().max())
    if not difference <= 1e-5 * max(1.0, float(expected.abs().max())):
        raise PosttrainError(f"the result's logits differ from those of {source.folder} by {difference:.3g}")
    return difference


def outputs(folder: Path) -> torch.Tensor:
    return probe(read_model(str(folder), head_of(str(folder)), torch.float32).eval())
