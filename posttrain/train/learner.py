"""The learner: a model and its optimizer on one device. It knows micro-batches, sums and gradients, but no algorithm.

    forward_backward   samples -> micro-batches -> forward -> loss -> backward; gradients are added up
    step               clip, check for non-finite values, update the weights
    logprobs, values, scores, evaluate    forward passes without gradients
    generate           completions, see local_generator.py

Where several processes hold a model together (parallel/fsdp.py), each has a learner; all are called together, each with
samples of its own. A process with fewer micro-batches than another runs dummy batches to keep in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from posttrain.checkpoints.tensor_files import load_tensors, save_tensors
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.devices import default_device
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import (
    Floats,
    ForwardRequest,
    Head,
    MicroBatch,
    Objective,
    Outputs,
    Sample,
    SamplingDistribution,
    WeightVersion,
)
from posttrain.data.encoding.templates import apply_template, template_stop_ids
from posttrain.data.packing import collate, pack_into_micro_batches
from posttrain.engines.base import LOCAL, BetweenSteps, EngineSpec, GenerationRequest, OnCompletion, Sampling
from posttrain.engines.vllm.replica import VllmReplica
from posttrain.engines.weight_probe import probe_sample
from posttrain.models import adapters as lora
from posttrain.models import memory
from posttrain.models.loading import compute_dtype, load_model, trainable_parameters
from posttrain.models.saving import load_weights, save_model
from posttrain.models.stop_ids import stop_ids
from posttrain.models.tensors import export_tensors, import_tensors
from posttrain.models.tokenizers import load_tokenizer
from posttrain.nn import training_graphs
from posttrain.nn.forward import ModelRunner, check_router, forward, verify_against_stock
from posttrain.nn.lm_head import EarlyGradients
from posttrain.nn.optimizer import Optimizer
from posttrain.parallel.fsdp import ModelShards, anchor_outputs, meta_copy
from posttrain.parallel.layouts import ParallelLayout
from posttrain.parallel.shards import full_tensor, local_shard, shard_slices
from posttrain.train.local_generator import LocalGenerator
from posttrain.train.metric_sums import LARGEST, MetricSums, Sums

PLAIN = SamplingDistribution()
VALUE_HEAD = "value_head.weight"
MIN_SHARED_PREFIX = 16  # tokens: neighbours that share at least this prefix compute it once
GRADIENT_ERROR = f"{LARGEST}gradient_error"

T = TypeVar("T")
Part = Literal["model", "optimizer"]


class Learner:
    """`forward_backward` adds gradients, `step` applies them; the other methods do not change the weights."""

    def __init__(
        self,
        model: ModelConfig,
        update: TrainConfig,
        *,
        head: Head = "token",
        trainable: bool = True,
        teacher: ModelConfig | None = None,
        template: str = "",
        value_head: bool = False,
        sampler_copy: bool = False,
        engine: EngineSpec = LOCAL,
        seed: int = 0,
        layout: ParallelLayout | None = ParallelLayout(),  # noqa: B008  frozen
    ) -> None:
        """`value_head`: the model is its own critic; `sampler_copy`: it generates with weights of their own.

        `engine`: what generates; vLLM always has weights of its own.
        `layout`: how the processes of a group share the model; None: each process has a whole model.
        """
        self.config, self.update, self.head = model, update, head
        self.device = default_device()
        self.dtype = compute_dtype(model, self.device)
        self.shards = ModelShards.create(layout, self.device, self.dtype) if layout and layout.is_sharded() else None
        loading: dict[str, Any] = {"device": self.device, "seed": seed, "shards": self.shards}
        self.model = load_model(model, head, trainable=trainable, **loading)
        self.tokenizer = load_tokenizer(model)
        if template:  # saved with the model, so that it is prompted, and stops, as in training
            apply_template(self.tokenizer, template)
            if head == "token":
                self.model.generation_config.eos_token_id = template_stop_ids(self.tokenizer)
        if model.router_aux_loss_coef:
            check_router(self.model)
        teacher_model = None if teacher is None else load_model(teacher, "token", trainable=False, **loading)
        values = new_value_head(self.model, seed) if value_head else None
        meta_model = None
        if self.shards is not None:
            meta_model = meta_copy(self.model) if head == "token" else None
            self.shards.shard(self.model, [teacher_model, None if values is None else values.float()])
        self.runner = self.make_runner(self.model)
        self.teacher = None if teacher_model is None else self.make_runner(teacher_model)
        if self.teacher is not None:
            check_teacher(self.runner, self.teacher)
        self.reshard()
        self.runner.value_head = values
        replica = None
        if engine.name == "vllm":
            options, trainer = engine.vllm_options, (self.weights, self.logprobs)
            replica = VllmReplica(options, self.model, self.tokenizer, self.dtype, *trainer)
        self.generator = LocalGenerator(
            self.runner,
            self.tokenizer,
            shards=self.shards,
            meta_model=meta_model,
            replica=replica,
            own_weights=sampler_copy,
            reserved_bytes=training_memory_bytes,
        )
        self.optimizer = Optimizer(self.parameters(), update, self.shards) if trainable else None
        lends_memory = engine.name == "vllm" or bool(layout and layout.offload)  # in some phases
        if trainable and self.shards is None and not lends_memory:
            self.runner.graphs = training_graphs.TrainingGraphs.from_model(self.model, update.micro_batch_tokens)
        LEARNERS.add(self)
        self.dropout_seed = seed if model.lora_dropout and trainable else None
        self.passes = 0  # calls of forward_backward since the last step
        if sampler_copy and self.shards is not None and replica is None:
            self.generator.update(0)

    def make_runner(self, model: Any) -> ModelRunner:
        """Returns what runs forward passes of the model, after comparing it with the model's own code."""
        runner = self.with_full_parameters(ModelRunner.from_model, model)
        if self.shards is not None and self.shards.context is not None:
            self.shards.context.check(model.config.get_text_config(), self.shards.layout.tensor_parallel)
            runner.context = self.shards.context
        self.with_full_parameters(verify_against_stock, runner)
        return runner

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns what is trained, by name."""
        head = self.runner.value_head
        return trainable_parameters(self.model) | ({VALUE_HEAD: head.weight} if head is not None else {})

    # Training

    def forward_backward(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        """Adds the gradient of (sum of losses) / denominator; returns the sums of loss and metrics.

        `tokens`: of the whole step, for the balance loss of a router.
        """
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.generator.release_memory()
        self.optimizer.keep_gradients = self.runner.graphs is not None and self.runner.graphs.alive
        self.optimizer.restore_gradients()
        metrics = MetricSums()
        with self.seeded_dropout():
            for batch in self.micro_batches(samples, objective.group_size):
                self.with_full_parameters(self.scaled_loss, batch, objective, denominator, tokens, metrics).backward()
        sums = metrics.read()
        error, _ = sums.pop(GRADIENT_ERROR, (0.0, None))
        if error > 1e-4:
            raise PosttrainError(
                f"the algorithm is declared `separable`, but the loss of a token reads the log-probabilities of other "
                f"tokens: gradients would be wrong by {error:.2g} of their size. Set `separable = False` in its class."
            )
        return sums

    def scaled_loss(
        self, batch: MicroBatch | None, objective: Objective, denominator: int, tokens: int, metrics: MetricSums
    ) -> torch.Tensor:
        """Computes the loss of one micro-batch as it is differentiated; None: a dummy batch, whose loss is 0."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        scale = self.optimizer.loss_scale
        if batch is None:
            out = forward(self.runner, self.dummy_batch(), objective.request, self.teacher)
            return anchor_outputs(torch.zeros((), device=self.device), out)
        early = None
        if objective.separable:
            early = EarlyGradients(objective, batch, denominator / scale, partial(metrics.add, GRADIENT_ERROR))
        out = forward(self.runner, batch, objective.request, self.teacher, early)
        loss = objective.loss(out, batch)
        scaled = loss.total / (denominator / scale)
        if out.router_loss is not None:
            scaled = scaled + objective.request.router_loss * out.router_loss / (tokens / scale)
            metrics.add("router_balance", out.router_loss, torch.tensor(len(batch.tokens), device=self.device))
        metrics.add("loss", loss.total)
        metrics.add_all(loss.metrics)
        return scaled if self.shards is None else anchor_outputs(scaled, out)

    @contextmanager
    def seeded_dropout(self) -> Iterator[None]:
        """Seeds dropout by run seed, step and data rank, so that checkpoints need no generator state."""
        if self.dropout_seed is None:
            yield
            return
        assert self.optimizer is not None
        rank = 0 if self.shards is None else self.shards.rank // self.shards.layout.tensor_parallel
        words = np.random.SeedSequence((self.dropout_seed, self.optimizer.steps, self.passes, rank)).generate_state(2)
        self.passes += 1
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
            yield

    def step(self, learning_rate: float) -> dict[str, float]:
        """Applies and clears the gradients; see Optimizer.step."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.generator.weights_changed()
        self.passes = 0
        return self.optimizer.step(learning_rate)

    def discard(self) -> dict[str, float]:
        """Clears the gradients without applying them."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.clear_gradients()
        self.passes = 0
        return {"skipped": 1.0}

    # Forward passes without gradients

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], objective: Objective) -> Sums:
        """Returns the sums of loss and metrics."""
        self.model.eval()
        metrics = MetricSums()
        for batch in self.micro_batches(samples, objective.group_size):
            present = self.dummy_batch() if batch is None else batch
            out = self.with_full_parameters(forward, self.runner, present, objective.request, self.teacher)
            if batch is not None:
                loss = objective.loss(out, batch)
                metrics.add("loss", loss.total)
                metrics.add_all(loss.metrics)
        self.reshard()
        self.model.train()
        return metrics.read()

    def logprobs(
        self, samples: Sequence[Sample], *, adapters: bool = True, distribution: SamplingDistribution = PLAIN
    ) -> list[Floats]:
        """Returns the log-probability of each counted token, 0 elsewhere; without `adapters`, of the base model."""
        request = ForwardRequest(names=frozenset({"logprobs"}), distribution=distribution)
        with nullcontext() if adapters else lora.disabled(self.model):
            return self.token_streams(samples, request, lambda out: out.logprobs)

    def probe_logprobs(self) -> list[Floats]:
        """Returns log-probabilities of the probe, by which an engine's weights are compared with these."""
        return self.logprobs([probe_sample(self.model.config.get_text_config().vocab_size)])

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns the critic's value of the state before each counted token, 0 elsewhere."""
        return self.token_streams(samples, ForwardRequest(names=frozenset({"values"})), lambda out: out.values)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the output of the score head for each sample."""
        found: dict[int, float] = {}
        for indices, out, _ in self.forward_all(samples, ForwardRequest(names=frozenset({"scores"}))):
            assert out.scores is not None
            found |= dict(zip(indices, out.scores.tolist(), strict=True))
        return [found[i] for i in range(len(samples))]

    def token_streams(
        self, samples: Sequence[Sample], request: ForwardRequest, read: Callable[[Outputs], torch.Tensor | None]
    ) -> list[Floats]:
        """Returns one array per sample of the output that `read` selects."""
        found: dict[int, Floats] = {}
        for indices, out, batch in self.forward_all(samples, request):
            stream = read(out)
            assert stream is not None
            parts = np.split(stream.cpu().numpy().astype(np.float32), np.cumsum(batch.lengths)[:-1])
            found |= dict(zip(indices, parts, strict=True))
        return [found[i] for i in range(len(samples))]

    @torch.no_grad()
    def forward_all(
        self, samples: Sequence[Sample], request: ForwardRequest
    ) -> list[tuple[list[int], Outputs, MicroBatch]]:
        """Runs all samples through the model; returns (indices of the samples, outputs, micro-batch) of each pass."""
        was_training = self.model.training  # False while completions are being generated
        self.model.eval()
        results = []
        for indices in self.in_lockstep(self.pack(samples)):
            if indices is None:
                self.with_full_parameters(forward, self.runner, self.dummy_batch(), request)
                continue
            batch = collate([samples[i] for i in indices], self.device, self.min_shared_prefix)
            results.append((indices, self.with_full_parameters(forward, self.runner, batch, request), batch))
        self.reshard()
        self.model.train(was_training)
        return results

    # Micro-batches

    def micro_batches(self, samples: Sequence[Sample], group_size: int) -> Iterator[MicroBatch | None]:
        """Yields micro-batches, each laid out while the device computes the one before; None: see `in_lockstep`."""
        for indices in self.in_lockstep(self.pack(samples, group_size)):
            if indices is None:
                yield None
            else:
                yield collate([samples[i] for i in indices], self.device, self.min_shared_prefix)

    def pack(self, samples: Sequence[Sample], group_size: int = 1) -> list[list[int]]:
        """Divides the samples into micro-batches; returns their indices."""
        ranks = 1 if self.shards is None else self.shards.layout.context_parallel  # which divide each micro-batch
        budget = self.update.micro_batch_tokens * ranks
        return pack_into_micro_batches(samples, budget, group_size, self.min_shared_prefix)

    @property
    def min_shared_prefix(self) -> int:
        """From how many tokens on a prefix that neighbours share is computed once; 0: a model here cannot do that."""
        able = self.runner.shares_prefixes and (self.teacher is None or self.teacher.shares_prefixes)
        return MIN_SHARED_PREFIX if able else 0

    def dummy_batch(self) -> MicroBatch:
        """Keeps ranks in step; contributes zero."""
        two_tokens = Sample(tokens=np.zeros(2, dtype=np.int32), mask=np.array([False, True]))
        return collate([two_tokens], self.device)

    # Sharded models

    def with_full_parameters(self, function: Callable[..., T], *args: Any) -> T:
        """Calls the function where the parameters are gathered."""
        return function(*args) if self.shards is None else self.shards.with_full_parameters(function, *args)

    def reshard(self) -> None:
        """Frees gathered parameters after passes without a backward pass."""
        if self.shards is not None:
            self.shards.reshard()

    def in_lockstep(self, micro_batches: Sequence[T]) -> Iterator[T | None]:
        """Yields the micro-batches, then None for each pass that other ranks make and this one has no samples for."""
        return iter(micro_batches) if self.shards is None else self.shards.in_lockstep(micro_batches)

    # Generation

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """See LocalGenerator.generate."""
        return self.generator.generate(
            requests, sampling, current=current, between_steps=between_steps, on_completion=on_completion
        )

    def update_generator(self, version: WeightVersion) -> None:
        """Generate with the current weights from now on, which are of this version."""
        self.generator.update(version)

    def stop_ids(self) -> list[int]:
        """Returns the tokens that end a completion: the tokenizer's, and those that the model's files name."""
        return stop_ids(self.tokenizer, self.model.generation_config)

    def close(self) -> None:
        self.generator.close()

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors under their names in Hugging Face files, adapters merged, always in the same order.

        In the dtype that the model computes in. All processes that hold the model iterate together.
        """
        yield from export_tensors(self.model, self.dtype)

    def set_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes what another learner's `weights` yields into this model, in place."""
        assert self.shards is None and self.optimizer is None, "only for a learner that is not trained"
        import_tensors(self.model, weights)

    def annotate(self, entries: dict[str, Any]) -> None:
        """Writes entries into the model's config, with which they are saved."""
        for key, value in entries.items():
            setattr(self.model.config, key, value)

    def score_statistics(self) -> tuple[float, float]:
        """Returns mean and standard deviation of a reward model's scores, as saved with it."""
        mean, deviation = (getattr(self.model.config, name, None) for name in ("score_mean", "score_std"))
        if mean is None or not deviation:
            raise UsageError("reward.normalize: the reward model was saved without score_mean and score_std")
        return float(mean), float(deviation)

    def save(self, folder: Path) -> None:
        """Writes model/, a plain Hugging Face directory, and beside it what training needs to resume."""
        assert self.optimizer is not None
        save_model(self.model, self.tokenizer, folder / "model", self.shards)
        self.optimizer.save(folder)
        if self.runner.value_head is not None:
            weight = full_tensor(local_shard(self.runner.value_head.weight), self.runner.value_head.weight)
            if self.shards is None or self.shards.rank == 0:
                save_tensors(folder / "value-head.safetensors", {VALUE_HEAD: weight})

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, with any number of processes."""
        assert self.optimizer is not None
        load_weights(self.model, folder / "model")
        if self.runner.value_head is not None:
            weight = self.runner.value_head.weight
            local_shard(weight).copy_(load_tensors(folder / "value-head.safetensors")[VALUE_HEAD][shard_slices(weight)])
        self.optimizer.load(folder)
        self.generator.weights_changed()

    # Host memory

    def offload(self, part: Part) -> None:
        """Moves a part to host memory until `onload`; on a CPU it is there already."""
        self.move(part, torch.device("cpu"))

    def onload(self, part: Part) -> None:
        self.move(part, self.device)

    def move(self, part: Part, device: torch.device) -> None:
        in_host_memory = self.shards is not None and "parameters" in self.shards.layout.offload
        if self.device.type == "cpu" or in_host_memory:
            return
        self.runner.graphs = None  # they would keep memory
        if self.optimizer is not None:
            self.optimizer.kept_gradients = {}
        if part == "model":
            (self.model if self.shards is None else self.shards.root).to(device)
        if self.optimizer is not None:
            self.optimizer.move(device)


LEARNERS: WeakSet[Learner] = WeakSet()  # of this process, which share a device


def training_memory_bytes() -> int:
    """Returns the bytes that training will allocate besides what it holds: gradients, Adam's moments, one full pass."""
    trained = [learner for learner in LEARNERS if learner.optimizer is not None]
    passes = [memory.max_pass_bytes(one.config, one.head, one.dtype, one.update.micro_batch_tokens) for one in trained]
    missing = [one.optimizer.missing_bytes(one.device) for one in trained if one.optimizer]
    return sum(missing) + max(0, max(passes, default=0) - training_graphs.graph_memory_bytes())


def check_teacher(student: ModelRunner, teacher: ModelRunner) -> None:
    """Two distributions can be compared only over the same tokens."""
    if student.vocabulary_size != teacher.vocabulary_size:
        raise UsageError(
            f"algo.teacher: its vocabulary has {teacher.vocabulary_size} tokens, the student's "
            f"{student.vocabulary_size}. Choose a teacher and a student of one family, with the same vocabulary."
        )


def new_value_head(model: Any, seed: int) -> torch.nn.Linear:
    """Returns a head that maps the trunk's hidden state to a value, with small initial weights."""
    size, like = model.config.get_text_config().hidden_size, next(model.parameters())
    head = torch.nn.Linear(size, 1, bias=False)
    head.weight.data.normal_(0.0, 1 / (size + 1), generator=torch.Generator().manual_seed(seed))
    return head if like.is_meta else head.to(device=like.device, dtype=like.dtype)
