"""Runs the recorded commands and collects the numbers that are compared.

This module uses only the command line and files on disk, so that it runs with any version of the package.
"""

import hashlib
import json
import random
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors import safe_open

from tests.e2e.commands import command, rows_of
from tests.tiny import NAMES, tiny_folder

FOLDER = Path(__file__).parent
NUMBERS = FOLDER / "numbers.json"
_TABLE = yaml.safe_load((FOLDER / "cases.yaml").read_text(encoding="utf-8"))
CASES: dict[str, list[str]] = _TABLE["cases"]
PLANS: list[str] = _TABLE["plans"]

WALL_CLOCK = re.compile(
    "time/.*|tokens_per_second(_per_device)?|(.*/)?model_flop_utilisation|(.*/)?memory_gib|(.*_)?seconds"
)
NOT_COMPARED = ("columns", "failure")  # copies of inputs, and message texts
ROLLOUT_KEYS = ("step", "origin", "version", "finish", "turns", "reward", "baseline", "rewards", "logprobs")
TENSOR_FILES = re.compile(r"(-\d{5}-of-\d{5})?\.safetensors$")


def prepare(place, commands):
    """Copies the inputs of the previous version into an empty directory."""
    shutil.copytree(FOLDER / "inputs", place, dirs_exist_ok=True)
    shutil.copytree(FOLDER / "old_configs", place / "configs")
    for name in NAMES:
        if re.search(rf"\btiny/{name}\b", " ".join(commands)):
            tiny_folder(name, place).rename(place / name)
            (place / "tiny").mkdir(exist_ok=True)
            (place / name).rename(place / "tiny" / name)


def run(commands):
    """Runs commands of the previous version in the current directory; all must succeed."""
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "posttrain", line
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        code = command(*arguments)
        assert code == 0, f"exit code {code} of a command of the previous version: {line}"


def numbers_of(place):
    """Collects what commands wrote: metrics, rollouts and weights of runs, lines of files, hashes of tensors."""
    found = {}
    runs = sorted(file.parent for file in place.rglob("metrics.jsonl"))
    for folder in runs:
        found[name_of(folder, place)] = numbers_of_run(folder)
    for file in sorted(place.glob("*.jsonl")):
        found[file.name] = [plain(row) for row in rows_of(file)]
    for file in sorted(place.rglob("report.json")):
        found[name_of(file, place)] = json.loads(file.read_text(encoding="utf-8"))
    elsewhere = [folder / "checkpoints" for folder in runs] + [place / "tiny"]
    tensors = hashes(place, without=elsewhere)
    return found | ({"tensors": tensors} if tensors else {})


def numbers_of_run(folder):
    metrics = [plain(row) for row in rows_of(folder / "metrics.jsonl")]
    if any(row.get("staleness") for row in metrics):  # generated ahead: the position in the data depends on timing
        metrics = [{key: value for key, value in row.items() if key != "epoch"} for row in metrics]
    found = {"metrics": metrics}
    rollouts = [rollout(row) for row in rows_of(folder / "rollouts.jsonl")]
    if rollouts:
        found["rollouts"] = rollouts
    newest = max((folder / "checkpoints").glob("step-*"), default=None)
    if newest is not None:
        found["weights"] = {name: value for name, value in hashes(newest).items() if "optimizer" not in name}
    return found


def plain(row):
    return {key: value for key, value in row.items() if not WALL_CLOCK.fullmatch(key) and key not in NOT_COMPARED}


def rollout(row):
    """Keeps of a line of rollouts.jsonl the tokens of the completion and all that was computed for them."""
    start = row["prompt_length"]
    kept = {key: row[key] for key in ROLLOUT_KEYS if key in row}
    kept |= {"failed": bool(row["failure"]), "tokens": row["tokens"][start:], "advantages": row.get("advantages", [])}
    if len(set(kept["advantages"])) == 1:  # one for all tokens
        kept["advantages"] = kept["advantages"][0]
    if row["turns"] > 1:
        kept["mask"] = row["mask"][start:]
    return kept


def hashes(folder, without=()):
    """Returns a hash of names, types, shapes and bytes for each file of tensors; shards count as one file."""
    files = {}
    for file in sorted(folder.rglob("*.safetensors")):
        if not any(file.is_relative_to(other) for other in without):
            files.setdefault(TENSOR_FILES.sub("", name_of(file, folder)), []).append(file)
    return {name: hash_of_tensors(shards) for name, shards in files.items()}


def hash_of_tensors(shards):
    parts = {}
    for file in shards:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor = tensors.get_tensor(name)
                content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                parts[name] = f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
    return hashlib.sha256("\n".join(parts[name] for name in sorted(parts)).encode()).hexdigest()


def name_of(path, place):
    return path.relative_to(place).as_posix()


def read_numbers(file=NUMBERS):
    return json.loads(file.read_text(encoding="utf-8"))


def write_numbers(numbers, file):
    """Writes JSON with one line per step, rollout or example. Floats keep their exact bits."""

    def written(value, depth, indent):
        inner = " " * (indent + 1)
        if isinstance(value, dict) and depth:
            lines = [f"{inner}{json.dumps(key)}: {written(item, depth - 1, indent + 1)}" for key, item in value.items()]
            return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
        if isinstance(value, list) and value and depth:
            lines = [inner + json.dumps(item) for item in value]
            return "[\n" + ",\n".join(lines) + "\n" + " " * indent + "]"
        return json.dumps(value)

    file.write_text(written(numbers, 5, 0) + "\n", encoding="utf-8")
