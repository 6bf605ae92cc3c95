"""`posttrain convert SRC DST --from hf --to mcore --tp 2 --pp 2`; the names of the original's options work too."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UsageError
from posttrain.verbs import TOOLS

if TYPE_CHECKING:
    import torch

    from posttrain.models.convert.megatron import Layout
    from posttrain.models.convert.source import Source

FORMATS = ("hf", "mcore", "legacy", "sharded")
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
NO_EFFECT = "accepted for old scripts; changes nothing here"


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 11,13") from error


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="posttrain convert", description=TOOLS["convert"], allow_abbrev=False)
    add = made.add_argument
    add("source", nargs="?", default="", help="folder to read")
    add("out", nargs="?", default="", help="folder to write; must not exist or be empty")
    add("--from", dest="origin", choices=FORMATS, help="format of the source; recognised if left out")
    add("--to", dest="goal", choices=FORMATS, help="format to write: our own checkpoints are `sharded`")
    cut = made.add_argument_group("how the target is cut")
    cut.add_argument("--tp", "--target-tensor-parallel-size", type=int, default=1, help="tensor parallel ranks")
    cut.add_argument("--pp", "--target-pipeline-parallel-size", type=int, default=1, help="pipeline stages")
    cut.add_argument("--ep", "--target-expert-model-parallel-size", type=int, default=1, help="expert parallel ranks")
    cut.add_argument("--cp", "--context-parallel-size", type=int, default=1, help="accepted; does not change weights")
    cut.add_argument(
        "--vpp", "--num-layers-per-virtual-pipeline-stage", type=int, default=0, help="layers a virtual stage"
    )
    cut.add_argument("--num-layer-list", type=numbers, default=(), help="layers a stage, as 11,13,19,21")
    cut.add_argument("--noop-layers", type=numbers, default=(), help="layers that do nothing, as 46,47")
    cut.add_argument(
        "--vocab-multiple", "--make-vocab-size-divisible-by", type=int, default=1, help="pad to this times --tp rows"
    )
    cut.add_argument("--grouped-experts", "--moe-grouped-gemm", action="store_true", help="experts as weight1, weight2")
    cut.add_argument("--engine", action="store_true", help="names of Transformer Engine's layers")
    cut.add_argument("--dtype", "--params-dtype", choices=sorted({*TYPES, *TYPES.values()}), help="round to this type")
    more = made.add_argument_group("what else")
    more.add_argument("--original", help="Hugging Face folder with config.json and tokenizer, if the source has none")
    more.add_argument("--lora", "--lora-load", help="folder of LoRA adapters (peft) to merge on the way")
    more.add_argument("--verify", choices=("logits",), help="load both sides and compare what they compute")
    more.add_argument("--workers", type=int, default=1, help="tensors converted at a time")
    more.add_argument("--source-noop-layers", type=numbers, default=(), help="of a source that this tool did not write")
    more.add_argument("--source-ep", type=int, default=1, help="of a source that this tool did not write")
    old = made.add_argument_group("names of older scripts")
    old.add_argument("--load-dir", help="the source")
    old.add_argument("--save-dir", help="the target")
    old.add_argument("--load-model-type", choices=("hf", "mg", "optim"), help="hf, or mg: Megatron")
    old.add_argument("--save-model-type", choices=("hf", "mg"), help="hf, or mg: Megatron")
    old.add_argument("--use-mcore-models", action="store_true", help="Megatron means core, not legacy")
    old.add_argument("--load-from-legacy", action="store_true", help="the source is legacy")
    old.add_argument("--save-to-legacy", action="store_true", help="the target is legacy")
    for name in ("--model-type", "--model-type-hf", "--tokenizer-model", "--spec", "--loader", "--saver"):
        old.add_argument(name, help=NO_EFFECT)
    for name in ("--add-qkv-bias", "--load-checkpoint-loosely"):
        old.add_argument(name, action="store_true", help=NO_EFFECT)
    return made


def run(args: list[str]) -> int:
    """Convert and say what was done."""
    options = parser().parse_args(args)
    translate(options)
    from posttrain.log import quiet_libraries

    quiet_libraries()
    import torch

    dtype: torch.dtype | None = getattr(torch, TYPES.get(options.dtype, options.dtype)) if options.dtype else None
    source = opened(options)
    try:
        convert(options, source, dtype)
    finally:
        source.close()
    return 0


def translate(options: argparse.Namespace) -> None:
    """Older names of the same things."""
    options.source, options.out = options.load_dir or options.source, options.save_dir or options.out
    if not options.source or not options.out:
        raise UsageError("posttrain convert SRC DST: two folders are needed")
    megatron = "mcore" if options.use_mcore_models else "legacy"
    if options.load_model_type and not options.origin:
        legacy = "legacy" if options.load_from_legacy else "mcore" if options.save_to_legacy else megatron
        options.origin = "hf" if options.load_model_type == "hf" else legacy
    if options.save_model_type and not options.goal:
        core = "legacy" if options.save_to_legacy else "mcore" if options.load_from_legacy else megatron
        options.goal = "hf" if options.save_model_type == "hf" else core
    if not options.goal:
        raise UsageError(f"--to: say what to write: {', '.join(FORMATS)}")
    if options.workers < 1 or options.vocab_multiple < 1:
        raise UsageError("--workers and --vocab-multiple are at least 1")


def opened(options: argparse.Namespace) -> Source:
    """The source, with the adapters of a run noted for merging."""
    from posttrain.models.convert.megatron import Layout
    from posttrain.models.convert.source import megatron_kind, open_source, recognise_format

    folder = Path(options.source)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    kind = options.origin or recognise_format(folder)
    if kind == "megatron":
        kind = megatron_kind(folder)
    if kind == "sharded":
        from posttrain.models import lora
        from posttrain.models.load import is_adapter, resolve_path

        folder, kind = Path(resolve_path(str(folder))), "hf"
        if is_adapter(folder):
            if options.lora:
                raise UsageError(f"--lora: {folder} holds adapters already")
            options.lora = str(folder)
            folder = Path(resolve_path(lora.base_of(folder)))
    original = Path(options.original) if options.original else None
    out = Path(options.out)
    if options.goal == "hf" and kind != "hf" and (out / "config.json").is_file():
        original, options.out = original or out, str(out / "mg2hf")  # beside the original, as older tools do
    return open_source(folder, kind, original, Layout(ep=options.source_ep, noop=options.source_noop_layers))


def target_of(options: argparse.Namespace) -> Layout:
    from posttrain.models.convert.megatron import Layout

    if options.goal in ("hf", "sharded"):
        return Layout()
    return Layout(
        options.goal,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        layers_per_stage=options.num_layer_list,
        layers_per_virtual_stage=options.vpp,
        noop=options.noop_layers,
        experts="grouped" if options.grouped_experts else "single",
        engine=options.engine,
    )


def convert(options: argparse.Namespace, source: Source, dtype: torch.dtype | None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from posttrain.models.convert.convert import convert as write
    from posttrain.models.convert.convert import wrap_as_checkpoint
    from posttrain.models.convert.verify import verify_logits

    out = Path(options.out)
    lora = Path(options.lora) if options.lora else None
    if options.verify and (dtype is not None or lora is not None):
        raise UsageError("--verify compares equal weights: leave --dtype and --lora out")

    def verify(folder: Path, layout: Layout) -> None:
        with tempfile.TemporaryDirectory(prefix=".verify-", dir=folder.parent) as scratch:
            difference = verify_logits(source, folder, layout, Path(scratch))
        print(f"logits of both sides: largest difference {difference:.3g}")

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        total = sum(source.entry(tensor).size for tensor in source.stored)
        task = bar.add_task("converting", total=total)
        details: dict[str, Any] = {
            "dtype": dtype,
            "lora": lora,
            "vocabulary_multiple": options.vocab_multiple,
            "workers": options.workers,
            "progress": lambda count: bar.advance(task, count),
        }
        if options.verify:
            details["check"] = verify
        make = wrap_as_checkpoint if options.goal == "sharded" else write
        report = make(source, out, target_of(options), **details)
    print(f"{report.elements:,} weights in {report.tensors} tensors, {report.bytes_written:,} bytes: each used once")
    if report.padding:
        print(f"{report.padding} rows of padding")
    print(f"done: {out}")
