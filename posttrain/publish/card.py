"""Writes the model card of a run: what was trained on what, with which settings, its curves and its evaluation.

Paths of this machine are not written: of a file only its name, of a base model only a name of the hub.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

import yaml

from posttrain import __version__
from posttrain.checkpoints.checkpoint import CHECKPOINT_NAME, is_run_directory, step_of
from posttrain.models.adapters import base_model_of
from posttrain.models.paths import HUB_NAME, base_model_path, is_adapter
from posttrain.plots.files import write_charts
from posttrain.plots.runs import RunMetrics, panels_of, read_metrics

SECTIONS = ("train", "algo", "rollout", "model")
NOT_SETTINGS = ("path", "tokenizer")
ADDRESS = re.compile(r"[a-z]+://", re.IGNORECASE)
FILE = re.compile(r"\.(jsonl?|parquet|arrow|csv|txt|md|py|ya?ml|jinja)\b", re.IGNORECASE)
CURVES = "curves.svg"


def write_card(folder: Path, name: str, report: dict[str, Any]) -> None:
    """Write README.md, and the curves if the model comes from a run, into the folder of an exported model."""
    source = Path(report["source"])
    run = run_of(source)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) if run else {}
    metrics = metrics_of(run, source) if run else []
    base = hub_base(config, report)
    header: dict[str, Any] = {
        "library_name": {"gguf": "gguf"}.get(report["format"], "peft" if is_adapter(folder) else "transformers"),
        "tags": ["posttrain", *([str(config["verb"])] if config else [])],
    }
    if base:
        header["base_model"] = base
    if not report["architecture"].endswith("ForSequenceClassification"):
        header["pipeline_tag"] = "text-generation"
    parts = [f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {name}\n"]
    if config:
        start = f" from [{base}](https://huggingface.co/{base})" if base else ""
        parts.append(f"Trained{start} with `posttrain {config['verb']}` (posttrain {__version__}).\n")
        parts.append(data_text(config) + settings_table(config))
    if metrics and run:
        panels = panels_of([RunMetrics(name, run, metrics)], ())
        write_charts(panels, folder / CURVES, name)
        parts.append(f"## Training\n\n![Curves of the run]({CURVES})\n\n{metrics_table(metrics)}")
    parts.append(export_text(report))
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def run_of(source: Path) -> Path | None:
    """Return the run directory that a model belongs to, if it is one of a run."""
    return next((folder for folder in (source, *source.parents[:3]) if is_run_directory(folder)), None)


def metrics_of(run: Path, source: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run up to the checkpoint that the model is; the run may have gone on."""
    file = run / "metrics.jsonl"
    rows = read_metrics(file) if file.is_file() else []
    checkpoint = next((folder for folder in (source, *source.parents) if CHECKPOINT_NAME.fullmatch(folder.name)), None)
    return rows if checkpoint is None else [row for row in rows if row.get("step", 0) <= step_of(checkpoint)]


def hub_base(config: dict[str, Any], report: dict[str, Any]) -> str:
    """Return the name of the base model on the hub; empty if it is a directory of this machine."""
    source = str(report["source"])
    base = base_model_of(Path(source)) if is_adapter(source) else base_model_path(source)
    for path in (str(config.get("model", {}).get("path", "")), str(base)):
        if HUB_NAME.fullmatch(path) and "/" in path and not Path(path).exists():
            return path
    return ""


def data_text(config: dict[str, Any]) -> str:
    """List the data by name."""
    data = config.get("data", {})
    lines = [
        f"- {what}: {', '.join(f'`{plain(source)}`' for source in data.get(key) or ())}"
        for key, what in (("train", "training"), ("eval", "evaluation"))
        if data.get(key)
    ]
    return "## Data\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def plain(value: Any) -> str:
    """Return a value for a table: of paths the last part, without what Markdown would read as its own signs."""
    text = str(value)
    if ADDRESS.match(text):
        text = "(an address)"  # of a service; it may be internal, or hold a key
    elif is_path(text):
        text = PurePath(text).name
    return re.sub(r"[`|\n\r]", " ", text)[:200]


def is_path(text: str) -> bool:
    """Whether a value is a path; names of the hub have a slash, too."""
    if text.startswith(("/", "~", ".")) or (len(text) > 2 and text[1] == ":"):
        return True
    return "/" in text and (text.count("/") > 1 or bool(FILE.search(text)) or Path(text).exists())


def settings_table(config: dict[str, Any]) -> str:
    """List the settings that are not empty or switched off."""
    rows = [f"| `seed` | `{config.get('seed', 0)}` |"]
    for section in SECTIONS:
        for name, value in (config.get(section) or {}).items():
            if name in NOT_SETTINGS or value in (None, "", False, 0, [], {}) or isinstance(value, dict):
                continue
            shown = ", ".join(map(plain, value)) if isinstance(value, list) else plain(value)
            rows.append(f"| `{section}.{name}` | `{shown}` |")
    return "## Settings\n\n| option | value |\n|---|---|\n" + "\n".join(rows) + "\n"


def metrics_table(metrics: list[dict[str, Any]]) -> str:
    """List the first and last values of loss, reward and evaluation."""
    rows = []
    names = sorted({n for row in metrics for n in row if n in ("loss", "reward", "tokens") or n.startswith("eval/")})
    for name in names:
        values = [row[name] for row in metrics if row.get(name) is not None]
        if values:
            rows.append(f"| `{plain(name)}` | {values[0]:.4g} | {values[-1]:.4g} |")
    steps = metrics[-1].get("step", len(metrics))
    return f"{steps} steps.\n\n| metric | first | last |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def export_text(report: dict[str, Any]) -> str:
    """Say in which format the model is, and how far it is from the original."""
    kind = {"hf": "Hugging Face", "gguf": f"GGUF, {report.get('type')}", "fp8": "FP8 (compressed-tensors)"}
    kind |= {method: f"4-bit weights by {method.upper()} (compressed-tensors)" for method in ("awq", "gptq")}
    text = f"## Format\n\n{kind[report['format']]}, {report['parameters']:,} parameters"
    text += ", LoRA adapters merged" * report["merged"] + ", moving average of the weights" * report["averaged"] + "."
    if "kl" in report:
        text += (
            f" KL divergence per token from the original: {report['kl']:.3g} nats; "
            f"same most likely token: {report['agreement']:.1%} of {report['tokens']}."
        )
    return text + "\n"
