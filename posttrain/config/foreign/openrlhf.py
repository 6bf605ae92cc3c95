"""OpenRLHF's options: flat names until 2025, dotted groups since 2026."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config.foreign.huggingface import (
    KERNELS,
    LOADER,
    PACKING,
    SAVES_ALL,
    STEP_LOG,
    scheduler,
    warmup_ratio,
)
from posttrain.config.foreign.meanings import (
    EVERY,
    GROUPED,
    OFFLINE,
    ONLINE,
    STEP_TOKENS,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    absent,
    by_hand,
    chosen,
    clip_both,
    here,
    if_positive,
    if_true,
    is_off,
    items,
    listed,
    made,
    needless,
    number,
    offload,
    part_of,
    plain,
    positive_only,
    reward_model,
    reward_range,
    truth,
    unrelated,
    vllm,
)

ESTIMATORS = {
    "gae": ("ppo",),
    "group_norm": GROUPED,
    "dr_grpo": ("grpo",),
    "rloo": ("rloo",),
    "reinforce": ("reinforce",),
    "reinforce_baseline": ("reinforce",),
}
TEMPLATE = needless("the chat template is always applied where the data are conversations; data.chat_template: another")
TOKENIZER = needless("the fast tokenizer is used where there is one")
LAUNCHER = needless("workers are started by cluster.devices, torchrun or srun")
DEEPSPEED = unrelated("models are divided by FSDP2, not by DeepSpeed")
COLUMNS = by_hand("data.map_keys", note="only for columns that are not recognised: our name -> the column's")
ENTITY = needless("the variables WANDB_ENTITY and WANDB_RUN_GROUP, and WANDB_API_KEY for the key")
MICRO = by_hand(
    "train.micro_batch_tokens", note="tokens of a forward pass, not examples; does not change the result", harmless=True
)
SHARED = needless("models share devices unless they are given their own")
ROLE_DEVICES = "per role; cluster.devices counts all of them together"


def tracking(value: Any, given: Given) -> Found:
    """Translate a value that is a key of Weights & Biases, or True."""
    return {"log.report_to": ["wandb"]} if str(value).lower() not in ("", "none", "false") else {}


SPLITS = ("dataset_split", "train_split", "prompt_split", "data.dataset_split", "data.prompt_split")


def limited(option: str, mixed: str) -> Meaning:
    """Translate max_samples, which bounds each source and, where several are mixed, what is drawn of them, too."""

    def translate(value: Any, given: Given) -> Found:
        probabilities = next((given[name] for name in PROBABILITIES if given.get(name)), "")
        several = {mixed: value} if len(items(probabilities)) > 1 else {}
        return {option: value, **several}

    return made(option, by=translate, note=f"of each source; {mixed} bounds a mixture of them")


PROBABILITIES = (
    *("prompt_data_probs", "dataset_probs", "generate.dataset_probs", "score.dataset_probs"),
    *("data.dataset_probs", "data.prompt_probs"),
)


def template(value: Any, given: Given) -> Found:
    """The model's own template counts with apply_chat_template, and none where plain texts are trained on."""
    own = truth(given.get("apply_chat_template")) or truth(given.get("pretrain_mode"))
    return {} if own else {"data.chat_template": value}


def tool_template(value: Any, given: Given) -> Found:
    return {} if truth(given.get("apply_chat_template")) else {"chat_template": value}


def wandb_project(value: Any, given: Given) -> Found:
    used = given.get("use_wandb", given.get("logger.wandb.key"))
    return {} if is_off(used) else {"log.project": value}


def wandb_name(value: Any, given: Given) -> Found:
    return {"log.run_name": value} if wandb_project("", given) else {}


def sources(value: Any, given: Given) -> Found:
    """Names with commas; the files may have a kind and an @ in front."""
    split = next((str(given[name]) for name in SPLITS if given.get(name)), "train")
    names = [name.split("@", 1)[-1] if "@" in name else name for name in items(value)]
    behind = "" if split == "train" else f":{split}"
    return {"data.train": [name if Path(name).suffix else f"{name}{behind}" for name in names]}


def averaging(value: Any, given: Given) -> Found:
    """Only the decay of the two options counts here."""
    name = "train.ema_beta" if "train.enable_ema" in given else "ema_beta"
    return {"train.ema_decay": given.get(name, "0.992")} if truth(value) else {}


def adaptive(target: str) -> Meaning:
    note = "a KL per completion here, per token there: multiply it by the usual length"
    return by_hand(target, note=note)


def kl_place(value: Any, given: Given) -> Found:
    return {"algo.kl_in": "loss" if truth(value) else "reward"}


def two_clips(value: Any, given: Given) -> Found | None:
    low, *high = items(value) if not isinstance(value, list) else value
    return {"algo.clip_low": low, "algo.clip_high": high[0]} if high else None


def two_bounds(value: Any, given: Given) -> Found | None:
    low, *high = items(value) if not isinstance(value, list) else value
    return {"algo.importance_floor": low, "algo.importance_cap": high[0]} if high else {"algo.importance_cap": low}


IMPORTANCE_BOUNDS = made("algo.importance_floor", "algo.importance_cap", by=two_bounds, note="a low and a high bound")
IMPORTANCE_MODE = chosen(
    "algo.importance_mode",
    {"tis": "token_truncate", "icepop": "token_mask", "seq-mask-tis": "geometric_mask"},
    note="tis: token_truncate, icepop: token_mask, seq-mask-tis: geometric_mask",
)
ROLES = ("ref", "critic", "reward")


def placed(given: Given) -> dict[str, int]:
    """Return the devices that each role has for itself, the policy and the engines too."""

    def count(role: str) -> int:
        names = ((f"{role}_num_nodes", f"{role}_num_gpus_per_node"), (f"{role}.num_nodes", f"{role}.num_gpus_per_node"))
        for nodes, devices in names:
            if nodes in given or devices in given:
                return round((number(given.get(nodes, "1")) or 0) * (number(given.get(devices, "8")) or 0))
        return 0

    found = {"actor": count("actor")}
    if truth(given.get("colocate_all_models")) or truth(given.get("train.colocate_all")):
        return found
    for role in ROLES:
        beside = ("colocate_actor_ref", "train.colocate_actor_ref") if role == "ref" else ()
        beside = ("colocate_critic_reward", "train.colocate_critic_reward") if role == "reward" else beside
        found[role] = 0 if any(truth(given.get(name)) for name in beside) else count(role)
    if not any(given.get(name) for name in ("reward_pretrain", "reward.model_name_or_path")):
        found["reward"] = 0
    for engines, size in (("vllm_num_engines", "vllm_tensor_parallel_size"),
                          ("vllm.num_engines", "vllm.tensor_parallel_size")):  # fmt: skip
        if engines in given:
            found["vllm"] = round((number(given[engines]) or 0) * (number(given.get(size, "1")) or 1))
    return found


def all_devices(value: Any, given: Given) -> Found:
    return {"cluster.devices": str(sum(placed(given).values()))}


def role_devices(role: str, option: str) -> Meaning:
    """Translate the devices of a role, unless it shares those of another one."""

    def translate(value: Any, given: Given) -> Found:
        devices = placed(given).get(role, 0)
        return {option: str(devices)} if devices else {}

    return made(option, by=translate, note=ROLE_DEVICES)


def beside_critic(value: Any, given: Given) -> Found:
    return {"cluster.reward_colocate_with": ["critic"]} if truth(value) and placed(given).get("critic") else {}


def column(*ours: str) -> Meaning:
    """Translate the name of a column; `ours`: its name here, where there is no other column and where there is."""

    def translate(value: Any, given: Given) -> Found:
        names = [f"{prefix}output_key" for prefix in ("", "data.")]
        single = len(ours) > 1 and not any(given.get(name) for name in names)
        name = ours[0] if single else ours[-1]
        return {} if value == name else {"data.map_keys": {name: value}}

    return made("data.map_keys", by=translate, note=f"as {' or '.join(ours)}")


def plain_column(ours: str) -> Meaning:
    """Do the same for tools, whose option has no section."""
    return Meaning(
        ("map_keys",), f"as {ours}", lambda value, given: {} if value == ours else {"map_keys": {ours: value}}
    )


def columns(prefix: str, **ours: tuple[str, ...]) -> dict[str, str | Meaning]:
    return {f"{prefix}{key}": column(*names) for key, names in ours.items()}


CHAT_COLUMNS = {"input_key": ("messages", "prompt"), "output_key": ("response",)}
PAIR_COLUMNS = {"prompt_key": ("prompt",), "chosen_key": ("chosen",), "rejected_key": ("rejected",)}
LABELLED_COLUMNS = {"input_key": ("messages", "prompt"), "output_key": ("completion",), "label_key": ("label",)}
PROMPT_COLUMNS = {"input_key": ("prompt",), "label_key": ("ground_truth",)}


def engines(size: str, colocated: str) -> Meaning:
    """Translate the number of engines of `size` devices; `colocated`: the switch that lets them share the policy's."""

    def translate(value: Any, given: Given) -> Found | None:
        count, devices = number(value), number(given.get(size, "1"))
        if count is None or devices is None:
            return None
        own = {} if truth(given.get(colocated)) else {"cluster.rollout_devices": str(round(count * devices))}
        return {"rollout.engine": "vllm", **own} if count > 0 else {}

    return made(
        "rollout.engine",
        "cluster.rollout_devices",
        by=translate,
        note="vllm; cluster.rollout_devices: devices of all engines together, 0 if they share the policy's",
    )


def engine_size(colocated: str) -> Meaning:
    """Translate the devices of an engine: an option of vLLM where it shares the policy's devices."""

    def translate(value: Any, given: Given) -> Found:
        if truth(given.get(colocated)):
            return {"rollout.engine": "vllm", "rollout.vllm_options": {"tensor_parallel_size": plain(value)}}
        return {"cluster.rollout_tensor_parallel_size": value}

    return made(
        "cluster.rollout_tensor_parallel_size",
        "rollout.vllm_options",
        by=translate,
        note="devices of one engine; tensor_parallel_size of rollout.vllm_options where it shares the policy's",
    )


def ahead(enabled: str) -> Meaning:
    return Meaning(
        ("rollout.ahead",),
        "batches in advance",
        lambda value, given: {"rollout.ahead": value} if truth(given.get(enabled)) else {},
    )


def remote(value: Any, given: Given) -> Found | None:
    """Translate an address, or a Python file with reward_func."""
    return {"reward.functions": [u if u.startswith("http") else f"{u}:reward_func" for u in items(value)]}


WARMUP = made("train.warmup_ratio", by=warmup_ratio, note="lr_scheduler constant has none there")
SAME: Table = {  # with these names in both
    "lr_scheduler": made("train.lr_scheduler", "train.min_lr_ratio", by=scheduler, note="cosine, linear or constant"),
    "lr_warmup_ratio": WARMUP,
    "min_lr_ratio": "train.min_lr_ratio",
    "max_norm": "train.max_grad_norm",
    "local_rank": LAUNCHER,
    "use_ms": by_hand("model.path", note="modelscope://owner/name"),
}
EMA = "train.ema_decay"

MUON = absent("train.optimizer muon has the learning rate of AdamW, and no further settings", "adam", "adamw")
FLAT: Table = {
    **SAME,
    "pretrain": "model.path",
    "save_path": "output_dir",
    "ckpt_path": needless("checkpoints are in the run directory, output_dir"),
    "save_steps": positive_only("save.every_steps", "-1 there is 0 here: only at the end"),
    "eval_steps": positive_only("eval.every_steps", "-1 there is 0 here: only at the end"),
    "max_ckpt_num": "save.max_checkpoints",
    "max_ckpt_mem": by_hand("save.max_gigabytes", note="0: no limit", harmless=True),
    "load_checkpoint": by_hand(
        "resume", "output_dir", note="resume continues the run in output_dir, if there is one", harmless=True
    ),
    "save_hf_ckpt disable_ds_ckpt use_ds_universal_ckpt": SAVES_ALL,
    "logging_steps": STEP_LOG,
    "seed": "seed",
    "full_determinism": needless("runs are deterministic wherever the device allows it"),
    "l2": "train.weight_decay",
    "adam_betas": made(
        "train.adam_beta1",
        "train.adam_beta2",
        by=lambda value, given: dict(zip(("train.adam_beta1", "train.adam_beta2"), items(value), strict=False)),
    ),
    "micro_train_batch_size": MICRO,
    "max_samples": limited("data.max_examples", "data.max_mixture_examples"),
    "eval_dataset": listed("data.eval"),
    "dataset_split train_split eval_split prompt_split": part_of("data.train", "behind the name: owner/name:train"),
    "input_key output_key prompt_key label_key chosen_key rejected_key": COLUMNS,
    "input_template": made("data.chat_template", by=template, note="unless apply_chat_template is given"),
    "apply_chat_template": TEMPLATE,
    "tokenizer_chat_template": "data.chat_template",
    "multiturn": needless("all assistant turns of a conversation count"),
    "disable_fast_tokenizer": TOKENIZER,
    "dataloader_num_workers": LOADER,
    "bf16": if_true({"model.dtype": "bfloat16"}, note="bfloat16; the default on an accelerator"),
    "param_dtype": chosen("model.dtype", {"bf16": "bfloat16", "fp16": "float16"}),
    "gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing_use_reentrant": needless("model.gradient_checkpointing has one form"),
    "flash_attn attn_implementation use_liger_kernel deepcompile": KERNELS,
    "packing_samples": PACKING,
    "zero_stage": Meaning(
        ("cluster.zero_stage",),
        "2 or 3; FSDP2 always divides weights, gradients and optimizer",
        lambda value, given: {"cluster.zero_stage": value} if str(value) in ("2", "3") else {},
    ),
    "zpg grad_accum_dtype overlap_comm disable_trace_cache": DEEPSPEED,
    "adam_offload": offload("moments"),
    "ds_tensor_parallel_size": "cluster.tensor_parallel_size",
    "ring_attn_size": here(
        "cluster.context_parallel_size", "a ring only where the heads do not suffice, or with cluster.ulysses_degree 1"
    ),
    "ring_head_stride": needless("keys and values of all heads are sent together"),
    "load_in_4bit": "model.load_in_4bit",
    "lora_rank": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    "target_modules": listed("model.lora_target_modules"),
    "aux_loss_coef": "model.router_aux_loss_coef",
    "use_wandb": made("log.report_to", by=tracking, note="wandb; the key by wandb login"),
    "wandb_project": made("log.project", by=wandb_project, note="with use_wandb"),
    "wandb_org wandb_group": ENTITY,
    "wandb_run_name": made("log.run_name", by=wandb_name, note="with use_wandb"),
    "use_tensorboard": made(
        "log.report_to",
        "log.tensorboard_dir",
        by=lambda value, given: {"log.report_to": ["tensorboard"], "log.tensorboard_dir": value},
        note="tensorboard, and its directory",
    ),
    "perf": STEP_LOG,
}
FLAT_OFFLINE: Table = {
    "dataset": made("data.train", by=sources, note="names separated by spaces"),
    "dataset_probs": listed("data.weights"),
    "train_batch_size": here("train.batch_size", "examples of an optimizer step"),
    "max_epochs": "train.epochs",
    "max_len": "data.max_length",
    "learning_rate": "train.learning_rate",
    "compute_fp32_loss": needless("losses are computed in float32"),
}
FLAT_SFT: Table = {
    **columns("", **CHAT_COLUMNS),
    "pretrain_mode": Meaning(
        note="not an option: posttrain pretrain", verbs={"true": ("pretrain",), "false": ("sft",)}
    ),
}
FLAT_REFERENCED: Table = {
    "beta": "algo.beta",
    "ref_pretrain": "algo.reference",
    "ref_offload": offload("reference"),
}
FLAT_DPO: Table = {
    **columns("", **PAIR_COLUMNS),
    "ipo": if_true({"algo.loss_type": "ipo"}, note="ipo"),
    "label_smoothing": "algo.label_smoothing",
    "nll_loss_coef": "algo.sft_coef",
}
FLAT_KTO: Table = {
    **columns("", **PAIR_COLUMNS, **LABELLED_COLUMNS),
    "vanilla_loss": if_true({"algo.variant": "vanilla"}, note="vanilla"),
    "unpaired_preference": needless("examples are single answers with a label"),
    "desirable_loss_weight": "algo.desirable_weight",
    "undesirable_loss_weight": "algo.undesirable_weight",
}
FLAT_REWARD: Table = {
    **columns("", **PAIR_COLUMNS),
    "loss": chosen("algo.loss_type", {"sigmoid": "sigmoid", "logexp": "logexp"}),
    "margin_loss": "algo.use_margin",
    "head_prefix value_head_prefix": needless("the head is part of the saved model"),
}
FLAT_PRM: Table = {"placeholder_token": "algo.placeholder", "reward_tokens": STEP_TOKENS}
FLAT_DISTILL: Table = {
    "teacher_model": "algo.teacher",
    "kd_coef": by_hand(
        "algo.sft_coef", note="there kd_coef and 1 - kd_coef weigh the two losses; here SFT has a weight"
    ),
    "teacher_offload": unrelated("the teacher stays on its device"),
}

PROMPTS = "prompts of a rollout batch"
COMPLETIONS = "completions of an optimizer step"
FLAT_ONLINE: Table = {
    **columns("", **PROMPT_COLUMNS),
    "prompt_data dataset": made("data.train", by=sources, note="names separated by spaces"),
    "prompt_data_probs dataset_probs": listed("data.weights"),
    "rollout_batch_size": here("train.batch_size", PROMPTS),
    "train_batch_size": here("algo.mini_batch_size", COMPLETIONS),
    "micro_rollout_batch_size vllm_generate_batch_size": needless("the engine batches by itself"),
    "num_episodes": "train.epochs",
    "max_epochs": here("algo.epochs_per_batch", "passes over a rollout batch; num_episodes is train.epochs"),
    "prompt_max_len": here("data.max_length", "tokens of a prompt"),
    "generate_max_len": here("rollout.max_tokens", "tokens of a completion"),
    "max_len": needless("data.max_length bounds the prompt, rollout.max_tokens the completion"),
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "actor_learning_rate": "train.learning_rate",
    "eps_clip": clip_both(unless="eps_clip_low_high"),
    "eps_clip_low_high": made("algo.clip_low", "algo.clip_high", by=two_clips),
    "dual_clip": "algo.dual_clip",
    "init_kl_coef": "algo.kl_coef",
    "kl_target": adaptive("algo.kl_target"),
    "kl_horizon": "algo.kl_horizon",
    "kl_estimator": "algo.kl_estimator",
    "use_kl_loss": made("algo.kl_in", by=kl_place, note="loss; else reward"),
    "entropy_loss_coef": "algo.entropy_coef",
    "token_level_loss": chosen(
        "algo.loss_aggregation",
        {"true": "token_mean", "false": "sample_mean"},
        note="not an option there: token_mean, in 2024 sample_mean",
    ),
    "advantage_estimator": Meaning(note="not an option: the verb here", verbs=ESTIMATORS),
    "policy_loss_type": Meaning(note="not an option: gspo is a verb", verbs={"gspo": ("gspo",)}),
    "normalize_reward": if_true({"reward.normalize": "saved"}, note="saved: with the reward model's own numbers"),
    "reward_clip_range": made(
        *("reward.clip", "reward.clip_min", "reward.clip_max"),
        by=reward_range,
        note="one option if both bounds have the same size, else two",
    ),
    "overlong_buffer_len": "reward.overlong_tokens",
    "overlong_penalty_factor": "reward.overlong_penalty",
    "reward_pretrain": reward_model(),
    "remote_rm_url": made("reward.functions", by=remote, note="http://... or FILE.py:reward_func"),
    "ref_pretrain": "algo.reference",
    "agent_func_path": by_hand("rollout.environment", note="FILE.py:CLASS with start and step"),
    "enable_ema": made(EMA, by=averaging, note="a decay such as 0.992 turns it on"),
    "ema_beta": part_of(EMA, "with enable_ema"),
    "dynamic_filtering": "rollout.dynamic_sampling",
    "dynamic_filtering_reward_range": absent(
        "groups with equal rewards are replaced, whatever the reward", "0 1", "0.0 1.0"
    ),
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.samples_per_prompt",
    "vllm_num_engines": engines("vllm_tensor_parallel_size", "colocate_all_models"),
    "vllm_tensor_parallel_size": engine_size("colocate_all_models"),
    "vllm_gpu_memory_utilization": vllm("gpu_memory_utilization"),
    "enable_prefix_caching": vllm("enable_prefix_caching"),
    "enforce_eager": vllm("enforce_eager"),
    "vllm_sync_backend vllm_sync_with_ray vllm_enable_sleep deepspeed_enable_sleep": needless(
        "weights reach the engine by the cheapest route"
    ),
    "enable_vllm_is_correction": by_hand("algo.importance_cap", note="2 by default, 0 turns the correction off"),
    "vllm_is_truncated_threshold": IMPORTANCE_BOUNDS,
    "vllm_is_correction_type": IMPORTANCE_MODE,
    "use_icepop": if_true({"algo.importance_mode": "token_mask"}, note="token_mask"),
    "async_train": by_hand("rollout.ahead", note="batches in advance; 0 is on-policy"),
    "async_queue_size": ahead("async_train"),
    "partial_rollout": by_hand("rollout.inflight_updates", note="new weights for completions in progress"),
    "use_dynamic_batch": PACKING,
    "train_max_tokens_per_gpu": "train.micro_batch_tokens",
    "rollout_max_tokens_per_gpu": needless("train.micro_batch_tokens bounds every forward pass"),
    "ref_num_nodes ref_num_gpus_per_node": role_devices("ref", "cluster.reference_devices"),
    "reward_num_nodes reward_num_gpus_per_node": role_devices("reward", "cluster.reward_devices"),
    "critic_num_nodes critic_num_gpus_per_node": role_devices("critic", "cluster.critic_devices"),
    "actor_num_nodes actor_num_gpus_per_node": made(
        "cluster.devices", by=all_devices, note="all devices, those of other roles too"
    ),
    "colocate_all_models": SHARED,
    "colocate_actor_ref": needless("the reference shares the policy's devices unless cluster.reference_devices is set"),
    "colocate_critic_reward": made(
        "cluster.reward_colocate_with",
        by=beside_critic,
        note="critic, if the critic has devices of its own; else all share already",
    ),
    "ref_reward_offload": offload("reference", "reward"),
    "adam_offload": offload("optimizer"),
    "actor_init_on_gpu": needless("weights are loaded onto their devices"),
}
FLAT_CRITIC: Table = {
    "critic_pretrain": "algo.critic",
    "critic_learning_rate": "algo.critic_learning_rate",
    "value_clip": "algo.value_clip",
    "lambd": "algo.gae_lambda",
    "gamma": "algo.gamma",
    "freezing_actor_steps": if_positive("algo.freeze_actor_steps"),
    "save_value_network": needless("the critic is part of every checkpoint"),
    "head_prefix value_head_prefix": needless("the head is part of the saved model"),
    "pretrain_data": listed("algo.pretrain_data"),
    "pretrain_data_probs pretrain_split": absent("algo.pretrain_coef weighs the files", "1.0", "1", "train"),
    "ptx_coef": Meaning(
        ("algo.pretrain_coef",),
        "with algo.pretrain_data",
        lambda value, given: {"algo.pretrain_coef": [value]} if given.get("pretrain_data") else {},
    ),
}
UNDISCOUNTED = absent("a completion has one advantage in this trainer, without discount", "1", "1.0")
NO_CRITIC: Table = {
    "critic_pretrain critic_learning_rate value_clip lambd save_value_network freezing_actor_steps": unrelated(
        "this trainer has no critic; posttrain ppo has"
    ),
    "gamma": UNDISCOUNTED,
    "pretrain_data ptx_coef": absent("posttrain ppo has algo.pretrain_data and algo.pretrain_coef"),
}
UNSCALED = chosen("algo.scale_by_std", {"true": "false", "false": "true"}, note="turned round")
WHITENING = chosen("algo.whiten_advantages", {"true": "false", "false": "true"}, note="turned round")

WITH_BASELINE = Meaning(
    ("algo.baseline",),
    "not an option: the verb here; of reinforce_baseline also algo.baseline",
    lambda value, given: {"algo.baseline": "true"} if value == "reinforce_baseline" else {},
    verbs=ESTIMATORS,
)
WITHOUT_CRITIC = tuple(verb for verb in ONLINE if verb != "ppo")
HUMAN, USER = "Human: {}\\nAssistant: ", "User: {}\\nAssistant: "
BOTH = {"seed": "42", "save_steps": "-1", "wandb_project": "openrlhf_train_sft"}
BOTH_ONLINE = {
    "actor_learning_rate": "1e-6",
    "train_batch_size": "128",
    "prompt_max_len": "1024",
    "generate_max_len": "1024",
    "n_samples_per_prompt": "1",
    "eps_clip": "0.2",
    "use_kl_loss": "False",
    "reward_clip_range": ["-10", "10"],
    "wandb_project": "openrlhf_train_ppo",
}
BOTH_CRITIC = {"critic_learning_rate": "9e-6", "value_clip": "0.2", "lambd": "0.95"}
CUT = {"top_p": "0.9", "repetition_penalty": "1.2"}
GENERATED = {**CUT, "temperature": "1.0", "max_new_tokens": "1024", "max_samples": "1000000"}
CHATTING = {**CUT, "temperature": "0.2"}
PROGRAMS = {
    "sft": "train_sft",
    "pretrain": "train_sft",
    "reward": "train_rm",
    "prm": "train_prm",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "distill": "train_kd",
    **dict.fromkeys(ONLINE, "train_ppo_ray"),
    **dict.fromkeys(("generate", "score"), "batch_inference"),
    "chat": "interactive_chat",
}


def tool_vllm(name: str) -> Meaning:
    """Pass on an option of vLLM to a tool, where generate_vllm asks for it."""
    return Meaning(
        ("vllm_options",),
        f"as {name}, with engine vllm",
        lambda value, given: (
            {"vllm_options": {name: plain(value)}} if given.get("eval_task") == "generate_vllm" else {}
        ),
    )


def stage_vllm(name: str) -> Meaning:
    """Do the same for the first stage of a pipeline."""
    return Meaning(
        ("generate.vllm_options",),
        f"as {name}, with generate_vllm",
        lambda value, given: (
            {"generate.vllm_options": {name: plain(value)}}
            if given.get("generate.eval_task") == "generate_vllm"
            else {}
        ),
    )


def window(value: Any, given: Given) -> Found:
    """Translate iter, which counts from 0 and is off when not given or negative, with rollout_batch_size."""
    place = number(given.get("iter"))
    if place is None or place < 0:
        return {}
    size = given.get("rollout_batch_size", "2048")
    return {"window_index": str(round(place) + 1), "window_size": size}


def condition(value: Any, given: Given) -> Found | None:
    """Translate <rm_score>: 5.00 behind a prompt, with enable_ca; another text has to be written by hand."""
    if not truth(given.get("enable_ca")):
        return {}
    found = re.fullmatch(r"<rm_score>: *(-?[\d.]+)", str(given.get("ca_prompt", "")).strip())
    return {"condition": found[1]} if found else None


POST_PROCESSORS = {"rs": "best-of-n", "iter_dpo": "pairs", "ca": "condition"}


INFERENCE: Table = {  # batch_inference and interactive_chat
    "max_new_tokens": "max_tokens",
    "greedy_sampling": if_true({"temperature": "0"}, note="0"),
    "top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "input_template": made("chat_template", by=tool_template, note="unless apply_chat_template is given"),
    "apply_chat_template": needless("the chat template is applied; chat_template: another"),
    "bf16": if_true({"dtype": "bfloat16"}, note="bfloat16; the default on an accelerator"),
    "load_in_4bit": "load_in_4bit",
    "flash_attn": KERNELS,
    "disable_fast_tokenizer": TOKENIZER,
    "zero_stage local_rank": LAUNCHER,
    "enable_ca ca_prompt": made(
        "condition", by=condition, note="the reward that is asked for, of a model that conditional-sft trained"
    ),
}
TASKS = {"generate": ("generate", "eval"), "generate_vllm": ("generate", "eval"), "rm": ("score",)}
GENERATE: Table = {
    **INFERENCE,
    "eval_task": Meaning(
        ("engine",),
        "not an option: posttrain generate generates, posttrain score computes rewards; generate_vllm: engine vllm",
        lambda value, given: {"engine": "vllm"} if value == "generate_vllm" else {},
        verbs=TASKS,
    ),
    "pretrain": "model",
    "dataset": listed("data"),
    "output_path": "output_file",
    "max_samples": "max_examples",
    "prompt_max_len": "max_prompt_length",
    "best_of_n": "samples_per_prompt",
    "micro_batch_size": by_hand("batch_size", note="prompts at a time", harmless=True),
    "input_key": plain_column("prompt"),
    "output_key": needless("only prompts are read"),
    "tp_size": tool_vllm("tensor_parallel_size"),
    "max_num_seqs": tool_vllm("max_num_seqs"),
    "enable_prefix_caching": tool_vllm("enable_prefix_caching"),
    "iter": made("window_index", by=window, note="parts are counted from 1 here, from 0 there"),
    "rollout_batch_size": made("window_size", by=window, note="with iter"),
    "post_processor max_len normalize_reward": needless("it belongs to eval_task rm"),
    "seed": "seed",
    "dataset_probs": listed("weights"),
}
SCORE: Table = {
    "eval_task": Meaning(note="not an option: posttrain score computes rewards", verbs=TASKS),
    "pretrain": Meaning(
        ("reward",), "a reward model is a reward of the form model:PATH", lambda v, given: {"reward": [f"model:{v}"]}
    ),
    "dataset": "file",
    "output_path": "output_file",
    "max_samples": "max_examples",
    "max_len": "max_length",
    "input_template": made("chat_template", by=tool_template, note="unless apply_chat_template is given"),
    "input_key": plain_column("prompt"),
    "output_key": plain_column("completion"),
    "normalize_reward": "normalize",
    "dataset_probs": absent("files are read one after the other", "1", "1.0"),
    "micro_batch_size": needless("completions are batched by their length"),
    "post_processor": Meaning(
        note="a second command: posttrain select best-of-n (rs), pairs (iter_dpo) or condition (ca)", harmless=True
    ),
    "reward_template": Meaning(
        note="condition_template of posttrain select condition, the second command", harmless=True
    ),
    "bf16": INFERENCE["bf16"],
    "flash_attn": KERNELS,
    "head_prefix value_head_prefix": needless("the head is part of the saved model"),
    "zero_stage local_rank": LAUNCHER,
}
PIPELINE: Table = {  # what the scripts of rejection sampling, iterative DPO and conditional SFT give to batch_inference
    "best_of_n n_samples_per_prompt": "generate.samples_per_prompt",
    "max_new_tokens generate_max_len": "generate.max_tokens",
    "temperature": "generate.temperature",
    "top_p": "generate.top_p",
    "repetition_penalty": "generate.repetition_penalty",
    "greedy_sampling": if_true({"generate.temperature": "0"}, note="0"),
    "rollout_batch_size": here("prompts_per_iteration"),
    "iter": by_hand("iterations", note="all of them; the pipeline counts by itself"),
    "reward_pretrain": reward_model(),
    "remote_rm_url": FLAT_ONLINE["remote_rm_url"],
    "enable_ca ca_prompt": by_hand("condition_template", note="of posttrain conditional-sft"),
}
IN_RUN = needless("the files between the stages are in the run directory")
STAGES: Table = {  # a script that generates, scores and trains; the flags of the first two have the stage in front
    "generate.pretrain": "model.path",
    "generate.dataset score.dataset": made("data.train", by=sources, note="names separated by spaces"),
    "generate.dataset_probs score.dataset_probs": listed("data.weights"),
    "generate.max_samples": "data.max_examples",
    "score.max_samples": limited("data.max_examples", "data.max_mixture_examples"),
    "max_samples": absent("all selected completions are trained on", "1000000"),
    "generate.eval_task": Meaning(
        ("generate.engine",),
        "vllm for generate_vllm",
        lambda value, given: {"generate.engine": "vllm"} if value == "generate_vllm" else {},
    ),
    **{
        f"generate.{name}": f"generate.{ours}"
        for name, ours in (
            ("max_new_tokens", "max_tokens"),
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("best_of_n", "samples_per_prompt"),
            ("repetition_penalty", "repetition_penalty"),
        )
    },
    "generate.greedy_sampling": if_true({"generate.temperature": "0"}, note="0"),
    "generate.tp_size": stage_vllm("tensor_parallel_size"),
    "generate.max_num_seqs": stage_vllm("max_num_seqs"),
    "generate.enable_prefix_caching": stage_vllm("enable_prefix_caching"),
    "generate.rollout_batch_size": "prompts_per_iteration",
    "generate.iter": needless("the pipeline counts its iterations"),
    "generate.prompt_max_len score.max_len": needless("data.max_length bounds prompt and completion"),
    "generate.input_key": column("prompt"),
    "generate.input_template": made("data.chat_template", by=template, note="unless apply_chat_template is given"),
    "generate.apply_chat_template": TEMPLATE,
    "score.eval_task score.post_processor": needless("the pipeline is chosen by them"),
    "score.pretrain": reward_model(),
    "score.normalize_reward": needless("conditional-sft always normalizes its rewards"),
    "score.micro_batch_size generate.micro_batch_size": needless("completions are batched by their length"),
    "generate.output_path score.output_path": IN_RUN,
    "*.bf16 *.flash_attn *.zero_stage *.local_rank *.disable_fast_tokenizer": KERNELS,
    "iterations": "iterations",
}
CHAT: Table = {**INFERENCE, "pretrain": "models", "max_len": here("max_tokens", "of a completion")}

OPENRLHF = Library(
    "OpenRLHF",
    (
        (EVERY, FLAT),
        (OFFLINE, FLAT_OFFLINE),
        (("sft", "pretrain"), FLAT_SFT),
        (("dpo", "kto"), FLAT_REFERENCED),
        (("dpo",), FLAT_DPO),
        (("kto",), FLAT_KTO),
        (("reward",), FLAT_REWARD),
        (("prm",), FLAT_PRM),
        (("distill",), FLAT_DISTILL),
        (ONLINE, FLAT_ONLINE),
        (WITHOUT_CRITIC, NO_CRITIC),
        (("reinforce",), {"gamma": "algo.gamma", "advantage_estimator": WITH_BASELINE}),
        (GROUPED, {"no_advantage_std_norm": UNSCALED}),
        (("generate",), GENERATE),
        (("rejection-sampling", "iterative-dpo", "conditional-sft"), {**PIPELINE, **STAGES}),
        (("score",), SCORE),
        (("chat",), CHAT),
        (("ppo",), {**FLAT_CRITIC, "no_advantage_std_norm": WHITENING}),
    ),
    PROGRAMS,
    defaults=(
        (EVERY, {**BOTH, "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": "0.03"}),
        (OFFLINE, {"train_batch_size": "128", "max_len": "512", "max_epochs": "1", "max_samples": "1000000"}),
        (("sft", "pretrain"), {"learning_rate": "5e-6", "max_epochs": "2", "max_len": "2048", "input_template": USER}),
        (("reward",), {"learning_rate": "9e-6", "wandb_project": "openrlhf_train_rm"}),
        (("dpo",), {"learning_rate": "1e-5", "beta": "0.1", "wandb_project": "openrlhf_train_dpo"}),
        (("kto",), {"learning_rate": "1e-5", "beta": "0.01", "max_len": "2048", "input_template": USER}),
        (ONLINE, {**BOTH_ONLINE, "rollout_batch_size": "1024", "init_kl_coef": "0.01", "kl_estimator": "k1"}),
        (("ppo",), {**BOTH_CRITIC, "ptx_coef": "0.05"}),
        (("generate",), {"max_new_tokens": "1024", "prompt_max_len": "1024", "seed": "1234"}),
        (("chat",), {**CHATTING, "input_template": USER}),
    ),
)
OPENRLHF_2024 = replace(  # the programs of June 2024, examples/*.py, had other defaults; the scheduler had no option
    OPENRLHF,
    name="OpenRLHF of 2024",
    defaults=(
        (EVERY, {**BOTH, "lr_scheduler": "cosine", "lr_warmup_ratio": "0.03", "input_template": HUMAN}),
        (OFFLINE, {"train_batch_size": "128", "max_len": "512", "max_epochs": "1", "max_samples": "1000000"}),
        (("sft", "pretrain"), {"learning_rate": "2e-6", "max_epochs": "2"}),
        (("reward",), {"learning_rate": "1e-5", "wandb_project": "openrlhf_train_rm"}),
        (("dpo", "kto"), {"learning_rate": "1e-5", "beta": "0.01", "wandb_project": "openrlhf_train_dpo"}),
        (
            ONLINE,
            {**BOTH_ONLINE, "rollout_batch_size": "512", "init_kl_coef": "0.02", "max_samples": "100000"}
            | {"token_level_loss": "False"},
        ),
        (("ppo",), {**BOTH_CRITIC, "ptx_coef": "0.05"}),
        (("generate", "score", "chat"), {"input_template": HUMAN}),
        (("generate",), {"max_new_tokens": "1024", "prompt_max_len": "1024", "seed": "1234", **CUT}),
        (("rejection-sampling", "iterative-dpo"), {f"generate.{name}": value for name, value in GENERATED.items()}),
        (("chat",), CHATTING),
    ),
)

# The names of 2026: what they mean is what the flat ones mean.

DOTTED: Table = {
    **SAME,
    "ckpt.output_dir": FLAT["save_path"],
    "ckpt.path": FLAT["ckpt_path"],
    "ckpt.save_steps": FLAT["save_steps"],
    "ckpt.max_num": FLAT["max_ckpt_num"],
    "ckpt.max_mem": FLAT["max_ckpt_mem"],
    "ckpt.load_enable": FLAT["load_checkpoint"],
    "ckpt.save_hf ckpt.disable_ds ds.use_universal_ckpt": SAVES_ALL,
    "ckpt.best_metric_key": needless("the best checkpoint is kept besides the newest ones"),
    "eval.steps": FLAT["eval_steps"],
    "eval.dataset": listed("data.eval"),
    "eval.split": part_of("data.eval", "behind the name: owner/name:test"),
    "logger.logging_steps": STEP_LOG,
    "logger.wandb.key": FLAT["use_wandb"],
    "logger.wandb.project": FLAT["wandb_project"],
    "logger.wandb.org logger.wandb.group": ENTITY,
    "logger.wandb.run_name": FLAT["wandb_run_name"],
    "logger.tensorboard_dir": FLAT["use_tensorboard"],
    "train.micro_batch_size": MICRO,
    "train.seed": here("seed"),
    "train.full_determinism_enable": FLAT["full_determinism"],
    "ds.param_dtype": FLAT["param_dtype"],
    "ds.zero_stage": FLAT["zero_stage"],
    "ds.zpg ds.grad_accum_dtype ds.overlap_comm": DEEPSPEED,
    "ds.adam_offload": FLAT["adam_offload"],
    "ds.attn_implementation ds.experts_implementation ds.use_liger_kernel ds.deepcompile": KERNELS,
    "ds.tensor_parallel_size": FLAT["ds_tensor_parallel_size"],
    "ds.ring_attn_size": FLAT["ring_attn_size"],
    "ds.ring_attn_head_stride": FLAT["ring_head_stride"],
    "ds.packing_samples": PACKING,
    "ds.load_in_4bit": "model.load_in_4bit",
    "ds.lora.rank": "model.lora_rank",
    "ds.lora.alpha": "model.lora_alpha",
    "ds.lora.dropout": "model.lora_dropout",
    "ds.lora.target_modules": FLAT["target_modules"],
    "ds.value_head_prefix": needless("the head is part of the saved model"),
    "data.max_samples": FLAT["max_samples"],
    "data.input_key data.output_key data.prompt_key data.label_key data.chosen_key data.rejected_key": COLUMNS,
    "data.input_template data.tokenizer_chat_template": "data.chat_template",
    "data.apply_chat_template": TEMPLATE,
    "data.multiturn": FLAT["multiturn"],
    "data.disable_fast_tokenizer": TOKENIZER,
    "data.dataloader_num_workers": LOADER,
    "data.image_key data.max_images_per_prompt actor.freeze_visual_encoder": unrelated("models of text alone"),
}
DOTTED_OFFLINE: Table = {
    "model.model_name_or_path": "model.path",
    "data.dataset": FLAT_OFFLINE["dataset"],
    "data.dataset_probs": FLAT_OFFLINE["dataset_probs"],
    "data.dataset_split": part_of("data.train", "behind the name: owner/name:train"),
    "data.max_len": "data.max_length",
    "train.batch_size": "train.batch_size",
    "train.max_epochs": "train.epochs",
    "model.aux_loss_coef": "model.router_aux_loss_coef",
    "model.gradient_checkpointing_enable": "model.gradient_checkpointing",
    "model.gradient_checkpointing_reentrant": FLAT["gradient_checkpointing_use_reentrant"],
    "optim muon.*": MUON,
    "adam.lr": "train.learning_rate",
    "adam.betas": FLAT["adam_betas"],
    "adam.eps": absent("AdamW's epsilon is fixed", "1e-8", "1e-08"),
    "adam.weight_decay": "train.weight_decay",
}
DOTTED_ONLINE: Table = {
    "actor.model_name_or_path": "model.path",
    "actor.num_nodes actor.num_gpus_per_node": FLAT_ONLINE["actor_num_nodes actor_num_gpus_per_node"],
    "ref.num_nodes ref.num_gpus_per_node": FLAT_ONLINE["ref_num_nodes ref_num_gpus_per_node"],
    "reward.num_nodes reward.num_gpus_per_node": FLAT_ONLINE["reward_num_nodes reward_num_gpus_per_node"],
    "critic.num_nodes critic.num_gpus_per_node": FLAT_ONLINE["critic_num_nodes critic_num_gpus_per_node"],
    "train.colocate_actor_ref": FLAT_ONLINE["colocate_actor_ref"],
    "train.colocate_critic_reward": FLAT_ONLINE["colocate_critic_reward"],
    "train.colocate_all": SHARED,
    "vllm.num_engines": engines("vllm.tensor_parallel_size", "train.colocate_all"),
    "vllm.tensor_parallel_size": engine_size("train.colocate_all"),
    "vllm.gpu_memory_utilization": vllm("gpu_memory_utilization"),
    "vllm.enable_prefix_caching": vllm("enable_prefix_caching"),
    "vllm.enforce_eager": vllm("enforce_eager"),
    "vllm.sync_backend vllm.sync_with_ray vllm.enable_sleep ds.enable_sleep": needless(
        "weights reach the engine by the cheapest route"
    ),
    "algo.advantage.is_correction_enable": FLAT_ONLINE["enable_vllm_is_correction"],
    "algo.advantage.is_correction_threshold": IMPORTANCE_BOUNDS,
    "algo.advantage.is_correction_type": IMPORTANCE_MODE,
    "train.async_enable": FLAT_ONLINE["async_train"],
    "train.async_queue_size": ahead("train.async_enable"),
    "train.partial_rollout_enable": FLAT_ONLINE["partial_rollout"],
    "train.dynamic_batch_enable": PACKING,
    "train.max_tokens_per_gpu": "train.micro_batch_tokens",
    "rollout.max_tokens_per_gpu": needless("train.micro_batch_tokens bounds every forward pass"),
    "rollout.micro_batch_size rollout.vllm_generate_batch_size": needless("the engine batches by itself"),
    "train.num_episodes": "train.epochs",
    "train.max_epochs": FLAT_ONLINE["max_epochs"],
    "rollout.batch_size": FLAT_ONLINE["rollout_batch_size"],
    "train.batch_size": FLAT_ONLINE["train_batch_size"],
    "data.max_len": by_hand("data.max_length", note="tokens of a prompt here, of prompt and completion there"),
    "rollout.max_new_tokens": "rollout.max_tokens",
    "rollout.n_samples_per_prompt": "rollout.samples_per_prompt",
    "rollout.temperature": "rollout.temperature",
    "rollout.top_p": "rollout.top_p",
    "actor.eps_clip": clip_both(unless="actor.eps_clip_low_high"),
    "actor.eps_clip_low_high": FLAT_ONLINE["eps_clip_low_high"],
    "actor.dual_clip": FLAT_ONLINE["dual_clip"],
    "actor.policy_loss_type": FLAT_ONLINE["policy_loss_type"],
    "actor.entropy_coef": "algo.entropy_coef",
    "actor.aux_loss_coef": "model.router_aux_loss_coef",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing",
    "actor.gradient_checkpointing_reentrant": FLAT["gradient_checkpointing_use_reentrant"],
    "actor.adam.lr": "train.learning_rate",
    "actor.adam.betas": FLAT["adam_betas"],
    "actor.adam.eps": absent("AdamW's epsilon is fixed", "1e-8", "1e-08"),
    "actor.adam.weight_decay": "train.weight_decay",
    "actor.lr_scheduler": SAME["lr_scheduler"],
    "actor.lr_warmup_ratio": WARMUP,
    "actor.min_lr_ratio": "train.min_lr_ratio",
    "actor.max_norm": "train.max_grad_norm",
    "actor.optim actor.muon.* critic.optim critic.muon.*": MUON,
    "algo.advantage.estimator": FLAT_ONLINE["advantage_estimator"],
    "algo.kl.init_coef": "algo.kl_coef",
    "algo.kl.target": FLAT_ONLINE["kl_target"],
    "algo.kl.horizon": "algo.kl_horizon",
    "algo.kl.estimator": "algo.kl_estimator",
    "algo.kl.use_loss": FLAT_ONLINE["use_kl_loss"],
    "algo.dynamic_filtering_enable": "rollout.dynamic_sampling",
    "algo.dynamic_filtering_range": FLAT_ONLINE["dynamic_filtering_reward_range"],
    "reward.model_name_or_path": reward_model(),
    "reward.remote_url": FLAT_ONLINE["remote_rm_url"],
    "reward.normalize_enable": FLAT_ONLINE["normalize_reward"],
    "reward.clip_range": FLAT_ONLINE["reward_clip_range"],
    "reward.overlong_buffer_len": "reward.overlong_tokens",
    "reward.overlong_penalty_factor": "reward.overlong_penalty",
    "reward.stop_properly_penalty_coef": absent("reward.overlong_penalty penalises length"),
    "reward.offload": offload("reward"),
    "ref.offload": offload("reference"),
    "train.enable_ema": FLAT_ONLINE["enable_ema"],
    "train.ema_beta": FLAT_ONLINE["ema_beta"],
    "train.agent_func_path": FLAT_ONLINE["agent_func_path"],
    "data.prompt_dataset": FLAT_ONLINE["prompt_data dataset"],
    "data.prompt_probs": listed("data.weights"),
    "data.prompt_split": part_of("data.train", "behind the name: owner/name:train"),
    "eval.temperature": "eval.temperature",
    "eval.n_samples_per_prompt": "eval.samples_per_prompt",
}
CRITIC_SCHEDULE = needless("the critic has the policy's schedule, with a peak of its own, algo.critic_learning_rate")
DOTTED_CRITIC: Table = {
    "critic.model_name_or_path": "algo.critic",
    "critic.adam.lr": "algo.critic_learning_rate",
    "critic.adam.* critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm": CRITIC_SCHEDULE,
    "critic.value_clip": "algo.value_clip",
    "critic.freezing_steps": FLAT_CRITIC["freezing_actor_steps"],
    "critic.save_value_network": FLAT_CRITIC["save_value_network"],
    "algo.advantage.lambd": "algo.gae_lambda",
    "algo.advantage.gamma": "algo.gamma",
    "algo.advantage.no_std_norm": WHITENING,
}
DOTTED_NO_CRITIC: Table = {
    "critic.* algo.advantage.lambd": unrelated("this trainer has no critic; posttrain ppo has"),
    "algo.advantage.gamma": UNDISCOUNTED,
}

OPENRLHF_2026 = Library(
    "OpenRLHF (2026)",
    (
        (EVERY, DOTTED),
        (OFFLINE, DOTTED_OFFLINE),
        (("sft", "pretrain"), {"model.pretrain_mode_enable": FLAT_SFT["pretrain_mode"]}),
        (
            ("dpo",),
            {
                "model.beta": "algo.beta",
                "model.ipo_enable": FLAT_DPO["ipo"],
                "model.label_smoothing": "algo.label_smoothing",
                "model.nll_loss_coef": "algo.sft_coef",
                "ref.model_name_or_path": "algo.reference",
                "ref.offload": offload("reference"),
            },
        ),
        (("sft", "pretrain"), columns("data.", **CHAT_COLUMNS)),
        (("dpo", "reward"), columns("data.", **PAIR_COLUMNS)),
        (ONLINE, columns("data.", **PROMPT_COLUMNS)),
        (("reward",), {"model.loss_type": FLAT_REWARD["loss"], "model.margin_loss_enable": "algo.use_margin"}),
        (ONLINE, DOTTED_ONLINE),
        (WITHOUT_CRITIC, DOTTED_NO_CRITIC),
        (("reinforce",), {"algo.advantage.gamma": "algo.gamma", "algo.advantage.estimator": WITH_BASELINE}),
        (GROUPED, {"algo.advantage.no_std_norm": UNSCALED}),
        (("ppo",), DOTTED_CRITIC),
    ),
    PROGRAMS,
)
