"""Compare weight conversion with a plain copy of the same bytes, and measure its memory by the model's size.

A random Llama in bfloat16 goes hf -> mcore (tp 2, pp 2) -> hf. BENCH_CONVERT_GIGABYTES gives its sizes (`0.5 1 2`),
BENCH_CONVERT_PICTURE a .png file for memory against size, BENCH_CONVERT_MEMORY a limit in GiB for a
conversion (RLIMIT_DATA). Twice the model's size must be free on the disk.
Copy and conversion both start with an empty page cache and end when everything is synced to disk.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from posttrain.convert.conversion import convert
from posttrain.convert.files import create_safetensors
from posttrain.convert.hugging_face import hf_stored
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.parameters import model_parameters
from posttrain.convert.source import open_source

HIDDEN, FFN, VOCABULARY = 2048, 5632, 32_000
TARGET = CheckpointLayout("mcore", tp=2, pp=2)
WORKERS = 2
GIB = 2**30


def measure_convert() -> None:
    sizes = [float(word) for word in os.environ.get("BENCH_CONVERT_GIGABYTES", "0.5 1 2").split()]
    rows = [row for gigabytes in sizes for row in measure_size(gigabytes)]
    if picture := os.environ.get("BENCH_CONVERT_PICTURE"):
        draw(rows, Path(picture))


def measure_size(gigabytes: float) -> list[dict[str, float]]:
    """Convert there and back at one size, with copies before and after."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = write_model(folder / "hf", gigabytes)
        copied = timed_copy(folder / "hf", folder / "copy")
        shutil.rmtree(folder / "copy")
        there = in_a_process("hf", folder / "hf", folder / "core")
        shutil.rmtree(folder / "hf")
        back = in_a_process("mcore", folder / "core", folder / "back")
        shutil.rmtree(folder / "back")
        again = timed_copy(folder / "core", folder / "copy")
    print(f"copy {written / 1e9:.2f} GB: {written / copied / 1e9:.2f} and {written / again / 1e9:.2f} GB/s")
    copy_rate = 2 * written / (copied + again) / 1e9
    for what, row in (("hf -> mcore", there), ("mcore -> hf", back)):
        rate = written / row["seconds"] / 1e9
        row["gigabytes"] = written / 1e9
        print(
            f"convert {what} {written / 1e9:.2f} GB: {rate:.2f} GB/s, ratio {rate / copy_rate:.2f}; "
            f"{row['cpu']:.0f} s of CPU in {row['seconds']:.0f} s; "
            f"memory {row['peak'] / GIB:.2f} GiB, bound {row['bound'] / GIB:.2f} GiB"
        )
    return [there, back]


def write_model(folder: Path, gigabytes: float) -> int:
    """Write a Llama of about this size, with weights that do not compress; return its bytes."""
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
    shape, parameters = model_parameters(config)
    tensors = {tensor.name: (torch.bfloat16, tensor.shape) for tensor in hf_stored(config, shape, parameters)}
    file = create_safetensors(folder / "model.safetensors", tensors)
    noise = torch.randint(0, 256, (2 * VOCABULARY * HIDDEN + 4096,), dtype=torch.uint8)
    for number, (name, location) in enumerate(file.tensors.items()):
        start = number * 37 % 4096
        file.write(name, noise[start : start + location.size])
    file.finish()
    return sum(location.size for location in file.tensors.values())


def forget(folder: Path) -> None:
    """Drop a directory's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def timed_copy(source: Path, target: Path) -> float:
    """Return the seconds of a sequential copy, synced to disk."""
    forget(source)
    start = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return time.perf_counter() - start


def in_a_process(kind: str, source: Path, out: Path) -> dict[str, float]:
    """Return seconds and memory of one conversion in a new process."""
    forget(source)
    words = [sys.executable, "-m", "bench.convert", kind, str(source), str(out)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def resident() -> int:
    """Return the peak memory in bytes, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def one_conversion(kind: str, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    if limit := float(os.environ.get("BENCH_CONVERT_MEMORY", "0")):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * GIB), int(limit * GIB)))
    start, before = time.perf_counter(), time.process_time()
    source = open_source(Path(folder), kind, None, None)
    target = TARGET if kind == "hf" else CheckpointLayout()
    convert(source, Path(out), target, workers=WORKERS)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    both = open_source(Path(out), target.format, None, None)
    largest = max(side.location(tensor).size for side in (source, both) for tensor in side.stored)
    bound = 2 * largest * WORKERS + GIB
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": resident(), "bound": bound}))


def draw(rows: list[dict[str, float]], file: Path) -> None:
    """Draw the peak memory of the process against the size of the model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for label, marker, parameter in (("hf to mcore", "o", rows[0::2]), ("mcore to hf", "x", rows[1::2])):
        axes.plot([r["gigabytes"] for r in parameter], [r["peak"] / GIB for r in parameter], marker=marker, label=label)
    bounds = [r["bound"] / GIB for r in rows[0::2]]
    axes.plot([r["gigabytes"] for r in rows[0::2]], bounds, "--", color="grey", label="bound")
    axes.set(xlabel="size of the model, GB", ylabel="peak memory, GiB", ylim=(0, None), xlim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=90)


if __name__ == "__main__":
    one_conversion(*sys.argv[1:])
