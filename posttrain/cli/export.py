"""`posttrain export SOURCE OUTPUT_DIR`: writes the model of a run for Hugging Face's libraries or another runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.config.tools import ToolArgs, positional, read_tool
from posttrain.config.verbs import TOOLS


@dataclass(kw_only=True)
class ExportArgs(ToolArgs):
    """Options of `posttrain export`."""

    verb: ClassVar[str] = "export"
    about: ClassVar[str] = TOOLS["export"]
    example: ClassVar[str] = "posttrain export runs/sft my-model --format gguf --gguf_type q4_k_m"

    source: str = positional()
    """Run directory, one of its checkpoints, Hugging Face directory or hub name."""
    output_dir: str = positional()
    """Directory to write; it must be new or empty."""
    format: Literal["hf", "gguf", "fp8", "awq", "gptq"] = "hf"
    """hf: Hugging Face directory; gguf: one file for llama.cpp and Ollama; fp8: 8-bit weights for vLLM; awq, gptq:
    4-bit weights for vLLM, chosen with examples."""
    gguf_type: Literal["f16", "q8_0", "q4_k_m"] = "q8_0"
    """Type of the weights in a GGUF file."""
    calibration_data: str = ""
    """Data file with examples of what the model will see, for awq and gptq; any format of docs/data.md."""
    calibration_examples: int = 256
    """Use this many of the first examples of calibration_data."""
    ema: bool = False
    """Export the moving average of the weights (train.ema_decay)."""
    merge: bool = True
    """Merge LoRA adapters into the weights."""
    push: str = ""
    """Upload the result to the Hugging Face hub under this name (owner/model), with a model card made from the run."""
    private: bool = True
    """Create the repository as a private one, with --push."""


ARGS = (ExportArgs,)


def run(args: list[str]) -> int:
    """Export, and print what was written."""
    options = read_tool(ExportArgs(), args)
    from posttrain.core.logging import quiet_libraries
    from posttrain.publish.formats import Calibration, export

    quiet_libraries()
    report = export(
        options.source,
        Path(options.output_dir),
        target_format=options.format,
        gguf_type=options.gguf_type,
        merge=options.merge,
        use_ema=options.ema,
        calibration=Calibration(options.calibration_data, options.calibration_examples),
        push_to=options.push,
        private=options.private,
    )
    print_report(report, options)
    if "pushed" in report:
        print(f"pushed: {report['pushed']}")
    return 0


def print_report(report: dict[str, Any], options: ExportArgs) -> None:
    merged = ", adapters merged" * report["merged"] + ", moving average of the weights" * report["averaged"]
    print(f"from: {report['source']}{merged}")
    print(f"{report['architecture']}, {report['parameters']:,} parameters in {report['dtype']}")
    if report["rounding"] > 1e-5:  # of half precision; smaller differences come from another order of sums
        print(f"rounding merged weights to {report['dtype']} changes outputs by {report['rounding']:.2g} of their size")
    for remark in report["remarks"]:
        print(f"note: {remark}")
    if report["format"] == "hf":
        print(f"done: {options.output_dir} was read back and computes the same as {options.source}")
        return
    print(
        f"KL per token from the original: {report['kl']:.3g} nats, at most {report['worst']:.3g}; "
        f"same most likely token: {report['agreement']:.1%} of {report['tokens']}"
    )
    if report.get("modelfile"):
        print(f"Ollama: ollama create NAME -f {Path(options.output_dir) / 'Modelfile'}")
    print(f"done: {options.output_dir} was read back, {report['bytes'] / 2**20:,.1f} MiB")
