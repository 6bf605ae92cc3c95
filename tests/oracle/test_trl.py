"""Losses, gradients and advantages equal those of TRL's own trainers on the same random numbers (`make test-peers`).

A trainer of TRL is made without its constructor and given only what its loss reads, so that its code runs as it is.
What differs on purpose is described in docs/losses.md and not compared.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="make test-peers installs it")

from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from posttrain.algorithms import ALGORITHMS, RolloutSettings
from posttrain.algorithms.kto import DESIRABLE, MISMATCHED
from posttrain.core.types import Outputs
from posttrain.nn import logprobs as chunked

from .batches import batch_of, sample

LONGEST = 9
SEEDS = range(3)


class Accelerator:
    """One process: everything gathered is one's own."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True
    is_main_process = True

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction):
        return value

    def pad_across_processes(self, value, dim, pad_index):
        return value


class Model(torch.nn.Module):
    """Stands where a trainer asks its model for its mode."""

    is_gradient_checkpointing = False


def trainer_of(cls, **fields):
    """A trainer of TRL with these fields alone."""
    trainer = object.__new__(cls)
    common = {
        "accelerator": Accelerator(),
        "model": Model(),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    vars(trainer).update(common | fields)
    return trainer


def rows_of(rng, count, least=0):
    """Samples with random masks; those of one algorithm in TRL's order must be arranged by the caller."""
    masks = [[0, *([1] * least), *rng.integers(0, 2, rng.integers(1, LONGEST - least))] for _ in range(count)]
    masks[0] = [0, 1]
    return [sample(rng, [int(x) for x in mask]) for mask in masks]


def padded(values, rows):
    """Numbers of counted tokens, one after the other, as [B, L] with zeros behind; and the mask."""
    counts = [int(row.mask.sum()) for row in rows]
    parts = values.split(counts)
    width = max(counts)
    mask = torch.tensor([[1] * count + [0] * (width - count) for count in counts])
    return torch.stack([torch.nn.functional.pad(part, (0, width - len(part))) for part in parts]), mask


def streams(rows, name):
    """A stream of the samples at their counted tokens, one after the other."""
    return torch.tensor(np.concatenate([getattr(row, name)[row.mask] for row in rows]), dtype=torch.float64)


def own_stream(values, batch):
    """The same numbers as a stream of ours."""
    return torch.zeros(len(batch.tokens), dtype=values.dtype).index_put((batch.counted,), values)


def build(name, **options):
    cls = ALGORITHMS[name]
    rollout = (RolloutSettings(max_completion_tokens=LONGEST),) if cls.online else ()
    return cls(cls.Config(**options), *rollout)


def same(ours, theirs, values, single=False):
    """Both losses are equal, and their gradients by the log-probabilities (or whatever `values` are)."""
    near = {"rel": 2e-4, "abs": 1e-5} if single else {"rel": 1e-7, "abs": 1e-9}
    assert ours.item() == pytest.approx(theirs.item(), **near)
    gradients = [torch.autograd.grad(loss, values, retain_graph=True)[0].flatten().tolist() for loss in (ours, theirs)]
    assert gradients[0] == pytest.approx(gradients[1], **near)


# Preferences


class Policy:
    """Returns the log-probabilities that it is given, as TRL's patched models do."""

    is_gradient_checkpointing = False

    def __init__(self, logprobs):
        self.logprobs = logprobs

    def __call__(self, **inputs):
        none = torch.zeros_like(self.logprobs.detach())
        return SimpleNamespace(
            log_probs=self.logprobs,
            entropy=none,
            mean_logits=none,
            is_top1=none.bool(),
            log_sum_sq_probs=none,
        )


def pairs_of(rng, least=0):
    """Six pairs in our order, chosen and rejected next to each other, and their places in TRL's: all chosen first."""
    rows = rows_of(rng, 12, least)
    for index, row in enumerate(rows):
        row.group = index // 2
        row.logprobs = rng.uniform(-3, -0.05, len(row)).astype(np.float32)
    return rows, [*range(0, 12, 2), *range(1, 12, 2)]


DPO_CASES = [
    *(
        {"loss_type": name}
        for name in ("sigmoid", "hinge", "apo_zero", "apo_down", "nca_pair", "bco_pair", "sppo_hard")
    ),
    {"loss_type": "ipo", "length_normalize": True},
    {"loss_type": "sigmoid", "length_normalize": True},
    {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "exo_pair", "label_smoothing": 0.01},
    {"loss_type": "discopop", "discopop_tau": 0.3},
    {"loss_type": "aot"},
    {"loss_type": "aot_unpaired", "label_smoothing": 0.1},
    {"loss_types": ("sigmoid", "bco_pair", "aot"), "loss_weights": (0.8, 0.2, 0.3)},
    {"f_divergence": "forward_kl"},
    {"f_divergence": "js_divergence"},
    {"f_divergence": "alpha_divergence", "f_alpha": 0.3},
    {"f_divergence": "js_divergence", "loss_type": "hinge"},
    {"ld_alpha": 0.4},
    {"weight_by_policy": True},
]


def case(options):
    return "-".join(f"{key}={value}" for key, value in options.items()) or "default"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", DPO_CASES, ids=case)
def test_dpo(options, seed):
    rng = np.random.default_rng(seed)
    rows, order = pairs_of(rng)
    batch = batch_of(rows)
    algo = build("dpo", beta=0.3, **options)
    config, values = algo.config, streams(rows, "logprobs").requires_grad_()
    algo.assign_credit(rows)
    batch = batch_of(rows)
    ours = algo.loss(Outputs(logprobs=own_stream(values, batch)), batch).total / 6

    single = config.f_divergence == "alpha_divergence"  # TRL has no double precision there
    now, mask = padded(values, rows)
    before, _ = padded(streams(rows, "ref_logprobs"), rows)
    now, before, mask = (x[order] for x in (now.float() if single else now, before, mask))
    names = config.loss_types or (config.loss_type,)
    if config.length_normalize and names == ("sigmoid",):
        names = ("sigmoid_norm",)
    completion_mask = torch.cat([torch.zeros(12, 1, dtype=mask.dtype), mask], 1)
    inputs = {
        "input_ids": torch.ones_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }
    trainer = trainer_of(
        DPOTrainer,
        args=SimpleNamespace(discopop_tau=config.discopop_tau, gradient_checkpointing_kwargs=None),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        loss_types=list(names),
        loss_weights=list(config.loss_weights or [1.0]),
        f_divergence_type=config.f_divergence,
        f_alpha_divergence_coef=config.f_alpha,
        ld_alpha=config.ld_alpha if config.ld_alpha < 1 else None,
        use_weighting=config.weight_by_policy,
        precompute_ref_logps=False,
        ref_model=Policy(before.float() if single else before),
    )
    theirs = trainer._compute_loss(Policy(now), inputs, return_outputs=False)
    same(ours, theirs, values, single)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", ["kto", "apo_zero_unpaired"])
def test_kto(variant, seed):
    rng = np.random.default_rng(seed)
    rows, matched = rows_of(rng, 7), rows_of(rng, 7)
    for row in rows + matched:
        row.logprobs = rng.uniform(-2, -0.05, len(row)).astype(np.float32)
    for row in matched:
        row.label = MISMATCHED
    algo = build("kto", variant=variant, beta=0.3, desirable_weight=1.3, undesirable_weight=0.6)
    real = algo.assign_credit(rows + matched if variant == "kto" else rows)
    batch = batch_of(real)
    values = streams(rows, "logprobs").requires_grad_()
    ours = algo.loss(Outputs(logprobs=own_stream(values, batch)), batch).total / len(rows)

    now, mask = padded(values, rows)
    other, other_mask = padded(streams(matched, "logprobs"), matched)
    sums = [padded(streams(part, "ref_logprobs"), part)[0].sum(1) for part in (rows, matched)]
    wide = [torch.cat([torch.zeros(7, 1, dtype=part.dtype), part], 1) for part in (mask, other_mask)]
    inputs = {
        "input_ids": torch.ones_like(wide[0]),
        "attention_mask": torch.ones_like(wide[0]),
        "completion_mask": wide[0],
        "KL_input_ids": torch.full_like(wide[1], 2),
        "KL_attention_mask": torch.ones_like(wide[1]),
        "KL_completion_mask": wide[1],
        "label": torch.tensor([row.label == DESIRABLE for row in rows]),
        "ref_logps": sums[0],
        "ref_KL_logps": sums[1],
    }

    def model(**given):
        return Policy(other if int(given["input_ids"][0, 0]) == 2 else now)()

    trainer = trainer_of(
        KTOTrainer,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.6,
        loss_type=variant,
        calculate_KL=variant == "kto",
        precompute_ref_logps=True,
    )
    same(ours, trainer._compute_loss(model, inputs, return_outputs=False), values)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cpo", {"loss_type": "sigmoid", "label_smoothing": 0.1}),
        ("cpo", {"loss_type": "hinge"}),
        ("cpo", {"loss_type": "ipo"}),
        ("simpo", {"gamma_beta_ratio": 0.4}),
        ("simpo", {"gamma_beta_ratio": 1.4, "label_smoothing": 0.2}),
    ],
    ids=str,
)
def test_cpo_and_simpo(name, options, seed):
    """The loss on the margin; TRL averages the SFT term over the tokens of the batch, here it is left out."""
    rng = np.random.default_rng(seed)
    rows, order = pairs_of(rng)
    batch = batch_of(rows)
    values = streams(rows, "logprobs").requires_grad_()
    algo = build(name, beta=0.7, sft_coef=0.0, **options)
    ours = algo.loss(Outputs(logprobs=own_stream(values, batch)), batch).total / 6
    now, mask = padded(values, rows)
    sums = (now.sum(1) / mask.sum(1).clamp(min=1) if name == "simpo" else now.sum(1))[order]
    trainer = trainer_of(
        CPOTrainer,
        alpha=0.0,
        beta=0.7,
        loss_type="simpo" if name == "simpo" else algo.config.loss_type,
        label_smoothing=algo.config.label_smoothing,
        simpo_gamma=0.7 * options.get("gamma_beta_ratio", 0.0),
    )
    same(ours, trainer.cpo_loss(*sums.chunk(2))[0].mean(), values)


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo(seed):
    """The odds-ratio term; TRL's SFT term also covers the prompt. Completions without tokens are NaN there."""
    rng = np.random.default_rng(seed)
    rows, order = pairs_of(rng, least=1)
    batch = batch_of(rows)
    values = streams(rows, "logprobs").requires_grad_()
    whole = build("orpo", odds_ratio_coef=0.6).loss(Outputs(logprobs=own_stream(values, batch)), batch).total
    nll = build("orpo", odds_ratio_coef=0.0).loss(Outputs(logprobs=own_stream(values, batch)), batch).total
    now, mask = padded(values, rows)
    means = (now.sum(1) / mask.sum(1))[order]
    trainer = trainer_of(ORPOTrainer, beta=0.6)
    same((whole - nll) / 6, -trainer.odds_ratio_loss(*means.chunk(2))[0].mean(), values, single=True)


# Reinforcement learning

AGGREGATION = {"grpo": "sample_mean", "sapo": "sample_mean", "bnpo": "token_mean", "dapo": "token_mean"}
POLICY_CASES = [
    ("grpo", "grpo", {}),
    ("grpo", "bnpo", {}),
    ("grpo", "dapo", {"clip_low": 0.1, "clip_high": 0.28}),
    ("grpo", "dr_grpo", {}),
    ("grpo", "dapo", {"dual_clip": 1.4}),
    ("grpo", "dapo", {"kl_coef": 0.3}),
    ("grpo", "grpo", {"kl_coef": 0.3, "kl_bias_correction": True}),
    ("grpo", "bnpo", {"off_policy_mask_threshold": 0.05}),
    ("grpo", "bnpo", {"entropy_coef": 0.2}),
    ("gspo", "grpo", {"clip_low": 0.05, "clip_high": 0.1}),
    ("gspo", "luspo", {"clip_low": 0.05, "clip_high": 0.1}),
    ("cispo", "cispo", {"clip_high": 0.2}),
    ("sapo", "sapo", {"temperature_positive": 3.0, "temperature_negative": 5.0}),
    *(
        ("grpo", "bnpo", {"importance_mode": mode, "importance_cap": cap, "importance_floor": floor})
        for mode, cap, floor in [
            ("token_truncate", 1.1, 0.9),
            ("token_mask", 1.2, 0.8),
            ("sequence_truncate", 1.3, 0.5),
            ("sequence_mask", 1.5, 0.4),
        ]
    ),
    ("gmpo", "gmpo", {"clip_low": 0.1, "clip_high": 0.15}),
    ("gmpo", "gmpo", {"kl_coef": 0.2}),
]


def rollout_of(rng, count=8, per_token=True):
    rows = rows_of(rng, count, least=1)
    for row in rows:
        n = len(row)
        row.logprobs = rng.uniform(-2, -0.1, n).astype(np.float32)
        row.old_logprobs = row.logprobs + rng.uniform(-0.3, 0.3, n).astype(np.float32)
        row.advantages = (rng.normal(0, 1, n) if per_token else np.full(n, rng.normal())).astype(np.float32)
    return rows


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "loss_type", "options"), POLICY_CASES, ids=str)
def test_policy_gradient(name, loss_type, options, seed):
    rng = np.random.default_rng(seed)
    rows = rollout_of(rng, per_token=name not in ("gspo", "gmpo"))
    batch = batch_of(rows)
    count, tokens = len(rows), int(batch.mask.sum())
    aggregation = {"dr_grpo": "fixed_length", "luspo": "fixed_length", "gmpo": "sample_mean", "cispo": "token_mean"}
    algo = build(
        name,
        **{"importance_cap": 0.0, "loss_aggregation": (AGGREGATION | aggregation)[loss_type]} | options,
    )
    config = algo.config
    old = streams(rows, "old_logprobs")
    values = (old + torch.tensor(rng.normal(0, 0.2, len(old)))).requires_grad_()
    entropy = torch.tensor(rng.uniform(0, 2, len(old)))
    out = Outputs(logprobs=own_stream(values, batch), entropy=own_stream(entropy, batch))
    total = algo.loss(out, batch).total
    ours = total / (tokens if config.loss_aggregation == "token_mean" else count)
    if loss_type == "luspo":
        ours = ours * LONGEST  # up to a constant it is gspo without division by the length

    now, mask = padded(values, rows)
    chaos, _ = padded(entropy, rows)
    before, advantages, reference, sampled = (
        padded(streams(rows, field), rows)[0] for field in ("old_logprobs", "advantages", "ref_logprobs", "logprobs")
    )
    inputs = {
        "prompt_ids": torch.ones(count, 1, dtype=torch.long),
        "prompt_mask": torch.ones(count, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": advantages[:, 0] if name in ("gspo", "gmpo") else advantages,
        "old_per_token_logps": before,
        "ref_per_token_logps": reference,
        "sampling_per_token_logps": sampled,
        "num_items_in_batch": mask.sum(),
    }
    weighted = config.importance_cap > 0
    if weighted:
        inputs["importance_sampling_ratio"] = scored(
            rows,
            before,
            sampled,
            mask,
            mode=config.importance_mode,
            low=config.importance_floor,
            high=config.importance_cap,
        )["importance_sampling_ratio"]
    trainer = trainer_of(
        GMPOTrainer if name == "gmpo" else GRPOTrainer,
        args=SimpleNamespace(
            delta=config.dual_clip or None,
            use_bias_correction_kl=config.kl_bias_correction,
            sapo_temperature_pos=getattr(config, "temperature_positive", 1.0),
            sapo_temperature_neg=getattr(config, "temperature_negative", 1.0),
            steps_per_generation=1,
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=config.off_policy_mask_threshold or None,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        beta=config.kl_coef,
        loss_type=loss_type,
        epsilon_low=config.clip_low,
        epsilon_high=1 + config.clip_high if name == "cispo" else config.clip_high,
        use_vllm=weighted,
        vllm_importance_sampling_correction=weighted,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=config.entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy_coef,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (now, chaos, None),
    )
    same(ours, trainer._compute_loss(None, inputs), values)


def scored(rows, before, sampled, mask, rewards=None, weights=None, cls=GRPOTrainer, **options):
    """What TRL computes of finished completions, by its own code: importance weights and advantages."""
    count = len(rows)
    rewards = torch.zeros(count, 1, dtype=torch.float64) if rewards is None else rewards
    lengths = mask.sum(1).tolist()
    ids = [[1] * length for length in lengths]
    logps = [row[:length].tolist() for row, length in zip(sampled, lengths, strict=True)]
    generated = ([[1]] * count, ids, None, [""] * count, logps, {}, None, None)
    fields = {
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "use_vllm": cls is GRPOTrainer,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": options.get("mode", "token_truncate"),
        "vllm_importance_sampling_clip_min": options.get("low", 0.0),
        "vllm_importance_sampling_clip_max": options.get("high", 2.0),
        "num_iterations": 1,
        "beta": 0.0,
        "num_generations": options.get("group", count),
        "multi_objective_aggregation": options.get("aggregation", "sum_then_normalize"),
        "scale_rewards": options.get("scale", "group"),
        "normalize_advantages": options.get("normalize", False),
        "reward_weights": torch.tensor([1.0] * rewards.shape[1] if weights is None else weights, dtype=torch.float64),
        "reward_funcs": [None] * rewards.shape[1],
        "reward_func_names": [str(index) for index in range(rewards.shape[1])],
        "reward_clip_range": None,
        "log_multimodal": False,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "args": SimpleNamespace(
            per_device_train_batch_size=count,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        "_generate": lambda prompts: generated if cls is GRPOTrainer else (generated[0], ids, generated[3]),
        "_calculate_rewards": lambda *args: rewards,
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (before, None, None),
    }
    trainer = trainer_of(cls, **fields)
    return trainer._generate_and_score_completions([{"prompt": "p"} for _ in rows])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("grpo", {}, {}),
        ("grpo", {"scale_by_std": False}, {"scale": "none"}),
        ("grpo", {"std_over": "batch"}, {"scale": "batch"}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, {"aggregation": "normalize_then_sum"}),
    ],
    ids=str,
)
def test_advantages_of_several_rewards(name, options, theirs, seed):
    """Two rewards with weights, one of which does not apply everywhere."""
    rng = np.random.default_rng(seed)
    rows = rollout_of(rng)
    rewards = rng.normal(0, 1, (8, 2))
    rewards[3, 1] = math.nan
    weights = [0.7, 1.9]
    for index, row in enumerate(rows):
        row.group = index // 4
        row.reward = float(np.nansum(rewards[index] * weights))
        row.reward_terms = tuple((w, r) for w, r in zip(weights, rewards[index], strict=True))
    algo = build(name, std_epsilon=1e-4, **options)
    algo.assign_credit(rows)
    before, mask = padded(streams(rows, "old_logprobs"), rows)
    found = scored(rows, before, before, mask, torch.tensor(rewards), weights, group=4, **theirs)["advantages"]
    assert [float(row.advantages[row.mask][0]) for row in rows] == pytest.approx(found.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_advantages(normalize, seed):
    rng = np.random.default_rng(seed)
    rows = rollout_of(rng)
    for index, row in enumerate(rows):
        row.group, row.reward = index // 4, float(rng.normal())
    build("rloo", kl_coef=0.0, normalize_advantages=normalize).assign_credit(rows)
    before, mask = padded(streams(rows, "old_logprobs"), rows)
    rewards = torch.tensor([[row.reward] for row in rows], dtype=torch.float64)
    found = scored(rows, before, before, mask, rewards, cls=RLOOTrainer, group=4, normalize=normalize)["advantages"]
    assert [float(row.advantages[row.mask][0]) for row in rows] == pytest.approx(found.tolist(), rel=1e-3, abs=1e-4)


# Distributions


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3), ("jsd", 0.5)])
def test_divergences(kind, beta, temperature):
    rng = np.random.default_rng(0)
    student = torch.tensor(rng.normal(0, 2, (7, 11))).requires_grad_()
    teacher = torch.tensor(rng.normal(0, 2, (7, 11)))
    ours = chunked.token_divergence(student, teacher, lambda x: x, lambda x: x, 11, kind, beta or 0.5, temperature, 0)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=temperature, reduction="sum")
    same(ours.sum(), theirs, student)
