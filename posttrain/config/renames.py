"""Previous spellings of our own options and what they are called now.

Command lines, YAML files, saved runs' config.yaml and Python dicts of the previous version keep working: `renamed`
turns an entry with an old name, or with a value in an old form, into entries of this version. Help does not show old
names. A function of the table gets the value as a list of words: what was typed, or the items of a YAML list.
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

AGGREGATIONS = {"token": "token_mean", "sample": "sample_mean", "length": "fixed_length"}
"""Previous values of algo.loss_aggregation."""

# The same value under another name. Of several new names the first that a verb has is meant.
NAMES: dict[str, str | tuple[str, ...]] = {
    "log.wandb_project": "log.project",
    "log.wandb_name": "log.run_name",
    "log.wandb_dir": "log.tracker_dir",
    "out": "output_dir",
    "steps": "train.max_steps",
    "profile": "train.profile_steps",
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
    "reward": "reward.functions",
    "score.weights": "reward.weights",
    "score.timeout_seconds": "reward.timeout_seconds",
    "score.memory_gib": "reward.memory_gib",
    "score.workers": "reward.workers",
    "score.max_failure_rate": "reward.max_failure_rate",
    "score.template": "reward.model_chat_template",
    "prompts": "prompts_per_iteration",
    "generate.n": "generate.samples_per_prompt",
    "generate.batch": "generate.batch_size",
    "eval.n": "eval.samples_per_prompt",
    "rewards.weights": "reward.weights",
    "rewards.workers": "reward.workers",
    "rewards.clip": "reward.clip",
    "rewards.normalize": "reward.normalize",
    "algo.kl": "algo.kl_coef",
    "algo.entropy": "algo.entropy_coef",
    "algo.loss": "algo.loss_type",
    "algo.pref_ftx": "algo.sft_coef",
    "algo.sft_weight": "algo.sft_coef",
    "algo.center": "algo.center_coef",
    "algo.odds_weight": "algo.odds_ratio_coef",
    "algo.whiten": "algo.whiten_advantages",
}

# The same for options of tools, which have no section. A name may still be one of another tool.
TOOL_NAMES: dict[str, str | tuple[str, ...]] = {
    "out": ("output_dir", "output_file"),
    "n": "samples_per_prompt",
    "batch": "batch_size",
    "template": "chat_template",
    "max_rows": "max_examples",
    "max_prompt_tokens": "max_prompt_length",
    "max_tokens": "max_length",  # of score, which generates nothing
    "on_long": "on_overlong",
    "on_bad_row": "on_bad_example",
    "weights": "reward_weights",
    "right": "pass_threshold",
    "shown": "show_failures",
    # data check, with the names of training
    "verb": "trainer",
    "model.path": "model",
    "model.tokenizer": "tokenizer",
    "data.max_length": "max_length",
    "data.max_tokens": "max_length",
    "data.on_overlong": "on_overlong",
    "data.on_long": "on_overlong",
    "data.map_keys": "map_keys",
    "data.chat_template": "chat_template",
    "data.template": "chat_template",
    "algo.placeholder": "placeholder",
    # convert, inspect and diff
    "folder": "path",
    "rows": "max_tensors",
    "from": "source_format",
    "to": "target_format",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "cp": "context_parallel_size",
    "vpp": "layers_per_virtual_stage",
    "engine": "transformer_engine",
    "source_ep": "source_expert_parallel_size",
    # cluster up
    "memory": "object_store_mib",
}
PREVIOUS_SWITCHES = {"greedy"}
"""Previous options without a value that do not exist as switches any more."""
PREVIOUS_LISTS = {"engine"}
"""Options that have one value now, and previously took key=value pairs after it."""

SWITCHES = {"algo.shuffle_minibatch": "algo.shuffle_mini_batch"}  # another library's spelling, one letter apart


def renamed(key: str, value: Any, known: Collection[str]) -> Values | None:
    """Return the entries that replace an old one; None if the entry is not an old one for a verb with these options."""
    if key in known:
        form = VALUE_FORMS.get(key)
        changed = form(value) if form is not None else None
        return changed if changed is not None and changed.keys() <= set(known) else None
    if key == "cluster.layout":
        return cluster_layout([str(word) for word in as_list(value)], known)
    if key in TRANSFORMS:
        found = TRANSFORMS[key](as_list(value))
        return found if found.keys() <= set(known) else None
    return next(({name: value} for name in new_names(key) if name in known), None)


def new_names(key: str) -> tuple[str, ...]:
    """Return what an old name may stand for; it depends on the verb."""
    found = [table[key] for table in (TOOL_NAMES, NAMES, SWITCHES) if key in table]
    return tuple(name for new in found for name in ((new,) if isinstance(new, str) else new))


def renamed_settings(settings: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return settings that were stored beside results, maybe by the previous version, as section.option -> value.

    `known`: the names that these settings have now.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {}
        for key, entry in inner.items() if inner and name not in known else [(name, value)]:
            found |= renamed(key, entry, known) or {key: entry}
    return found


def as_list(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def parse_number(key: str, word: Any) -> float:
    try:
        return float(word)
    except (TypeError, ValueError):
        raise UsageError(f"{key} is {word!r}; it must be a number.") from None


def pair(key: str, words: Sequence[Any], *names: str) -> Values:
    """Split the values of a previous option that held several."""
    if len(words) != len(names):
        raise UsageError(f"{key} is {' '.join(map(str, words))!r}; use {' and '.join(names)} instead.")
    return dict(zip(names, words, strict=True))


# Values that were spelled differently


def max_examples(option: str) -> Transform:
    """Translate a limit that was absent where there was none; it is 0 now."""

    def transform(words: list[Any]) -> Values:
        return {option: words[0] if words and words[0] not in (None, "None") else 0}

    return transform


def schedule(words: list[Any]) -> Values:
    """Translate cosine:0.05: the shape of the schedule, and the ratio at its end."""
    shape, colon, end = str(words[0] if len(words) == 1 else " ".join(map(str, words))).partition(":")
    ratio = parse_number("update.schedule", end) if colon else 0.1
    return {"train.lr_scheduler": shape, "train.min_lr_ratio": ratio}


def warmup(words: list[Any]) -> Values:
    """Translate a number of steps or, below 1, a share of all steps."""
    amount = parse_number("update.warmup", words[0] if len(words) == 1 else words)
    if amount >= 1:
        return {"train.warmup_steps": round(amount), "train.warmup_ratio": 0.0}
    return {"train.warmup_steps": 0, "train.warmup_ratio": amount}


def betas(words: list[Any]) -> Values:
    return pair("update.betas", words, "train.adam_beta1", "train.adam_beta2")


def log_to(words: list[Any]) -> Values:
    """Translate wandb:PROJECT to wandb and its project."""
    places, project = [], ""
    for word in map(str, words):
        if word.startswith("wandb:"):
            project = word.removeprefix("wandb:")
        places.append("wandb" if word.startswith("wandb:") else word)
    return {"log.report_to": places, "log.project": project}


def normalize_models(words: list[Any]) -> Values:
    return {"reward.normalize": "saved" if not words or str(words[0]).lower() == "true" else "none"}


def reward_limits(words: list[Any]) -> Values:
    """Translate the triple of seconds, GiB and share that may fail."""
    names = ("reward.timeout_seconds", "reward.memory_gib", "reward.max_failure_rate")
    return pair("rewards.limits", words, *names)


def overlong(words: list[Any]) -> Values:
    return pair("rewards.overlong", words, "reward.overlong_tokens", "reward.overlong_penalty")


def cluster_limits(words: list[Any]) -> Values:
    return pair("cluster.limits", words, "cluster.max_restarts", "cluster.worker_timeout_seconds")


def loss_aggregation(words: list[Any]) -> Values:
    word = words[0] if len(words) == 1 else words
    return {"algo.loss_aggregation": AGGREGATIONS.get(str(word), word)}


def shared_trunk(words: list[Any]) -> Values:
    """Translate the weight of the value loss; 0 meant a separate critic."""
    coef = parse_number("algo.shared_trunk", words[0] if len(words) == 1 else words)
    return {"algo.share_critic": True, "algo.value_loss_coef": coef} if coef else {"algo.share_critic": False}


def reward_tokens(words: list[Any]) -> Values:
    return pair("algo.reward_tokens", words, "algo.positive_token", "algo.negative_token")


LAYOUT_OPTIONS = {
    "devices": "devices",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "zero": "zero_stage",
}
INHERITING = ("reference", "critic", "reward")
"""Roles whose models have the policy's layout unless they have options of their own."""


def cluster_layout(words: Sequence[str], known: Collection[str]) -> Values:
    """Translate `tp=2 rollout.devices=4 reference.devices=critic reward-1.tp=1`; the rest has its defaults."""
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
    """Return an option's value per reward model, from settings of all (`reward`) and of single ones (`reward-1`)."""
    single = {int(role.partition("-")[2]): value for role, value in entries.items() if role != "reward"}
    common = entries.get("reward", "actor" if option == "colocate_with" else "0")
    return [single.get(index, common) for index in range(max(1, *single) + 1)] if single else [common]


def greedy(words: list[Any]) -> Values:
    return {"temperature": 0.0} if words == [True] else {}


def window(words: list[Any]) -> Values:
    """Translate 3:2048: the third window of 2,048 prompts."""
    if not words or not words[0]:
        return {}
    index, _, size = str(words[0]).partition(":")
    if not (index.isdigit() and size.isdigit()):
        raise UsageError(f"window is {words[0]!r}; use window_index and window_size instead, such as 3 and 2048.")
    return {"window_index": int(index), "window_size": int(size)}


TRANSFORMS: dict[str, Transform] = {
    "greedy": greedy,
    "window": window,
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
    "algo.average": loss_aggregation,
    "algo.shared_trunk": shared_trunk,
    "algo.reward_tokens": reward_tokens,
}


# Options that keep their name, with another form of the value. None: the value has the current form.


WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?inf|nan)", re.DOTALL | re.I)


def split_weights(names: Sequence[str]) -> tuple[list[str], list[float]]:
    """Split `a.jsonl:0.7 b.jsonl:0.3` into names and weights; either all have a weight or none has."""
    # A file may really be called a.jsonl:1, and C:1 is a path on a drive.
    found = [(name, None if Path(name).exists() else WEIGHT.fullmatch(name)) for name in names]
    found = [(name, match if match and len(match["name"]) > 1 else None) for name, match in found]
    weighted = [(match["name"], float(match["weight"])) for _, match in found if match]
    if weighted and len(weighted) < len(names):
        plain = next(name for name, match in found if not match)
        raise UsageError(f"{plain} has no weight, but another source has. Give all of them weights, or none.")
    return [name for name, _ in weighted] or list(names), [weight for _, weight in weighted]


def weighted_sources(value: Any) -> Values | None:
    names, weights = split_weights([str(word) for word in as_list(value)])
    return {"data.train": names, "data.weights": weights} if weights else None


def eval_part(value: Any) -> Values | None:
    """Translate a number below 1 in place of files, which was the fraction to hold out."""
    words = as_list(value)
    try:
        numbers = [float(word) for word in words]
    except (TypeError, ValueError):
        return None
    return {"data.eval_fraction": numbers[0]} if len(numbers) == 1 else None


def dynamic_sampling(value: Any) -> Values | None:
    """Translate the maximum number of batches of a step; 0 meant no dynamic sampling."""
    words = as_list(value)
    if len(words) != 1 or isinstance(words[0], bool) or not str(words[0]).isdigit():
        return None
    batches = int(words[0])
    if not batches:
        return {"rollout.dynamic_sampling": False}
    return {"rollout.dynamic_sampling": True, "rollout.dynamic_sampling_max_batches": batches}


def kl_target(value: Any) -> Values | None:
    """Translate the pair of target and horizon."""
    words = as_list(value)
    return {"algo.kl_target": words[0], "algo.kl_horizon": words[1]} if len(words) == 2 else None


def reference(value: Any) -> Values | None:
    """Translate every:50, a reference that is replaced by the policy after each 50th step."""
    steps = re.fullmatch(r"every:0*([1-9]\d*)", " ".join(map(str, as_list(value))))
    return {"algo.reference": "", "algo.reference_sync_steps": int(steps[1])} if steps else None


def pretrain_data(value: Any) -> Values | None:
    names, weights = split_weights([str(word) for word in as_list(value)])
    return {"algo.pretrain_data": names, "algo.pretrain_coef": weights} if weights else None


def engine(section: str) -> Callable[[Any], Values | None]:
    """Translate `vllm max_num_seqs=64 inflight`: the engine, its options, and whether weights change in flight."""

    def transform(value: Any) -> Values | None:
        words = [str(word) for word in as_list(value)]
        if len(words) < 2:
            return {f"{section}.engine": words[0]} if isinstance(value, list) and words else None
        name, *rest = words
        options = dict(word.partition("=")[::2] for word in rest if word != "inflight")
        found: Values = {f"{section}.engine": name, f"{section}.vllm_options": options}
        return found | ({"rollout.inflight_updates": "inflight" in rest} if section == "rollout" else {})

    return transform


def tool_engine(value: Any) -> Values | None:
    """Translate `local beams=4`, or `vllm max_num_seqs=256 ...`."""
    words = [str(word) for word in as_list(value)]
    if not isinstance(value, list) or len(words) < 2:
        return {"engine": words[0]} if isinstance(value, list) and len(words) == 1 else None
    name, *rest = words
    options = dict(word.partition("=")[::2] for word in rest)
    if name == "vllm" and all("=" in word for word in rest):
        return {"engine": name, "vllm_options": options}
    if list(options) != ["beams"] or not all("=" in word for word in rest):
        raise UsageError(f"engine is {' '.join(words)!r}; use num_beams or vllm_options instead.")
    beams = options["beams"]
    return {"engine": name, "num_beams": int(beams) if beams.isdigit() else beams}


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def short_dtype(option: str) -> Callable[[Any], Values | None]:
    """Translate bf16 to bfloat16, and so on."""

    def transform(value: Any) -> Values | None:
        words = as_list(value)
        return {option: DTYPES[str(words[0])]} if len(words) == 1 and str(words[0]) in DTYPES else None

    return transform


def comma_list(option: str) -> Callable[[Any], Values | None]:
    """Translate `11,13` and `11, 13` to 11 13."""

    def transform(value: Any) -> Values | None:
        text = ",".join(map(str, as_list(value)))
        words = [word.strip() for word in text.split(",") if word.strip()]
        return {option: words} if any("," in str(word) for word in as_list(value)) else None

    return transform


VALUE_FORMS: dict[str, Callable[[Any], Values | None]] = {
    "engine": tool_engine,
    "dtype": short_dtype("dtype"),
    "params_dtype": short_dtype("params_dtype"),
    **{name: comma_list(name) for name in ("layers_per_stage", "num_layer_list", "noop_layers", "source_noop_layers")},
    "data.train": weighted_sources,
    "data.eval": eval_part,
    "rollout.dynamic_sampling": dynamic_sampling,
    "rollout.engine": engine("rollout"),
    "algo.kl_target": kl_target,
    "algo.reference": reference,
    "algo.pretrain_data": pretrain_data,
    "generate.engine": engine("generate"),
}
