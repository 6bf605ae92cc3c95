"""The learner: a model and its optimizer on one device. It knows micro-batches, sums and gradients, but no algorithm.

    forward_backward   samples -> micro-batches -> forward -> loss -> backward; gradients are added up
    step               clip, check for non-finite values, update the weights
    logprobs, values, scores, evaluate    forward passes without gradients
    generate           completions, see local_generator.py

Where several processes hold a model together (parallel/fsdp.py), each has a learner; all are called together, each with
samples of its own. A process with fewer micro-batches than another runs dummy batches to keep in step.
"""

from __future__ import annotations

import gc
import io
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from posttrain.checkpoints import random_state
from posttrain.checkpoints.checkpoint import FileEntries, FileHashing, files_of_rank
from posttrain.checkpoints.tensor_files import load_tensors, save_tensors
from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.core.accelerators import accelerator_type
from posttrain.core.device_rates import rates_of
from posttrain.core.devices import default_device, device_memory
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.host import peak_memory_gib
from posttrain.core.types import (
    ExpertUse,
    Floats,
    ForwardRequest,
    Head,
    Ints,
    MicroBatch,
    Objective,
    Outputs,
    Sample,
    SamplingDistribution,
    WeightVersion,
)
from posttrain.data.encoding.conversation import encode_conversation
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.encoding.templates import apply_template, template_stop_ids
from posttrain.data.packing import collate, pack_into_micro_batches, pack_padded
from posttrain.engines.base import LOCAL, BetweenSteps, EngineSpec, GenerationRequest, OnCompletion, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm.replica import VllmReplica
from posttrain.engines.weight_probe import probe_sample
from posttrain.harness.base import EvaluatedModel, HarnessScores, HarnessTasks, evaluate_tasks
from posttrain.models import adapters as lora
from posttrain.models import memory
from posttrain.models.loading import compute_dtype, load_model, trainable_parameters
from posttrain.models.saving import load_weights, save_model
from posttrain.models.stop_ids import stop_ids
from posttrain.models.tensors import export_tensors, import_tensors
from posttrain.models.tokenizers import load_tokenizer
from posttrain.models.work import work_of
from posttrain.nn import training_graphs
from posttrain.nn.activation_offload import ActivationOffload
from posttrain.nn.embedding_noise import EmbeddingNoise
from posttrain.nn.forward import (
    ModelRunner,
    check_router,
    forward,
    stage_output,
    verify_against_stock,
    verify_stages,
)
from posttrain.nn.layers import use_fp8_products
from posttrain.nn.lm_head import EarlyGradients
from posttrain.nn.optimizer import Optimizer
from posttrain.nn.optimizer_rules import embedding_names
from posttrain.parallel.communication import CommunicationMeter
from posttrain.parallel.fsdp import ModelShards, anchor_outputs, meta_copy
from posttrain.parallel.layouts import ParallelLayout
from posttrain.parallel.pipeline import StageInput
from posttrain.parallel.shards import full_tensor, local_shard, shard_slices
from posttrain.train.local_generator import LocalGenerator
from posttrain.train.metric_sums import LARGEST, OUT_OF_MEMORY, MetricSums, Sums
from posttrain.train.profiler import WorkerProfile
from posttrain.train.rank_report import RankReport

PLAIN = SamplingDistribution()
VALUE_HEAD = "value_head.weight"
MIN_SHARED_PREFIX = 16  # tokens: neighbours that share at least this prefix compute it once
NO_LIMIT = 2**30  # tokens of a prompt
GRADIENT_ERROR = f"{LARGEST}gradient_error"

T = TypeVar("T")
Part = Literal["model", "optimizer"]


class Learner:
    """`forward_backward` adds gradients, `step` applies them; the other methods do not change the weights."""

    def __init__(
        self,
        model: ModelConfig,
        train_config: TrainConfig,
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
        """Load the model and everything it needs for the given purpose.

        `head`: token (a language model) or score (a reward model or critic); `value_head`: adds a head for values to
        a language model, which is then its own critic.
        `engine`: what generates; `sampler_copy`: generation uses a copy of the weights, made by `update_generator`,
        so that training can change the model meanwhile. vLLM always has a copy.
        `layout`: how the processes of a group share the model; None: each process has a whole model.
        """
        self.config, self.train_config, self.head = model, train_config, head
        self.device = default_device()
        self.dtype = compute_dtype(model, self.device)
        self.shards = ModelShards.create(layout, self.device, self.dtype) if layout and layout.is_sharded() else None
        loading: dict[str, Any] = {"device": self.device, "seed": seed, "shards": self.shards}
        self.model = load_model(model, head, trainable=trainable, **loading)
        self.device_name = device_memory(self.device)[0]
        self.work = work_of(self.model) if rates_of(self.device_name) else None  # to compare with the device's rate
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
        self.pipeline = None if self.shards is None else self.shards.pipeline
        if self.pipeline is not None and not self.pipeline.is_last:
            values = None
        if self.shards is not None:
            meta_model = meta_copy(self.model) if head == "token" else None
            self.shards.shard(self.model, [teacher_model, None if values is None else values.float()])
        self.runner = self.make_runner(self.model)
        if trainable and train_config.fp8:
            use_fp8_products(self.model)
        self.teacher = None if teacher_model is None else self.make_runner(teacher_model)
        if self.teacher is not None:
            check_teacher(self.runner, self.teacher)
        self.reshard()
        self.runner.value_head = values
        offload = layout.offload if layout else frozenset()
        self.hashing: FileHashing | None = None  # of the checkpoint that was saved last
        self.generator = self.make_generator(engine, meta_model, sampler_copy, frees_copy="engine" in offload)
        self.optimizer: Optimizer | None = None
        if trainable:
            self.prepare_training(engine, offload, seed)
        LEARNERS.add(self)
        self.meter = CommunicationMeter(self.device)
        self.seconds = self.flops = 0.0  # of training since the last report
        self.dropout_seed = seed if model.lora_dropout and trainable else None
        self.profile: WorkerProfile | None = None
        self.passes = 0  # calls of forward_backward since the last step
        if sampler_copy and self.shards is not None and engine.name == "local":
            self.generator.update(0)

    def prepare_training(self, engine: EngineSpec, offload: frozenset[str], seed: int) -> None:
        """Make the optimizer, and what a forward pass of training needs besides the model."""
        config = self.train_config
        self.optimizer = Optimizer(
            self.parameters(),
            config,
            self.shards,
            host_moments="moments" in offload,
            embeddings=embedding_names(self.model),
        )
        if config.neftune_noise_alpha:
            embedding = self.model.get_input_embeddings()
            self.runner.noise = EmbeddingNoise(embedding, config.neftune_noise_alpha, seed)
        if "activations" in offload and self.device.type != "cpu":
            ActivationOffload(self.device).install(self.model)
        # CUDA graphs would keep memory that an engine or an offloaded part needs.
        shares_memory = engine.name == "vllm" or bool(offload - {"moments", "activations"})
        if self.shards is None and not shares_memory and self.runner.noise is None:
            self.runner.graphs = training_graphs.TrainingGraphs.from_model(self.model, config.micro_batch_tokens)

    def make_runner(self, model: Any) -> ModelRunner:
        """Return what runs forward passes of the model, after comparing it with the model's own code."""
        runner = self.with_full_parameters(ModelRunner.from_model, model)
        if self.shards is not None:
            runner.context, runner.pipeline = self.shards.context, self.shards.pipeline
            runner.tensor = self.shards.tensor_ranks_of(model)
        if self.pipeline is None:
            self.with_full_parameters(verify_against_stock, runner)
        else:
            verify_stages(runner, self.with_full_parameters, self.dtype)
        return runner

    def make_generator(
        self, engine: EngineSpec, meta_model: Any, sampler_copy: bool, *, frees_copy: bool
    ) -> LocalGenerator:
        """Return what generates: the local engine on these weights or a copy of them, or vLLM."""
        replica = None
        if engine.name == "vllm":
            trainer = self.weights, self.logprobs
            replica = VllmReplica(engine.vllm_options, self.model, self.tokenizer, self.dtype, *trainer)
        return LocalGenerator(
            self.runner,
            self.tokenizer,
            shards=self.shards,
            meta_model=meta_model,
            replica=replica,
            own_weights=sampler_copy,
            reserved_bytes=training_memory_bytes,
            engine=engine,
            frees_copy=frees_copy,
        )

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained, by name."""
        head = self.runner.value_head
        return trainable_parameters(self.model) | ({VALUE_HEAD: head.weight} if head is not None else {})

    # Training

    def forward_backward(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        """Add the gradient of (sum of losses) / denominator; return the sums of loss and metrics.

        `tokens`: of the whole step, for the balance loss of a router. If the device or the host runs out of memory,
        the only sum is OUT_OF_MEMORY: the size to repeat the step with, after `discard`; 0 if none is smaller.
        """
        try:
            with self.timed(), self.meter.measured():
                return self.add_gradients(samples, objective, denominator, tokens)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0]
        # Outside of the handler, where the failed pass is not referenced any more.
        return self.recover_memory(samples, objective.group_size, reason)

    def add_gradients(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        """Do what `forward_backward` describes, where memory suffices."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        if objective.request.experts == "replay" and any(sample.experts is None for sample in samples):
            raise UsageError(
                f"rollout.router_replay: the engine has recorded no experts of {type(self.model).__name__}. It is for "
                "mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3. Leave it out."
            )
        self.generator.release_memory()
        self.optimizer.keep_gradients = self.runner.graphs is not None and self.runner.graphs.alive
        self.optimizer.restore_gradients()
        if self.runner.noise is not None:
            self.runner.noise.step = self.optimizer.steps
        metrics = MetricSums()
        exchange = None if self.shards is None else self.shards.exchange
        if exchange is not None:
            exchange.received = []  # of passes without gradients
        with self.seeded_dropout():
            batches = self.with_counted_flops(self.micro_batches(samples, objective.group_size))
            loss = partial(
                self.scaled_loss, objective=objective, denominator=denominator, tokens=tokens, metrics=metrics
            )
            if self.pipeline is not None:
                self.run_stages(list(batches), loss, self.stage_backward)
            else:
                for batch, last in mark_last(batches):
                    if self.shards is not None:
                        self.shards.set_last_micro_batch(last)
                    self.with_full_parameters(loss, batch).backward()
        if exchange is not None:
            metrics.add("expert_imbalance", *exchange.imbalance())
        sums = metrics.read()
        error, _ = sums.pop(GRADIENT_ERROR, (0.0, None))
        if error > 1e-4:
            raise PosttrainError(
                f"the algorithm is declared `separable`, but the loss of a token reads the log-probabilities of other "
                f"tokens: gradients would be wrong by {error:.2g} of their size. Set `separable = False` in its class."
            )
        return sums

    def recover_memory(self, samples: Sequence[Sample], group_size: int, reason: str) -> Sums:
        """Free what a failed pass holds, and return the size of micro-batches with which it can be repeated."""
        micro_batches = self.pack(samples, group_size)
        largest = max(micro_batches, key=lambda indices: sum(len(samples[i]) for i in indices))
        tokens = min(self.train_config.micro_batch_tokens, sum(len(samples[i]) for i in largest))
        if self.shards is not None and self.shards.size > 1:
            raise PosttrainError(
                f"out of memory on rank {self.shards.rank} in a micro-batch of {tokens:,} tokens: {reason}. The ranks "
                f"of a sharded model cannot repeat a pass one by one: set --train.micro_batch_tokens {tokens // 2} or "
                "--model.gradient_checkpointing"
            )
        self.runner.graphs = None  # CUDA graphs keep the memory of the largest pass
        assert self.optimizer is not None
        self.optimizer.kept_gradients = {}
        self.optimizer.clear_gradients()
        self.reshard()
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        smaller = tokens // 2 if any(len(indices) > group_size for indices in micro_batches) else 0
        return {OUT_OF_MEMORY: (float(smaller), None)}

    def limit_micro_batches(self, tokens: int) -> None:
        """Make micro-batches smaller from now on; the results of steps do not depend on it."""
        self.train_config = replace(self.train_config, micro_batch_tokens=tokens)

    def scaled_loss(
        self,
        batch: MicroBatch | None,
        at: StageInput | None = None,
        *,
        objective: Objective,
        denominator: int,
        tokens: int,
        metrics: MetricSums,
    ) -> torch.Tensor:
        """Compute the loss of one micro-batch as it is differentiated; None: a dummy batch, whose loss is 0.

        `at`: the input of the last pipeline stage.
        """
        assert self.optimizer is not None, "this learner was loaded for inference"
        scale = self.optimizer.loss_scale
        if batch is None:
            out = forward(self.runner, self.dummy_batch(), objective.request, self.teacher, at=at)
            return anchor_outputs(torch.zeros((), device=self.device), out)
        early = None
        if objective.separable:
            early = EarlyGradients(objective, batch, denominator / scale, partial(metrics.add, GRADIENT_ERROR))
        out = forward(self.runner, batch, objective.request, self.teacher, early, at)
        loss = objective.loss(out, batch)
        scaled = loss.total / (denominator / scale)
        if out.router_loss is not None:
            scaled = scaled + objective.request.router_loss * out.router_loss / (tokens / scale)
            metrics.add("router_balance", out.router_loss, torch.tensor(len(batch.tokens), device=self.device))
        if out.rerouted is not None:
            metrics.add("tokens_rerouted", out.rerouted.sum(), torch.tensor(len(batch.counted), device=self.device))
        metrics.add("loss", loss.total)
        metrics.add_all(loss.metrics)
        return scaled if self.shards is None else anchor_outputs(scaled, out)

    @contextmanager
    def seeded_dropout(self) -> Iterator[None]:
        """Seed dropout by run seed, step and data rank, so that checkpoints need no generator state."""
        if self.dropout_seed is None:
            yield
            return
        assert self.optimizer is not None
        rank = 0 if self.shards is None else self.shards.rank // self.shards.layout.tensor_parallel
        words = np.random.SeedSequence((self.dropout_seed, self.optimizer.steps, self.passes, rank)).generate_state(2)
        self.passes += 1
        kind = accelerator_type()
        with torch.random.fork_rng([self.device] if kind else [], device_type=kind or "cpu"):
            torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
            yield

    def step(self, learning_rate: float) -> dict[str, float]:
        """Apply and clear the gradients; see Optimizer.step."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.generator.weights_changed()
        self.passes = 0
        with self.timed():
            return self.optimizer.step(learning_rate)

    def discard(self) -> dict[str, float]:
        """Clear the gradients without applying them."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.clear_gradients()
        self.passes = 0
        return {"skipped": 1.0}

    def start_profile(self, chosen: bool) -> None:
        """Start torch's profiler, if this rank is one of those chosen."""
        self.profile = WorkerProfile() if chosen else None

    def stop_profile(self, file: Path | None) -> list[dict[str, Any]]:
        """Stop the profiler, write its trace, and return time and calls of each operator."""
        profile, self.profile = self.profile, None
        return profile.stop(file) if profile is not None and file is not None else []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to that of the next report."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def with_counted_flops(self, batches: Iterable[MicroBatch | None]) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches, and count their FLOPs for the next report."""
        for batch in batches:
            self.flops += 0.0 if batch is None else self.batch_flops(batch)
            yield batch

    def batch_flops(self, batch: MicroBatch) -> float:
        """Return the FLOPs of training on a micro-batch; a prefix that its samples share counts once."""
        if self.work is None:
            return 0.0
        lengths = np.asarray(batch.lengths, dtype=np.float64)
        share = len((batch.sharing or batch).tokens) / max(1.0, float(lengths.sum()))
        squares = float(np.square(lengths).sum()) * share
        return self.work.model_flops(float(lengths.sum()) * share, float(len(batch.counted)), squares)

    def request_communication(self) -> None:
        """Measure the time in communication until the next report; not while this rank is profiled.

        A process cannot run torch's profiler twice at a time: it crashes.
        """
        if self.profile is None:
            self.meter.request()

    def rank_report(self) -> RankReport:
        """Return what this rank has done since the last report."""
        found = RankReport(
            host=socket.gethostname(),
            device=self.device_name,
            memory_gib=peak_memory_gib(),
            seconds=self.seconds,
            flops=self.flops,
            communication_seconds=self.meter.take(),
        )
        self.seconds = self.flops = 0.0
        return found

    # Forward passes without gradients

    def use_average(self) -> None:
        """Compute with the weights that are saved, until `use_trained`: with schedule_free those are an average."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.write_average()

    def use_trained(self) -> None:
        """Compute with the weights that are trained."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.write_trained()

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], objective: Objective) -> Sums:
        """Return the sums of loss and metrics."""
        self.model.eval()
        metrics = MetricSums()
        for batch, out in self.outputs(self.micro_batches(samples, objective.group_size), objective.request):
            if batch is not None:
                loss = objective.loss(out, batch)
                metrics.add("loss", loss.total)
                metrics.add_all(loss.metrics)
        self.reshard()
        self.model.train()
        return metrics.read()

    def logprobs(
        self,
        samples: Sequence[Sample],
        *,
        adapters: bool = True,
        distribution: SamplingDistribution = PLAIN,
        experts: ExpertUse = "ignore",
    ) -> list[Floats]:
        """Return the log-probability of each counted token, 0 elsewhere; without `adapters`, of the base model."""
        request = ForwardRequest(names=frozenset({"logprobs"}), distribution=distribution, experts=experts)
        with nullcontext() if adapters else lora.disabled(self.model):
            return self.token_streams(samples, request, lambda out: out.logprobs)

    def token_statistics(
        self, samples: Sequence[Sample], distribution: SamplingDistribution, experts: ExpertUse
    ) -> list[Floats]:
        """Return log-probability and entropy at each counted token, [tokens, 2]; 0 elsewhere."""
        names = frozenset({"logprobs", "entropy"})

        def read(out: Outputs) -> torch.Tensor:
            assert out.logprobs is not None and out.entropy is not None
            return torch.stack([out.logprobs, out.entropy], dim=1)

        request = ForwardRequest(names=names, distribution=distribution, experts=experts)
        return self.token_streams(samples, request, read, (2,))

    def likeliest(self, samples: Sequence[Sample], count: int, temperature: float) -> list[tuple[Ints, Floats]]:
        """Return the likeliest tokens and their log-probabilities, both [tokens, count]; 0 where no token counts."""
        assert self.runner.context is None, "refused in the checks of the configuration"
        request = ForwardRequest(names=frozenset({"likeliest"}), likeliest=count, temperature=temperature)
        found: dict[int, tuple[Ints, Floats]] = {}
        for indices, out, batch in self.forward_all(samples, request):
            assert out.likeliest is not None
            lists = []
            for values, dtype in zip(out.likeliest, (np.int32, np.float32), strict=True):
                whole = np.zeros((len(batch.tokens), values.shape[1]), dtype=dtype)
                whole[batch.counted.cpu().numpy()] = values.cpu().numpy()
                lists.append(np.split(whole, np.cumsum(batch.lengths)[:-1]))
            found |= dict(zip(indices, zip(*lists, strict=True), strict=True))
        if self.pipeline is not None and not self.pipeline.is_last:
            return []  # the last stage's are taken
        return [found[i] for i in range(len(samples))]

    def probe_logprobs(self) -> list[Floats]:
        """Return log-probabilities of the probe, by which an engine's weights are compared with these."""
        return self.logprobs([probe_sample(self.model.config.get_text_config().vocab_size)])

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the critic's value of the state before each counted token, 0 elsewhere."""
        return self.token_streams(samples, ForwardRequest(names=frozenset({"values"})), lambda out: out.values)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the output of the score head for each sample."""
        found = np.zeros(len(samples), dtype=np.float32)
        for indices, out, _ in self.forward_all(samples, ForwardRequest(names=frozenset({"scores"}))):
            assert out.scores is not None
            found[indices] = out.scores.cpu().numpy()
        return self.from_last_stage(found).tolist()

    def token_streams(
        self,
        samples: Sequence[Sample],
        request: ForwardRequest,
        read: Callable[[Outputs], torch.Tensor | None],
        shape: tuple[int, ...] = (),
    ) -> list[Floats]:
        """Return one array per sample of the output that `read` selects; `shape`: that of each token's."""
        found = {index: np.zeros((len(sample), *shape), dtype=np.float32) for index, sample in enumerate(samples)}
        for indices, out, batch in self.forward_all(samples, request):
            stream = read(out)
            assert stream is not None
            parts = np.split(stream.cpu().numpy().astype(np.float32), np.cumsum(batch.lengths)[:-1])
            found |= dict(zip(indices, parts, strict=True))
        if not samples or self.pipeline is None:
            return list(found.values())
        joined = self.from_last_stage(np.concatenate([found[index] for index in range(len(samples))]))
        return np.split(joined, np.cumsum([len(sample) for sample in samples])[:-1])

    @torch.no_grad()
    def forward_all(
        self, samples: Sequence[Sample], request: ForwardRequest
    ) -> list[tuple[list[int], Outputs, MicroBatch]]:
        """Run all samples through the model; return (indices of the samples, outputs, micro-batch) of each pass.

        Of pipeline stages only the last one has results.
        """
        was_training = self.model.training  # False while completions are being generated
        self.model.eval()
        packed = self.pack(samples)
        passes = self.outputs(self.collated(samples, packed), request)
        results = [(i, out, batch) for i, (batch, out) in zip(packed, passes, strict=False) if batch is not None]
        for _ in passes:  # of dummy batches
            pass
        self.reshard()
        self.model.train(was_training)
        return results

    def outputs(
        self, batches: Iterable[MicroBatch | None], request: ForwardRequest
    ) -> Iterator[tuple[MicroBatch | None, Outputs]]:
        """Yield each micro-batch with the outputs of its pass; None: a dummy batch. Only the last stage yields."""
        if self.pipeline is None:
            for batch in batches:
                present = self.dummy_batch() if batch is None else batch
                yield batch, self.with_full_parameters(forward, self.runner, present, request, self.teacher)
            return

        def last_stage(batch: MicroBatch | None, at: StageInput) -> Outputs:
            return forward(self.runner, self.dummy_batch() if batch is None else batch, request, at=at)

        waiting = list(batches)
        yield from zip(waiting, self.run_stages(waiting, last_stage), strict=False)

    # Pipeline stages

    def run_stages(
        self,
        batches: list[MicroBatch | None],
        last_stage: Callable[[MicroBatch | None, StageInput], T],
        backward: Callable[[bool, Callable[[], None]], None] | None = None,
    ) -> list[T]:
        """Run micro-batches through all pipeline stages; return what the last one computes. See Pipeline.run."""
        assert self.pipeline is not None
        batches += [None] * (self.pipeline.padded_count(len(batches)) - len(batches))
        size = self.model.config.get_text_config().hidden_size

        def compute(batch: MicroBatch | None, at: StageInput) -> Any:
            assert self.pipeline is not None
            if self.pipeline.is_last_stage(at.stage):
                return self.with_full_parameters(last_stage, batch, at)
            return self.with_full_parameters(stage_output, self.runner, present(batch), at)

        def present(batch: MicroBatch | None) -> MicroBatch:
            return self.dummy_batch() if batch is None else batch

        def received(batch: MicroBatch | None) -> torch.Tensor:
            rows = self.runner.hidden_rows(present(batch))
            return torch.empty(1, rows, size, dtype=self.dtype, device=self.device)

        return self.pipeline.run(batches, compute, received, backward)

    def stage_backward(self, last: bool, run: Callable[[], None]) -> None:
        """Run one backward pass of a pipeline stage."""
        assert self.shards is not None
        self.shards.set_last_micro_batch(last)
        run()

    def from_last_stage(self, values: Floats) -> Floats:
        """Return the last pipeline stage's values on all stages."""
        if self.pipeline is None or not len(values):
            return values
        return self.pipeline.from_last(torch.from_numpy(values).to(self.device)).cpu().numpy()

    # Micro-batches

    def micro_batches(self, samples: Sequence[Sample], group_size: int) -> Iterator[MicroBatch | None]:
        """Yield micro-batches, each laid out while the device computes the one before; None: see `in_lockstep`."""
        yield from self.collated(samples, self.pack(samples, group_size))

    def collated(self, samples: Sequence[Sample], packed: Sequence[list[int]]) -> Iterator[MicroBatch | None]:
        """Yield packed samples as micro-batches; None: see `in_lockstep`."""
        for indices in self.in_lockstep(packed):
            if indices is None:
                yield None
            else:
                yield collate([samples[i] for i in indices], self.device, self.min_shared_prefix)

    def pack(self, samples: Sequence[Sample], group_size: int = 1) -> list[list[int]]:
        """Divide the samples into micro-batches; return their indices."""
        ranks = 1 if self.shards is None else self.shards.layout.context_parallel  # which divide each micro-batch
        budget = self.train_config.micro_batch_tokens * ranks
        if not (self.runner.packed and (self.teacher is None or self.teacher.packed)):
            return pack_padded(samples, budget, group_size)
        return pack_into_micro_batches(samples, budget, group_size, self.min_shared_prefix)

    @property
    def min_shared_prefix(self) -> int:
        """Neighbours that share a prefix of at least this many tokens compute it once; 0: not with this model."""
        able = self.runner.shares_prefixes and (self.teacher is None or self.teacher.shares_prefixes)
        able = able and self.runner.noise is None
        return MIN_SHARED_PREFIX if able else 0

    def dummy_batch(self) -> MicroBatch:
        """Return a batch for a rank without samples: it joins the collectives of a pass and contributes zero."""
        shortest = Sample(tokens=np.zeros(2, dtype=np.int32), mask=np.array([False, True]))
        shortest.teacher_ids, shortest.teacher_logprobs = np.zeros((2, 1), np.int32), np.full((2, 1), -1.0, np.float32)
        return collate([shortest], self.device)

    # Sharded models

    def with_full_parameters(self, function: Callable[..., T], *args: Any) -> T:
        """Call the function where the parameters are gathered."""
        return function(*args) if self.shards is None else self.shards.with_full_parameters(function, *args)

    def reshard(self) -> None:
        """Free gathered parameters after passes without a backward pass."""
        if self.shards is not None:
            self.shards.reshard()

    def in_lockstep(self, micro_batches: Sequence[T]) -> Iterator[T | None]:
        """Yield the micro-batches, then None for each pass that other ranks make and this one has no samples for."""
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
        """Generate one sample per request; see LocalGenerator.generate."""
        return self.generator.generate(
            requests, sampling, current=current, between_steps=between_steps, on_completion=on_completion
        )

    def local_engine(self, current: bool) -> LocalEngine | None:
        """Return the engine that generates in this process; None if vLLM does."""
        return None if self.generator.replica is not None else self.generator.local_engine(current)

    def evaluate_tasks(self, first: bool, settings: HarnessTasks) -> HarnessScores | None:
        """Run the tasks of a harness with the current weights on the first rank; others only share their part of them.

        Harnesses seed the global random generators, whose states training goes on with.
        """
        self.generator.weights_changed()  # also between trained and averaged weights, without a step
        engine = self.generator.local_engine(True)
        if not first:
            return None
        runner, state = engine.runner, random_state.rng_state()
        encoder = Encoder(self.tokenizer, DataConfig(max_length=NO_LIMIT), "prompt", runner.vocabulary_size)
        prefix = MIN_SHARED_PREFIX if runner.shares_prefixes and runner.noise is None else 0
        pack = partial(pack_into_micro_batches, min_shared_prefix=prefix) if runner.packed else pack_padded
        model = EvaluatedModel(
            name=self.config.path,
            tokenizer=self.tokenizer,
            runner=runner,
            stop_ids=tuple(self.stop_ids()),
            context=getattr(runner.model.config.get_text_config(), "max_position_embeddings", None),
            min_shared_prefix=prefix,
            pack=lambda samples: pack(samples, self.train_config.micro_batch_tokens, 1),
            encode=lambda messages: encode_conversation(encoder, messages, self.config.path),
            generate=engine.generate,
        )
        was_training = runner.model.training
        runner.model.eval()
        try:
            with redirect_stderr(io.StringIO()):  # progress bars, which would write over that of training
                return evaluate_tasks(settings, model)
        finally:
            runner.model.train(was_training)
            random_state.restore_rng(state)
            self.generator.weights_changed()

    def update_generator(self, version: WeightVersion) -> None:
        """Make generation use the current weights from now on; `version` is recorded in the samples."""
        self.generator.update(version)

    def stop_ids(self) -> list[int]:
        """Return the tokens that end a completion: the tokenizer's, and those that the model's files name."""
        return stop_ids(self.tokenizer, self.model.generation_config)

    def close(self) -> None:
        self.generator.close()

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors under their names in Hugging Face files, adapters merged, always in the same order.

        Tensors have the dtype that the model computes in. All processes that hold the model iterate together.
        """
        yield from export_tensors(self.model, self.dtype, self.shards)

    def set_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write what another learner's `weights` yields into this model, in place."""
        assert self.shards is None and self.optimizer is None, "only for a learner that is not trained"
        import_tensors(self.model, weights)

    def annotate(self, entries: dict[str, Any]) -> None:
        """Write entries into the model's config, with which they are saved."""
        for key, value in entries.items():
            setattr(self.model.config, key, value)

    def score_statistics(self) -> tuple[float, float]:
        """Return mean and standard deviation of a reward model's scores, as saved with it."""
        mean, deviation = (getattr(self.model.config, name, None) for name in ("score_mean", "score_std"))
        if mean is None or not deviation:
            raise UsageError("reward.normalize: the reward model was saved without score_mean and score_std")
        return float(mean), float(deviation)

    def save_weights(self, folder: Path) -> None:
        """Write a plain Hugging Face directory."""
        save_model(self.model, self.tokenizer, folder, self.shards)

    def save(self, folder: Path) -> None:
        """Write model/, a plain Hugging Face directory, and beside it what training needs to resume."""
        assert self.optimizer is not None
        self.optimizer.write_average()
        self.save_weights(folder / "model")
        self.optimizer.write_trained()
        self.optimizer.save(folder)
        if self.runner.value_head is not None:
            weight = full_tensor(local_shard(self.runner.value_head.weight), self.runner.value_head.weight)
            first = 0 if self.pipeline is None or self.shards is None else self.shards.size - self.shards.stage_size
            if self.shards is None or self.shards.rank == first:
                save_tensors(folder / "value-head.safetensors", {VALUE_HEAD: weight})

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, with any number of processes."""
        assert self.optimizer is not None
        load_weights(self.model, folder / "model")
        if self.runner.value_head is not None:
            weight = self.runner.value_head.weight
            local_shard(weight).copy_(load_tensors(folder / "value-head.safetensors")[VALUE_HEAD][shard_slices(weight)])
        self.optimizer.load(folder)
        self.generator.weights_changed()

    def start_hashing(self, checkpoint: Path, folder: Path) -> None:
        """Sync and hash, in a thread, the files that this rank has written into a folder of a checkpoint."""
        rank = 0 if self.shards is None else torch.distributed.get_rank()
        self.hashing = FileHashing(checkpoint, files_of_rank(folder, rank))

    def hashed_files(self) -> FileEntries | None:
        """Return the result of `start_hashing`; None while the thread works."""
        assert self.hashing is not None, "start_hashing comes first"
        return self.hashing.result()

    # Host memory

    def offload(self, part: Part) -> None:
        """Move a part to host memory until `onload`; on a CPU nothing moves."""
        self.move(part, torch.device("cpu"))

    def onload(self, part: Part) -> None:
        """Move a part back to the device."""
        self.move(part, self.device)

    def move(self, part: Part, device: torch.device) -> None:
        """Move a part to a device, where moving is possible."""
        in_host_memory = self.shards is not None and "parameters" in self.shards.layout.offload
        if self.device.type == "cpu" or in_host_memory:
            return
        self.runner.graphs = None  # CUDA graphs would keep device memory
        if self.optimizer is not None:
            self.optimizer.kept_gradients = {}
        if part == "model":
            (self.model if self.shards is None else self.shards.root).to(device)
        if self.optimizer is not None:
            self.optimizer.move(device)


LEARNERS: WeakSet[Learner] = WeakSet()  # of this process, which share a device


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with whether it is the last one."""
    waiting: list[T] = []
    for item in items:
        if waiting:
            yield waiting.pop(), False
        waiting.append(item)
    yield from ((item, True) for item in waiting)


def training_memory_bytes() -> int:
    """Return the bytes that training will allocate besides what it holds: gradients, Adam's moments, one full pass."""
    missing = largest_pass = 0
    for learner in LEARNERS:
        if learner.optimizer is not None:
            tokens = learner.train_config.micro_batch_tokens
            missing += learner.optimizer.missing_bytes(learner.device)
            one_pass = memory.max_pass_bytes(learner.config, learner.head, learner.dtype, tokens)
            largest_pass = max(largest_pass, one_pass)
    return missing + max(0, largest_pass - training_graphs.graph_memory_bytes())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host was missing; PyTorch raises a RuntimeError for the host's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def check_teacher(student: ModelRunner, teacher: ModelRunner) -> None:
    """Raise UsageError unless both have the same vocabulary, over which distributions are compared."""
    if student.vocabulary_size != teacher.vocabulary_size:
        raise UsageError(
            f"algo.teacher: its vocabulary has {teacher.vocabulary_size} tokens, the student's "
            f"{student.vocabulary_size}. Choose a teacher and a student of one family, with the same vocabulary."
        )


def new_value_head(model: Any, seed: int) -> torch.nn.Linear:
    """Return a head that maps the trunk's hidden state to a value, with small initial weights."""
    size, like = model.config.get_text_config().hidden_size, next(model.parameters())
    head = torch.nn.Linear(size, 1, bias=False)
    head.weight.data.normal_(0.0, 1 / (size + 1), generator=torch.Generator().manual_seed(seed))
    return head if like.is_meta else head.to(device=like.device, dtype=like.dtype)
