"""What must hold of the losses whatever the numbers: symmetries, zeros, sums over parts, finite extremes."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.types import Loss, Outputs

from .batches import batch_of, random_logprobs, sample, samples

PAIRWISE = ["dpo", "simpo", "cpo", "orpo"]


def algorithm(name, **options):
    cls = ALGORITHMS[name]
    if name == "distill":
        options = {"teacher": "pico", "sft_coef": 0.5} | options
    if name == "opd":
        options = {"teacher": "pico"} | options
    return cls(cls.Config(**options))


def pair_with_log_ratios(chosen: float, rejected: float):
    """A pair of one-token answers with these log-ratios."""
    rng = np.random.default_rng(0)
    rows = [sample(rng, [0, 1]), sample(rng, [0, 1])]
    batch = batch_of(rows)
    offsets = torch.tensor([0.0, chosen, 0.0, rejected], dtype=torch.float64)
    return (batch.ref_logprobs + offsets).requires_grad_(), batch


def loss_of(algo, logprobs, batch) -> float:
    return algo.loss(Outputs(logprobs=logprobs), batch).total.item()


def random_outputs(rng, batch) -> Outputs:
    return Outputs(
        logprobs=random_logprobs(rng, batch),
        divergence=random_logprobs(rng, batch),
        scores=torch.tensor(rng.normal(0, 2, len(batch.lengths))),
        choices=torch.tensor(rng.normal(0, 2, (len(batch.counted), 2))).log_softmax(-1),
        entropy=random_logprobs(rng, batch),
    )


@pytest.mark.parametrize("beta", [0.01, 0.1, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 0.5])
def test_dpo_without_a_margin_costs_log_2(beta, smoothing):
    logprobs, batch = pair_with_log_ratios(0.7, 0.7)
    found = loss_of(algorithm("dpo", beta=beta, label_smoothing=smoothing), logprobs, batch)
    assert found == pytest.approx(math.log(2), rel=1e-12)


def test_smoothing_of_one_half_does_not_know_which_answer_is_better():
    algo = algorithm("dpo", label_smoothing=0.5, beta=0.9)
    assert loss_of(algo, *pair_with_log_ratios(1.3, -0.4)) == pytest.approx(
        loss_of(algo, *pair_with_log_ratios(-0.4, 1.3)), rel=1e-12
    )


def test_robust_dpo_is_unbiased_under_flipped_labels():
    """(1 - e) L(m) + e L(-m) is the loss that clean labels would give."""
    robust = algorithm("dpo", loss_type="robust", label_smoothing=0.3, beta=0.9)
    kept, flipped = loss_of(robust, *pair_with_log_ratios(1.3, -0.4)), loss_of(robust, *pair_with_log_ratios(-0.4, 1.3))
    clean = loss_of(algorithm("dpo", beta=0.9), *pair_with_log_ratios(1.3, -0.4))
    assert 0.7 * kept + 0.3 * flipped == pytest.approx(clean, rel=1e-12)


@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_ipo_is_zero_with_zero_gradient_at_its_target_margin(beta):
    logprobs, batch = pair_with_log_ratios(1 / (2 * beta) + 0.2, 0.2)
    loss = algorithm("dpo", loss_type="ipo", beta=beta).loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-20)
    assert logprobs.grad.abs().max().item() == pytest.approx(0, abs=1e-9)


def test_simpo_reaches_log_2_at_its_target_margin():
    """With means 1.4 apart the target margin is just met, whatever the lengths."""
    rng = np.random.default_rng(0)
    batch = batch_of([sample(rng, [0, 1, 1, 1]), sample(rng, [0, 0, 1])])
    logprobs = torch.tensor([0, -0.1, -0.5, -0.3, 0, 0, -1.7], dtype=torch.float64)
    assert loss_of(algorithm("simpo"), logprobs, batch) == pytest.approx(math.log(2), rel=1e-12)


def test_sigmoid_and_logexp_are_one_loss():
    rng = np.random.default_rng(1)
    batch = batch_of(samples(rng, 2))
    scores = torch.tensor(rng.normal(0, 300, len(batch.lengths)))  # far beyond where exp overflows a float32
    results = [
        algorithm("reward", loss_type=loss, use_margin=True).loss(Outputs(scores=scores), batch).total.item()
        for loss in ("sigmoid", "logexp")
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-12)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_batch_is_the_sum_of_its_parts(name):
    """Loss, metrics and gradients: the split into packs cannot matter. (KTO's baseline is set beforehand.)"""
    rng = np.random.default_rng(2)
    algo = algorithm(name)
    rows = samples(rng, algo.group_size)
    if algo.online:
        for row in rows:
            row.logprobs, row.old_logprobs, row.advantages = (
                rng.uniform(-2, -0.1, len(row)).astype(np.float32) for _ in range(3)
            )
    batch = batch_of(rows)
    out = random_outputs(rng, batch)
    whole = algo.loss(out, batch)

    parts: list[Loss] = []
    starts, steps = batch.starts.tolist(), [int(row.mask.sum()) for row in rows]
    for first in range(0, len(rows), algo.group_size):
        last = first + algo.group_size
        tokens = slice(starts[first], starts[last])
        part = Outputs(
            logprobs=out.logprobs[tokens],
            divergence=out.divergence[tokens],
            scores=out.scores[first:last],
            choices=out.choices[sum(steps[:first]) : sum(steps[:last])],
            entropy=out.entropy[tokens],
        )
        parts.append(algo.loss(part, batch_of(rows[first:last])))

    assert sum(part.total for part in parts).item() == pytest.approx(whole.total.item(), rel=1e-12)
    for key, value in whole.metrics.items():
        for k, component in enumerate(value if isinstance(value, tuple) else (value,)):
            found = [p.metrics[key][k] if isinstance(value, tuple) else p.metrics[key] for p in parts]
            joined = max(found) if key.startswith("largest_") else sum(found)
            assert joined.item() == pytest.approx(component.item(), rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize("name", [*PAIRWISE, "kto", "sft"])
def test_a_batch_without_a_counted_token_is_finite_and_has_a_gradient_path(name):
    """Another rank may have tokens: the loss must still be a number that backward() accepts."""
    rng = np.random.default_rng(0)
    algo = algorithm(name)
    batch = batch_of([sample(rng, [0, 0]), sample(rng, [0])])
    logprobs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = algo.loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extreme", [(-5e3, -1e-9), (-1e-9, -5e3), (0.0, 0.0)])
@pytest.mark.parametrize("name", [*PAIRWISE, "kto"])
def test_extreme_probabilities_stay_finite(name, extreme, dtype):
    rng = np.random.default_rng(0)
    batch = batch_of([sample(rng, [0, 1]), sample(rng, [0, 1])])
    logprobs = torch.tensor([0, extreme[0], 0, extreme[1]], dtype=dtype, requires_grad=True)
    loss = algorithm(name).loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.isfinite().all()


def test_every_verb_is_registered_and_its_defaults_are_options():
    assert set(ALGORITHMS) == {
        *("pretrain", "sft", "reward", "prm", "dpo", "kto", "simpo", "orpo", "cpo", "distill"),
        *("grpo", "gspo", "gmpo", "cispo", "sapo", "rloo", "reinforce", "remax", "ppo", "opd"),
    }
    for cls in ALGORITHMS.values():
        sections = {f.name: f.default_factory for f in dataclasses.fields(OnlineConfig if cls.online else Config)}
        for key, value in cls.defaults.items():
            section, option = key.split(".")
            known = {field.name: field for field in dataclasses.fields(sections[section]())}
            assert isinstance(value, type(known[option].default)), key
