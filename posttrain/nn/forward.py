"""One forward pass over a pack, and the one place where logits and tokens are shifted against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from posttrain.core import ops
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import ForwardRequest, MicroBatch, Objective, Outputs, Sample
from posttrain.data.packing import collate
from posttrain.nn import attention
from posttrain.nn import logprobs as chunked
from posttrain.nn.layers import PlainHead, Slopes, use_fused_layers
from posttrain.nn.training_graphs import TrainingGraphs
from posttrain.parallel.context import ContextGroup, OwnedPositions

TOKEN_MULTIPLE = 256  # tokens are padded to a multiple of it where the device is faster for that


@dataclass(slots=True, eq=False)
class ModelRunner:
    """A model as the forward pass sees it: its layers, its head, and how its attention is run."""

    model: Any
    varlen_kernel: bool
    shares_prefixes: bool = False  # whether shared prefixes may be computed once; set by verify_against_stock
    value_head: torch.nn.Linear | None = None  # on a language model that is its own critic
    plain_head: PlainHead | None = None  # where there are kernels for the head's log-probabilities
    graphs: TrainingGraphs | None = None  # set where training passes are captured as CUDA graphs
    context: ContextGroup | None = None  # where several ranks divide the tokens of a pack

    @classmethod
    def from_model(cls, model: Any) -> ModelRunner:
        """Its layers run the kernels of nn/layers.py from now on, where those know them."""
        use_fused_layers(model)
        return cls(model, attention.supports_varlen_kernel(model), plain_head=PlainHead.from_model(model))

    @property
    def vocabulary_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    def run_layers(self, batch: MicroBatch, **extra: Any) -> Any:
        """The trunk's output object; last_hidden_state is [1, T, H], or [1, U, H] where samples share.

        With a context it is this rank's slice of that, and padded.
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
        """Hidden states [n, H] -> float32 logits [n, V], with the scalings some families put behind their head."""
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
        """Hidden states [n, H] -> what the critic expects to gain from there: [n]."""
        head = self.model.score if self.value_head is None else self.value_head
        return head(hidden)[:, 0].float()


def forward(
    runner: ModelRunner,
    batch: MicroBatch,
    request: ForwardRequest,
    teacher: ModelRunner | None = None,
    slopes: Slopes | None = None,
) -> Outputs:
    """Compute what the request names, at the positions that count and nowhere else."""
    extra = {"output_router_logits": True} if request.router_loss else {}
    result = runner.run_layers(batch, **extra)
    hidden = result.last_hidden_state.squeeze(0)  # not [0], whose gradient is a copy
    out = Outputs()
    # hidden[i - 1] predicts tokens[i]; the first token of a sample is never counted.
    before = cache(lambda: Places.of(runner, hidden, batch.computed(batch.counted - 1)))
    if {"logprobs", "entropy"} & request.names:
        if runner.context is not None or request.names - {"logprobs", "entropy"}:
            slopes = None  # a loss of more, or of what others compute, is asked when all is known
        targets = before().of_mine(batch.tokens[batch.counted])
        logprobs, entropy = token_logprobs(runner, before().states, targets, request, slopes)
        out.logprobs, out.entropy = (to_stream(before().all(values), batch) for values in (logprobs, entropy))
    if "divergence" in request.names:
        assert teacher is not None, "a divergence needs a teacher"
        with torch.no_grad():
            taught = teacher.run_layers(batch).last_hidden_state[0]
        divergence = chunked.token_divergence(
            before().states,
            taught[before().local],
            runner.logits,
            teacher.logits,
            runner.vocabulary_size,
            request.divergence,
            request.jsd_beta,
            request.temperature,
        )
        out.divergence = to_stream(before().all(divergence), batch)
    if "choices" in request.names:  # what the model says next, after a counted token
        at = Places.of(runner, hidden, batch.computed(batch.counted))
        logits, wanted = runner.logits(at.states), list(request.choice_ids)
        among = logits.log_softmax(-1)[:, wanted] if request.among_all else logits[:, wanted].log_softmax(-1)
        out.choices = at.all(among)
    if "scores" in request.names:
        last = Places.of(runner, hidden, batch.computed(batch.starts[1:].long() - 1))
        out.scores = last.all(runner.model.score(last.states)[:, 0].float())
    if "values" in request.names:  # of the state before a counted token
        out.values = to_stream(before().all(runner.values(before().states)), batch)
    if request.router_loss:
        experts = runner.model.config.num_experts_per_tok
        routers = result.router_logits
        sample_of = batch.sample_of
        if runner.context is not None:  # sums over samples, of this rank's tokens
            places = batch.computed(torch.arange(len(batch.tokens), device=batch.tokens.device))
            own = runner.context.owned_positions(places, len(hidden))
            count = own.counts[runner.context.rank]
            routers, sample_of = [logits[own.local[:count]] for logits in routers], sample_of[own.mine[:count]]
        elif batch.sharing is not None:  # each sample is balanced as if it were alone
            routers = [logits[batch.sharing.place] for logits in routers]
        together = {} if runner.context is None else {"add_up": runner.context.sum}
        out.router_loss = ops.router_balance(routers, experts, sample_of, len(batch.lengths), **together)
    return out


@dataclass(slots=True, eq=False)
class Places:
    """Hidden states at some places of a row: this rank's, where several divide it."""

    states: torch.Tensor  # [m, H]
    local: torch.Tensor  # [m] where they are in `hidden`
    context: ContextGroup | None
    own: OwnedPositions | None

    @classmethod
    def of(cls, runner: ModelRunner, hidden: torch.Tensor, places: torch.Tensor) -> Places:
        own = None if runner.context is None else runner.context.owned_positions(places, len(hidden))
        local = places if own is None else own.local
        return cls(hidden[local], local, runner.context, own)

    def of_mine(self, values: torch.Tensor) -> torch.Tensor:
        """What belongs to these places, of something that belongs to all of them."""
        return values if self.own is None else F.pad(values, (0, 1))[self.own.mine]

    def all(self, values: torch.Tensor) -> torch.Tensor:
        """What was computed at these places, and by others at theirs."""
        return values if self.own is None or self.context is None else self.context.gather_values(values, self.own)


def token_logprobs(
    runner: ModelRunner,
    states: torch.Tensor,
    targets: torch.Tensor,
    request: ForwardRequest,
    slopes: Slopes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See chunked.token_logprobs; by kernels where there are some."""
    head, distribution = runner.plain_head, request.distribution
    if head is not None and head.serves(distribution):
        wanted = {"entropy": "entropy" in request.names, "entropy_gradient": request.entropy_gradient}
        return head.logprobs(states, targets, distribution.temperature, **wanted, slopes=slopes)
    return chunked.token_logprobs(
        states, targets, runner.logits, runner.vocabulary_size, distribution, entropy_gradient=request.entropy_gradient
    )


def to_stream(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """[M] at the counted positions -> [T], 0 elsewhere."""
    return values.new_zeros(len(batch.tokens)).index_copy(0, batch.counted, values)


class LossGradients:
    """Gradients of a loss before all log-probabilities are known: of one that is `separable`, see Algorithm.

    The loss is asked with what is known so far, and 0 for all tokens still to come.
    """

    def __init__(
        self, objective: Objective, batch: MicroBatch, denominator: float, say_error: Callable[[torch.Tensor], None]
    ) -> None:
        """`say_error` is told how far they were from the gradients of the whole loss, as a part of those."""
        self.objective, self.batch, self.denominator, self.say_error = objective, batch, denominator, say_error
        self.logprobs, self.entropy, self.used = (
            torch.zeros(len(batch.counted), device=batch.tokens.device) for _ in range(3)
        )

    def at(self, first: int, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = slice(first, first + len(logprobs))
        count = len(self.used[rows])  # the rest is padding
        padding = len(logprobs) - count
        self.logprobs[rows], self.entropy[rows] = logprobs[:count], entropy[:count]
        with torch.enable_grad():
            known = [self.logprobs.clone().requires_grad_()]
            if self.objective.request.entropy_gradient:
                known.append(self.entropy.clone().requires_grad_())
            out = Outputs(
                logprobs=to_stream(known[0], self.batch), entropy=to_stream((*known, self.entropy)[1], self.batch)
            )
            total = self.objective.loss(out, self.batch).total / self.denominator
            slopes = torch.autograd.grad(total, known, allow_unused=True, materialize_grads=True)
        self.used[rows] = slopes[0][rows]
        here = [F.pad(slope[rows], (0, padding)) for slope in slopes]
        return here[0], here[1] if len(here) > 1 else None

    def compare(self, d_logprobs: torch.Tensor) -> None:
        """With the gradients that the whole loss has in the end."""
        off = (d_logprobs[: len(self.used)] - self.used).abs().sum()
        self.say_error(off / d_logprobs.abs().sum().clamp(min=1e-30))


def check_router(model: Any) -> None:
    """A router loss is asked for: does the model have routers that are balanced by one?"""
    if getattr(model.config, "router_aux_loss_coef", None) is None:
        raise UsageError(
            f"model.router_aux_loss_coef: {type(model).__name__} has no load-balancing loss "
            "(it is dense, or balances its experts otherwise). Leave model.router_aux_loss_coef at 0."
        )


@torch.no_grad()
def verify_against_stock(runner: ModelRunner) -> None:
    """Compare the packed forward pass with the model's own on two short samples, before any training.

    A leak between packed samples, a head with an unknown scaling or positions that an architecture ignores would
    train the wrong thing without an error; here they stop the run. Where only sharing goes wrong, it is left out.
    """
    model: Any = runner.model
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    documents = [torch.randint(0, vocabulary, (length,), generator=generator) for length in (7, 12)]
    documents[1][:5] = documents[0][:5]  # to share
    was_training = model.training
    model.eval()
    try:
        model.set_attn_implementation("eager" if needs_eager_attention(model) else "sdpa")
        expected = [stock_hidden(model, document[None].to(device)) for document in documents]
        model.set_attn_implementation(attention.NAME)
        samples = [Sample(tokens=d.numpy().astype("int32"), mask=(torch.arange(len(d)) > 0).numpy()) for d in documents]
        found = own_hidden(runner, collate(samples, device))
        shared = shared_hidden(runner, samples, device)
    finally:
        model.set_attn_implementation(attention.NAME)
        model.train(was_training)
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    error = difference(found, expected)
    if not error < tolerance:
        raise PosttrainError(
            f"{type(model).__name__}: the packed forward pass differs from the model's own "
            f"(relative error {error:.3g}). This architecture cannot be trained packed; please report it."
        )
    runner.shares_prefixes = shared is not None and difference(shared, expected) < tolerance


def needs_eager_attention(model: Any) -> bool:
    """Families whose scores are capped: transformers computes them right only in its plain attention."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None


def has_language_head(model: Any) -> bool:
    return model.get_output_embeddings() is not None


def shared_hidden(runner: ModelRunner, samples: list[Sample], device: torch.device) -> list[torch.Tensor] | None:
    """The same with the samples' common beginning computed once; None where the device's kernel cannot do that."""
    try:
        if runner.varlen_kernel and not kernel_shares_prefixes(next(runner.model.parameters()).dtype, device):
            return None
        return own_hidden(runner, collate(samples, device, min_shared_prefix=5))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # a kernel that takes no more keys than queries
        if runner.varlen_kernel:
            return None
        raise


@torch.enable_grad()
def kernel_shares_prefixes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the ragged kernel, told of more keys than queries, gives the other route's result and gradients.

    Which key the first query stands at is the kernel's own convention, so it is tried out and not assumed.
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
            how: dict[str, Any] = {"packing": attention.packing_for(batch, varlen_kernel=varlen_kernel)}
            out, _ = attention.packed_attention(torch.nn.Module(), a, b, c, None, sliding_window=window, **how)
            found.append([out.detach(), *torch.autograd.grad(out, (a, b, c), weight.transpose(1, 2))])
        errors = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(*found, strict=True)]
        if not all(error < 0.05 for error in errors):  # max() would pass over what is not a number
            return False
    return True


def own_hidden(runner: ModelRunner, batch: MicroBatch) -> list[torch.Tensor]:
    """What `stock_hidden` gives, of each sample of a pack, by the packed forward pass."""
    hidden = runner.run_layers(batch).last_hidden_state[0]
    if runner.context is not None:
        hidden = runner.context.gather_tokens(hidden, len((batch.sharing or batch).tokens))
    if batch.sharing is not None:
        hidden = hidden[batch.sharing.place]
    return [runner.logits(part) if has_language_head(runner.model) else part for part in hidden.split(batch.lengths)]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of any sample; not a number where one is broken."""
    errors = [
        (a.float() - b.float()).abs().mean() / b.float().abs().mean().clamp(min=1e-6)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def stock_hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a language model, last hidden state of a score model, by the stock code: [T, ...]."""
    if has_language_head(model):
        return model(input_ids=ids, use_cache=False).logits[0]
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state[0]


__all__ = ["LossGradients", "ModelRunner", "check_router", "forward", "kernel_shares_prefixes", "verify_against_stock"]
