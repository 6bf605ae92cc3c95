"""How a step's rows are packed, split and accumulated does not change loss, metrics or gradients, for any algorithm."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.algos import ALGORITHMS
from posttrain.config import ModelConfig, UpdateConfig
from posttrain.learner import Learner
from posttrain.runtime.base import add_up, averages
from posttrain.types import Objective, Sample, count
from tests.tiny import tiny_folder

VARIANTS = [(verb, {}) for verb in ALGORITHMS] + [
    ("dpo", {"loss": "ipo", "pref_ftx": 0.3}),
    ("dpo", {"loss": "robust", "label_smoothing": 0.1, "length_normalize": True}),
    ("kto", {"variant": "vanilla"}),
    ("reward", {"loss": "logexp", "use_margin": True, "center": 0.01}),
    ("distill", {"divergence": "jsd", "sft_weight": 0.5}),
]


def rows_for(algo, seed=0, count_rows=6):
    """Ragged rows with an empty mask and a single counted token among them."""
    rng = np.random.default_rng(seed)
    samples = []
    for row in range(count_rows):
        for member in range(2 if algo.rows == "pair" else 1):
            length = int(rng.integers(3, 25))
            prompt = int(rng.integers(1, length))
            mask = np.arange(length) >= prompt
            if row == 1 and member == 0:
                mask[:] = False
            if row == 2:
                mask[:-1] = False
            samples.append(
                Sample(
                    tokens=rng.integers(3, 60, length).astype(np.int32),
                    mask=mask,
                    targets=(rng.random(length) * mask).astype(np.float32),
                    ref_logprobs=(-rng.random(length) * mask).astype(np.float32),
                    logprobs=(-rng.random(length) * mask).astype(np.float32),
                    label=float(row % 2),
                    margin=float(rng.random()),
                    group=row,
                )
            )
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return {name: str(tiny_folder(name, tmp_path_factory.mktemp(name))) for name in ("llama", "mixtral")}


def prepared(algo):
    samples = algo.prepare(rows_for(algo))
    for sample in samples:
        if sample.ref_logprobs is None:
            sample.ref_logprobs = -0.1 * sample.mask.astype(np.float32)
            sample.logprobs = -0.2 * sample.mask.astype(np.float32)
    return algo.score(samples)


def gradients(learner, objective, parts, samples):
    """Loss, metrics and gradients of one step whose rows arrive in several calls."""
    denominator, tokens = count(samples, objective.unit), sum(map(len, samples))
    sums = [learner.forward_backward(part, objective, denominator, tokens) for part in parts]
    grads = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
    learner.discard()
    return averages(add_up(sums), denominator), grads


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("verb", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
)
def test_split_packing_and_accumulation_do_not_matter(folder, verb, options, model):
    options = options | ({"teacher": folder[model]} if verb == "distill" else {})
    algo = ALGORITHMS[verb](ALGORITHMS[verb].Config(**options))
    config = ModelConfig(path=folder[model], dtype="float32", router_loss=0.1 if model == "mixtral" else 0.0)
    teacher = ModelConfig(path=folder[model], dtype="float32") if verb == "distill" else None
    learner = Learner(config, UpdateConfig(), head=algo.head, teacher=teacher)
    if teacher is not None:  # a teacher that differs from the student
        with torch.no_grad():
            for parameter in learner.teacher.model.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                parameter.add_(0.1 * noise.to(parameter.device))
    request = replace(algo.request(lambda text: {"+": 5, "-": 6}[text]), router_loss=config.router_loss)
    objective = Objective(request=request, loss=algo.loss, unit=algo.unit, group_size=algo.group_size)
    samples = prepared(algo)
    size = algo.group_size

    learner.update = UpdateConfig(tokens_per_device=100_000)
    whole, expected = gradients(learner, objective, [samples], samples)
    assert np.isfinite(whole["loss"]) and any(g.abs().max() > 0 for g in expected.values())
    one_by_one = [samples[i : i + size] for i in range(0, len(samples), size)]
    backwards = [sample for part in reversed(one_by_one) for sample in part]
    halves = [samples[: 3 * size], samples[3 * size :]]
    for budget, parts in ((1, [samples]), (40, [samples]), (40, halves), (100_000, one_by_one), (60, [backwards])):
        learner.update = UpdateConfig(tokens_per_device=budget)
        means, found = gradients(learner, objective, parts, samples)
        assert means.keys() == whole.keys()
        for name in whole:
            assert means[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
        assert found.keys() == expected.keys()
        for name in expected:
            scale = max(1.0, float(expected[name].abs().max()))
            error = float((found[name] - expected[name]).abs().max())
            assert error <= 1e-6 * scale, f"{name}: {error:.2g} of {scale:.2g}"
