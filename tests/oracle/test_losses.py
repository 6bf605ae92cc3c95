"""Each loss and its gradient equal the slow loop's, on ragged batches with empty, single-token and cut-off answers."""

import numpy as np
import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.core.types import Outputs

from . import slow
from .batches import batch_of, per_sample_lists, random_logprobs, samples

SEEDS = range(4)

LOGPROB_LOSSES = [
    ("sft", slow.nll, {}),
    ("pretrain", slow.nll, {}),
    ("dpo", slow.dpo, {}),
    ("dpo", slow.dpo, {"beta": 0.7, "label_smoothing": 0.2}),
    ("dpo", slow.dpo, {"loss_type": "ipo", "beta": 0.3}),
    ("dpo", slow.dpo, {"loss_type": "ipo", "beta": 0.3, "length_normalize": True}),
    ("dpo", slow.dpo, {"loss_type": "hinge", "beta": 0.4}),
    ("dpo", slow.dpo, {"loss_type": "robust", "beta": 0.5, "label_smoothing": 0.3}),
    ("dpo", slow.dpo, {"sft_coef": 0.6, "length_normalize": True}),
    *(("dpo", slow.dpo, {"loss_type": name, "beta": 0.4}) for name in ("apo_zero", "apo_down", "nca_pair", "bco_pair")),
    ("dpo", slow.dpo, {"loss_type": "sppo_hard", "beta": 0.6}),
    ("dpo", slow.dpo, {"loss_type": "discopop", "beta": 0.2, "discopop_tau": 0.5}),
    ("dpo", slow.dpo, {"loss_type": "exo_pair", "beta": 0.3, "label_smoothing": 0.1}),
    ("dpo", slow.dpo, {"loss_types": ("sigmoid", "bco_pair"), "loss_weights": (0.8, 0.2), "sft_coef": 1.0}),
    *(("dpo", slow.dpo, {"f_divergence": kind, "f_alpha": 0.3}) for kind in ("forward_kl", "js_divergence")),
    ("dpo", slow.dpo, {"f_divergence": "alpha_divergence", "f_alpha": 0.3}),
    ("dpo", slow.dpo, {"ld_alpha": 0.4, "beta": 0.3}),
    ("simpo", slow.simpo, {}),
    ("simpo", slow.simpo, {"beta": 1.3, "gamma_beta_ratio": 0.4, "label_smoothing": 0.1, "sft_coef": 0.5}),
    ("simpo", slow.simpo, {"loss_type": "hinge", "gamma_beta_ratio": 0.2}),
    ("simpo", slow.simpo, {"loss_type": "ipo", "beta": 2.0}),
    ("cpo", slow.cpo, {}),
    ("cpo", slow.cpo, {"beta": 0.5, "label_smoothing": 0.15, "sft_coef": 0.3}),
    ("orpo", slow.orpo, {}),
    ("orpo", slow.orpo, {"odds_ratio_coef": 1.7}),
    ("kto", slow.kto, {}),
    ("kto", slow.kto, {"beta": 0.8, "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    ("kto", slow.kto, {"variant": "apo_zero_unpaired", "beta": 0.5}),
    ("kto", slow.kto, {"variant": "vanilla", "beta": 0.5, "length_normalize": True}),
]


def label(case):
    return case[0] + "".join(f"-{key}={value}" for key, value in case[2].items())


def algorithm(name, options):
    cls = ALGORITHMS[name]
    return cls(cls.Config(**options))


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", LOGPROB_LOSSES, ids=label)
def test_loss_and_gradient_with_respect_to_logprobs(case, seed):
    name, oracle, options = case
    rng = np.random.default_rng(seed)
    algo = algorithm(name, options)
    rows = samples(rng, algo.group_size)
    batch = batch_of(rows)
    logprobs = random_logprobs(rng, batch)
    formula_options = {key: value for key, value in options.items() if key != "variant"}

    def formula(values):
        return oracle(rows, values, **formula_options)

    loss = algo.loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()

    values = per_sample_lists(logprobs, batch)
    close(loss.item(), formula(values))
    counted = [(i, j) for i, row in enumerate(rows) for j in np.flatnonzero(row.mask).tolist()]
    expected = slow.gradient(formula, values, counted)
    found = per_sample_lists(logprobs.grad, batch)
    for i, row in enumerate(rows):
        for j in range(len(row)):
            assert found[i][j] == pytest.approx(expected.get((i, j), 0.0), rel=1e-7, abs=1e-8), (i, j)
            assert row.mask[j] or found[i][j] == 0.0, "a token that does not count has a gradient"


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_fine_tuning(seed):
    rng = np.random.default_rng(seed)
    rows = samples(rng, 1)
    batch = batch_of(rows)
    logprobs = random_logprobs(rng, batch)
    loss = algorithm("sft", {"loss_type": "dft"}).loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()
    values = per_sample_lists(logprobs, batch)
    close(loss.item(), slow.dft(rows, values))
    counted = [(i, j) for i, row in enumerate(rows) for j in np.flatnonzero(row.mask).tolist()]
    expected = slow.gradient(lambda moved: slow.dft(rows, moved, values), values, counted)
    for i, row in enumerate(per_sample_lists(logprobs.grad, batch)):
        for j, found in enumerate(row):
            assert found == pytest.approx(expected.get((i, j), 0.0), rel=1e-7, abs=1e-8)


AOT = [
    {"loss_type": "aot"},
    {"loss_type": "aot", "beta": 0.6, "label_smoothing": 0.2, "length_normalize": True},
    {"loss_type": "aot_unpaired", "beta": 0.4},
    {"loss_type": "aot_unpaired", "beta": 0.4, "label_smoothing": 0.1, "length_normalize": True},
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", AOT, ids=str)
def test_sorted_pairs_of_the_step(options, seed):
    """Ranks and partners are constants that assign_credit writes; the gradient is that of the sorted sums."""
    rng = np.random.default_rng(seed)
    algo = algorithm("dpo", options)
    rows = samples(rng, 2)
    logprobs = random_logprobs(rng, batch_of(rows))
    values = per_sample_lists(logprobs, batch_of(rows))
    for row, own in zip(rows, values, strict=True):
        row.logprobs = np.array(own)
        row.ref_logprobs = row.ref_logprobs.astype(np.float64)
    batch = batch_of(algo.assign_credit(rows))

    def formula(moved):
        return slow.aot(rows, moved, **options)

    loss = algo.loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()
    assert loss.item() == pytest.approx(formula(values), rel=1e-6)
    counted = [(i, j) for i, row in enumerate(rows) for j in np.flatnonzero(row.mask).tolist()]
    expected = slow.gradient(formula, values, counted, h=1e-5)
    found = per_sample_lists(logprobs.grad, batch)
    assert any(expected.values())
    for (i, j), value in expected.items():
        assert found[i][j] == pytest.approx(value, rel=1e-5, abs=1e-7), (i, j)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "logexp"},
        {"use_margin": True},
        {"loss_type": "logexp", "use_margin": True},
        {"center_coef": 0.3},
    ],
    ids=str,
)
def test_reward_model(options, seed):
    rng = np.random.default_rng(seed)
    algo = algorithm("reward", options)
    rows = samples(rng, 2)
    scores = torch.tensor(rng.normal(0, 2, len(rows))).requires_grad_()

    def formula(values):
        return slow.reward(rows, values[0], **options)

    loss = algo.loss(Outputs(scores=scores), batch_of(rows)).total
    loss.backward()
    close(loss.item(), formula([scores.tolist()]))
    expected = slow.gradient(formula, [scores.tolist()], [(0, j) for j in range(len(rows))])
    for j, value in enumerate(scores.grad.tolist()):
        assert value == pytest.approx(expected[0, j], rel=1e-7, abs=1e-8)


def test_reward_model_metrics():
    rng = np.random.default_rng(3)
    rows = samples(rng, 2)
    scores = rng.normal(0, 2, len(rows))
    metrics = (
        algorithm("reward", {"use_margin": True}).loss(Outputs(scores=torch.tensor(scores)), batch_of(rows)).metrics
    )
    chosen, rejected = scores[0::2].tolist(), scores[1::2].tolist()
    assert metrics["accuracy"].item() == sum(c > r for c, r in zip(chosen, rejected, strict=True))
    close(metrics["chosen_score"].item(), sum(chosen))
    close(metrics["rejected_score"].item(), sum(rejected))
    close(metrics["margin"].item(), sum(chosen) - sum(rejected))


@pytest.mark.parametrize("seed", SEEDS)
def test_process_reward_model_with_hard_and_soft_labels(seed):
    rng = np.random.default_rng(seed)
    rows = samples(rng, 1)
    batch = batch_of(rows)
    logits = torch.tensor(rng.normal(0, 2, (len(batch.counted), 2))).requires_grad_()

    def formula(values):
        normalised = [[x - np.logaddexp(*row) for x in row] for row in values]
        return slow.prm(rows, normalised)

    result = algorithm("prm", {}).loss(Outputs(choices=logits.log_softmax(-1)), batch)
    result.total.backward()
    close(result.total.item(), formula(logits.tolist()))
    where = [(i, j) for i in range(len(logits)) for j in range(2)]
    expected = slow.gradient(formula, logits.tolist(), where)
    for i, j in where:
        assert logits.grad[i, j].item() == pytest.approx(expected[i, j], rel=1e-7, abs=1e-8)

    targets = [t for row in rows for t in row.targets[row.mask].tolist()]
    agree = sum((right > wrong) == (t > 0.5) for (right, wrong), t in zip(logits.tolist(), targets, strict=True))
    assert result.metrics["accuracy"].item() == agree


@pytest.mark.parametrize("sft_coef", [0.0, 0.4])
def test_distillation_adds_up_the_divergence(sft_coef):
    rng = np.random.default_rng(0)
    algo = algorithm("distill", {"teacher": "pico", "sft_coef": sft_coef})
    rows = samples(rng, 1)
    batch = batch_of(rows)
    logprobs = random_logprobs(rng, batch)
    divergence = random_logprobs(rng, batch)
    out = Outputs(divergence=divergence, logprobs=logprobs if sft_coef else None)
    loss = algo.loss(out, batch).total
    loss.backward()
    expected = -slow.nll(rows, per_sample_lists(divergence, batch))
    expected += sft_coef * slow.nll(rows, per_sample_lists(logprobs, batch))
    close(loss.item(), expected)
    assert divergence.grad.tolist() == batch.mask.double().tolist()
    if sft_coef:
        assert logprobs.grad.tolist() == (-sft_coef * batch.mask.double()).tolist()


@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo", "orpo"])
def test_pair_metrics(name):
    """Rewards, margin, accuracy and log-probabilities are sums over pairs, and carry no gradient."""
    rng = np.random.default_rng(5)
    algo = algorithm(name, {})
    rows = samples(rng, 2)
    batch = batch_of(rows)
    logprobs = random_logprobs(rng, batch)
    metrics = algo.loss(Outputs(logprobs=logprobs), batch).metrics
    values = per_sample_lists(logprobs, batch)
    implicit = {
        "dpo": lambda row, sample: 0.1 * slow.log_ratio(sample, row),
        "simpo": lambda row, sample: 2.5 * slow.mean(row, sample.mask),
        "cpo": lambda row, sample: 0.1 * slow.total(row, sample.mask),
        "orpo": lambda row, sample: (m := min(slow.mean(row, sample.mask), -1e-6)) - np.log(1 - np.exp(m)),
    }[name]
    rewards = [implicit(row, sample) for row, sample in zip(values, rows, strict=True)]
    sums = [slow.total(row, sample.mask) for row, sample in zip(values, rows, strict=True)]
    close(metrics["chosen_reward"].item(), sum(rewards[0::2]))
    close(metrics["rejected_reward"].item(), sum(rewards[1::2]))
    close(metrics["margin"].item(), sum(rewards[0::2]) - sum(rewards[1::2]))
    assert metrics["accuracy"].item() == sum(c > r for c, r in zip(rewards[0::2], rewards[1::2], strict=True))
    close(metrics["chosen_logprob"].item(), sum(sums[0::2]))
    close(metrics["rejected_logprob"].item(), sum(sums[1::2]))
    close(
        metrics["chosen_nll"].item(),
        -sum(slow.mean(v, s.mask) for v, s in zip(values[0::2], rows[0::2], strict=True)),
    )
    assert not any(metric.requires_grad for metric in metrics.values())


def test_pairs_weighted_by_the_policy():
    """WPO: the weight is a constant, so the numbers at rest stay where they are when the gradient is taken."""
    rng = np.random.default_rng(5)
    algo = algorithm("dpo", {"weight_by_policy": True, "beta": 0.6, "sft_coef": 0.2})
    rows = samples(rng, 2)
    batch = batch_of(rows)
    logprobs = random_logprobs(rng, batch)
    loss = algo.loss(Outputs(logprobs=logprobs), batch).total
    loss.backward()
    values = per_sample_lists(logprobs, batch)

    def formula(moved):
        return slow.dpo(rows, moved, beta=0.6, sft_coef=0.2, weight_by_policy=True, at_rest=values)

    close(loss.item(), formula(values))
    assert loss.item() != pytest.approx(slow.dpo(rows, values, beta=0.6, sft_coef=0.2))
    counted = [(i, j) for i, row in enumerate(rows) for j in np.flatnonzero(row.mask).tolist()]
    expected = slow.gradient(formula, values, counted)
    found = per_sample_lists(logprobs.grad, batch)
    for (i, j), value in expected.items():
        assert found[i][j] == pytest.approx(value, rel=1e-5, abs=1e-7)
