"""The forward pass over a micro-batch; the only place that aligns logits with the tokens that they predict."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from posttrain.core import ops
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import ForwardRequest, Ints, MicroBatch, Outputs, Sample
from posttrain.data.packing import collate
from posttrain.nn import attention
from posttrain.nn import logprobs as chunked
from posttrain.nn.embedding_noise import EmbeddingNoise
from posttrain.nn.layers import supports_fused_layers, use_fused_layers
from posttrain.nn.lm_head import EarlyGradients, FusedHead, to_stream
from posttrain.nn.routing import NOT_RECORDED, RecordedRouting, observe_routers
from posttrain.nn.training_graphs import TrainingGraphs
from posttrain.parallel.context import ContextGroup, OwnedPositions
from posttrain.parallel.pipeline import AbsentModule, Pipeline, StageInput
from posttrain.parallel.tensor import local_logits
from posttrain.parallel.tensor_group import TensorGroup

TOKEN_MULTIPLE = 256  # tokens are padded to a multiple of it where the device is faster for that
NOT_PACKED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError, AssertionError)
"""What the code of a model raises that takes no packing."""

log = logging.getLogger("posttrain")
announced: set[str] = set()  # classes of models that run padded, named once per process


@dataclass(slots=True, eq=False)
class ModelRunner:
    """A Hugging Face model and how its forward pass runs: packed or padded; the kernels for attention, layers, head."""

    model: Any
    varlen_kernel: bool
    packed: bool = True  # False: samples are padded rows, computed by the model's own code; see verify_against_stock
    shares_prefixes: bool = False  # whether shared prefixes may be computed once; set by verify_against_stock
    value_head: torch.nn.Linear | None = None  # of a language model that is also the critic
    fused_head: FusedHead | None = None  # set where there are kernels for the head's log-probabilities
    graphs: TrainingGraphs | None = None  # set where training passes are captured as CUDA graphs
    noise: EmbeddingNoise | None = None  # set where training passes have noise on the embeddings
    context: ContextGroup | None = None  # set where several ranks divide the tokens of a micro-batch
    pipeline: Pipeline | None = None  # set where several ranks hold different layers
    tensor: TensorGroup | None = None  # set where several ranks divide the model by blocks
    test_max_tokens: int = 0  # tests set it: a training pass with more tokens raises OutOfMemoryError; 0: no limit

    @classmethod
    def from_model(cls, model: Any, *, packed: bool = True) -> ModelRunner:
        """Wrap a model; its layers are replaced by fused ones (nn/layers.py) where these support it."""
        use_fused_layers(model)
        observe_routers(model)
        if not packed:
            use_own_attention(model)
        varlen_kernel = packed and attention.supports_varlen_kernel(model)
        return cls(model, varlen_kernel, packed, fused_head=FusedHead.from_model(model))

    @property
    def vocabulary_size(self) -> int:
        head = self.model.get_output_embeddings()
        if isinstance(head, AbsentModule):  # it is in another pipeline stage
            return self.model.config.get_text_config().vocab_size
        return head.weight.shape[0]

    def run_layers(
        self, batch: MicroBatch, routing: RecordedRouting | None = None, at: StageInput | None = None, **extra: Any
    ) -> Any:
        """Run embeddings and decoder layers; returns transformers' output object.

        Its last_hidden_state is [1, T, H], or [1, U, H] where samples share prefixes. With context parallelism it is
        this rank's slice of that, padded. `routing`: the experts that the sampler chose. `at`: the pipeline stage to
        run instead of all layers; hidden states between two stages are padded, too.
        """
        if self.test_max_tokens and len(batch.tokens) > self.test_max_tokens and torch.is_grad_enabled():
            raise torch.OutOfMemoryError(f"{len(batch.tokens)} tokens; the limit for tests is {self.test_max_tokens}")
        if self.graphs is not None and torch.is_grad_enabled() and not extra and routing is None:
            hidden = self.graphs.last_hidden_state(batch)
            if hidden is not None:
                return SimpleNamespace(last_hidden_state=hidden[None])
        if not self.packed:
            if routing is not None and routing.replay:
                raise UsageError(
                    f"rollout.router_replay: {type(self.model).__name__} is not trained packed. Leave it out."
                )
            return self.run_padded_layers(batch, **extra)
        row = batch.sharing or batch
        multiple_of = 1 if extra else TOKEN_MULTIPLE  # router outputs for padding must not count
        packing = attention.packing_for(batch, varlen_kernel=self.varlen_kernel, multiple_of=multiple_of)
        streams = [F.pad(stream, (0, packing.padding)) for stream in (row.tokens, row.positions)]
        if self.context is not None:
            packing.context, packing.tokens = self.context, len(streams[0])
            packing.ring = self.context.ring_plan(row.lengths, self.slice_rows(batch))
            streams = [self.context.slice_tokens(stream, len(row.tokens), self.token_multiple) for stream in streams]
        elif self.divides_tokens:
            packing.unattended = -len(streams[0]) % self.token_multiple
            streams = [F.pad(stream, (0, packing.unattended)) for stream in streams]
        tokens, positions = (stream[None] for stream in streams)
        packing.routing, packing.divided = routing, self.divides_tokens
        if routing is not None:
            routing.experts = self.own_tokens(routing.experts, packing.padding + packing.unattended)
        options: dict[str, Any] = {"position_ids": positions, "use_cache": False, "packing": packing, **extra}
        with nullcontext() if self.tensor is None else self.tensor.dividing(self.divides_tokens):
            result = self.run_stage(tokens, at, options)
        if at is not None and self.pipeline is not None and not self.pipeline.is_last_stage(at.stage):
            return result
        if self.tensor is not None and self.divides_tokens:
            result.last_hidden_state = self.tensor.all_tokens(result.last_hidden_state)
        if self.context is None:
            result.last_hidden_state = result.last_hidden_state[:, : len(row.tokens)]
        return result

    def run_stage(self, tokens: torch.Tensor, at: StageInput | None, options: dict[str, Any]) -> Any:
        """Run all layers on tokens, or those of a pipeline stage on its input."""
        layers = getattr(self.model, self.model.base_model_prefix)
        if at is None or self.pipeline is None:
            return layers(input_ids=tokens, **options)
        with self.pipeline.selected(self.model, at.stage):
            source = {"input_ids": tokens} if at.hidden is None else {"inputs_embeds": at.hidden}
            return layers(**source, **options)

    @property
    def divides_tokens(self) -> bool:
        """Whether tensor ranks divide the tokens between attention and MLPs."""
        return self.tensor is not None and self.tensor.sequence

    @property
    def token_multiple(self) -> int:
        """What the number of tokens of a pass is padded to a multiple of, so that ranks can divide them."""
        ranks = self.tensor.size if self.tensor is not None and self.divides_tokens else 1
        if self.context is None:
            return ranks
        # Of a slice each tensor rank has a part, and a rank of a ring two.
        return TOKEN_MULTIPLE if ranks == 1 else math.lcm(TOKEN_MULTIPLE, 2 * self.context.size * ranks)

    def hidden_rows(self, batch: MicroBatch) -> int:
        """Return the number of tokens, with padding, whose hidden states a pipeline stage sends to the next."""
        width = self.slice_rows(batch)
        return width // self.tensor.size if self.tensor is not None and self.divides_tokens else width

    def slice_rows(self, batch: MicroBatch) -> int:
        """Return the number of tokens, with padding, of this rank: all, or a slice of them with context parallelism."""
        tokens = len((batch.sharing or batch).tokens)
        if self.context is not None:
            return self.context.slice_width(tokens, self.token_multiple)
        if self.varlen_kernel:
            tokens = -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        return -(-tokens // self.token_multiple) * self.token_multiple

    def run_padded_layers(self, batch: MicroBatch, **extra: Any) -> Any:
        """Run the layers on samples as rows, padded on the right, which causal models do not read.

        The result has the tokens of the micro-batch in their order, without the padding. It is one call, so that the
        ranks of a sharded model stay in step.
        """
        layers = getattr(self.model, self.model.base_model_prefix)
        source, real = attention.padded_indices(batch.lengths, list(range(len(batch.lengths))))
        real = real.to(batch.tokens.device)
        kept = real.reshape(-1).nonzero()[:, 0]
        tokens = batch.tokens[source.to(batch.tokens.device)].view(real.shape) * real
        result = layers(input_ids=tokens, attention_mask=real.long(), use_cache=False, **extra)

        def without_padding(stream: torch.Tensor) -> torch.Tensor:
            return stream.reshape(len(source), -1).index_select(0, kept)

        router_logits = tuple(without_padding(logits) for logits in getattr(result, "router_logits", None) or ())
        hidden = without_padding(result.last_hidden_state)
        return SimpleNamespace(last_hidden_state=hidden[None], router_logits=router_logits)

    def own_tokens(self, experts: torch.Tensor, padding: int) -> torch.Tensor:
        """Pad recorded experts [T, layers, k] as the tokens are, and return those of this rank's tokens."""
        padded = F.pad(experts, (0, 0, 0, 0, 0, padding), value=NOT_RECORDED)
        if self.context is None:
            return padded
        index = self.context.slice_tokens(
            torch.arange(1, len(padded) + 1, device=experts.device), len(experts), self.token_multiple
        )
        return F.pad(padded, (0, 0, 0, 0, 1, 0), value=NOT_RECORDED)[index]  # index 0: padding

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [n, V] of hidden states [n, H], with the scalings that some families apply."""
        return self.scaled_logits(self.model.get_output_embeddings()(hidden).float())

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the part of the vocabulary that this rank has."""
        if self.vocabulary_ranks is None:
            return self.logits(hidden)
        return self.scaled_logits(
            local_logits(self.model.get_output_embeddings(), self.vocabulary_ranks, hidden).float()
        )

    @property
    def vocabulary_ranks(self) -> TensorGroup | None:
        """The tensor ranks that divide the vocabulary; None: they do not."""
        return self.tensor if self.divides_tokens else None

    def scaled_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the scalings of some families to logits, or to those of a part of the vocabulary."""
        config = self.model.config
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            logits = logits / config.logits_scaling
        if getattr(config, "final_logit_softcapping", None) is not None:  # Gemma
            logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
        return logits

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the critic's values [n] of hidden states [n, H]."""
        head = self.model.score if self.value_head is None else self.value_head
        return head(hidden)[:, 0].float()


def forward(
    runner: ModelRunner,
    batch: MicroBatch,
    request: ForwardRequest,
    teacher: ModelRunner | None = None,
    early: EarlyGradients | None = None,
    at: StageInput | None = None,
) -> Outputs:
    """Compute the outputs that the request names, only at the positions that the mask counts.

    `at`: the last pipeline stage and its input, where the layers before it are in other stages.
    """
    extra = {"output_router_logits": True} if request.router_loss else {}
    routing = None
    if batch.experts is not None and request.experts != "ignore" and at is None:  # a stage sees its own routers only
        routing = RecordedRouting(batch.experts, request.experts == "replay")
    with noise_added(runner, batch):
        result = runner.run_layers(batch, routing, at, **extra)
    hidden = result.last_hidden_state.squeeze(0)  # not [0], whose gradient is a copy
    out = Outputs()
    # hidden[i - 1] predicts tokens[i]; the first token of a sample is never counted. Selected on first use only.
    before = cache(lambda: SelectedStates.select(runner, hidden, batch.computed(batch.counted - 1)))
    if runner.context is not None or request.names - {"logprobs", "entropy", "divergence"}:
        early = None  # the loss needs other outputs, or those of other ranks
    if {"logprobs", "entropy"} & request.names:
        targets = before().local_values(batch.tokens[batch.counted])
        logprobs, entropy = head_logprobs(runner, before().states, targets, request, early)
        out.logprobs, out.entropy = (to_stream(before().gather(values), batch) for values in (logprobs, entropy))
    if routing is not None and routing.differs:
        out.rerouted = to_stream(before().gather(routing.rerouted()[before().local]), batch)
    if "likeliest" in request.names:
        out.likeliest = chunked.likeliest_tokens(
            before().states, runner.logits, runner.vocabulary_size, request.likeliest, request.temperature
        )
    if "divergence" in request.names and teacher is None:
        assert batch.teacher_ids is not None and batch.teacher_logprobs is not None, "a divergence needs a teacher"
        divergence = chunked.listed_divergence(
            before().states,
            batch.teacher_ids[batch.counted],
            batch.teacher_logprobs[batch.counted],
            runner.logits,
            runner.vocabulary_size,
            request.divergence,
            request.jsd_beta,
            request.temperature,
        )
        out.divergence = to_stream(divergence, batch)
    elif "divergence" in request.names:
        assert teacher is not None
        with torch.no_grad():
            teacher_hidden = teacher.run_layers(batch).last_hidden_state[0]
        teacher_states = teacher_hidden[before().local]
        divergence = head_divergence(runner, teacher, before().states, teacher_states, request, early)
        out.divergence = to_stream(before().gather(divergence), batch)
    if "choices" in request.names:  # predictions of the token after a counted one
        after = SelectedStates.select(runner, hidden, batch.computed(batch.counted))
        logits, wanted = runner.logits(after.states), list(request.choice_ids)
        among = logits.log_softmax(-1)[:, wanted] if request.among_all else logits[:, wanted].log_softmax(-1)
        out.choices = after.gather(among)
    if "scores" in request.names:
        last = SelectedStates.select(runner, hidden, batch.computed(batch.starts[1:].long() - 1))
        out.scores = last.gather(runner.model.score(last.states)[:, 0].float())
    if "values" in request.names:  # of the state before each counted token
        out.values = to_stream(before().gather(runner.values(before().states)), batch)
    if request.router_loss:
        out.router_loss = router_loss(runner, batch, result.router_logits, len(hidden))
    return out


def stage_output(runner: ModelRunner, batch: MicroBatch, at: StageInput) -> torch.Tensor:
    """Compute the hidden states that a pipeline stage before the last one sends on: [1, T, H]."""
    with noise_added(runner, batch):
        return runner.run_layers(batch, at=at).last_hidden_state


def noise_added(runner: ModelRunner, batch: MicroBatch) -> AbstractContextManager[None]:
    """Add noise to the embeddings in the block, where a training pass is to have it."""
    return nullcontext() if runner.noise is None or not torch.is_grad_enabled() else runner.noise.added(batch)


def router_loss(
    runner: ModelRunner, batch: MicroBatch, router_logits: Sequence[torch.Tensor], local_tokens: int
) -> torch.Tensor:
    """Compute the load-balancing loss of all layers, each sample on its own; `local_tokens`: on this rank, padded."""
    experts, samples = runner.model.config.num_experts_per_tok, len(batch.lengths)
    if runner.tensor is not None:
        router_logits = [runner.tensor.share_of_gradient(logits) for logits in router_logits]
    if runner.context is not None:  # sums per sample, over this rank's tokens
        positions = batch.computed(torch.arange(len(batch.tokens), device=batch.tokens.device))
        owned = runner.context.owned_positions(positions, local_tokens)
        count = owned.counts[runner.context.rank]
        local_logits = [logits[owned.local[:count]] for logits in router_logits]
        sample_of = batch.sample_of[owned.mine[:count]]
        return ops.router_balance(local_logits, experts, sample_of, samples, add_up=runner.context.sum)
    router_logits = [logits[:local_tokens] for logits in router_logits]  # without padding
    if batch.sharing is not None:  # a shared prefix counts in every sample that has it
        router_logits = [logits[batch.sharing.place] for logits in router_logits]
    return ops.router_balance(router_logits, experts, batch.sample_of, samples)


@dataclass(slots=True, eq=False)
class SelectedStates:
    """Hidden states at selected positions; with context parallelism, at those that this rank owns."""

    states: torch.Tensor  # [m, H]
    local: torch.Tensor  # [m] their indices in this rank's hidden states
    context: ContextGroup | None
    owned: OwnedPositions | None

    @classmethod
    def select(cls, runner: ModelRunner, hidden: torch.Tensor, positions: torch.Tensor) -> SelectedStates:
        owned = None if runner.context is None else runner.context.owned_positions(positions, len(hidden))
        local = positions if owned is None else owned.local
        return cls(hidden[local], local, runner.context, owned)

    def local_values(self, values: torch.Tensor) -> torch.Tensor:
        """Select, from values at all selected positions, those at the positions that this rank owns."""
        return values if self.owned is None else F.pad(values, (0, 1))[self.owned.mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values at all selected positions from the ranks that computed them."""
        return values if self.owned is None or self.context is None else self.context.gather_values(values, self.owned)


def head_logprobs(
    runner: ModelRunner,
    states: torch.Tensor,
    targets: torch.Tensor,
    request: ForwardRequest,
    early: EarlyGradients | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probability of each target and entropy, by the fused head if it supports the request."""
    head, distribution = runner.fused_head, request.distribution
    if head is not None and head.supports(distribution):
        wanted = {"entropy": "entropy" in request.names, "entropy_gradient": request.entropy_gradient}
        return head.logprobs(states, targets, distribution.temperature, **wanted, early=early)
    truncated = distribution.top_k or distribution.top_p < 1.0 or distribution.min_p  # by all logits of a token
    return chunked.token_logprobs(
        states,
        targets,
        runner.logits if truncated else runner.own_logits,
        runner.vocabulary_size,
        distribution,
        entropy_gradient=request.entropy_gradient,
        ranks=None if truncated else runner.vocabulary_ranks,
    )


def head_divergence(
    runner: ModelRunner,
    teacher: ModelRunner,
    states: torch.Tensor,
    teacher_states: torch.Tensor,
    request: ForwardRequest,
    early: EarlyGradients | None = None,
) -> torch.Tensor:
    """Compute the divergence from the teacher at each position, by the fused heads if both exist."""
    head, other = runner.fused_head, teacher.fused_head
    plain = not request.divergence_top_k and runner.tensor is None
    if head is not None and other is not None and plain:
        options = (request.divergence, request.jsd_beta, request.temperature)
        return head.divergence(states, other, teacher_states, *options, early)
    ranks = None if request.divergence_top_k else runner.vocabulary_ranks
    return chunked.token_divergence(
        states,
        teacher_states,
        runner.logits if ranks is None else runner.own_logits,
        teacher.logits if ranks is None else teacher.own_logits,
        runner.vocabulary_size,
        request.divergence,
        request.jsd_beta,
        request.temperature,
        request.divergence_top_k,
        ranks,
    )


@torch.no_grad()
def next_token_logprobs(
    runner: ModelRunner, tokens: Ints, top: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Return the log-probability of each token but the first, given those before it, by the model's own distribution.

    The second list has the `top` most likely tokens at each of these positions, in descending order.
    """
    device = next(runner.model.parameters()).device
    batch = collate([Sample(tokens=tokens, mask=np.arange(len(tokens)) > 0)], device)
    hidden = runner.run_layers(batch).last_hidden_state[0][:-1]
    targets = batch.tokens[1:].long()
    logprobs: list[float] = []
    likeliest: list[list[tuple[int, float]]] = []
    size = chunked.chunk_length(runner.vocabulary_size)
    for states, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        distribution = runner.logits(states).log_softmax(-1)
        logprobs += distribution.gather(1, wanted[:, None])[:, 0].tolist()
        best = distribution.topk(min(top, distribution.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likeliest += [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return logprobs, likeliest


@torch.no_grad()
def continuation_logprobs(
    runner: ModelRunner, sequences: Sequence[Ints], counts: Sequence[int], min_shared_prefix: int = 0
) -> list[tuple[float, bool]]:
    """Return the log-probability of the last `count` tokens of each sequence, and whether each is the most likely one.

    All sequences are one micro-batch. The last token of a sequence is not an input of the model, so that a sequence may
    have one token more than the model has positions.
    """
    device = next(runner.model.parameters()).device
    inputs = [Sample(tokens=tokens[:-1], mask=np.zeros(len(tokens) - 1, dtype=np.bool_)) for tokens in sequences]
    batch = collate(inputs, device, min_shared_prefix)
    ends = np.cumsum([len(sample) for sample in inputs])
    places = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    wanted = np.concatenate([tokens[-count:] for tokens, count in zip(sequences, counts, strict=True)])
    hidden = runner.run_layers(batch).last_hidden_state.squeeze(0)
    states = hidden[batch.computed(torch.as_tensor(places, device=device))]
    targets = torch.as_tensor(wanted, device=device).long()
    logprobs, likeliest = [], []
    size = chunked.chunk_length(runner.vocabulary_size)
    for some, of_them in zip(states.split(size), targets.split(size), strict=True):
        distribution = runner.logits(some).log_softmax(-1)
        logprobs.append(distribution.gather(1, of_them[:, None])[:, 0])
        likeliest.append(distribution.argmax(-1) == of_them)
    sums = [part.sum() for part in torch.cat(logprobs).double().split(list(counts))]
    greedy = [part.all() for part in torch.cat(likeliest).split(list(counts))]
    return [(float(total), bool(best)) for total, best in zip(sums, greedy, strict=True)]


def check_router(model: Any) -> None:
    """Raise UsageError if the model has no load-balancing loss; called when one is requested."""
    if getattr(model.config, "router_aux_loss_coef", None) is None:
        raise UsageError(
            f"model.router_aux_loss_coef: {type(model).__name__} has no load-balancing loss "
            "(it is dense, or balances its experts in another way). Set model.router_aux_loss_coef to 0."
        )


@torch.no_grad()
def verify_against_stock(runner: ModelRunner) -> None:
    """Compare the packed forward pass with the model's own code on short samples, before any training.

    Where it differs, because states leak between packed samples, attention is not replaceable or positions are ignored,
    the model runs padded (`packed` is False) by its own code, and a line of the log says so. A pass that differs even
    then, such as a head with an unknown scaling, stops the run: it would train wrongly without an error. If only the
    computation with shared prefixes differs, prefixes are not shared.
    """
    model: Any = runner.model
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    first, second, other = verification_samples(model.get_input_embeddings().weight.shape[0])
    documents = [first, second]
    samples, exchanged = ([sample_of(document) for document in pair] for pair in (documents, [other, documents[1]]))
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    was_training = model.training
    model.eval()
    try:
        use_own_attention(model)
        expected = [stock_output(model, document[None].to(device)) for document in documents]
        error = packing_error(runner, samples, exchanged, expected, device)
        if error < tolerance:
            shared = None if in_ring(runner) else packed_outputs_with_prefix(runner, samples, device)
            runner.shares_prefixes = shared is not None and relative_error(shared, expected) < tolerance
            return
        if not supports_fused_layers(model):  # those are known to run packed: the error is not theirs
            run_padded(runner)
            error = relative_error(packed_outputs(runner, collate(samples, device)), expected)
    finally:
        model.train(was_training)
    if not error < tolerance:
        raise PosttrainError(
            f"{type(model).__name__}: the {'packed' if runner.packed else 'padded'} forward pass differs from the "
            f"model's own (relative error {error:.3g}). This architecture cannot be trained; please report it."
        )


@torch.no_grad()
def verify_stages(runner: ModelRunner, gathered: Callable[..., Any], dtype: torch.dtype) -> None:
    """Compare the packed pass through all pipeline stages with the model's own code, stage by stage.

    As `verify_against_stock`, but a model that cannot run packed is refused. `gathered`: calls a function where the
    parameters are; `dtype`: of the hidden states.
    """
    model, pipeline = runner.model, runner.pipeline
    assert pipeline is not None
    config, device = model.config.get_text_config(), pipeline.device
    first, second, exchanged = verification_samples(config.vocab_size)

    def packed(samples: list[Sample], min_shared_prefix: int = 0) -> list[torch.Tensor]:
        batch = collate(samples, device, min_shared_prefix=min_shared_prefix)

        def compute(batch: MicroBatch, at: StageInput) -> Any:
            if pipeline.is_last_stage(at.stage):
                return gathered(packed_outputs, runner, batch, at)
            return gathered(stage_output, runner, batch, at)

        def received(batch: MicroBatch) -> torch.Tensor:
            return torch.empty(1, runner.hidden_rows(batch), config.hidden_size, dtype=dtype, device=device)

        return (pipeline.run([batch], compute, received) or [[]])[0]

    def stock(tokens: torch.Tensor) -> list[torch.Tensor]:
        def run(ids: torch.Tensor, at: StageInput) -> torch.Tensor:
            with pipeline.selected(model, at.stage):
                source = {"input_ids": ids} if at.hidden is None else {"inputs_embeds": at.hidden}
                hidden = getattr(model, model.base_model_prefix)(**source, use_cache=False).last_hidden_state
            last = pipeline.is_last_stage(at.stage)
            return runner.logits(hidden[0]) if last and has_language_head(model) else hidden[0] if last else hidden

        def received(ids: torch.Tensor) -> torch.Tensor:
            return torch.empty(1, ids.shape[1], config.hidden_size, dtype=dtype, device=device)

        return pipeline.run([tokens[None].to(device)], lambda ids, at: gathered(run, ids, at), received)

    was_training = model.training
    model.eval()
    use_own_attention(model)
    expected = [output for document in (first, second) for output in stock(document)]
    attention.use_packed(model)
    samples = [sample_of(first), sample_of(second)]
    found, again = packed(samples), packed([sample_of(exchanged), sample_of(second)])
    shared: list[torch.Tensor] = []
    if not in_ring(runner) and (not runner.varlen_kernel or kernel_shares_prefixes(dtype, device)):
        shared = packed(samples, 5)
    model.train(was_training)
    exact = dtype == torch.float32
    errors = [relative_error(found, expected), relative_error(again[1:], found[1:])] if pipeline.is_last else [0.0, 0.0]
    errors.append(relative_error(shared, expected) if shared else 1.0)
    error, leak, prefix = pipeline.from_last(torch.tensor(errors, device=device)).tolist()
    if not (error < (2e-3 if exact else 0.1) and leak < (1e-5 if exact else 0.02)):
        raise PosttrainError(
            f"{type(model).__name__}: the packed pass through pipeline stages differs from the model's own (relative "
            f"error {error:.3g}, between samples {leak:.3g}). Leave out cluster.pipeline_parallel_size."
        )
    runner.shares_prefixes = prefix < (2e-3 if exact else 0.1)


def packing_error(
    runner: ModelRunner,
    samples: list[Sample],
    exchanged: list[Sample],
    expected: list[torch.Tensor],
    device: torch.device,
) -> float:
    """Return the relative error of the packed pass; infinite if the model cannot run packed, or if samples leak.

    `exchanged` has another first sample of the same length: the outputs of the second must not change. That shows leaks
    which are small in a model with small weights.
    """
    try:
        attention.use_packed(runner.model)
        found = packed_outputs(runner, collate(samples, device))
        again = packed_outputs(runner, collate(exchanged, device))
    except torch.OutOfMemoryError:
        raise
    except NOT_PACKED:
        return math.inf
    exact = next(runner.model.parameters()).dtype == torch.float32
    leaks = not relative_error(again[1:], found[1:]) < (1e-5 if exact else 0.02)  # experts are summed in another order
    return math.inf if leaks else relative_error(found, expected)


def run_padded(runner: ModelRunner) -> None:
    """Let the model run padded from now on; the log says so once per class."""
    name = type(runner.model).__name__
    if runner.context is not None:
        raise UsageError(
            f"{name} cannot be trained packed, which context parallelism needs: leave out cluster.context_parallel_size"
        )
    use_own_attention(runner.model)
    runner.packed, runner.varlen_kernel, runner.shares_prefixes = False, False, False
    if name not in announced:
        announced.add(name)
        log.warning(f"{name}: a packed pass differs from its own, so it runs unpacked, with padding, by its own code.")


def use_own_attention(model: Any) -> None:
    """Let the model use its own attention: transformers' sdpa, or its only one."""
    try:
        model.set_attn_implementation("eager" if needs_eager_attention(model) else "sdpa")
    except ValueError:  # it has no sdpa
        model.set_attn_implementation("eager")


def verification_samples(vocabulary: int) -> list[torch.Tensor]:
    """Return two samples that share a prefix of 5 tokens, and another one of the first one's length."""
    generator = torch.Generator().manual_seed(0)
    first, second, other = (torch.randint(0, vocabulary, (length,), generator=generator) for length in (7, 12, 7))
    second[:5] = first[:5]
    return [first, second, other]


def sample_of(document: torch.Tensor) -> Sample:
    return Sample(tokens=document.numpy().astype("int32"), mask=(torch.arange(len(document)) > 0).numpy())


def needs_eager_attention(model: Any) -> bool:
    """Whether the model caps attention scores, which transformers computes correctly only in its eager attention."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None


def has_language_head(model: Any) -> bool:
    return model.get_output_embeddings() is not None


def in_ring(runner: ModelRunner) -> bool:
    """Whether context ranks form a ring, which computes whole samples: prefixes are not shared there."""
    return runner.context is not None and runner.context.ring is not None


def packed_outputs_with_prefix(
    runner: ModelRunner, samples: list[Sample], device: torch.device
) -> list[torch.Tensor] | None:
    """Compute `packed_outputs` with the shared prefix computed once; None if the device's kernel cannot do that."""
    try:
        if runner.varlen_kernel and not kernel_shares_prefixes(next(runner.model.parameters()).dtype, device):
            return None
        return packed_outputs(runner, collate(samples, device, min_shared_prefix=5))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a kernel that needs as many keys as queries
        if runner.varlen_kernel:
            return None
        raise


@torch.enable_grad()
def kernel_shares_prefixes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the varlen kernel, given more keys than queries, has the same result and gradients as the padded route.

    Which key the first query is aligned with is the kernel's convention, so it is tested, not assumed.
    """
    tokens = [np.array([0] * 20 + [after] * after, dtype=np.int32) for after in (3, 30)]
    batch = collate(
        [Sample(tokens=t, mask=np.zeros(len(t), dtype=np.bool_)) for t in tokens], device, min_shared_prefix=20
    )
    assert batch.sharing is not None
    size, generator = len(batch.sharing.tokens), torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(1, n, size, 64, generator=generator).to(device, dtype) for n in (4, 2, 2, 4))
    for window in (None, 7):
        found = []
        for varlen_kernel in (True, False):
            a, b, c = (stream.clone().requires_grad_() for stream in (q, k, v))
            options: dict[str, Any] = {"packing": attention.packing_for(batch, varlen_kernel=varlen_kernel)}
            out, _ = attention.packed_attention(torch.nn.Module(), a, b, c, None, sliding_window=window, **options)
            found.append([out.detach(), *torch.autograd.grad(out, (a, b, c), weight.transpose(1, 2))])
        errors = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(*found, strict=True)]
        if not all(error < 0.05 for error in errors):  # unlike max(), this is False for NaN
            return False
    return True


def packed_outputs(runner: ModelRunner, batch: MicroBatch, at: StageInput | None = None) -> list[torch.Tensor]:
    """Compute what `stock_output` returns, for each sample of a micro-batch, by the packed forward pass."""
    hidden = runner.run_layers(batch, at=at).last_hidden_state[0]
    if runner.context is not None:
        hidden = runner.context.gather_tokens(hidden, len((batch.sharing or batch).tokens))
    if batch.sharing is not None:
        hidden = hidden[batch.sharing.place]
    return [runner.logits(part) if has_language_head(runner.model) else part for part in hidden.split(batch.lengths)]


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative error of any sample; NaN if one has NaN."""
    errors = [
        (a.float() - b.float()).abs().mean() / b.float().abs().mean().clamp(min=1e-6)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def stock_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits of a language model, or the last hidden state of a score model, by its own code: [T, ...]."""
    if has_language_head(model):
        return model(input_ids=ids, use_cache=False).logits[0]
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state[0]


__all__ = [
    "ModelRunner",
    "check_router",
    "forward",
    "kernel_shares_prefixes",
    "next_token_logprobs",
    "stage_output",
    "verify_against_stock",
    "verify_stages",
]
