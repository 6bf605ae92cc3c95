"""Log-probabilities and divergences of the head's logits."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl

VOCABULARY_BLOCK = 8192


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del with_entropy  # computing it costs nothing here
    rows, vocabulary = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    target_logprobs_kernel[(rows,)](
        logits, targets, found, rows, vocabulary, 1.0 / temperature, BLOCK=VOCABULARY_BLOCK, num_warps=8
    )
    return found[0], found[1], found[2]


@triton.jit(do_not_specialize=["rows", "inverse"])
def target_logprobs_kernel(logits, targets, found, rows, vocabulary, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * vocabulary
    most = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighed = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(source + column, mask=column < vocabulary, other=-1.0e30).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(z))
        mass = tl.exp(z - higher)
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(mass)
        weighed = weighed * fade + tl.sum(tl.where(mass > 0, mass * z, 0.0))
        most = higher
    normalizer = most + tl.log(total)
    target = tl.load(source + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(found + row, target - normalizer)
    tl.store(found + rows + row, normalizer - weighed / total)
    tl.store(found + 2 * rows + row, normalizer)


def target_logprobs_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    d_picked: torch.Tensor,
    d_entropy: torch.Tensor | None,
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    target_logprobs_backward_kernel[(rows, triton.cdiv(vocabulary, VOCABULARY_BLOCK))](
        logits, targets, normalizer, entropy, d_picked, d_entropy, vocabulary, 1.0 / temperature,
        ENTROPY=d_entropy is not None, BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["inverse"])
def target_logprobs_backward_kernel(
    logits, targets, normalizer, entropy, d_picked, d_entropy, vocabulary, inverse,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = logits + row * vocabulary + column
    logp = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse - tl.load(normalizer + row)
    p = tl.exp(logp)
    gradient = (tl.where(column == tl.load(targets + row), 1.0, 0.0) - p) * tl.load(d_picked + row)
    if ENTROPY:
        gradient -= tl.load(d_entropy + row) * p * (logp + tl.load(entropy + row))
    tl.store(at, (gradient * inverse).to(logits.dtype.element_ty), mask=inside)


KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


def divergence(
    logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float, kind: str, jsd_beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    found = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    divergence_kernel[(rows,)](
        logits, teacher_logits, found, rows, vocabulary, 1.0 / temperature, jsd_beta, KIND=KINDS[kind],
        BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return found[0], found[1], found[2], found[3]


@triton.jit(do_not_specialize=["rows", "inverse", "beta"])
def divergence_kernel(
    logits, teacher_logits, found, rows, vocabulary, inverse, beta, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    most = tl.full([], -1.0e30, tl.float32)
    teacher_most = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    teacher_total = tl.full([], 0.0, tl.float32)
    weighed = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        z = tl.load(logits + row * vocabulary + column, mask=inside, other=-1.0e30).to(tl.float32) * inverse
        q = tl.load(teacher_logits + row * vocabulary + column, mask=inside, other=-1.0e30).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(z))
        teacher_higher = tl.maximum(teacher_most, tl.max(q))
        mass = tl.exp(z - higher)
        teacher_mass = tl.exp(q - teacher_higher)
        fade = tl.exp(most - higher)
        teacher_fade = tl.exp(teacher_most - teacher_higher)
        total = total * fade + tl.sum(mass)
        teacher_total = teacher_total * teacher_fade + tl.sum(teacher_mass)
        if KIND == 0:
            weighed = weighed * teacher_fade + tl.sum(tl.where(teacher_mass > 0, teacher_mass * (q - z), 0.0))
        if KIND == 1:
            weighed = weighed * fade + tl.sum(tl.where(mass > 0, mass * (z - q), 0.0))
        most = higher
        teacher_most = teacher_higher
    normalizer = most + tl.log(total)
    teacher_normalizer = teacher_most + tl.log(teacher_total)
    own = tl.full([], 0.0, tl.float32)
    if KIND == 0:
        value = weighed / teacher_total - (teacher_normalizer - normalizer)
    if KIND == 1:
        value = weighed / total - (normalizer - teacher_normalizer)
        own = value
    if KIND == 2:
        value = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            z = tl.load(logits + row * vocabulary + column, mask=inside, other=0.0).to(tl.float32) * inverse
            q = tl.load(teacher_logits + row * vocabulary + column, mask=inside, other=0.0).to(tl.float32) * inverse
            logp = z - normalizer
            logq = q - teacher_normalizer
            mixture = log_mixture(logp, logq, beta)
            own += tl.sum(tl.where(inside, tl.exp(logp) * (logp - mixture), 0.0))
            value += tl.sum(tl.where(inside, tl.exp(logq) * (logq - mixture), 0.0))
        value = beta * value + (1.0 - beta) * own
    tl.store(found + row, value)
    tl.store(found + rows + row, normalizer)
    tl.store(found + 2 * rows + row, teacher_normalizer)
    tl.store(found + 3 * rows + row, own)


@triton.jit
def log_mixture(logp, logq, beta):
    """log(beta q + (1 - beta) p)"""
    higher = tl.maximum(logp, logq)
    return higher + tl.log(beta * tl.exp(logq - higher) + (1.0 - beta) * tl.exp(logp - higher))


def divergence_backward(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float,
    kind: str,
    jsd_beta: float,
    normalizer: torch.Tensor,
    teacher_normalizer: torch.Tensor,
    own: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    divergence_backward_kernel[(rows, triton.cdiv(vocabulary, VOCABULARY_BLOCK))](
        logits, teacher_logits, normalizer, teacher_normalizer, own, gradient, vocabulary, 1.0 / temperature, jsd_beta,
        KIND=KINDS[kind], BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["inverse", "beta"])
def divergence_backward_kernel(
    logits, teacher_logits, normalizer, teacher_normalizer, own, gradient, vocabulary, inverse, beta,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = row * vocabulary + column
    logp = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * inverse - tl.load(normalizer + row)
    logq = tl.load(teacher_logits + at, mask=inside, other=0.0).to(tl.float32) * inverse
    logq -= tl.load(teacher_normalizer + row)
    p = tl.exp(logp)
    if KIND == 0:
        by_logits = p - tl.exp(logq)
    if KIND == 1:
        by_logits = p * (logp - logq - tl.load(own + row))
    if KIND == 2:
        by_logits = (1.0 - beta) * p * (logp - log_mixture(logp, logq, beta) - tl.load(own + row))
    scaled = by_logits * tl.load(gradient + row) * inverse
    tl.store(logits + at, scaled.to(logits.dtype.element_ty), mask=inside)
