"""`posttrain convert SOURCE OUTPUT_DIR --target_format mcore`; command lines of MindSpeed-LLM's converter work too."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from posttrain.config.tools import ToolArgs, check_at_least, positional, read_tool, required
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.core.temporary import TemporaryFolder

Format = Literal["hf", "mcore", "legacy", "sharded"]

if TYPE_CHECKING:
    import torch

    from posttrain.convert.adapter import LoraAdapter
    from posttrain.convert.megatron import CheckpointLayout
    from posttrain.convert.source import SourceCheckpoint


@dataclass(kw_only=True)
class MindSpeedConvertFlags:
    """Flags of MindSpeed-LLM's convert_ckpt.py, so that command lines of its users work unchanged."""

    group: ClassVar[str] = "flags of MindSpeed-LLM 2.0.0, for existing scripts"

    load_dir: str = ""
    """The source directory."""
    save_dir: str = ""
    """The directory to write; the directory of the original Hugging Face model: the result is in its mg2hf."""
    load_model_type: Literal["", "hf", "mg", "optim"] = ""
    """Format of the source: hf, or mg for Megatron."""
    save_model_type: Literal["", "hf", "mg"] = ""
    """Format to write: hf, or mg for Megatron."""
    use_mcore_models: bool = False
    """mg means Megatron core instead of Megatron legacy."""
    load_from_legacy: bool = False
    """The source is Megatron legacy, the target Megatron core."""
    save_to_legacy: bool = False
    """The source is Megatron core, the target Megatron legacy."""
    target_tensor_parallel_size: int = 0
    """The same as tensor_parallel_size."""
    target_pipeline_parallel_size: int = 0
    """The same as pipeline_parallel_size."""
    target_expert_model_parallel_size: int = 0
    """The same as expert_parallel_size."""
    target_expert_parallel_size: int = 0
    """The same as expert_parallel_size."""
    num_layers_per_virtual_pipeline_stage: int = 0
    """The same as layers_per_virtual_stage."""
    num_layer_list: tuple[int, ...] = ()
    """The same as layers_per_stage; also with commas, as 11,13,19,21."""
    make_vocab_size_divisible_by: int = 0
    """The same as vocab_multiple."""
    moe_grouped_gemm: bool = False
    """The same as grouped_experts."""
    params_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """The same as dtype; also as fp32, bf16 or fp16."""
    lora_load: str = ""
    """The same as lora."""
    lora_r: int = 0
    """The same as lora_rank."""
    moe_tp_extend_ep: bool = False
    """The same as tp_extend_ep."""
    orm: bool = False
    """The source is a reward model, also if its config.json is that of a language model: its head is rm_head."""
    context_parallel_size: int = 1
    """Has no effect: weights do not depend on it."""
    model_type: str = ""
    """Has no effect."""
    model_type_hf: str = ""
    """Has no effect: config.json names the model type."""
    tokenizer_model: str = ""
    """Has no effect: the tokenizer is copied from the source."""
    loader: str = ""
    """Has no effect."""
    saver: str = ""
    """Has no effect."""
    spec: tuple[str, ...] = ()
    """Has no effect: config.json defines the layers."""
    lora_target_modules: tuple[str, ...] = ()
    """Has no effect: the adapter files name their modules."""
    add_qkv_bias: bool = False
    """Has no effect: config.json defines the biases."""
    add_dense_bias: bool = False
    """Has no effect: config.json defines the biases."""
    add_output_layer_bias: bool = False
    """Has no effect: config.json defines the biases."""
    post_norm: bool = False
    """Has no effect: config.json defines the norms."""
    w_pack: bool = False
    """Has no effect: config.json states whether queries, keys and values are one tensor."""
    qlora_nf4: bool = False
    """Refused: weights are converted unquantized, and model.load_in_4bit quantizes them when they are loaded."""
    load_checkpoint_loosely: bool = False
    """Has no effect: every tensor is accounted for."""
    save_lora_to_hf: bool = False
    """Has no effect: adapters are recognised by their files."""
    load_hf_from_config: bool = False
    """Has no effect."""


@dataclass(kw_only=True)
class ConvertArgs(ToolArgs, MindSpeedConvertFlags):
    """Options of `posttrain convert`."""

    verb: ClassVar[str] = "convert"
    about: ClassVar[str] = TOOLS["convert"]
    example: ClassVar[str] = "posttrain convert my-model my-core --target_format mcore --tensor_parallel_size 2"

    source: str = positional()
    """Directory to read: Hugging Face model, Megatron checkpoint, run, checkpoint of a run, or LoRA adapters."""
    output_dir: str = positional()
    """Directory to write; it must be new or empty."""
    target_format: Literal["", "hf", "mcore", "legacy", "sharded"] = required()
    """Required. Format to write: Hugging Face, Megatron core, Megatron legacy, or a checkpoint of posttrain."""
    source_format: Literal["auto", "hf", "mcore", "legacy", "sharded"] = "auto"
    """Format of the source; auto: detected from its files."""
    tensor_parallel_size: int = 1
    """Tensor-parallel ranks of a Megatron target."""
    pipeline_parallel_size: int = 1
    """Pipeline stages of a Megatron target."""
    expert_parallel_size: int = 1
    """Expert-parallel ranks of a Megatron target."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each pipeline stage, such as 11 13 19 21; empty: the same number in each."""
    layers_per_virtual_stage: int = 0
    """Layers of each virtual pipeline stage; 0: no virtual stages."""
    noop_layers: tuple[int, ...] = ()
    """Indices of no-op layers, counted from 0, such as 46 47."""
    vocab_multiple: int = 1
    """Pad the vocabulary to a multiple of this times tensor_parallel_size."""
    grouped_experts: bool = False
    """Write all experts of a rank into weight1 and weight2, as Megatron's grouped GEMM does."""
    tp_extend_ep: bool = False
    """Experts are kept whole and distributed over the tensor-parallel ranks, too, as MindSpeed does: in a Megatron
    target, and in a Megatron source that posttrain did not write."""
    transformer_engine: bool = False
    """Use the tensor names of Transformer Engine's layers, which contain the norms."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Round the weights to this type; auto: keep their types."""
    original: str = ""
    """Hugging Face directory with config.json and tokenizer, if the source has none."""
    lora: str = ""
    """Directory of LoRA adapters, of peft or Megatron, to merge into the weights."""
    lora_rank: int = 0
    """Rank of adapters whose directory does not record it."""
    lora_alpha: float = 0.0
    """Alpha of adapters whose directory does not record it."""
    verify: Literal["none", "logits"] = "none"
    """logits: load source and result, and compare their logits."""
    workers: int = 0
    """Tensors converted at the same time; 0: one per core, at most 4."""
    source_noop_layers: tuple[int, ...] = ()
    """noop_layers of a Megatron source that posttrain did not write."""
    source_expert_parallel_size: int = 1
    """expert_parallel_size of a Megatron source that posttrain did not write."""

    def __post_init__(self) -> None:
        """Set the options that have the meaning of the flags given."""
        self.source, self.output_dir = self.load_dir or self.source, self.save_dir or self.output_dir
        self.tensor_parallel_size = self.target_tensor_parallel_size or self.tensor_parallel_size
        self.pipeline_parallel_size = self.target_pipeline_parallel_size or self.pipeline_parallel_size
        experts = self.target_expert_model_parallel_size or self.target_expert_parallel_size
        self.expert_parallel_size = experts or self.expert_parallel_size
        self.layers_per_stage = self.num_layer_list or self.layers_per_stage
        self.layers_per_virtual_stage = self.num_layers_per_virtual_pipeline_stage or self.layers_per_virtual_stage
        self.vocab_multiple = self.make_vocab_size_divisible_by or self.vocab_multiple
        self.grouped_experts = self.moe_grouped_gemm or self.grouped_experts
        self.tp_extend_ep = self.moe_tp_extend_ep or self.tp_extend_ep
        self.lora, self.lora_rank = self.lora_load or self.lora, self.lora_r or self.lora_rank
        if self.params_dtype:
            self.dtype = self.params_dtype
        self.only_optimizer = self.load_model_type == "optim" and not (self.save_model_type or self.target_format)
        if self.only_optimizer:
            self.target_format = "mcore"  # so that the refusal says why
        if self.load_model_type and self.source_format == "auto":
            to_legacy, core = self.save_to_legacy, self.use_mcore_models
            megatron: Format = "legacy" if self.load_from_legacy else "mcore" if to_legacy or core else "legacy"
            self.source_format = "hf" if self.load_model_type == "hf" else megatron
        if self.save_model_type and not self.target_format:
            from_legacy, core = self.load_from_legacy, self.use_mcore_models
            megatron = "legacy" if self.save_to_legacy else "mcore" if from_legacy or core else "legacy"
            self.target_format = "hf" if self.save_model_type == "hf" else megatron


ARGS = (ConvertArgs,)


def run(args: list[str]) -> int:
    """Convert, and print what was written."""
    options = read_tool(ConvertArgs(), args)
    check_options(options)
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    folder = Path(options.source)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory")
    from posttrain.convert.adapter_files import is_adapter_folder

    if options.source_format != "sharded" and is_adapter_folder(folder):
        return convert_adapters(options, folder)
    source, training_state = open_checkpoint(options, folder)
    try:
        run_conversion(options, source, training_state)
    finally:
        source.close()
    return 0


def check_options(options: ConvertArgs) -> None:
    """Raise UsageError for options that cannot work together."""
    check_at_least(options, vocab_multiple=1, workers=0)
    check_at_least(options, tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1)
    if options.only_optimizer:
        raise UsageError(
            "--load_model_type optim without --save_model_type: optimizer states of Megatron are not converted. "
            "--load_model_type mg converts the weights; a run here resumes on any number of devices without conversion"
        )
    if options.qlora_nf4:
        raise UsageError(
            "--qlora_nf4: weights are not stored in 4 bits. Leave it out; --model.load_in_4bit true quantizes them "
            "when a run loads them"
        )
    sizes = (options.tensor_parallel_size, options.pipeline_parallel_size, options.expert_parallel_size)
    if options.target_format in ("hf", "sharded") and max(sizes) > 1:
        raise UsageError(
            f"--target_format {options.target_format} is not divided into ranks. Leave out --tensor_parallel_size, "
            "--pipeline_parallel_size and --expert_parallel_size."
        )


def open_checkpoint(options: ConvertArgs, folder: Path) -> tuple[SourceCheckpoint, Path | None]:
    """Open the source, and return the run's checkpoint too if it is one; adapters of a run are to be merged."""
    from posttrain.convert.source import megatron_kind, open_source, recognise_format

    kind = recognise_format(folder) if options.source_format == "auto" else options.source_format
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
                raise UsageError(f"--lora {options.lora}: {folder} holds adapters already; leave out --lora")
            options.lora = str(folder)
            folder = Path(resolve_path(adapters.base_model_of(folder)))
    original = original_of(options, kind)
    given = given_layout(options)
    return open_source(folder, kind, original, given, reward_model=options.orm), training_state


def given_layout(options: ConvertArgs) -> CheckpointLayout:
    """Return what the options state about the layout of a source that posttrain did not write."""
    from posttrain.convert.megatron import CheckpointLayout

    return CheckpointLayout(
        ep=options.source_expert_parallel_size,
        noop=options.source_noop_layers,
        tp_extend_ep=options.tp_extend_ep,
    )


def original_of(options: ConvertArgs, kind: str) -> Path | None:
    """Return the directory with configuration and tokenizer; if it is the output directory, the result is in mg2hf/."""
    out = Path(options.output_dir)
    if options.target_format == "hf" and kind != "hf" and (out / "config.json").is_file():
        options.original, options.output_dir = options.original or str(out), str(out / "mg2hf")  # as MindSpeed-LLM
    return Path(options.original) if options.original else None


def given_lora_config(options: ConvertArgs) -> dict[str, Any]:
    return {"r": options.lora_rank, "lora_alpha": options.lora_alpha}


def read_lora(options: ConvertArgs, source: SourceCheckpoint) -> LoraAdapter:
    from posttrain.convert.adapter_files import AdapterBase, is_peft, read_adapter
    from posttrain.convert.source import megatron_kind

    folder = Path(options.lora)
    base = AdapterBase(source.config, source.shape, source.parameters)
    given = given_layout(options)
    kind = "hf" if is_peft(folder) else megatron_kind(folder)
    return read_adapter(folder, base, kind, given, given_lora_config(options))[0]


def convert_adapters(options: ConvertArgs, folder: Path) -> int:
    """Convert adapters alone, between peft and Megatron."""
    from posttrain.convert.adapter_files import AdapterBase, base_folder, is_peft, read_adapter, write_adapter
    from posttrain.convert.parameters import model_parameters
    from posttrain.convert.source import megatron_kind, read_model_config

    changed = options.lora or options.dtype != "auto" or options.verify != "none"
    if options.target_format == "sharded" or changed:
        raise UsageError(
            f"{folder} holds adapters. They are converted to hf, mcore or legacy, without --lora, --dtype and --verify."
        )
    if is_peft(folder):
        kind = "hf"
    else:
        kind = megatron_kind(folder) if options.source_format == "auto" else options.source_format
    config = read_model_config(base_folder(folder, original_of(options, "adapters")))
    base = AdapterBase(config, *model_parameters(config))
    given = given_layout(options)
    adapter, _ = read_adapter(folder, base, kind, given, given_lora_config(options))
    count = write_adapter(adapter, base, Path(options.output_dir), target_of(options), folder)
    print(f"{len(adapter.factors)} adapted matrices, {count} tensors")
    print(f"done: {options.output_dir}")
    return 0


def target_of(options: ConvertArgs) -> CheckpointLayout:
    from posttrain.convert.megatron import CheckpointLayout

    if options.target_format in ("hf", "sharded"):
        return CheckpointLayout()
    return CheckpointLayout(
        options.target_format,
        tp=options.tensor_parallel_size,
        pp=options.pipeline_parallel_size,
        ep=options.expert_parallel_size,
        layers_per_stage=options.layers_per_stage,
        layers_per_virtual_stage=options.layers_per_virtual_stage,
        noop=options.noop_layers,
        experts="grouped" if options.grouped_experts else "single",
        tp_extend_ep=options.tp_extend_ep,
        engine=options.transformer_engine,
    )


def run_conversion(options: ConvertArgs, source: SourceCheckpoint, training_state: Path | None) -> None:
    """Write the target with progress on standard error."""
    import torch

    from posttrain.convert.conversion import convert as write
    from posttrain.convert.conversion import wrap_as_checkpoint
    from posttrain.convert.verify import verify_logits
    from posttrain.core.progress import ProgressDisplay, time_left

    out = Path(options.output_dir)
    dtype: torch.dtype | None = None if options.dtype == "auto" else getattr(torch, options.dtype)
    adapter = read_lora(options, source) if options.lora else None
    if options.verify == "logits" and (dtype is not None or adapter is not None):
        raise UsageError("--verify logits compares equal weights: leave out --dtype and --lora")

    def verify(folder: Path, layout: CheckpointLayout) -> None:
        with TemporaryFolder(folder.parent, f"verify-{out.name}") as scratch:
            difference = verify_logits(source, folder, layout, scratch)
        print(f"logits of source and result: largest difference {difference:.3g}")

    written, started, lock = 0, time.monotonic(), threading.Lock()
    with ProgressDisplay(stream=sys.stderr, transient=True) as display:

        def show_progress(count: int, total: int) -> None:
            nonlocal written
            with lock:  # several threads write
                written += count
                speed = written / max(time.monotonic() - started, 1e-3)
                shown = f"{written / 1e9:.1f} of {total / 1e9:.1f} GB  {speed / 1e6:,.0f} MB/s"
                eta = time_left(started, written, total)
                display.update("converting", shown, done=written, total=total, eta=eta)

        details: dict[str, Any] = {
            "dtype": dtype,
            "adapter": adapter,
            "vocabulary_multiple": options.vocab_multiple,
            "workers": options.workers or min(4, os.cpu_count() or 1),
            "progress": show_progress,
        }
        if options.verify == "logits":
            details["check"] = verify
        if options.target_format == "sharded":
            same = dtype is None and adapter is None
            report = wrap_as_checkpoint(source, out, training_state if same else None, **details)
        else:
            report = write(source, out, target_of(options), **details)
    print(
        f"{report.elements:,} weights in {report.tensors} tensors, {report.bytes_written:,} bytes; each was used once"
    )
    if report.padding:
        print(f"{report.padding} rows of padding in the vocabulary")
    print(f"done: {out}")
