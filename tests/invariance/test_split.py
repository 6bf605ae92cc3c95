"""How a step's rows are packed, split and accumulated does not change loss, metrics or gradients, for any algorithm."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.algorithms import ALGORITHMS, OnlineAlgorithm, RolloutSettings
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError
from posttrain.core.types import ForwardRequest, Objective, Sample, SamplingDistribution, count_units
from posttrain.nn import lm_head
from posttrain.train.learner import Learner
from posttrain.train.metric_sums import add_sums, averages
from tests.tiny import tiny_folder

VARIANTS = [(verb, {}) for verb in ALGORITHMS] + [
    ("dpo", {"loss_type": "ipo", "sft_coef": 0.3}),
    ("dpo", {"loss_type": "robust", "label_smoothing": 0.1, "length_normalize": True}),
    ("dpo", {"loss_types": ("apo_down", "sppo_hard"), "loss_weights": (0.8, 0.1), "ld_alpha": 0.5}),
    ("dpo", {"weight_by_policy": True, "sft_coef": 0.2}),
    ("dpo", {"loss_type": "aot"}),
    ("dpo", {"loss_types": ("aot_unpaired", "hinge"), "loss_weights": (0.7, 0.3), "length_normalize": True}),
    ("grpo", {"kl_cov_fraction": 0.3, "kl_cov_coef": 0.5, "mini_batch_size": 4}),
    ("sft", {"loss_type": "dft"}),
    ("grpo", {"top_entropy_fraction": 0.4, "clip_cov_fraction": 0.2, "clip_cov_low": 0.01}),
    ("grpo", {"group_advantage": "length_weighted_mean", "scale_by_std": False, "mini_batch_size": 4}),
    ("kto", {"variant": "vanilla"}),
    ("kto", {"variant": "apo_zero_unpaired"}),
    ("reward", {"loss_type": "logexp", "use_margin": True, "center_coef": 0.01}),
    ("distill", {"divergence": "jsd", "sft_coef": 0.5}),
    ("grpo", {"kl_coef": 0.1, "entropy_coef": 0.05, "loss_aggregation": "sample_mean", "importance_cap": 1.05}),
    ("grpo", {"scale_by_std": False, "loss_aggregation": "fixed_length", "epochs_per_batch": 2}),
    ("grpo", {"dual_clip": 1.3, "importance_mode": "token_mask", "importance_floor": 0.9, "mini_batch_size": 4}),
    ("grpo", {"importance_mode": "sequence_truncate", "std_over": "batch", "kl_coef": 0.1, "kl_bias_correction": True}),
    ("grpo", {"importance_mode": "geometric_mask", "importance_cap": 1.02, "off_policy_mask_threshold": 0.01}),
    ("distill", {"divergence": "reverse_kl", "divergence_top_k": 5}),
    ("opd", {"divergence": "jsd", "divergence_top_k": 5, "reward_coef": 0.5, "loss_aggregation": "sample_mean"}),
    ("opd", {"divergence_clip": 0.1, "reward_coef": 0.5, "loss_aggregation": "sample_mean"}),
    ("opd", {"teacher_context_column": "hint", "divergence_top_k": 4}),
    ("opd", {"objective": "policy_gradient", "gamma": 0.5, "mini_batch_size": 4, "reward_coef": 0.5}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.05, "mini_batch_size": 4}),
    ("cispo", {"clip_high": 0.05, "mini_batch_size": 4, "kl_coef": 0.1}),
    ("reinforce", {"baseline": True, "gamma": 0.9, "mini_batch_size": 4}),
    ("ppo", {"share_critic": True, "value_loss_coef": 0.5, "loss_aggregation": "sample_mean", "kl_in": "loss"}),
]
DRAWN_FROM = SamplingDistribution(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01)
TAUGHT = ("distill", "opd")
SETTINGS = RolloutSettings(max_completion_tokens=30, distribution=DRAWN_FROM)


def rows_for(algo, seed=0, count_rows=6, alike=0):
    """Ragged rows with an empty mask and a single counted token among them; three neighbouring rows begin `alike`."""
    rng = np.random.default_rng(seed)
    samples = []
    for row in range(count_rows):
        if row % 3 == 0:
            beginning = rng.integers(3, 60, alike)
        for member in range({"pair": 2, "prompt": 3}.get(algo.example_kind, 1)):
            length = alike + int(rng.integers(3, 25))
            prompt = alike + int(rng.integers(1, length - alike))
            mask = np.arange(length) >= prompt
            if row == 1 and member == 0:
                mask[:] = False
            if row == 2:
                mask[:-1] = False
            tokens = rng.integers(3, 60, length).astype(np.int32)
            tokens[:alike] = beginning
            samples.append(
                Sample(
                    tokens=tokens,
                    mask=mask,
                    targets=(rng.random(length) * mask).astype(np.float32),
                    ref_logprobs=(-rng.random(length) * mask).astype(np.float32),
                    logprobs=(-rng.random(length) * mask).astype(np.float32),
                    values=(rng.normal(0, 1, length) * mask).astype(np.float32),
                    reward=float(rng.random()),
                    baseline=float(rng.random()),
                    label=float(row % 2),
                    margin=float(rng.random()),
                    group=row,
                )
            )
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return {name: str(tiny_folder(name, tmp_path_factory.mktemp(name))) for name in ("llama", "mixtral")}


def algorithm(verb, settings, **options):
    cls = ALGORITHMS[verb]
    return cls(cls.Config(**options), settings) if issubclass(cls, OnlineAlgorithm) else cls(cls.Config(**options))


def prepared(algo, learner=None, alike=0):
    samples = algo.prepare(rows_for(algo, alike=alike))
    if algo.online:  # policies that differ a little from the one in training
        rng = np.random.default_rng(1)
        for sample, stream in zip(
            samples, learner.logprobs(samples, distribution=algo.rollout.distribution), strict=True
        ):
            for name in ("logprobs", "ref_logprobs", *(["old_logprobs"] if algo.several_updates() else [])):
                setattr(sample, name, (stream + rng.normal(0, 0.1, len(sample)) * sample.mask).astype(np.float32))
        if (settings := algo.teachers()) is not None and settings.top_k:
            lists = learner.likeliest(samples, settings.top_k, settings.temperature)
            for sample, (tokens, logprobs) in zip(samples, lists, strict=True):  # of a teacher that is flatter
                sample.teacher_ids, sample.teacher_logprobs = tokens, (logprobs - 0.5).astype(np.float32)
    for sample in samples:
        if sample.ref_logprobs is None:
            sample.ref_logprobs = -0.1 * sample.mask.astype(np.float32)
            sample.logprobs = -0.2 * sample.mask.astype(np.float32)
    return algo.assign_credit(samples)


def gradients(learner, objective, parts, samples):
    """Loss, metrics and gradients of one step whose rows arrive in several calls."""
    denominator, tokens = count_units(samples, objective.unit), sum(map(len, samples))
    sums = [learner.forward_backward(part, objective, denominator, tokens) for part in parts]
    grads = {name: p.grad.clone() for name, p in learner.parameters().items() if p.grad is not None}
    learner.discard()
    return averages(add_sums(sums), denominator), grads


def every(variants):
    return pytest.mark.parametrize(
        ("verb", "options"), list(variants), ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
    )


EVERY_ALGORITHM = every(VARIANTS)


def made(folder, verb, options, model):
    """An algorithm, its objective and a learner for it."""
    options = options | ({"teacher": folder[model]} if verb in TAUGHT else {})
    algo = algorithm(verb, SETTINGS, **options)
    config = ModelConfig(path=folder[model], dtype="float32", router_aux_loss_coef=0.1 if model == "mixtral" else 0.0)
    teacher = ModelConfig(path=folder[model], dtype="float32") if algo.teacher_path() else None
    value_head = "values" in algo.outputs()
    learner = Learner(config, TrainConfig(), head=algo.head, teacher=teacher, value_head=value_head)
    if teacher is not None:  # a teacher that differs from the student
        with torch.no_grad():
            for parameter in learner.teacher.model.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                parameter.add_(0.1 * noise.to(parameter.device))
    request = replace(
        algo.forward_request(lambda text: {"+": 5, "-": 6}[text]), router_loss=config.router_aux_loss_coef
    )
    objective = algo.objective(request)
    return algo, objective, learner


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@EVERY_ALGORITHM
def test_split_packing_and_accumulation_do_not_matter(folder, verb, options, model):
    algo, objective, learner = made(folder, verb, options, model)
    compare(learner, objective, prepared(algo, learner))


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@EVERY_ALGORITHM
def test_neither_does_sharing(folder, verb, options, model):
    algo, objective, learner = made(folder, verb, options, model)
    samples = prepared(algo, learner, alike=20)
    learner.runner.shares_prefixes = False
    whole, expected = gradients(learner, objective, [samples], samples)
    learner.runner.shares_prefixes = True
    for budget in (100_000, 120, 60):
        learner.train_config = TrainConfig(micro_batch_tokens=budget)
        batches = learner.micro_batches(samples, objective.group_size)
        assert any(batch.sharing is not None for batch in batches), budget
        assert_same(gradients(learner, objective, [samples], samples), (whole, expected))


def in_small_chunks(algo, objective, learner, monkeypatch):
    """Gradients of the same loss with logits computed once, and twice; many chunks, some packs with padding."""
    if algo.online:
        objective = replace(
            objective, request=replace(objective.request, distribution=SamplingDistribution(temperature=0.7))
        )
    samples = prepared(algo, learner)
    learner.train_config = TrainConfig(micro_batch_tokens=60)
    learner.runner.fused_head = replace(learner.runner.fused_head, multiple=8)
    monkeypatch.setattr(lm_head, "LOGITS_PER_CPU_CHUNK", 7 * learner.runner.vocabulary_size)
    return [gradients(learner, replace(objective, separable=once), [samples], samples) for once in (True, False)]


def is_separable(verb, options):
    return algorithm(verb, SETTINGS, **options | ({"teacher": "none"} if verb in TAUGHT else {})).is_separable()


@every(variant for variant in VARIANTS if is_separable(*variant))
def test_neither_does_it_that_logits_are_computed_once(folder, verb, options, monkeypatch):
    algo, objective, learner = made(folder, verb, options, "llama")
    assert_same(*in_small_chunks(algo, objective, learner, monkeypatch))


@pytest.mark.parametrize("verb", ["gspo", "dpo", "simpo", "kto"])
def test_a_loss_that_is_falsely_called_separable_stops_the_run(folder, verb, monkeypatch):
    algo, objective, learner = made(folder, verb, {}, "llama")
    with pytest.raises(PosttrainError, match="reads the log-probabilities of other tokens"):
        in_small_chunks(algo, objective, learner, monkeypatch)


def test_a_sample_that_was_drawn_twice_counts_twice(folder):
    """PF-PPO draws with replacement: the same object may be in a batch several times, also in one micro-batch."""
    algo, objective, learner = made(folder, "ppo", {"share_critic": True}, "llama")
    samples = prepared(algo, learner, alike=20)[:6]
    twice = [*samples, samples[2], samples[2]]
    whole, expected = gradients(learner, objective, [twice], twice)
    for budget in (1, 60):
        learner.train_config = TrainConfig(micro_batch_tokens=budget)
        assert_same(gradients(learner, objective, [twice], twice), (whole, expected))
    learner.runner.shares_prefixes = False
    assert_same(gradients(learner, objective, [samples, samples[2:3], samples[2:3]], twice), (whole, expected))


def test_log_probabilities_values_and_scores_are_the_same_when_shared(folder):
    algo = ALGORITHMS["grpo"](ALGORITHMS["grpo"].Config())
    samples = rows_for(algo, alike=20)
    config, update = ModelConfig(path=folder["llama"], dtype="float32"), TrainConfig(micro_batch_tokens=120)
    policy, critic = (Learner(config, update, head=head, trainable=False) for head in ("token", "score"))

    def looks(shares):
        policy.runner.shares_prefixes = critic.runner.shares_prefixes = shares
        drawn = policy.logprobs(samples, distribution=DRAWN_FROM)
        return [*policy.logprobs(samples), *drawn, *critic.values(samples), np.array(critic.scores(samples))]

    for shared, plain in zip(looks(True), looks(False), strict=True):
        assert shared.shape == plain.shape and np.abs(plain).max() < 50
        assert np.allclose(shared, plain, atol=2e-6)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_neither_do_they_for_a_critic(folder, model):
    algo = ALGORITHMS["ppo"](ALGORITHMS["ppo"].Config())
    policy = Learner(ModelConfig(path=folder[model], dtype="float32"), TrainConfig(), trainable=False)
    samples = prepared(algo, policy)
    config = ModelConfig(path=folder[model], dtype="float32", router_aux_loss_coef=0.1 if model == "mixtral" else 0.0)
    critic = Learner(config, TrainConfig(), head="score")
    request = ForwardRequest(names=frozenset({"values"}), router_loss=config.router_aux_loss_coef)
    compare(critic, Objective(request=request, loss=algo.critic_loss, unit="token"), samples)


def compare(learner, objective, samples):
    """Loss, metrics and gradients of the samples at once, and cut, packed and ordered otherwise."""
    size = objective.group_size
    learner.train_config = TrainConfig(micro_batch_tokens=100_000)
    whole, expected = gradients(learner, objective, [samples], samples)
    assert np.isfinite(whole["loss"]) and any(g.abs().max() > 0 for g in expected.values())
    one_by_one = [samples[i : i + size] for i in range(0, len(samples), size)]
    backwards = [sample for part in reversed(one_by_one) for sample in part]
    halves = [samples[: 3 * size], samples[3 * size :]]
    for budget, parts in ((1, [samples]), (40, [samples]), (40, halves), (100_000, one_by_one), (60, [backwards])):
        learner.train_config = TrainConfig(micro_batch_tokens=budget)
        assert_same(gradients(learner, objective, parts, samples), (whole, expected))


def assert_same(found, expected):
    (means, grads), (whole, whole_grads) = found, expected
    assert means.keys() == whole.keys()
    for name in whole:
        assert means[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    assert grads.keys() == whole_grads.keys()
    for name, value in whole_grads.items():
        scale = max(1.0, float(value.abs().max()))
        error = float((grads[name] - value).abs().max())
        assert error <= 1e-6 * scale, f"{name}: {error:.2g} of {scale:.2g}"
