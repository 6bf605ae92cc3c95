"""Weight conversion: bytes a second against a plain copy of the same files, and memory against the model's size.

A made-up Llama in bfloat16 goes hf -> mcore (tp 2, pp 2) -> hf. BENCH_CONVERT_GIGABYTES gives its sizes (`0.5 1 2`).
Both the copy and the conversion wait until the disk has everything; memory is the peak of a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from posttrain.models.convert.convert import convert
from posttrain.models.convert.families import hf_stored, model_parts
from posttrain.models.convert.files import create_safetensors
from posttrain.models.convert.megatron import Layout
from posttrain.models.convert.source import open_source

HIDDEN, FFN, VOCABULARY = 2048, 5632, 32_000
TARGET = Layout("mcore", tp=2, pp=2)


def measure_convert() -> None:
    sizes = [float(word) for word in os.environ.get("BENCH_CONVERT_GIGABYTES", "0.5 1 2").split()]
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            written = write_model(folder / "hf", gigabytes)
            copied = timed_copy(folder / "hf", folder / "copy")
            shutil.rmtree(folder / "copy")
            there = in_a_process("hf", folder / "hf", folder / "core")
            back = in_a_process("mcore", folder / "core", folder / "back")
            again = timed_copy(folder / "hf", folder / "copy")
            copy_rate = 2 * written / (copied + again) / 1e9
            for what, (seconds, peak, largest) in (("hf -> mcore", there), ("mcore -> hf", back)):
                rate = written / seconds / 1e9
                print(
                    f"convert {what} {written / 1e9:.2f} GB: {rate:.2f} GB/s, copy {copy_rate:.2f} GB/s, "
                    f"ratio {rate / copy_rate:.2f}; memory added {peak / 2**20:.0f} MiB, "
                    f"largest tensor {largest / 2**20:.0f} MiB"
                )


def write_model(folder: Path, gigabytes: float) -> int:
    """A Llama of about this size, random enough that no disk can compress it; returns its bytes."""
    per_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    layers = max(2, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / per_layer / 2) * 2)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shape, parts = model_parts(config)
    tensors = {tensor.name: (torch.bfloat16, tensor.shape) for tensor in hf_stored(config, shape, parts)}
    file = create_safetensors(folder / "model.safetensors", tensors)
    noise = torch.randint(0, 256, (2 * VOCABULARY * HIDDEN + 4096,), dtype=torch.uint8)
    for number, (name, entry) in enumerate(file.entries.items()):
        start = number * 37 % 4096
        file.write(name, noise[start : start + entry.size])
    file.seal()
    return sum(entry.size for entry in file.entries.values())


def timed_copy(source: Path, target: Path) -> float:
    """Seconds of a sequential copy that is on the disk at the end."""
    shutil.rmtree(target, ignore_errors=True)
    start = time.perf_counter()
    shutil.copytree(source, target)
    with (target / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - start


def in_a_process(kind: str, source: Path, out: Path) -> tuple[float, int, int]:
    """Seconds, peak memory beyond what the imports took, largest tensor; of one conversion in a fresh process."""
    words = [sys.executable, "-m", "bench.convert", kind, str(source), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    seconds, peak, largest = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak, largest


def resident(field: str) -> int:
    """Bytes, as the kernel counts them (VmRSS: now, VmHWM: at most)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def one_conversion(kind: str, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    before = resident("VmRSS")
    start = time.perf_counter()
    source = open_source(Path(folder), kind, None, None)
    convert(source, Path(out), TARGET if kind == "hf" else Layout(), workers=2)
    seconds = time.perf_counter() - start
    largest = max(source.entry(tensor).size for tensor in source.stored)
    print(json.dumps([seconds, resident("VmHWM") - before, largest]))


if __name__ == "__main__":
    one_conversion(*sys.argv[1:])
