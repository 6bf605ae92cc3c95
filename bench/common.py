"""What the tables share: shapes and models, rows, the clock, the machine's limits, peers, and the page of results."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.host import peak_memory_gib
from posttrain.core.types import Objective, Sample, count
from posttrain.train.learner import Learner

GPU = torch.cuda.is_available()
PEERS = ("trl", "vllm", "hf")
PEER_STEPS = 5  # of a peer on a GPU, where ours and theirs do not take turns
COLUMNS = ("date", "what", "ours", "peer", "ratio", "of the machine's limits", "versions", "command")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; zeros and nothing stand for what suits the device."""

    shapes: tuple[str, ...] = ()
    pack: int = 16384 if GPU else 1024  # tokens of one forward pass; on a CPU what its cache holds
    steps: int = 10 if GPU else 4
    profile: bool = False
    peers: tuple[str, ...] = PEERS
    model: str = ""  # folder of a model to generate with, in place of random weights
    out: Path = Path(__file__).parent / "results.md"
    picture: Path | None = None  # of the curves
    redraw: bool = False
    command: str = "python -m bench"

    def chosen(self, *on_gpu: str) -> list[str]:
        """Shapes to measure."""
        return list(self.shapes or (on_gpu if GPU else ("small",)))

    def peer(self, name: str) -> bool:
        return name in self.peers and importlib.util.find_spec("transformers" if name == "hf" else name) is not None


# Models


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 of published size, and how many sequences it generates at once."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    sequences: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Of all layers' matrix products."""
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_size)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary


SHAPES = {
    "small": Shape(256, 6, 8, 4, 768, 16_384, True, 64),  # for a CPU
    "0.5b": Shape(896, 24, 14, 2, 4864, 151_936, True, 512),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151_936, True, 512),
    "7b": Shape(3584, 28, 28, 4, 18_944, 152_064, False, 256),
}


def random_weights(shape: Shape, positions: int = 4096) -> Any:
    """bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if GPU else torch.float32
    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@contextmanager
def saved_model(shape: Shape) -> Iterator[str]:
    """A folder with random weights and a tokenizer whose token i is written `wi`, so that texts are exact."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{shape.vocabulary - 1}", pad_token="w0")
    with tempfile.TemporaryDirectory() as folder:
        random_weights(shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        free()
        yield folder


def words_of(folder: str) -> PreTrainedTokenizerFast:
    """Its tokenizer as it was saved: for peers, who would take the model's family for the tokenizer's."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def text_of(tokens: np.ndarray) -> str:
    return "".join(f" w{token}" for token in tokens)


def learner(folder: str, options: Options, *, trainable: bool = True) -> Learner:
    update = TrainConfig(micro_batch_tokens=options.pack)
    return Learner(ModelConfig(path=folder, dtype="auto" if GPU else "float32"), update, trainable=trainable)


def objective(name: str) -> tuple[Any, Objective]:
    """An algorithm with its defaults, and what a learner must know of it."""
    algo = ALGORITHMS[name](ALGORITHMS[name].Config())
    return algo, algo.objective(algo.forward_request(lambda _: 0))


def update(policy: Learner, samples: list[Sample], wanted: Objective) -> float:
    """One optimizer step; the loss."""
    denominator = count(samples, wanted.unit)
    sums = policy.forward_backward(samples, wanted, denominator, sum(map(len, samples)))
    policy.step(1e-6)
    return sums["loss"][0] / denominator


# Rows


def ragged(rng: np.random.Generator, low: int, high: int, shape: Shape, prompt: int = 0) -> Sample:
    """Random tokens: a prompt that does not count, and low..high more. The last one ends a text, as peers want it."""
    size = prompt + int(rng.integers(low, high))
    tokens = rng.integers(10, min(100_000, shape.vocabulary - 1), size).astype(np.int32)
    tokens[-1] = shape.vocabulary - 1
    return Sample(tokens=tokens, mask=np.arange(size) >= max(1, prompt))


# The clock


def clock() -> float:
    """Seconds; on a CPU those that this process computed, because others may be at work too."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Any]) -> float:
    began = clock()
    work()
    return clock() - began


def typical(seconds: list[float]) -> float:
    """The median without the first steps, which meet new shapes: of 10 the last 7."""
    first = max(1, len(seconds) * 3 // 10) if len(seconds) > 1 else 0
    return float(np.median(seconds[first:]))


def free() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> str:
    return f", {peak_memory_gib():.1f} GiB" if GPU else ""


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Print where the time went, kernel by kernel."""
    if not wanted:
        yield
        return
    kind = torch.profiler.ProfilerActivity.CUDA if GPU else torch.profiler.ProfilerActivity.CPU
    began = clock()
    with torch.profiler.profile(activities=[kind]) as found:
        yield
        took = clock() - began
    shares = [(e.self_device_time_total if GPU else e.self_cpu_time_total, e) for e in found.key_averages()]
    shares.sort(key=lambda share: -share[0])
    print(f"  {took:.3f} s, of them in kernels {sum(microseconds for microseconds, _ in shares) / 1e6:.3f} s")
    for microseconds, kernel in shares[:22]:
        print(f"  {microseconds / 1e3:9.1f} ms {kernel.count:6d} x  {kernel.key[:110]}", flush=True)


# What the machine can do


@cache
def limits() -> tuple[float, float]:
    """(FLOP/s of a large matrix product, bytes/s of a large copy), measured, in the precision that is trained in."""
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    size, megabytes, times = (8192, 2048, 20) if GPU else (1024, 128, 3)
    a, b, product = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)

    def best(work: Callable[[], Any]) -> float:
        work()
        return min(timed(lambda: [work() for _ in range(times)]) for _ in range(3)) / times

    product_rate = 2 * size**3 / best(lambda: torch.mm(a, b, out=product))
    copy_rate = 2 * source.nbytes / best(lambda: target.copy_(source))
    kind = str(dtype).removeprefix("torch.")
    print(f"limits of this machine: {product_rate / 1e12:.3g} TFLOP/s in {kind}, {copy_rate / 1e9:,.0f} GB/s")
    return product_rate, copy_rate


def training_flops(policy: Learner, samples: list[Sample], wanted: Objective, shape: Shape) -> float:
    """Of forward and backward through all matrices; attention, and what is computed again, do not count."""
    batches = [batch for batch in policy.micro_batches(samples, wanted.group_size) if batch is not None]
    computed = sum(len((batch.sharing or batch).tokens) for batch in batches)
    return 6.0 * (shape.layer_weights * computed + shape.head_weights * sum(len(batch.counted) for batch in batches))


def share_of_limits(flops: float, moved: float, seconds: float) -> str:
    """Both as far as they were counted."""
    product, copy = limits()
    parts = [f"{flops / seconds / 1e12:.3g} TFLOP/s ({100 * flops / seconds / product:.0f}%)"]
    if moved:
        parts.append(f"{moved / seconds / 1e9:,.0f} GB/s ({100 * moved / seconds / copy:.0f}%)")
    return ", ".join(parts)


# Peers


@dataclass(slots=True)
class Times:
    """Seconds of each step, what it logged, and the peak of memory."""

    seconds: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    memory: str = ""

    @property
    def typical(self) -> float:
        return typical(self.seconds)


Step = Callable[[int], dict[str, float]]
MakeTrainer = Callable[[list[Any]], Any]
"""TRL's trainer with these callbacks."""


class Ours:
    """Our steps, one a call."""

    def __init__(self, options: Options, make_step: Callable[[], Step]) -> None:
        self.options, self.step, self.times = options, make_step(), Times()

    def __call__(self) -> None:
        number = len(self.times.seconds)
        with profiled(self.options.profile and number == self.options.steps - 1):
            began = clock()
            self.times.logs.append(self.step(number))
            self.times.seconds.append(clock() - began)
        print(f"  step {number}: {self.times.seconds[-1]:.3f} s{peak()}", flush=True)


def in_turns(options: Options, make_step: Callable[[], Step], make_trl: MakeTrainer | None) -> dict[str, Times]:
    """Our steps and TRL's on the same rows.

    On a CPU one of each in turn, so that a busy machine is busy for both. A GPU has no room for both, and does not
    need it: ours, then theirs.
    """
    limits()
    free()
    ours = Ours(options, make_step)
    times = ours.times
    if make_trl is not None and not GPU:
        return {"ours": times, "TRL": trl_times(make_trl, ours)}
    for _ in range(options.steps):
        ours()
    times.memory = peak()
    del ours  # with the model
    free()
    return {"ours": times} | ({} if make_trl is None else {"TRL": trl_times(make_trl)})


def trl_times(make_trl: MakeTrainer, between: Callable[[], None] | None = None) -> Times:
    """TRL's steps by its own loop; `between` is called before each, off the clock."""
    from transformers import TrainerCallback

    times = Times()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if between is not None:
                between()
            self.began = clock()

        def on_step_end(self, *_, **__):
            times.seconds.append(clock() - self.began)

        def on_log(self, *_, logs, **__):
            times.logs.append(logs)

    make_trl([Clock()]).train()
    times.memory = peak()
    free()
    return times


def trl_options(options: Options) -> dict[str, Any]:
    """What all its trainers are told: the rows in order, nothing written, no recomputation.

    On a CPU float32 and no autocast; on a GPU bfloat16 weights, as TRL trains them. (Ours keep float32 masters.)
    """
    return {
        "output_dir": str(Path(tempfile.gettempdir()) / "bench-trl"),
        "max_steps": PEER_STEPS if GPU else options.steps,
        "learning_rate": 1e-6,
        "bf16": GPU,
        "use_cpu": not GPU,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": GPU,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "bfloat16" if GPU else "float32"},
    }


# Results


def versions(*names: str) -> str:
    found = []
    for name in ("torch", "transformers", *names):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


@dataclass(slots=True, kw_only=True)
class Result:
    """A row of the page of results."""

    what: str
    ours: str
    peer: str = ""
    ratio: float | None = None
    limits: str = ""
    peers: tuple[str, ...] = ()  # packages whose versions matter


def record(result: Result, options: Options) -> None:
    """Print it and append it to the page."""
    ratio = "" if result.ratio is None else f"{result.ratio:.2f}x"
    print(f"{result.what}: {result.ours}; {result.limits}")
    if result.peer:
        print(f"{result.what}: {result.peer}; ours is {ratio}", flush=True)
    device = torch.cuda.get_device_name() if GPU else "CPU, one thread"
    cells = [time.strftime("%Y-%m-%d"), result.what, result.ours, result.peer, ratio, result.limits]
    cells += [f"{device}, {versions(*result.peers)}", f"`{options.command}`"]
    page = options.out
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    head = "" if HEADER in text else ("\n" if text else "") + HEADER
    with page.open("a", encoding="utf-8") as file:
        file.write(head + "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")


def command_line(arguments: list[str]) -> str:
    return shlex.join(["python", "-m", "bench", *arguments])
