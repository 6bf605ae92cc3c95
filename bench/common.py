"""Shared parts of the benchmarks: models, examples, timing, the machine's limits, peers, and the results page."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, DeepseekV2Config, PreTrainedTokenizerFast, Qwen2Config, Qwen3MoeConfig

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import ModelConfig, TrainConfig, with_algorithm
from posttrain.core.devices import device_memory
from posttrain.core.host import peak_memory_gib
from posttrain.core.types import Objective, Sample, count_units
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train import memory_plan
from posttrain.train.learner import Learner

GPU = torch.cuda.is_available()
PEERS = ("trl", "vllm", "hf")
PEER_STEPS = 5  # of a peer on a GPU, where posttrain and peer do not alternate
COLUMNS = ("date", "what", "ours", "peer", "ratio", "of the machine's limits", "versions", "command")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line; 0 and empty values mean a default for the device."""

    shapes: tuple[str, ...] = ()
    micro_batch_tokens: int = 16384 if GPU else 1024  # tokens of one forward pass; on a CPU as many as fit its cache
    steps: int = 10 if GPU else 4
    rounds: int = 0  # of generation; the fastest counts
    row: int = 0  # tokens of every SFT example on a GPU, instead of different lengths
    quantization: str = "none"  # of the weights that generate
    kv_cache_dtype: str = "auto"  # fp8: keys and values in 8 bits
    fp8: bool = False  # train with linear layers in 8 bits
    sequences: int = 0  # completions generated together on a GPU; 0: those of the shape
    lora_rank: int = 0  # of adapters in generation
    adapters: int = 0  # of this rank, mixed in one batch; 0: one, which is part of the model
    profile: bool = False
    peers: tuple[str, ...] = PEERS
    model: str = ""  # directory of a model to generate with, instead of random weights
    out: Path = Path(__file__).parent / "results.md"
    picture: Path | None = None  # file for the curves
    redraw: bool = False
    command: str = "python -m bench"

    @property
    def engine_formats(self) -> dict[str, str]:
        """The options of LocalEngine that say in how many bits it generates."""
        return {"quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype}

    @property
    def described_formats(self) -> str:
        """What a row says about them."""
        weights = " in fp8" if self.quantization == "fp8" else ""
        return weights + (" with an fp8 KV cache" if self.kv_cache_dtype == "fp8" else "")

    def chosen(self, *on_gpu: str) -> list[str]:
        """Return the shapes to measure."""
        return list(self.shapes or (on_gpu if GPU else ("small",)))

    def peer(self, name: str) -> bool:
        return name in self.peers and importlib.util.find_spec("transformers" if name == "hf" else name) is not None


# Models


@dataclass(frozen=True, slots=True)
class Shape:
    """A published shape, and the number of sequences that it generates concurrently.

    Qwen2; with experts Qwen3-MoE, where `intermediate` is the width of one expert.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    sequences: int
    experts: int = 0
    experts_per_token: int = 1
    own_head_size: int = 0  # if it is not hidden / heads
    shared_experts: int = 0  # experts of every token
    latent_rank: int = 0  # of latent attention, with the other sizes of DeepSeek-V2

    @property
    def head_size(self) -> int:
        return self.own_head_size or self.hidden // self.heads

    @property
    def cached_numbers(self) -> int:
        """Numbers that the KV cache holds of one token in one layer."""
        return self.latent_rank + ROPE if self.latent_rank else 2 * self.kv_heads * self.head_size

    @property
    def attention_weights(self) -> int:
        if self.latent_rank:
            of_queries = self.hidden * self.heads * (NOPE + ROPE)
            of_latents = self.hidden * (self.latent_rank + ROPE) + self.latent_rank * self.heads * (NOPE + VALUES)
            return of_queries + of_latents + self.heads * VALUES * self.hidden
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size

    @property
    def layer_weights(self) -> int:
        """Number of weights that one token is multiplied with in all layers: of its own experts only."""
        used = self.experts_per_token + self.shared_experts
        mlp = 3 * self.hidden * self.intermediate * used + self.hidden * self.experts
        return self.layers * (self.attention_weights + mlp)

    @property
    def read_weights(self) -> int:
        """Number of weights of all layers that a decode step with many sequences reads: of all experts."""
        if not self.experts:
            return self.layer_weights
        mlp = 3 * self.hidden * self.intermediate * (self.experts + self.shared_experts) + self.hidden * self.experts
        return self.layers * (self.attention_weights + mlp)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary


NOPE, ROPE, VALUES = 128, 64, 128
"""Sizes of latent attention: parts of a head's keys that are not rotated and that are, and its values."""

SHAPES = {
    "small": Shape(256, 6, 8, 4, 768, 16_384, True, 64),  # for a CPU
    "0.5b": Shape(896, 24, 14, 2, 4864, 151_936, True, 512),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151_936, True, 512),
    "7b": Shape(3584, 28, 28, 4, 18_944, 152_064, False, 256),
    # Qwen3-30B-A3B with 12 of its 48 layers, and with 4 for training: float32 masters of 12 do not fit one GPU.
    "30b-a3b": Shape(2048, 12, 32, 4, 768, 151_936, False, 256, experts=128, experts_per_token=8, own_head_size=128),
    "30b-a3b-4": Shape(2048, 4, 32, 4, 768, 151_936, False, 256, experts=128, experts_per_token=8, own_head_size=128),
    # DeepSeek-V2-Lite, with experts in its first layer too.
    "v2-lite": Shape(
        2048, 27, 16, 16, 1408, 102_400, False, 256, experts=64, experts_per_token=6, shared_experts=2, latent_rank=512
    ),
}


def random_weights(shape: Shape, positions: int = 4096) -> Any:
    """Create a model with random weights: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if GPU else torch.float32
    kind: Any = Qwen2Config
    sizes: dict[str, int | None] = {"intermediate_size": shape.intermediate}
    if shape.experts:
        kind = partial(Qwen3MoeConfig, norm_topk_prob=True)
        sizes = {
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "head_dim": shape.head_size,
        }
    if shape.latent_rank:
        kind = DeepseekV2Config
        sizes = {
            "moe_intermediate_size": shape.intermediate,
            "n_routed_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "n_shared_experts": shape.shared_experts,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "kv_lora_rank": shape.latent_rank,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE,
            "v_head_dim": VALUES,
        }
    config = kind(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        **sizes,
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
    """Save random weights and a tokenizer that writes token i as `wi`, so that texts are exact; yield the directory."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{shape.vocabulary - 1}", pad_token="w0")
    with tempfile.TemporaryDirectory() as folder:
        random_weights(shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        free()
        yield folder


def words_of(folder: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer as it was saved; peers would choose one by the model's family."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def text_of(tokens: np.ndarray) -> str:
    return "".join(f" w{token}" for token in tokens)


def learner(folder: str, options: Options, *, trainable: bool = True, teacher: str = "") -> Learner:
    """Load a model to train, with a teacher beside it; on a GPU with a smaller step if this one does not fit."""
    config = with_algorithm(ALGORITHMS["sft"])
    config.model = ModelConfig(path=folder, dtype="auto" if GPU else "float32")
    config.train = TrainConfig(micro_batch_tokens=options.micro_batch_tokens, fp8=options.fp8 and trainable)
    config.data.max_length = options.row or min(2048, options.micro_batch_tokens)
    if GPU and trainable:
        algo, device = ALGORITHMS["sft"](config.algo), torch.device("cuda")
        largest, available = memory_plan.full_micro_batch(config, algo), device_memory(device)[1]
        if found := memory_plan.fitting_step(config, algo, device, largest, available):
            print("memory:", *found.options(config))
            config = found.applied(config)
    layout = ParallelLayout(offload=frozenset(config.cluster.offload))
    beside = replace(config.model, path=teacher) if teacher else None
    return Learner(config.model, config.train, trainable=trainable, teacher=beside, layout=layout)


def objective(name: str, **options: Any) -> tuple[Any, Objective]:
    """Return an algorithm with its defaults and these options, and its objective for the learner."""
    algo = ALGORITHMS[name](ALGORITHMS[name].Config(**options))
    return algo, algo.objective(algo.forward_request(lambda _: 0))


def update(policy: Learner, samples: list[Sample], wanted: Objective) -> float:
    """Make one optimizer step; return the loss."""
    denominator = count_units(samples, wanted.unit)
    sums = policy.forward_backward(samples, wanted, denominator, sum(map(len, samples)))
    policy.step(1e-6)
    if "loss" not in sums:
        raise SystemExit("out of memory: a step of this size does not fit; give less --micro_batch_tokens")
    return sums["loss"][0] / denominator


# Examples


def ragged(rng: np.random.Generator, low: int, high: int, shape: Shape, prompt: int = 0) -> Sample:
    """Return random tokens: a prompt, then low..high that are trained on; the last is EOS, as peers expect."""
    size = prompt + int(rng.integers(low, high))
    tokens = rng.integers(10, min(100_000, shape.vocabulary - 1), size).astype(np.int32)
    tokens[-1] = shape.vocabulary - 1
    return Sample(tokens=tokens, mask=np.arange(size) >= max(1, prompt))


# Timing


def clock() -> float:
    """Return seconds: on a CPU the CPU time of this process, because the machine may be busy."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Any]) -> float:
    began = clock()
    work()
    return clock() - began


def typical(seconds: list[float]) -> float:
    """Return the median without the first steps, which have new shapes: of 10 the last 7."""
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
    """Profile and print the time by kernel."""
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


# The machine's limits


@cache
def limits() -> tuple[float, float]:
    """Measure FLOP/s of a large matrix product and bytes/s of a large copy, in the precision of training."""
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
    """Return the FLOPs of forward and backward through all matrices, without attention and recomputation."""
    batches = [batch for batch in policy.micro_batches(samples, wanted.group_size) if batch is not None]
    computed = sum(len((batch.sharing or batch).tokens) for batch in batches)
    return 6.0 * (shape.layer_weights * computed + shape.head_weights * sum(len(batch.counted) for batch in batches))


def share_of_limits(flops: float, moved: float, seconds: float) -> str:
    """Describe FLOP/s, and bytes/s if they were counted, with their share of the machine's limits."""
    product, copy = limits()
    parts = [f"{flops / seconds / 1e12:.3g} TFLOP/s ({100 * flops / seconds / product:.0f}%)"]
    if moved:
        parts.append(f"{moved / seconds / 1e9:,.0f} GB/s ({100 * moved / seconds / copy:.0f}%)")
    return ", ".join(parts)


# Peers


@dataclass(slots=True)
class Times:
    """Seconds and logged values of each step, and peak memory."""

    seconds: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    memory: str = ""

    @property
    def typical(self) -> float:
        return typical(self.seconds)


Step = Callable[[int], dict[str, float]]
MakeTrainer = Callable[[list[Any]], Any]
"""Creates TRL's trainer with these callbacks."""


class Ours:
    """Steps of posttrain, one per call."""

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
    """Measure steps of posttrain and TRL on the same examples.

    On a CPU the steps alternate, so that other load on the machine affects both. On a GPU, which has no room for both,
    TRL follows posttrain.
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
    """Run TRL's steps in its own loop; `between` is called before each and not timed."""
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
    """Return arguments of all its trainers: examples in order, nothing written, no recomputation.

    On a CPU float32 and no autocast; on a GPU bfloat16 weights, as TRL trains them (posttrain: float32 master weights).
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
    """A row of the results page."""

    what: str
    ours: str
    peer: str = ""
    ratio: float | None = None
    limits: str = ""
    peers: tuple[str, ...] = ()  # packages whose versions matter


def record(result: Result, options: Options) -> None:
    """Print the row and append it to the results page."""
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
