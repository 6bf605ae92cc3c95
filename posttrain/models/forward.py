"""One forward pass over a pack, and the one place where logits and tokens are shifted against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain import ops
from posttrain.errors import PosttrainError, UsageError
from posttrain.models import attention
from posttrain.types import Batch, Outputs, Request, Sample


@dataclass(slots=True, eq=False)
class Trunk:
    """A model as the forward pass sees it: its layers, its head, and how its attention is run."""

    model: Any
    ragged_kernel: bool
    value_head: torch.nn.Linear | None = None  # on a language model that is its own critic

    @classmethod
    def of(cls, model: Any) -> Trunk:
        return cls(model, attention.has_ragged_kernel(model))

    @property
    def vocabulary(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    def hidden(self, batch: Batch, **extra: Any) -> Any:
        """The trunk's output object; last_hidden_state is [1, T, H]."""
        layers = getattr(self.model, self.model.base_model_prefix)
        return layers(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            packing=attention.layout(batch, ragged_kernel=self.ragged_kernel),
            **extra,
        )

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


def forward(trunk: Trunk, batch: Batch, request: Request, teacher: Trunk | None = None) -> Outputs:
    """Compute what the request names, at the positions that count and nowhere else."""
    extra = {"output_router_logits": True} if request.router_loss else {}
    result = trunk.hidden(batch, **extra)
    hidden = result.last_hidden_state[0]
    out = Outputs()
    before = batch.counted - 1  # hidden[i - 1] predicts tokens[i]; the first token of a sample is never counted
    if {"logprobs", "entropy"} & request.names:
        states, targets = hidden[before], batch.tokens[batch.counted]
        options = (request.drawing, request.entropy_gradient)
        logprobs, entropy = ops.token_logprobs(states, targets, trunk.logits, trunk.vocabulary, *options)
        out.logprobs, out.entropy = to_stream(logprobs, batch), to_stream(entropy, batch)
    if "divergence" in request.names:
        assert teacher is not None, "a divergence needs a teacher"
        with torch.no_grad():
            teacher_states = teacher.hidden(batch).last_hidden_state[0][before]
        divergence = ops.token_divergence(
            hidden[before],
            teacher_states,
            trunk.logits,
            teacher.logits,
            trunk.vocabulary,
            request.divergence,
            request.jsd_beta,
            request.temperature,
        )
        out.divergence = to_stream(divergence, batch)
    if "choices" in request.names:  # what the model says next, after a counted token
        out.choices = trunk.logits(hidden[batch.counted])[:, list(request.choice_ids)].log_softmax(-1)
    if "scores" in request.names:
        out.scores = trunk.model.score(hidden[batch.starts[1:].long() - 1])[:, 0].float()
    if "values" in request.names:  # of the state before a counted token
        out.values = to_stream(trunk.values(hidden[before]), batch)
    if request.router_loss:
        experts = trunk.model.config.num_experts_per_tok
        out.router_loss = ops.router_balance(result.router_logits, experts, batch.sample_of, len(batch.lengths))
    return out


def to_stream(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[M] at the counted positions -> [T], 0 elsewhere."""
    return values.new_zeros(len(batch.tokens)).index_copy(0, batch.counted, values)


def check_router(model: Any) -> None:
    """A router loss is asked for: does the model have routers that are balanced by one?"""
    if getattr(model.config, "router_aux_loss_coef", None) is None:
        raise UsageError(
            f"model.router_loss: {type(model).__name__} has no load-balancing loss "
            "(it is dense, or balances its experts otherwise). Leave model.router_loss at 0."
        )


@torch.no_grad()
def prove(trunk: Trunk) -> None:
    """Compare the packed forward pass with the model's own on two short samples, before any training.

    A leak between packed samples, a head with an unknown scaling or positions that an architecture ignores would
    train the wrong thing without an error; here they stop the run.
    """
    from posttrain.data.pack import collate

    model: Any = trunk.model
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    documents = [torch.randint(0, vocabulary, (length,), generator=generator) for length in (7, 12)]
    was_training = model.training
    model.eval()
    try:
        model.set_attn_implementation("eager" if trunk_needs_eager(model) else "sdpa")
        expected = [stock_hidden(model, document[None].to(device)) for document in documents]
        model.set_attn_implementation(attention.NAME)
        samples = [Sample(tokens=d.numpy().astype("int32"), mask=(torch.arange(len(d)) > 0).numpy()) for d in documents]
        batch = collate(samples, device)
        hidden = trunk.hidden(batch).last_hidden_state[0]
        found = [trunk.logits(part) if has_language_head(model) else part for part in hidden.split(batch.lengths)]
    finally:
        model.set_attn_implementation(attention.NAME)
        model.train(was_training)
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    for a, b in zip(found, expected, strict=True):
        error = (a.float() - b.float()).abs().mean() / b.float().abs().mean().clamp(min=1e-6)
        if not error < tolerance:
            raise PosttrainError(
                f"{type(model).__name__}: the packed forward pass differs from the model's own "
                f"(relative error {error:.3g}). This architecture cannot be trained packed; please report it."
            )


def trunk_needs_eager(model: Any) -> bool:
    """Families whose scores are capped: transformers computes them right only in its plain attention."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None


def has_language_head(model: Any) -> bool:
    return model.get_output_embeddings() is not None


def stock_hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a language model, last hidden state of a score model, by the stock code: [T, ...]."""
    if has_language_head(model):
        return model(input_ids=ids, use_cache=False).logits[0]
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state[0]


__all__ = ["Trunk", "check_router", "forward", "prove"]
