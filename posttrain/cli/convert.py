"""`posttrain convert SRC DST --from hf --to mcore --tp 2 --pp 2`; the names of the original's options work too."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.options import Parser
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from posttrain.convert.adapter import LoraAdapter
    from posttrain.convert.megatron import CheckpointLayout
    from posttrain.convert.source import SourceCheckpoint

FORMATS = ("hf", "mcore", "legacy", "sharded")
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
NO_EFFECT = "accepted for old scripts; changes nothing here"


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 11,13") from error


def joined(args: list[str]) -> list[str]:
    """Lists of numbers may have blanks behind their commas: 11, 13, 19, 21."""
    found: list[str] = []
    for word in args:
        if found and found[-1].endswith(",") and found[-1][:-1].replace(",", "").isdigit():
            found[-1] += word
        else:
            found.append(word)
    return found


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="posttrain convert", description=TOOLS["convert"], allow_abbrev=False)
    add = made.add_argument
    add("source", nargs="?", default="", help="folder to read")
    add("out", nargs="?", default="", help="folder to write; must not exist or be empty")
    add("--from", dest="origin", choices=FORMATS, help="format of the source; recognised if left out")
    add("--to", dest="goal", choices=FORMATS, help="format to write: our own checkpoints are `sharded`")
    cut = made.add_argument_group("how the target is cut")
    cut.add_argument("--tp", "--target-tensor-parallel-size", type=int, default=1, help="tensor parallel ranks")
    cut.add_argument("--pp", "--target-pipeline-parallel-size", type=int, default=1, help="pipeline stages")
    cut.add_argument(
        "--ep",
        "--target-expert-model-parallel-size",
        "--target-expert-parallel-size",
        type=int,
        default=1,
        help="expert parallel ranks",
    )
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
    more.add_argument(
        "--lora", "--lora-load", help="folder of LoRA adapters (peft's or Megatron's) to merge on the way"
    )
    more.add_argument("--lora-r", type=int, default=0, help="rank of adapters whose folder does not say it")
    more.add_argument("--lora-alpha", type=float, default=0.0, help="the same of their alpha")
    more.add_argument("--verify", choices=("logits",), help="load both sides and compare what they compute")
    more.add_argument("--workers", type=int, default=0, help="tensors converted at a time; one a core, at most 4")
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
    for name in ("--model-type", "--model-type-hf", "--tokenizer-model", "--loader", "--saver"):
        old.add_argument(name, help=NO_EFFECT)
    for name in ("--spec", "--lora-target-modules"):
        old.add_argument(name, nargs="+", help=NO_EFFECT)
    for name in (
        "--add-qkv-bias",
        "--add-dense-bias",
        "--load-checkpoint-loosely",
        "--save-lora-to-hf",
        "--load-hf-from-config",
    ):
        old.add_argument(name, action="store_true", help=NO_EFFECT)
    old.add_argument("--moe-tp-extend-ep", action="store_true", help="not known here: use --ep")
    return made


def run(args: list[str]) -> int:
    """Convert and say what was done."""
    options = parser().parse_args(joined(args))
    translate(options)
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    folder = Path(options.source)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    from posttrain.convert.adapter_files import is_adapter_folder

    if options.origin != "sharded" and is_adapter_folder(folder):
        return convert_adapters(options, folder)
    source, training_state = opened(options, folder)
    try:
        convert(options, source, training_state)
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
    if options.workers < 0 or options.vocab_multiple < 1:
        raise UsageError("--workers and --vocab-multiple are at least 1")
    if options.moe_tp_extend_ep and options.tp > 1:
        raise UsageError("--moe-tp-extend-ep: experts over tensor ranks too are not known here; use --ep alone")
    if options.goal in ("hf", "sharded") and max(options.tp, options.pp, options.ep) > 1:
        raise UsageError(f"--to {options.goal}: is not cut; leave --tp, --pp and --ep out")


def opened(options: argparse.Namespace, folder: Path) -> tuple[SourceCheckpoint, Path | None]:
    """The source, with the adapters of a run noted for merging; and the run's checkpoint, if it is one."""
    from posttrain.convert.megatron import CheckpointLayout
    from posttrain.convert.source import megatron_kind, open_source, recognise_format

    kind = options.origin or recognise_format(folder)
    if kind == "megatron":
        kind = megatron_kind(folder)
    training_state = None
    if kind == "sharded":
        from posttrain.models import adapters
        from posttrain.models.paths import is_adapter, resolve_path

        folder, kind = Path(resolve_path(str(folder))), "hf"
        training_state = folder.parent
        if is_adapter(folder):
            if options.lora:
                raise UsageError(f"--lora: {folder} holds adapters already")
            options.lora = str(folder)
            folder = Path(resolve_path(adapters.base_model_of(folder)))
    original = original_of(options, kind)
    given = CheckpointLayout(ep=options.source_ep, noop=options.source_noop_layers)
    return open_source(folder, kind, original, given), training_state


def original_of(options: argparse.Namespace, kind: str) -> Path | None:
    """Where configuration and tokenizer are. With the original's folder as target: in it, and the result beside."""
    out = Path(options.out)
    if options.goal == "hf" and kind != "hf" and (out / "config.json").is_file():
        options.original, options.out = options.original or str(out), str(out / "mg2hf")  # as older tools do
    return Path(options.original) if options.original else None


def known_of(options: argparse.Namespace) -> dict[str, Any]:
    return {"r": options.lora_r, "lora_alpha": options.lora_alpha}


def read_lora(options: argparse.Namespace, source: SourceCheckpoint) -> LoraAdapter:
    from posttrain.convert.adapter_files import AdapterBase, is_peft, read_adapter
    from posttrain.convert.megatron import CheckpointLayout
    from posttrain.convert.source import megatron_kind

    folder = Path(options.lora)
    base = AdapterBase(source.config, source.shape, source.parameters)
    given = CheckpointLayout(ep=options.source_ep, noop=options.source_noop_layers)
    kind = "hf" if is_peft(folder) else megatron_kind(folder)
    return read_adapter(folder, base, kind, given, known_of(options))[0]


def convert_adapters(options: argparse.Namespace, folder: Path) -> int:
    """Adapters alone, from one form to the other."""
    from posttrain.convert.adapter_files import AdapterBase, base_folder, is_peft, read_adapter, write_adapter
    from posttrain.convert.megatron import CheckpointLayout
    from posttrain.convert.parameters import model_parameters
    from posttrain.convert.source import megatron_kind, read_model_config

    if options.goal == "sharded" or options.lora or options.dtype or options.verify:
        raise UsageError(
            f"{folder} holds adapters: they go to hf, mcore or legacy, without --lora, --dtype and --verify"
        )
    kind = "hf" if is_peft(folder) else options.origin or megatron_kind(folder)
    config = read_model_config(base_folder(folder, original_of(options, "adapters")))
    base = AdapterBase(config, *model_parameters(config))
    given = CheckpointLayout(ep=options.source_ep, noop=options.source_noop_layers)
    adapter, _ = read_adapter(folder, base, kind, given, known_of(options))
    count = write_adapter(adapter, base, Path(options.out), target_of(options), folder)
    print(f"{len(adapter.factors)} adapted matrices, {count} tensors")
    print(f"done: {options.out}")
    return 0


def target_of(options: argparse.Namespace) -> CheckpointLayout:
    from posttrain.convert.megatron import CheckpointLayout

    if options.goal in ("hf", "sharded"):
        return CheckpointLayout()
    return CheckpointLayout(
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


def convert(options: argparse.Namespace, source: SourceCheckpoint, training_state: Path | None) -> None:
    import torch

    from posttrain.convert.conversion import convert as write
    from posttrain.convert.conversion import wrap_as_checkpoint
    from posttrain.convert.verify import verify_logits
    from posttrain.core.progress import ProgressDisplay, time_left

    out = Path(options.out)
    dtype: torch.dtype | None = getattr(torch, TYPES.get(options.dtype, options.dtype)) if options.dtype else None
    adapter = read_lora(options, source) if options.lora else None
    if options.verify and (dtype is not None or adapter is not None):
        raise UsageError("--verify compares equal weights: leave --dtype and --lora out")

    def verify(folder: Path, layout: CheckpointLayout) -> None:
        with tempfile.TemporaryDirectory(prefix=".verify-", dir=folder.parent) as scratch:
            difference = verify_logits(source, folder, layout, Path(scratch))
        print(f"logits of both sides: largest difference {difference:.3g}")

    written, started, lock = 0, time.monotonic(), threading.Lock()
    with ProgressDisplay(stream=sys.stderr, transient=True) as display:

        def show_progress(count: int, total: int) -> None:
            nonlocal written
            with lock:  # several threads write
                written += count
                speed = written / max(time.monotonic() - started, 1e-3)
                shown = f"{written / 1e9:.1f} of {total / 1e9:.1f} GB  {speed / 1e6:,.0f} MB/s"
                shown += f"  {time_left(started, written, total)}"
                display.update("converting", shown, done=written, total=total)

        details: dict[str, Any] = {
            "dtype": dtype,
            "adapter": adapter,
            "vocabulary_multiple": options.vocab_multiple,
            "workers": options.workers or min(4, os.cpu_count() or 1),
            "progress": show_progress,
        }
        if options.verify:
            details["check"] = verify
        if options.goal == "sharded":
            same = dtype is None and adapter is None
            report = wrap_as_checkpoint(source, out, training_state if same else None, **details)
        else:
            report = write(source, out, target_of(options), **details)
    print(f"{report.elements:,} weights in {report.tensors} tensors, {report.bytes_written:,} bytes: each used once")
    if report.padding:
        print(f"{report.padding} rows of padding")
    print(f"done: {out}")
