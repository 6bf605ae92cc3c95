"""Exports the model of a run in a format of another runtime, reads it back, and compares it with the original."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import UsageError
from posttrain.core.files import check_new_folder, new_folder
from posttrain.models.export import ExportSource, load_source
from posttrain.models.export import export as export_hf
from posttrain.models.paths import is_adapter, resolve_path
from posttrain.models.stop_ids import stop_ids
from posttrain.publish import fp8, gguf_file, hub
from posttrain.publish.card import write_card
from posttrain.publish.divergence import Original
from posttrain.publish.four_bit import (
    Calibration,
    FourBitMethod,
    calibration_tokens,
    check_four_bit,
    load_four_bit,
    write_four_bit,
)
from posttrain.publish.gguf_model import context_length, family_of
from posttrain.publish.gguf_tokenizer import describe_tokenizer
from posttrain.publish.ollama import UnknownTemplateError, modelfile

ExportFormat = Literal["hf", "gguf", "fp8", "awq", "gptq"]


def export(
    source: str,
    out: Path,
    *,
    target_format: ExportFormat = "hf",
    gguf_type: gguf_file.GgufType = "q8_0",
    merge: bool = True,
    use_ema: bool = False,
    calibration: Calibration = Calibration(),  # noqa: B008  frozen
    push_to: str = "",
    private: bool = True,
) -> dict[str, Any]:
    """Write a model to the new folder `out` as `write_format` does, push it to the hub if `push_to` names a repository.

    A pushed folder has a model card. What would prevent the upload is found before the model is loaded.
    """
    if push_to:
        hub.check_push(push_to)
        if not merge:
            hub.check_adapter_base(Path(resolve_path(source)))
    report = write_format(
        source,
        out,
        target_format=target_format,
        gguf_type=gguf_type,
        merge=merge,
        use_ema=use_ema,
        calibration=calibration,
    )
    if push_to:
        write_card(out, push_to.rpartition("/")[2], report)
        report["pushed"] = hub.push(out, push_to, private=private)
    return report


def write_format(
    source: str,
    out: Path,
    *,
    target_format: ExportFormat,
    gguf_type: gguf_file.GgufType,
    merge: bool,
    use_ema: bool,
    calibration: Calibration,
) -> dict[str, Any]:
    """Write the model of a run, checkpoint or folder to the new folder `out`, and return a report.

    hf: as `posttrain.models.export`, equal bit for bit. Others are read back, each weight must be within what its type
    can hold, and the report has the KL divergence per token from the original. On an error nothing is left at `out`.
    """
    check_new_folder(out)
    if target_format in ("awq", "gptq"):
        check_four_bit(target_format, calibration)
    if target_format == "hf":
        return export_hf(source, out, merge=merge, use_ema=use_ema) | {"format": "hf", "remarks": []}
    if not merge and is_adapter(resolve_path(source)):
        raise UsageError(f"adapters alone cannot be written as {target_format}: leave out --no_merge")
    if target_format == "gguf":
        gguf_file.require_gguf()
    loaded = load_source(source, use_ema=use_ema)
    if loaded.head != "token":
        raise UsageError(f"{source} is a reward model, which cannot be written as {target_format}. Export as hf.")
    report = loaded.report(out) | {"format": target_format}
    with new_folder(out, lambda: loaded.size) as unfinished:
        if target_format == "gguf":
            report |= write_gguf(loaded, unfinished, gguf_type, out.name)
        elif target_format in ("awq", "gptq"):
            report |= write_calibrated(loaded, unfinished, target_format, calibration)
        else:
            fp8.write_fp8(loaded.model, loaded.tokenizer, unfinished)
            original = Original(loaded.model, loaded.tokenizer)
            fp8.load_fp8(unfinished, loaded.model)
            report |= asdict(original.measure(loaded.model)) | {"remarks": []}
        report["bytes"] = sum(file.stat().st_size for file in unfinished.iterdir())
    return report


def write_calibrated(
    loaded: ExportSource, folder: Path, method: FourBitMethod, calibration: Calibration
) -> dict[str, Any]:
    """Write 4-bit weights that are chosen with examples; return what is reported about them."""
    tokens = calibration_tokens(loaded.model, loaded.tokenizer, calibration)
    dtype = loaded.model.dtype
    original = Original(loaded.model, loaded.tokenizer)
    write_four_bit(loaded.model.to(dtype), loaded.tokenizer, tokens, method, folder)
    used = f"calibrated with {len(tokens):,} examples, {sum(map(len, tokens)):,} tokens"
    return asdict(original.measure(load_four_bit(folder))) | {"remarks": [used]}


def write_gguf(loaded: ExportSource, folder: Path, kind: gguf_file.GgufType, name: str) -> dict[str, Any]:
    """Write the GGUF file and the Modelfile of Ollama; return what is reported about them."""
    model, tokenizer = loaded.model, loaded.tokenizer
    family = family_of(model.config)
    stops = stop_ids(tokenizer, model.generation_config)
    vocabulary = describe_tokenizer(tokenizer, model.config.vocab_size, stops)
    file = folder / f"{name}-{kind}.gguf"
    remarks = []
    context = context_length(model.config, family)
    if context < model.config.max_position_embeddings:
        remarks.append(
            f"llama.cpp has no attention window for this model: the context is {context} tokens, which fit in it"
        )
    has_modelfile = True
    try:
        text, more = modelfile(tokenizer, file.name, stops)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
        remarks += more
    except UnknownTemplateError as error:
        has_modelfile = False
        remarks.append(f"no Modelfile for Ollama was written: {error}")
    gguf_file.write_gguf(model, vocabulary, file, kind, name)
    original = Original(model, tokenizer)
    gguf_file.load_gguf(file, model, kind)
    return asdict(original.measure(model)) | {
        "file": file.name,
        "type": kind,
        "modelfile": has_modelfile,
        "remarks": remarks,
    }
