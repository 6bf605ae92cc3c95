"""The forward pass over a micro-batch; the only place that aligns logits with the tokens that they predict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from posttrain.core import ops
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import ForwardRequest, MicroBatch, Outputs, Sample
from posttrain.data.packing import collate
from posttrain.nn import attention
from posttrain.nn import logprobs as chunked
from posttrain.nn.layers import use_fused_layers
from posttrain.nn.lm_head import EarlyGradients, FusedHead, to_stream
from posttrain.nn.training_graphs import TrainingGraphs
from posttrain.parallel.context import ContextGroup, OwnedPositions

TOKEN_MULTIPLE = 256  # tokens are padded to a multiple of it where the device is faster for that


@dataclass(slots=True, eq=False)
class ModelRunner:
    """A Hugging Face model and how its packed forward pass runs: the kernels for attention, layers and head."""

    model: Any
    varlen_kernel: bool
    shares_prefixes: bool = False  # whether shared prefixes may be computed once; set by verify_against_stock
    value_head: torch.nn.Linear | None = None  # of a language model that is also the critic
    fused_head: FusedHead | None = None  # set where there are kernels for the head's log-probabilities
    graphs: TrainingGraphs | None = None  # set where training passes are captured as CUDA graphs
    context: ContextGroup | None = None  # set where several ranks divide the tokens of a micro-batch

    @classmethod
    def from_model(cls, model: Any) -> ModelRunner:
        """Wrap a model; its layers are replaced by fused ones (nn/layers.py) where these support it."""
        use_fused_layers(model)
        return cls(model, attention.supports_varlen_kernel(model), fused_head=FusedHead.from_model(model))

    @property
    def vocabulary_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    def run_layers(self, batch: MicroBatch, **extra: Any) -> Any:
        """Run embeddings and decoder layers; returns transformers' output object.

        Its last_hidden_state is [1, T, H], or [1, U, H] where samples share prefixes. With context parallelism it is
        this rank's slice of that, padded.
        """
        if self.graphs is not None and torch.is_grad_enabled() and not extra:
            hidden = self.graphs.last_hidden_state(batch)
            if hidden is not None:
                return SimpleNamespace(last_hidden_state=hidden[None])
        layers = getattr(self.model, self.model.base_model_prefix)
        row = batch.sharing or batch
        multiple_of = 1 if extra else TOKEN_MULTIPLE  # router outputs for padding must not count
        packing = attention.packing_for(batch, varlen_kernel=self.varlen_kernel, multiple_of=multiple_of)
        streams = [F.pad(stream, (0, packing.padding)) for stream in (row.tokens, row.positions)]
        if self.context is not None:
            packing.context, packing.tokens = self.context, len(streams[0])
            streams = [self.context.slice_tokens(stream, len(row.tokens), TOKEN_MULTIPLE) for stream in streams]
        tokens, positions = (stream[None] for stream in streams)
        result = layers(input_ids=tokens, position_ids=positions, use_cache=False, packing=packing, **extra)
        if self.context is None:
            result.last_hidden_state = result.last_hidden_state[:, : len(row.tokens)]
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] -> float32 logits [n, V], with the scalings that some families apply after the head."""
        config = self.model.config
        logits = self.model.get_output_embeddings()(hidden).float()
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            logits = logits / config.logits_scaling
        if getattr(config, "final_logit_softcapping", None) is not None:  # Gemma
            logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
        return logits

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] -> the critic's values [n]."""
        head = self.model.score if self.value_head is None else self.value_head
        return head(hidden)[:, 0].float()


def forward(
    runner: ModelRunner,
    batch: MicroBatch,
    request: ForwardRequest,
    teacher: ModelRunner | None = None,
    early: EarlyGradients | None = None,
) -> Outputs:
    """Compute the outputs that the request names, only at the positions that the mask counts."""
    extra = {"output_router_logits": True} if request.router_loss else {}
    result = runner.run_layers(batch, **extra)
    hidden = result.last_hidden_state.squeeze(0)  # not [0], whose gradient is a copy
    out = Outputs()
    # hidden[i - 1] predicts tokens[i]; the first token of a sample is never counted.
    before = cache(lambda: SelectedStates.select(runner, hidden, batch.computed(batch.counted - 1)))
    if {"logprobs", "entropy"} & request.names:
        if runner.context is not None or request.names - {"logprobs", "entropy"}:
            early = None  # the loss needs other outputs, or those of other ranks
        targets = before().local_values(batch.tokens[batch.counted])
        logprobs, entropy = token_logprobs(runner, before().states, targets, request, early)
        out.logprobs, out.entropy = (to_stream(before().gather(values), batch) for values in (logprobs, entropy))
    if "divergence" in request.names:
        assert teacher is not None, "a divergence needs a teacher model"
        with torch.no_grad():
            teacher_hidden = teacher.run_layers(batch).last_hidden_state[0]
        divergence = chunked.token_divergence(
            before().states,
            teacher_hidden[before().local],
            runner.logits,
            teacher.logits,
            runner.vocabulary_size,
            request.divergence,
            request.jsd_beta,
            request.temperature,
        )
        out.divergence = to_stream(before().gather(divergence), batch)
    if "choices" in request.names:  # predictions of the token after a counted one
        at = SelectedStates.select(runner, hidden, batch.computed(batch.counted))
        logits, wanted = runner.logits(at.states), list(request.choice_ids)
        among = logits.log_softmax(-1)[:, wanted] if request.among_all else logits[:, wanted].log_softmax(-1)
        out.choices = at.gather(among)
    if "scores" in request.names:
        last = SelectedStates.select(runner, hidden, batch.computed(batch.starts[1:].long() - 1))
        out.scores = last.gather(runner.model.score(last.states)[:, 0].float())
    if "values" in request.names:  # of the state before each counted token
        out.values = to_stream(before().gather(runner.values(before().states)), batch)
    if request.router_loss:
        experts = runner.model.config.num_experts_per_tok
        routers = result.router_logits
        sample_of = batch.sample_of
        if runner.context is not None:  # sums per sample, over this rank's tokens
            positions = batch.computed(torch.arange(len(batch.tokens), device=batch.tokens.device))
            owned = runner.context.owned_positions(positions, len(hidden))
            count = owned.counts[runner.context.rank]
            routers, sample_of = [logits[owned.local[:count]] for logits in routers], sample_of[owned.mine[:count]]
        elif batch.sharing is not None:  # each sample is balanced on its own
            routers = [logits[batch.sharing.place] for logits in routers]
        together = {} if runner.context is None else {"add_up": runner.context.sum}
        out.router_loss = ops.router_balance(routers, experts, sample_of, len(batch.lengths), **together)
    return out


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
        """Of values at all selected positions, those at the positions that this rank owns."""
        return values if self.owned is None else F.pad(values, (0, 1))[self.owned.mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values at all selected positions, from those that each rank computed at the positions it owns."""
        return values if self.owned is None or self.context is None else self.context.gather_values(values, self.owned)


def token_logprobs(
    runner: ModelRunner,
    states: torch.Tensor,
    targets: torch.Tensor,
    request: ForwardRequest,
    early: EarlyGradients | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and entropy: by the fused head if it supports the request, else logprobs.py."""
    head, distribution = runner.fused_head, request.distribution
    if head is not None and head.supports(distribution):
        wanted = {"entropy": "entropy" in request.names, "entropy_gradient": request.entropy_gradient}
        return head.logprobs(states, targets, distribution.temperature, **wanted, early=early)
    return chunked.token_logprobs(
        states, targets, runner.logits, runner.vocabulary_size, distribution, entropy_gradient=request.entropy_gradient
    )


def check_router(model: Any) -> None:
    """UsageError if the model has no load-balancing loss; called when one is requested."""
    if getattr(model.config, "router_aux_loss_coef", None) is None:
        raise UsageError(
            f"model.router_aux_loss_coef: {type(model).__name__} has no load-balancing loss "
            "(it is dense, or balances its experts otherwise). Leave model.router_aux_loss_coef at 0."
        )


@torch.no_grad()
def verify_against_stock(runner: ModelRunner) -> None:
    """Compare the packed forward pass with the model's own code on two short samples, before any training.

    Attention that leaks between packed samples, a head with an unknown scaling or an architecture that ignores
    positions would train wrongly without an error; here they stop the run. If only the computation with shared
    prefixes differs, prefixes are not shared.
    """
    model: Any = runner.model
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    documents = [torch.randint(0, vocabulary, (length,), generator=generator) for length in (7, 12)]
    documents[1][:5] = documents[0][:5]  # a shared prefix
    was_training = model.training
    model.eval()
    try:
        model.set_attn_implementation("eager" if needs_eager_attention(model) else "sdpa")
        expected = [stock_output(model, document[None].to(device)) for document in documents]
        model.set_attn_implementation(attention.NAME)
        samples = [Sample(tokens=d.numpy().astype("int32"), mask=(torch.arange(len(d)) > 0).numpy()) for d in documents]
        found = packed_outputs(runner, collate(samples, device))
        shared = packed_outputs_with_prefix(runner, samples, device)
    finally:
        model.set_attn_implementation(attention.NAME)
        model.train(was_training)
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    error = relative_error(found, expected)
    if not error < tolerance:
        raise PosttrainError(
            f"{type(model).__name__}: the packed forward pass differs from the model's own "
            f"(relative error {error:.3g}). This architecture cannot be trained packed; please report it."
        )
    runner.shares_prefixes = shared is not None and relative_error(shared, expected) < tolerance


def needs_eager_attention(model: Any) -> bool:
    """Families that cap attention scores: transformers computes them correctly only in its eager attention."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None


def has_language_head(model: Any) -> bool:
    return model.get_output_embeddings() is not None


def packed_outputs_with_prefix(
    runner: ModelRunner, samples: list[Sample], device: torch.device
) -> list[torch.Tensor] | None:
    """As `packed_outputs`, with the shared prefix computed once; None if the device's kernel does not support that."""
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


def packed_outputs(runner: ModelRunner, batch: MicroBatch) -> list[torch.Tensor]:
    """What `stock_output` returns for each sample of a micro-batch, by the packed forward pass."""
    hidden = runner.run_layers(batch).last_hidden_state[0]
    if runner.context is not None:
        hidden = runner.context.gather_tokens(hidden, len((batch.sharing or batch).tokens))
    if batch.sharing is not None:
        hidden = hidden[batch.sharing.place]
    return [runner.logits(part) if has_language_head(runner.model) else part for part in hidden.split(batch.lengths)]


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of any sample; NaN if one has NaN."""
    errors = [
        (a.float() - b.float()).abs().mean() / b.float().abs().mean().clamp(min=1e-6)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def stock_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a language model, or the last hidden state of a score model, by its own code: [T, ...]."""
    if has_language_head(model):
        return model(input_ids=ids, use_cache=False).logits[0]
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state[0]


__all__ = ["ModelRunner", "check_router", "forward", "kernel_shares_prefixes", "verify_against_stock"]
