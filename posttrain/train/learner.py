"""The learner: a model and its optimizer on one device. Knows packs, sums and gradients; knows no algorithm by name.

Where processes hold a model together (parallel/fsdp.py) each has a learner, all are called at once, each with samples
of its own, and the methods keep in step: who has less to compute makes passes that count for nothing.
"""

from __future__ import annotations

import copy
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
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm.replica import VllmReplica
from posttrain.engines.weight_probe import probe_sample
from posttrain.models import adapters as lora
from posttrain.models import memory
from posttrain.models.loading import compute_dtype, load_model, trainable_parameters
from posttrain.models.saving import load_weights, save_model
from posttrain.models.stop_ids import stop_ids
from posttrain.models.tensors import export_tensors, import_tensors, module_tensors
from posttrain.models.tokenizers import load_tokenizer
from posttrain.nn import training_graphs
from posttrain.nn.forward import ModelRunner, check_router, forward, verify_against_stock
from posttrain.nn.lm_head import EarlyGradients
from posttrain.nn.optimizer import Optimizer
from posttrain.parallel.fsdp import ModelShards, anchor_outputs, materialize, meta_copy
from posttrain.parallel.layouts import ParallelLayout
from posttrain.parallel.shards import full_tensor, local_shard, shard_slices

PLAIN = SamplingDistribution()
VALUE_HEAD = "value_head.weight"
SHARED_TOKENS = 16  # neighbours with so long a common beginning compute it once
LARGEST = "largest_"
"""Metrics of this prefix are the largest of all packs and ranks, not sums."""
SLOPE_ERROR = f"{LARGEST}slope_error"

T = TypeVar("T")
Part = Literal["model", "optimizer"]
Sums = dict[str, tuple[float, float | None]]
"""Metric -> (sum, count); a count of None stands for the objective's own denominator."""


class Learner:
    """`forward_backward` adds gradients, `step` applies them; everything else only looks."""

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
        engine: Sequence[str] = ("local",),
        seed: int = 0,
        layout: ParallelLayout | None = ParallelLayout(),  # noqa: B008  frozen
    ) -> None:
        """`value_head`: the model is its own critic; `sampler_copy`: it generates with weights of their own.

        `engine`: who generates, see rollout.engine; others than the local one always have weights of their own.
        `layout`: how the processes of a group share the model; None: they do not, each has it whole.
        """
        self.device = default_device()
        self.dtype = compute_dtype(model, self.device)
        self.update = update
        self.shards = ModelShards.create(layout, self.device, self.dtype) if layout and layout.is_sharded() else None
        self.model = load_model(model, head, device=self.device, trainable=trainable, seed=seed, shards=self.shards)
        self.tokenizer = load_tokenizer(model)
        if template:  # saved with the model, so that it is asked, and stops, as it was trained
            apply_template(self.tokenizer, template)
            if head == "token":
                self.model.generation_config.eos_token_id = template_stop_ids(self.tokenizer)
        if model.router_aux_loss_coef:
            check_router(self.model)
        taught = None
        if teacher is not None:
            options: dict[str, Any] = {"device": self.device, "trainable": False, "seed": seed, "shards": self.shards}
            taught = load_model(teacher, "token", **options)
        valued = new_value_head(self.model, seed) if value_head else None
        self.copies: dict[str, ModelRunner] = {}  # whole models to generate with, where the model is sharded
        self.up_to_date: set[str] = set()  # copies that hold the current weights
        if self.shards is not None:
            self.skeleton = meta_copy(self.model) if head == "token" else None
            self.shards.shard(self.model, [taught, None if valued is None else valued.float()])
        self.runner = self.proven(self.model)
        self.teacher: ModelRunner | None = None
        if taught is not None:
            self.teacher = self.proven(taught)
            check_teacher(self.runner, self.teacher)
        self.let_go()
        self.runner.value_head = valued
        self.own_sampler = sampler_copy
        self.sampler = self.runner
        self.replica: VllmReplica | None = None
        if engine[0] == "vllm":
            looks = (self.weights, self.logprobs)
            self.replica = VllmReplica(engine[1:], self.model, self.tokenizer, self.dtype, *looks)
        elif sampler_copy and self.shards is None:
            self.sampler = ModelRunner.from_model(copy.deepcopy(self.model).requires_grad_(False))
        self.engines: dict[int, LocalEngine] = {}
        self.optimizer = Optimizer(self.parameters(), update, self.shards) if trainable else None
        lends = engine[0] == "vllm" or bool(layout and layout.offload)  # memory that is free now and then
        if trainable and self.shards is None and not lends:
            self.runner.graphs = training_graphs.TrainingGraphs.from_model(self.model, update.micro_batch_tokens)
        self.config, self.head = model, head
        LEARNERS.add(self)
        self.weight_version: WeightVersion = 0  # of the sampler's weights
        self.dropout_seed = seed if model.lora_dropout and trainable else None
        self.passes = 0  # calls of forward_backward since the last step
        if sampler_copy and self.shards is not None and self.replica is None:
            self.update_sampler(0)

    def proven(self, model: Any) -> ModelRunner:
        """The model as passes see it, compared with its own code."""
        runner = self.inside(ModelRunner.from_model, model)
        if self.shards is not None and self.shards.context is not None:
            self.shards.context.check(model.config.get_text_config(), self.shards.layout.tensor_parallel)
            runner.context = self.shards.context
        self.inside(verify_against_stock, runner)
        return runner

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All that is trained, by name."""
        head = self.runner.value_head
        return trainable_parameters(self.model) | ({VALUE_HEAD: head.weight} if head is not None else {})

    def forward_backward(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        """Add the gradient of (sum of losses) / denominator. `tokens`: of the whole step, for the router's balance."""
        if self.replica is not None and not self.own_sampler:
            self.replica.sleep()
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.keep_gradients = self.runner.graphs is not None and self.runner.graphs.alive
        self.optimizer.restore_gradients()
        totals = Totals()
        with self.decided_dropout():
            for batch in self.batches(samples, objective.group_size):
                self.inside(self.scaled_loss, batch, objective, denominator, tokens, totals).backward()
        sums = totals.read()
        error, _ = sums.pop(SLOPE_ERROR, (0.0, None))
        if error > 1e-4:
            raise PosttrainError(
                f"the algorithm says `separable`, but a token's part of its loss reads the log-probabilities of other "
                f"tokens: gradients would be wrong by {error:.2g} of their size. Set `separable = False` in its class."
            )
        return sums

    @contextmanager
    def decided_dropout(self) -> Iterator[None]:
        """What is dropped follows from seed, step and data rank, so that no generator's state need be saved."""
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

    def scaled_loss(
        self, batch: MicroBatch | None, objective: Objective, denominator: int, tokens: int, totals: Totals
    ) -> torch.Tensor:
        """What is differentiated of one pack; 0 of a pack for company."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        pack, early, scale = self.company() if batch is None else batch, None, self.optimizer.loss_scale
        if batch is not None and objective.separable:
            early = EarlyGradients(objective, batch, denominator / scale, partial(totals.add, SLOPE_ERROR))
        out = forward(self.runner, pack, objective.request, self.teacher, early)
        if batch is None:
            return anchor_outputs(torch.zeros((), device=self.device), out)
        loss = objective.loss(out, batch)
        scaled = loss.total / (denominator / scale)
        if out.router_loss is not None:
            scaled = scaled + objective.request.router_loss * out.router_loss / (tokens / scale)
            totals.add("router_balance", out.router_loss, torch.tensor(len(batch.tokens), device=self.device))
        totals.add("loss", loss.total)
        totals.add_all(loss.metrics)
        return scaled if self.shards is None else anchor_outputs(scaled, out)

    def step(self, learning_rate: float) -> dict[str, float]:
        """Apply and forget the gradients; see Optimizer.step."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.up_to_date.clear()
        self.passes = 0
        return self.optimizer.step(learning_rate)

    def discard(self) -> dict[str, float]:
        """Forget the gradients instead of applying them."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.clear_gradients()
        self.passes = 0
        return {"skipped": 1.0}

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], objective: Objective) -> Sums:
        """Loss and metrics without gradients."""
        self.model.eval()
        totals = Totals()
        for batch in self.batches(samples, objective.group_size):
            pack = self.company() if batch is None else batch
            out = self.inside(forward, self.runner, pack, objective.request, self.teacher)
            if batch is not None:
                loss = objective.loss(out, batch)
                totals.add("loss", loss.total)
                totals.add_all(loss.metrics)
        self.let_go()
        self.model.train()
        return totals.read()

    def logprobs(
        self, samples: Sequence[Sample], *, adapters: bool = True, distribution: SamplingDistribution = PLAIN
    ) -> list[Floats]:
        """Log-probability of each counted token, 0 elsewhere. Without adapters: those of the frozen base model."""
        request = ForwardRequest(names=frozenset({"logprobs"}), distribution=distribution)
        with nullcontext() if adapters else lora.disabled(self.model):
            return self.streams(samples, request, lambda out: out.logprobs)

    def probed(self) -> list[Floats]:
        """Log-probabilities of the probe that tells whether a sampler has these weights."""
        return self.logprobs([probe_sample(self.model.config.get_text_config().vocab_size)])

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """What the critic expects before each counted token, 0 elsewhere."""
        return self.streams(samples, ForwardRequest(names=frozenset({"values"})), lambda out: out.values)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Answers with the sampler's weights, or with the `current` ones: the same, where it has none of its own.

        `on_completion` may be told of answers before all are there.
        """
        if self.replica is not None and not (current and self.own_sampler):  # which is at work on another batch
            if current or not self.replica.has_weights:
                self.replica.refresh(self.weight_version)
            return self.replica.generate(requests, sampling)
        if self.shards is None:
            runner = self.runner if current else self.sampler
        elif self.own_sampler and not current:
            runner = self.copies["sampler"]
        else:
            runner = self.copied("current")
        if id(runner) not in self.engines:
            self.engines[id(runner)] = LocalEngine(runner, self.tokenizer, reserved_bytes=memory_to_come)
        return self.engines[id(runner)].generate(
            requests, sampling, between_steps=between_steps, on_completion=on_completion
        )

    def close(self) -> None:
        """End what would not end by itself."""
        if self.replica is not None:
            self.replica.close()

    @torch.no_grad()
    def update_sampler(self, version: WeightVersion) -> None:
        """Copies the current weights, which are of this version, to the sampler, unless it shares the trainer's."""
        self.weight_version = version
        if self.replica is not None:
            self.replica.refresh(version)
            return
        if self.shards is not None:
            self.copied("sampler" if self.own_sampler else "current")
        if self.sampler is self.runner:
            return
        ours, theirs = self.model.state_dict(), self.sampler.model.state_dict()
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])

    @torch.no_grad()
    def copied(self, name: str) -> ModelRunner:
        """A whole copy of the model with the weights of now; all processes that hold it call together."""
        assert self.shards is not None and self.skeleton is not None, "a model with a score head does not generate"
        if name not in self.copies:
            model = materialize(self.skeleton, self.device, self.shards.dtype)
            self.copies[name] = ModelRunner.from_model(model)
        if name not in self.up_to_date:
            theirs = module_tensors(self.copies[name].model)
            for key, live in module_tensors(self.model).items():
                theirs[key].copy_(full_tensor(local_shard(live).to(theirs[key].dtype), live))
            self.up_to_date.add(name)
        return self.copies[name]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by their names in Hugging Face files, adapters merged, always in the same order.

        In the type that the model computes in. All processes that hold the model iterate together.
        """
        yield from export_tensors(self.model, self.dtype)

    def accept(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write what another learner's `weights` gives into this model, in place."""
        assert self.shards is None and self.optimizer is None, "only a learner that looks takes weights of others"
        import_tensors(self.model, weights)

    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and those the model's files name."""
        return stop_ids(self.tokenizer, self.model.generation_config)

    def score_statistics(self) -> tuple[float, float]:
        """Mean and deviation of a reward model's scores, as saved with it."""
        mean, deviation = (getattr(self.model.config, name, None) for name in ("score_mean", "score_std"))
        if mean is None or not deviation:
            raise UsageError("rewards.normalize: the reward model was saved without score_mean and score_std")
        return float(mean), float(deviation)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """The score head's number for each sample."""
        found: dict[int, float] = {}
        for indices, out, _ in self.look(samples, ForwardRequest(names=frozenset({"scores"}))):
            assert out.scores is not None
            found |= dict(zip(indices, out.scores.tolist(), strict=True))
        return [found[i] for i in range(len(samples))]

    def streams(
        self, samples: Sequence[Sample], request: ForwardRequest, read: Callable[[Outputs], torch.Tensor | None]
    ) -> list[Floats]:
        found: dict[int, Floats] = {}
        for indices, out, batch in self.look(samples, request):
            stream = read(out)
            assert stream is not None
            parts = np.split(stream.cpu().numpy().astype(np.float32), np.cumsum(batch.lengths)[:-1])
            found |= dict(zip(indices, parts, strict=True))
        return [found[i] for i in range(len(samples))]

    @torch.no_grad()
    def look(self, samples: Sequence[Sample], request: ForwardRequest) -> list[tuple[list[int], Outputs, MicroBatch]]:
        """Forward passes only: (indices of the samples, outputs, batch) of each pack."""
        was_training = self.model.training  # not so where answers are under way
        self.model.eval()
        seen = []
        for indices in self.paced(
            pack_into_micro_batches(samples, self.tokens_per_pack, min_shared_prefix=self.shared_tokens)
        ):
            if indices is None:
                self.inside(forward, self.runner, self.company(), request)
                continue
            batch = collate([samples[i] for i in indices], self.device, self.shared_tokens)
            seen.append((indices, self.inside(forward, self.runner, batch, request), batch))
        self.let_go()
        self.model.train(was_training)
        return seen

    def batches(self, samples: Sequence[Sample], group_size: int) -> Iterator[MicroBatch | None]:
        """Pack by pack, each laid out while the device is at work on the one before; None: see `paced`."""
        share = self.shared_tokens
        for indices in self.paced(pack_into_micro_batches(samples, self.tokens_per_pack, group_size, share)):
            yield None if indices is None else collate([samples[i] for i in indices], self.device, share)

    @property
    def tokens_per_pack(self) -> int:
        """Where context ranks divide packs, these are so much larger."""
        ranks = 1 if self.shards is None else self.shards.layout.context_parallel
        return self.update.micro_batch_tokens * ranks

    # Keeping in step with others, where there are some

    def inside(self, function: Callable[..., T], *args: Any) -> T:
        """Call it where the parameters are whole."""
        return function(*args) if self.shards is None else self.shards.with_full_parameters(function, *args)

    def let_go(self) -> None:
        """After passes that only looked: whole parameters are not kept."""
        if self.shards is not None:
            self.shards.reshard()

    def paced(self, packs: Sequence[T]) -> Iterator[T | None]:
        """The packs, then None for each pass that others make and this process has nothing for."""
        return iter(packs) if self.shards is None else self.shards.in_lockstep(packs)

    def company(self) -> MicroBatch:
        """A pack that stands for none."""
        two = Sample(tokens=np.zeros(2, dtype=np.int32), mask=np.array([False, True]))
        return collate([two], self.device)

    @property
    def shared_tokens(self) -> int:
        """How many tokens neighbours must have in common to compute them once; 0: a model here cannot share."""
        able = self.runner.shares_prefixes and (self.teacher is None or self.teacher.shares_prefixes)
        return SHARED_TOKENS if able else 0

    def annotate(self, facts: dict[str, Any]) -> None:
        """Write facts into the model's config, so that they are saved with it."""
        for key, value in facts.items():
            setattr(self.model.config, key, value)

    def save(self, folder: Path) -> None:
        """model/ is a plain Hugging Face folder; beside it what training needs to go on."""
        assert self.optimizer is not None
        save_model(self.model, self.tokenizer, folder / "model", self.shards)
        self.optimizer.save(folder)
        if self.runner.value_head is not None:
            weight = full_tensor(local_shard(self.runner.value_head.weight), self.runner.value_head.weight)
            if self.shards is None or self.shards.rank == 0:
                save_tensors(folder / "value-head.safetensors", {VALUE_HEAD: weight})

    def load(self, folder: Path) -> None:
        """Of any number of processes, whatever number there is now."""
        assert self.optimizer is not None
        load_weights(self.model, folder / "model")
        if self.runner.value_head is not None:
            weight = self.runner.value_head.weight
            local_shard(weight).copy_(load_tensors(folder / "value-head.safetensors")[VALUE_HEAD][shard_slices(weight)])
        self.optimizer.load(folder)
        self.up_to_date.clear()

    def offload(self, part: Part) -> None:
        """Move a part to host memory until `onload`; on a CPU it is there already."""
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


class Totals:
    """Sums of metrics kept on the device until the step is over, so that no pack waits for the host."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | None = None) -> None:
        total = total.detach().double()
        if name.startswith(LARGEST):
            self.sums[name] = torch.maximum(self.sums[name], total) if name in self.sums else total
            self.counts[name] = torch.ones_like(total)
            return
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        if count is not None:
            count = count.detach().double()
            self.counts[name] = self.counts[name] + count if name in self.counts else count

    def add_all(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            self.add(name, *value) if isinstance(value, tuple) else self.add(name, value)

    def read(self) -> Sums:
        """To the host, all at once."""
        values = [*self.sums.values(), *self.counts.values()]
        numbers = iter(torch.stack(values).tolist() if values else [])
        sums = {name: next(numbers) for name in self.sums}
        counts = {name: next(numbers) for name in self.counts}
        return {name: (total, counts.get(name)) for name, total in sums.items()}


LEARNERS: WeakSet[Learner] = WeakSet()  # of this process, which share a device


def memory_to_come() -> int:
    """Bytes that training will take beyond what it holds: gradients, Adam's averages, and one pass over a full pack."""
    trained = [learner for learner in LEARNERS if learner.optimizer is not None]
    passes = [memory.max_pass_bytes(one.config, one.head, one.dtype, one.update.micro_batch_tokens) for one in trained]
    wanted = [one.optimizer.missing_bytes(one.device) for one in trained if one.optimizer]
    return sum(wanted) + max(0, max(passes, default=0) - training_graphs.graph_memory_bytes())


def check_teacher(student: ModelRunner, teacher: ModelRunner) -> None:
    """Two distributions can be compared only over the same tokens."""
    if student.vocabulary_size != teacher.vocabulary_size:
        raise UsageError(
            f"algo.teacher: its vocabulary has {teacher.vocabulary_size} tokens, the student's "
            f"{student.vocabulary_size}. Choose a teacher and a student of one family, with the same vocabulary."
        )


def new_value_head(model: Any, seed: int) -> torch.nn.Linear:
    """A value for every position, from the trunk's hidden state; small at first."""
    size, like = model.config.get_text_config().hidden_size, next(model.parameters())
    head = torch.nn.Linear(size, 1, bias=False)
    head.weight.data.normal_(0.0, 1 / (size + 1), generator=torch.Generator().manual_seed(seed))
    return head if like.is_meta else head.to(device=like.device, dtype=like.dtype)
