"""Previous spellings of our own options and what they are called now.

Command lines, YAML files, saved runs' config.yaml and Python dicts of the previous version keep working: `renamed`
turns an entry with an old name, or with a value in an old form, into entries of today. Help does not show old names.
A function of the table gets the value as a list of words: what was typed, or the items of a YAML list.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.sections import OnlineClusterConfig
from posttrain.core.errors import UsageError

Values = dict[str, Any]
"""New option -> value."""
Transform = Callable[[list[Any]], Values]

# The same value under another name. Of several new names the first that a verb has is meant.
NAMES: dict[str, str | tuple[str, ...]] = {
    "out": "output_dir",
    "steps": "train.max_steps",
    "epochs": "train.epochs",
    "model.lora_targets": "model.lora_target_modules",
    "model.router_loss": "model.router_aux_loss_coef",
    "model.checkpoint_activations": "model.gradient_checkpointing",
    "data.on_bad_row": "data.on_bad_example",
    "data.template": "data.chat_template",
    "data.max_tokens": "data.max_length",
    "data.on_long": "data.on_overlong",
    "update.rows_per_step": "train.batch_size",
    "update.tokens_per_device": "train.micro_batch_tokens",
    "update.learning_rate": "train.learning_rate",
    "update.weight_decay": "train.weight_decay",
    "update.max_grad_norm": "train.max_grad_norm",
    "update.ema_decay": "train.ema_decay",
    "eval.every": "eval.every_steps",
    "save.every": "save.every_steps",
    "save.keep": "save.max_checkpoints",
    "save.keep_gigabytes": "save.max_gigabytes",
    "cluster.ray": "cluster.ray_address",
    "rewards.weights": "reward.weights",
    "rewards.workers": "reward.workers",
    "rewards.clip": "reward.clip",
    "rewards.normalize": "reward.normalize",
}

SWITCHES = {"algo.shuffle_minibatch": "algo.shuffle_mini_batch"}  # another library's spelling, one letter apart


def renamed(key: str, value: Any, known: Collection[str]) -> Values | None:
    """The entries that stand for an old one, or None if the entry is not an old one for a verb with these options."""
    if key in known:
        form = VALUE_FORMS.get(key)
        return form(value) if form is not None else None
    if key == "cluster.layout":
        return cluster_layout([str(word) for word in words_of(value)], known)
    if key in TRANSFORMS:
        found = TRANSFORMS[key](words_of(value))
        return found if found.keys() <= set(known) else None
    new = NAMES.get(key, SWITCHES.get(key, ()))
    names = (new,) if isinstance(new, str) else new
    return next(({name: value} for name in names if name in known), None)


def renamed_settings(settings: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Settings that were stored beside results, maybe by the previous version, as section.option -> value.

    `known`: the names that these settings have now.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {}
        for key, entry in inner.items() if inner and name not in known else [(name, value)]:
            found |= renamed(key, entry, known) or {key: entry}
    return found


def words_of(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def number(key: str, word: Any) -> float:
    try:
        return float(word)
    except (TypeError, ValueError):
        raise UsageError(f"{key} is {word!r}; it must be a number.") from None


def pair(key: str, words: Sequence[Any], *names: str) -> Values:
    """Several values in one option of old."""
    if len(words) != len(names):
        raise UsageError(f"{key} is {' '.join(map(str, words))!r}; use {' and '.join(names)} instead.")
    return dict(zip(names, words, strict=True))


# Values that were spelled differently


def max_examples(option: str) -> Transform:
    """Absent was no limit; now 0 is."""

    def transform(words: list[Any]) -> Values:
        return {option: words[0] if words and words[0] not in (None, "None") else 0}

    return transform


def schedule(words: list[Any]) -> Values:
    """cosine:0.05 -> the shape and where it ends."""
    shape, colon, end = str(words[0] if len(words) == 1 else " ".join(map(str, words))).partition(":")
    ratio = number("update.schedule", end) if colon else 0.1
    return {"train.lr_scheduler": shape, "train.min_lr_ratio": ratio}


def warmup(words: list[Any]) -> Values:
    """Below 1 it was a part of all steps."""
    amount = number("update.warmup", words[0] if len(words) == 1 else words)
    if amount >= 1:
        return {"train.warmup_steps": round(amount), "train.warmup_ratio": 0.0}
    return {"train.warmup_steps": 0, "train.warmup_ratio": amount}


def betas(words: list[Any]) -> Values:
    return pair("update.betas", words, "train.adam_beta1", "train.adam_beta2")


def log_to(words: list[Any]) -> Values:
    """wandb:PROJECT -> wandb and its project."""
    places, project = [], ""
    for word in map(str, words):
        if word.startswith("wandb:"):
            project = word.removeprefix("wandb:")
        places.append("wandb" if word.startswith("wandb:") else word)
    return {"log.report_to": places, "log.wandb_project": project}


def normalize_models(words: list[Any]) -> Values:
    return {"reward.normalize": "saved" if not words or str(words[0]).lower() == "true" else "none"}


def reward_limits(words: list[Any]) -> Values:
    """Seconds, GiB and the share that may fail."""
    names = ("reward.timeout_seconds", "reward.memory_gib", "reward.max_failure_rate")
    return pair("rewards.limits", words, *names)


def overlong(words: list[Any]) -> Values:
    return pair("rewards.overlong", words, "reward.overlong_tokens", "reward.overlong_penalty")


def cluster_limits(words: list[Any]) -> Values:
    return pair("cluster.limits", words, "cluster.max_restarts", "cluster.worker_timeout_seconds")


LAYOUT_OPTIONS = {
    "devices": "devices",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "zero": "zero_stage",
}
INHERITING = ("reference", "critic", "reward")  # roles whose models are divided as all are, unless they say otherwise


def cluster_layout(words: Sequence[str], known: Collection[str]) -> Values:
    """`tp=2 rollout.devices=4 reference.devices=critic reward-1.tp=1`: what is not named has its default."""
    defaults = dataclasses.asdict(OnlineClusterConfig())
    names = (*LAYOUT_OPTIONS.values(), "colocate_with")
    layout = [name for name in defaults if name.endswith(names) and name != "devices" and f"cluster.{name}" in known]
    values: Values = {f"cluster.{name}": defaults[name] for name in layout}
    entries = dict(word.partition("=")[::2] for word in words)
    rewards: dict[str, dict[str, str]] = {}  # option -> reward or reward-N -> value
    for key, value in entries.items():
        role, _, name = key.rpartition(".")
        if not value or name not in LAYOUT_OPTIONS or (name == "devices" and role in ("", "actor")):
            raise UsageError(
                f"cluster.layout has {f'{key}={value}'.rstrip('=')!r}; use cluster.tensor_parallel_size, "
                "cluster.rollout_devices and the like instead."
            )
        option = LAYOUT_OPTIONS[name] if name != "devices" or value.isdigit() else "colocate_with"
        kind, _, index = role.partition("-")
        if kind == "rollout" and option not in ("devices", "tensor_parallel_size"):
            continue  # it had no effect
        if kind == "reward" and (index.isdigit() or not index):
            rewards.setdefault(option, {})[role] = value
        elif kind and kind != "actor":
            values[f"cluster.{kind}_{option}"] = value
        elif kind or f"actor.{name}" not in entries:
            values[f"cluster.{option}"] = value
    values |= {f"cluster.reward_{option}": reward_list(given, option) for option, given in rewards.items()}
    for name, option in LAYOUT_OPTIONS.items():
        for key in (f"cluster.{role}_{option}" for role in INHERITING):
            if f"actor.{name}" in entries and not values.get(key, "absent"):  # it is not divided as the actor is
                size = entries.get(name, "3" if name == "zero" else "1")
                values[key] = [size] if key.startswith("cluster.reward") else size
    return values


def reward_list(entries: dict[str, str], option: str) -> list[str]:
    """The values of an option of reward models, from what is said of all (`reward`) and of single ones (`reward-1`)."""
    single = {int(role.partition("-")[2]): value for role, value in entries.items() if role != "reward"}
    common = entries.get("reward", "actor" if option == "colocate_with" else "0")
    return [single.get(index, common) for index in range(max(1, *single) + 1)] if single else [common]


TRANSFORMS: dict[str, Transform] = {
    "data.max_rows": max_examples("data.max_examples"),
    "eval.max_rows": max_examples("eval.max_examples"),
    "update.schedule": schedule,
    "update.warmup": warmup,
    "update.betas": betas,
    "log.to": log_to,
    "rewards.limits": reward_limits,
    "rewards.overlong": overlong,
    "cluster.limits": cluster_limits,
    "rewards.normalize_models": normalize_models,
}


# Options that keep their name, with another form of the value. None: it has today's form.


WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?inf|nan)", re.DOTALL | re.I)


def split_weights(names: Sequence[str]) -> tuple[list[str], list[float]]:
    """`a.jsonl:0.7 b.jsonl:0.3` -> names and weights; either all have a weight or none has."""
    # A file may really be called a.jsonl:1, and C:1 is a path on a drive.
    found = [(name, None if Path(name).exists() else WEIGHT.fullmatch(name)) for name in names]
    found = [(name, match if match and len(match["name"]) > 1 else None) for name, match in found]
    weighted = [(match["name"], float(match["weight"])) for _, match in found if match]
    if weighted and len(weighted) < len(names):
        plain = next(name for name, match in found if not match)
        raise UsageError(f"{plain} has no weight, but another source has. Give all of them weights, or none.")
    return [name for name, _ in weighted] or list(names), [weight for _, weight in weighted]


def weighted_sources(value: Any) -> Values | None:
    names, weights = split_weights([str(word) for word in words_of(value)])
    return {"data.train": names, "data.weights": weights} if weights else None


def eval_part(value: Any) -> Values | None:
    """A number below 1 in place of files was the part to hold out."""
    words = words_of(value)
    try:
        numbers = [float(word) for word in words]
    except (TypeError, ValueError):
        return None
    return {"data.eval_fraction": numbers[0]} if len(numbers) == 1 else None


def dynamic_sampling(value: Any) -> Values | None:
    """The most batches of a step, 0 for no dynamic sampling."""
    words = words_of(value)
    if len(words) != 1 or isinstance(words[0], bool) or not str(words[0]).isdigit():
        return None
    batches = int(words[0])
    if not batches:
        return {"rollout.dynamic_sampling": False}
    return {"rollout.dynamic_sampling": True, "rollout.dynamic_sampling_max_batches": batches}


def engine(section: str) -> Callable[[Any], Values | None]:
    """`vllm max_num_seqs=64 inflight`: the engine, its options, and whether weights change in flight."""

    def transform(value: Any) -> Values | None:
        words = [str(word) for word in words_of(value)]
        if len(words) < 2:
            return None
        name, *rest = words
        options = dict(word.partition("=")[::2] for word in rest if word != "inflight")
        found: Values = {f"{section}.engine": name, f"{section}.vllm_options": options}
        return found | ({"rollout.inflight_updates": "inflight" in rest} if section == "rollout" else {})

    return transform


VALUE_FORMS: dict[str, Callable[[Any], Values | None]] = {
    "data.train": weighted_sources,
    "data.eval": eval_part,
    "rollout.dynamic_sampling": dynamic_sampling,
    "rollout.engine": engine("rollout"),
    "generate.engine": engine("generate"),
}
