"""TRL's options: its trainers' configurations, ModelConfig and the arguments of its scripts (1.x, and older names)."""

from __future__ import annotations

from typing import Any

from posttrain.config.foreign.huggingface import ADAPTERS, DEFAULTS, KERNELS, PACKING, TRAINING
from posttrain.config.foreign.meanings import (
    DEVICES,
    EVERY,
    GROUPED,
    OFFLINE,
    ONLINE,
    REFERENCED,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    TranslationError,
    absent,
    by_hand,
    chosen,
    clip_both,
    here,
    if_true,
    items,
    listed,
    made,
    needless,
    number,
    part_of,
    positive_only,
    ratio,
    reward_model,
    reward_range,
    truth,
    unrelated,
    vllm,
)

ANSWERS_ONLY = needless("completions count, prompts never do, except with posttrain pretrain")


def dataset(value: Any, given: Given) -> Found:
    """The configuration and the split stand behind the name; the test split counts if it is evaluated on."""
    name = f"{value}@{given['dataset_config']}" if given.get("dataset_config") else str(value)
    found = {"data.train": [f"{name}:{given['dataset_train_split']}" if given.get("dataset_train_split") else name]}
    evaluated = str(given.get("eval_strategy", "no")).lower() != "no"
    return found | ({"data.eval": [f"{name}:{given.get('dataset_test_split', 'test')}"]} if evaluated else {})


def adapters(value: Any, given: Given) -> Found:
    """TRL's rank is 16 and alpha 32 unless they are given; PEFT's default are the projections of queries and values."""
    if not truth(value):
        return {}
    default = {} if given.get("lora_target_modules") else {"model.lora_target_modules": ["q_proj", "v_proj"]}
    rank, alpha = given.get("lora_r") or "16", given.get("lora_alpha") or "32"
    return {"model.lora_rank": rank, "model.lora_alpha": alpha} | default


def with_adapters(option: str) -> Meaning:
    """Counts only with use_peft."""
    return Meaning((option,), "with use_peft", lambda v, given: {option: v} if truth(given.get("use_peft")) else {})


def targets(value: Any, given: Given) -> Found:
    return {"model.lora_target_modules": items(value)} if truth(given.get("use_peft")) else {}


def prompts(value: Any, given: Given) -> Found | None:
    """Completions are counted there: of a batch that is generated, and of an optimizer step."""
    if DEVICES not in given:
        raise TranslationError(
            "a size per device, and the number of devices is not known. Give it with --devices N, or the prompts of a "
            "step with --train.batch_size"
        )
    size, devices, count = (number(given.get(n)) for n in ("per_device_train_batch_size", DEVICES, "num_generations"))
    accumulation = number(given.get("gradient_accumulation_steps", "1"))
    if not (size and devices and count and accumulation):
        return None
    step = size * devices * accumulation
    steps = number(given.get("steps_per_generation"))
    generated = number(given.get("generation_batch_size")) or (size * devices * steps if steps else step)
    if generated % count:
        raise TranslationError(f"{generated:g} completions of a batch are not a multiple of num_generations {count:g}")
    mini = {"algo.mini_batch_size": f"{step:g}"} if generated != step else {}
    return {"train.batch_size": f"{generated / count:g}", **mini}


def synchronised(value: Any, given: Given) -> Found:
    """TRL mixes 0.6 of the policy into the reference every 512 steps unless they are given."""
    if not truth(value):
        return {}
    steps, share = given.get("ref_model_sync_steps", "512"), given.get("ref_model_mixup_alpha", "0.6")
    return {"algo.reference_sync_steps": steps, "algo.reference_mixup_alpha": share}


def rpo(value: Any, given: Given) -> Found | None:
    return {"algo.sft_coef": value} if isinstance(value, str) and number(value) is not None else None


def gkd_divergence(value: Any, given: Given) -> Found | None:
    amount = number(value)
    if amount is None:
        return None
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return {"algo.divergence": ends[amount]} if amount in ends else {"algo.divergence": "jsd", "algo.jsd_beta": value}


SYNCHRONISED: Table = {
    "sync_ref_model": made(
        *("algo.reference_sync_steps", "algo.reference_mixup_alpha"),
        by=synchronised,
        note="a number of steps turns it on; 512 and 0.6 there unless given",
    ),
    "ref_model_sync_steps": part_of("algo.reference_sync_steps", "with sync_ref_model"),
    "ref_model_mixup_alpha": part_of("algo.reference_mixup_alpha", "with sync_ref_model"),
}
LORA = {"lora_r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
LORA |= {name: name for name in ("use_rslora", "use_dora")}
COMMON: Table = {
    **TRAINING,
    **ADAPTERS,
    "model_name_or_path": "model.path",
    "model_revision": absent("the directory or the cached snapshot is what is used", "main"),
    "model_init_kwargs model_init_kwargs.*": by_hand("model.dtype", note="other settings of loading do not exist"),
    "attn_implementation": KERNELS,
    "use_peft": made(
        *("model.lora_rank", "model.lora_alpha", "model.lora_target_modules"),
        by=adapters,
        note="a rank above 0 trains adapters; TRL's defaults are 16, 32 and q_proj v_proj",
    ),
    **{name: with_adapters(f"model.{ours}") for name, ours in LORA.items()},
    "lora_target_modules": made("model.lora_target_modules", by=targets, note="with use_peft"),
    "dataset_name": made("data.train", "data.eval", by=dataset, note="a split stands behind a colon: owner/name:train"),
    "dataset_train_split dataset_config": part_of("data.train", "behind the name: owner/name@config:train"),
    "dataset_test_split": part_of("data.eval", "behind the name: owner/name:test"),
    "datasets": by_hand("data.train", "data.weights", note="files or names, and weights if they are mixed"),
    "test_split_size": "data.eval_fraction",
    "dataset_streaming streaming": needless("files are read as they are used"),
    "dataset_num_proc dataset_batch_size pad_to_multiple_of pad_token eos_token padding_free": PACKING,
    "chat_template_path": "data.chat_template",
    "router_aux_loss_coef": "model.router_aux_loss_coef",
    "disable_dropout": needless("the model's own dropout is always off"),
    "config": needless("a file comes first: posttrain VERB FILE.yaml"),
}

LENGTHS: Table = {
    "max_length max_seq_length": "data.max_length",
    "truncation_mode": chosen("data.on_overlong", {"keep_start": "truncate"}, note="truncate cuts the end"),
    "max_prompt_length max_completion_length max_target_length": absent("data.max_length bounds the whole sequence"),
}

SFT: Table = {
    "packing packing_strategy eval_packing bfd": PACKING,
    "completion_only_loss assistant_only_loss": ANSWERS_ONLY,
    "dataset_text_field": chosen("data.map_keys", {"text": {}}, note='{"text": "column"}, with posttrain pretrain'),
    "dataset_kwargs": absent("formats are recognised by their columns; data.map_keys names other ones"),
    "loss_type": chosen(
        "algo.loss_type", {"nll": "nll", "dft": "dft"}, note="nll or dft, a mean over the step's tokens"
    ),
}

REFERENCE: Table = {
    "beta": "algo.beta",
    "precompute_ref_log_probs": "algo.precompute_reference",
    "precompute_ref_batch_size": needless("train.micro_batch_tokens bounds every forward pass"),
    "ref_model ref_model_name_or_path": "algo.reference",
    **SYNCHRONISED,
}


DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down"),
    *("exo_pair", "nca_pair", "bco_pair", "sppo_hard", "discopop", "aot", "aot_unpaired"),
)


def dpo_loss(value: Any, given: Given) -> Found | None:
    """IPO and sigmoid_norm are means over tokens there."""
    names = items(value)
    if names == ["sigmoid_norm"]:
        return {"algo.loss_type": "sigmoid", "algo.length_normalize": "true"}
    if not names or not set(names) <= set(DPO_LOSSES) or ("ipo" in names and len(names) > 1):
        return None
    chosen_loss = {"algo.loss_types": names} if len(names) > 1 else {"algo.loss_type": names[0]}
    return chosen_loss | ({"algo.length_normalize": "true"} if "ipo" in names else {})


DPO: Table = {
    "loss_type": made(
        "algo.loss_type",
        "algo.loss_types",
        "algo.length_normalize",
        by=dpo_loss,
        note="same names, several: algo.loss_types; ipo and sigmoid_norm: algo.length_normalize; sft: algo.sft_coef",
    ),
    "rpo_alpha": made("algo.sft_coef", by=rpo, note="the weight of the SFT loss beside the preference loss"),
    "loss_weights": by_hand("algo.loss_weights", "algo.sft_coef", note="the weight of sft is algo.sft_coef"),
    "label_smoothing": "algo.label_smoothing",
    "f_divergence_type": "algo.f_divergence",
    "f_alpha_divergence_coef": "algo.f_alpha",
    "ld_alpha": "algo.ld_alpha",
    "discopop_tau": "algo.discopop_tau",
    "use_weighting": absent("algo.weight_by_policy is WPO without the alignment of its weights"),
}
KTO: Table = {
    "desirable_weight": "algo.desirable_weight",
    "undesirable_weight": "algo.undesirable_weight",
    "loss_type": chosen(
        "algo.variant", {"kto": "kto", "apo_zero_unpaired": "apo_zero_unpaired"}, note="kto or apo_zero_unpaired"
    ),
}
ORPO: Table = {"beta": here("algo.odds_ratio_coef", "the paper's lambda")}
CPO: Table = {
    "beta": "algo.beta",
    "cpo_alpha": "algo.sft_coef",
    "label_smoothing": "algo.label_smoothing",
    "loss_type": Meaning(
        ("algo.loss_type",),
        "simpo is a verb, the others are losses",
        lambda value, given: {"algo.loss_type": value} if value in ("sigmoid", "hinge", "ipo") else None,
        verbs={"simpo": ("simpo",)},
    ),
    "alpha": absent("alpha-PO does not exist"),
}


SIMPO: Table = {
    **{key: CPO[key] for key in ("beta", "label_smoothing", "cpo_alpha", "alpha")},
    "loss_type": needless("the verb says it"),
    "simpo_gamma": ratio("algo.gamma_beta_ratio", "beta", note="divided by beta"),
}
REWARD: Table = {"center_rewards_coefficient": "algo.center_coef"}
PRM: Table = {
    "step_separator": by_hand("algo.placeholder", note="the token after each step that is scored"),
    "train_on_last_step_only": absent("every labelled step counts"),
}
DISTILL: Table = {
    "teacher_model_name_or_path": "algo.teacher",
    "temperature": "algo.temperature",
    "beta": made(
        "algo.divergence",
        "algo.jsd_beta",
        by=gkd_divergence,
        note="0 is forward_kl, 1 reverse_kl, between them jsd with algo.jsd_beta",
    ),
    "lmbda": absent("posttrain opd learns from the student's completions, which is lmbda 1", "0", "0.0"),
    "seq_kd max_new_tokens": absent("the student learns from the data's own completions"),
    "teacher_model_init_kwargs": needless("the teacher is loaded as the student is"),
}

OPD: Table = {
    **{key: DISTILL[key] for key in ("teacher_model_name_or_path", "beta", "teacher_model_init_kwargs")},
    "lmbda": Meaning(
        ("algo.student_fraction", "algo.completion_column"),
        "the share of the student's completions, drawn for each completion and not for each step",
        same=("1", "1.0"),
    ),
    "max_new_tokens": "rollout.max_tokens",
    "seq_kd": absent("posttrain generate writes a teacher's completions, posttrain sft learns them"),
}

PER_GENERATION = (
    "completions per optimizer step: the size per device times accumulation steps times devices; 0: the whole batch"
)
SAMPLING: Table = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": positive_only("rollout.top_k"),
    "min_p": "rollout.min_p",
}
USED = "use_vllm"


def reward_functions(value: Any, given: Given) -> Found:
    """Translate TRL's own functions, models, and nothing else: names here may be other functions."""
    found = []
    for name in items(value):
        if name == "accuracy_reward":
            found.append("math")
        elif "/" in name and not name.endswith(".py"):
            found.append(f"model:{name}")
        else:
            raise TranslationError(
                f"{name} is a function of TRL or of a Python package. Give a verifier (posttrain rewards list), "
                "FILE.py:FUNCTION or model:PATH with --reward.functions"
            )
    return {"reward.functions": found}


ROLLOUTS: Table = {
    **SAMPLING,
    "per_device_train_batch_size gradient_accumulation_steps": made(
        "train.batch_size",
        "algo.mini_batch_size",
        by=prompts,
        note="prompts per step; there completions are counted: divide size times accumulation times devices by "
        "num_generations",
    ),
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_eval": "eval.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_length",
    "generation_batch_size steps_per_generation": part_of("algo.mini_batch_size", PER_GENERATION),
    "shuffle_dataset": "data.shuffle",
    "repetition_penalty generation_kwargs": absent(
        "rollouts are drawn from the policy itself, without such changes", "1", "1.0"
    ),
    "beta": here("algo.kl_coef", "the weight of the KL to the reference"),
    "epsilon": clip_both(unless="epsilon_high"),
    "epsilon_high": "algo.clip_high",
    "delta": here("algo.dual_clip", "the bound of the ratio where the advantage is negative"),
    "off_policy_mask_threshold": "algo.off_policy_mask_threshold",
    "use_bias_correction_kl": if_true({"algo.kl_bias_correction": "true"}, note="with algo.kl_coef"),
    "num_iterations": "algo.epochs_per_batch",
    **SYNCHRONISED,
    "entropy_coef": "algo.entropy_coef",
    "top_entropy_quantile": Meaning(
        ("algo.top_entropy_fraction",),
        "the same share, but of each completion's tokens and not of the batch's",
        same=("1", "1.0"),
    ),
    "reward_funcs": made(
        "reward.functions", by=reward_functions, note="accuracy_reward is math; model:PATH for models"
    ),
    "reward_weights": listed("reward.weights"),
    "reward_model_name_or_path": reward_model(),
    "multi_objective_aggregation": absent("rewards are added up with reward.weights", "sum_then_normalize"),
    "use_adaptive_entropy": part_of("algo.entropy_target", "a target above 0"),
    "entropy_target": Meaning(
        ("algo.entropy_target",),
        "with use_adaptive_entropy",
        lambda value, given: {"algo.entropy_target": value} if truth(given.get("use_adaptive_entropy")) else {},
    ),
    "entropy_coef_delta": "algo.entropy_coef_delta",
    "entropy_coef_max": "algo.entropy_coef_max",
    "entropy_coef_min": absent("the smallest weight is 0", "0", "0.0"),
    "mask_truncated_completions": "algo.mask_truncated_completions",
    "log_completions log_unique_prompts num_completions_to_print": needless("posttrain samples shows all of them"),
    "use_vllm": if_true({"rollout.engine": "vllm"}, note="vllm"),
    "vllm_mode": by_hand(
        "cluster.rollout_devices", note="0 is colocate; devices of their own instead of a server", harmless=True
    ),
    "vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port": needless(
        "engines are started by the run"
    ),
    "vllm_gpu_memory_utilization": vllm("gpu_memory_utilization", unless=USED),
    "vllm_max_model_length": vllm("max_model_len", unless=USED),
    "vllm_tensor_parallel_size": vllm("tensor_parallel_size", unless=USED),
    "vllm_enable_sleep_mode vllm_model_impl": unrelated("rollout.vllm_options passes options to vLLM by vLLM's names"),
    "vllm_structured_outputs_regex vllm_guided_decoding_regex": absent("completions have no prescribed form"),
    "vllm_importance_sampling_clip_max vllm_importance_sampling_cap": "algo.importance_cap",
    "vllm_importance_sampling_clip_min": "algo.importance_floor",
    "vllm_importance_sampling_mode": here("algo.importance_mode", "sequence_mask is TRL's default"),
    "vllm_importance_sampling_correction": by_hand("algo.importance_cap", note="0 turns the correction off"),
    "use_transformers_paged use_transformers_continuous_batching cache_implementation": needless(
        "the local engine batches continuously"
    ),
    "ds3_gather_for_generation cast_lm_head_to_fp32": needless("the engine shares the trainer's weights"),
    "max_tool_calling_iterations": by_hand("rollout.environment", note="an environment decides how many turns"),
}


def aggregation(value: Any, given: Given) -> Found | None:
    ways = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "sample_mean", "dr_grpo": "fixed_length"}
    return {"algo.loss_aggregation": ways[value]} if value in ways else None


def scaling(value: Any, given: Given) -> Found | None:
    if (word := str(value).lower()) == "batch":
        return {"algo.scale_by_std": "true", "algo.std_over": "batch"}
    scaled = {"none": "false", "false": "false", "group": "true", "true": "true"}.get(word)
    return {"algo.scale_by_std": scaled} if scaled else None


GRPO: Table = {
    "loss_type": Meaning(
        ("algo.loss_aggregation",),
        "dapo and bnpo: token_mean, grpo: sample_mean, dr_grpo: fixed_length; cispo and sapo are verbs",
        aggregation,
        verbs={"cispo": ("cispo",), "sapo": ("sapo",)},
    ),
    "importance_sampling_level": Meaning(
        note="not an option: sequence is posttrain gspo",
        verbs={"sequence": ("gspo",), "token": ("grpo", "cispo", "sapo")},
    ),
    "multi_objective_aggregation": "algo.multi_objective_aggregation",
    "scale_rewards": made(
        "algo.scale_by_std", "algo.std_over", by=scaling, note="group, or batch with algo.std_over; none: false"
    ),
}
SAPO: Table = {
    "sapo_temperature_pos": "algo.temperature_positive",
    "sapo_temperature_neg": "algo.temperature_negative",
}
RLOO: Table = {
    "normalize_advantages": "algo.normalize_advantages",
    "reward_clip_range": made(
        *("reward.clip", "reward.clip_min", "reward.clip_max"),
        by=reward_range,
        note="one option if both bounds have the same size, else two",
    ),
}
PPO: Table = {
    "num_ppo_epochs": "algo.epochs_per_batch",
    "num_mini_batches": by_hand("algo.mini_batch_size", note="completions per optimizer step, not their number"),
    "kl_coef": "algo.kl_coef",
    "kl_estimator": "algo.kl_estimator",
    "cliprange": clip_both(),
    "cliprange_value": "algo.value_clip",
    "vf_coef": by_hand(
        "algo.value_loss_coef", note="only with algo.share_critic; else the critic has its own optimizer"
    ),
    "gamma": "algo.gamma",
    "lam": "algo.gae_lambda",
    "whiten_rewards": absent("advantages are whitened, algo.whiten_advantages, rewards are not"),
    "response_length": "rollout.max_tokens",
    "stop_token stop_token_id": by_hand("rollout.stop", note="the end-of-turn token always ends a completion"),
    "missing_eos_penalty": absent("reward.overlong_penalty penalises length"),
    "total_episodes": by_hand("train.epochs", "train.max_steps", note="passes over the prompts, or batches of them"),
    "sft_model_path": "model.path",
    "reward_model_path": reward_model(),
    "local_rollout_forward_batch_size": needless("the engine batches by itself"),
}

TRL = Library(
    "TRL",
    (
        (EVERY, COMMON),
        (OFFLINE, LENGTHS),
        (("sft", "pretrain"), SFT),
        (REFERENCED, REFERENCE),
        (("dpo",), DPO),
        (("kto",), KTO),
        (("orpo",), ORPO),
        (("cpo",), CPO),
        (("simpo",), SIMPO),
        (("reward",), REWARD),
        (("prm",), PRM),
        (("distill",), DISTILL),
        (ONLINE, ROLLOUTS),
        (GROUPED, GRPO),
        (("sapo",), SAPO),
        (("rloo",), RLOO),
        (("ppo",), PPO),
        (("opd",), OPD),
    ),
    {"distill": "GKDTrainer", "opd": "GKDTrainer", "simpo": "CPOTrainer"},
    defaults=(
        (EVERY, DEFAULTS),
        (OFFLINE, {"max_length": "1024"}),
        (("sft", "pretrain"), {"learning_rate": "2e-5"}),
        (("dpo", "kto", "orpo", "cpo", "simpo"), {"learning_rate": "1e-6", "beta": "0.1"}),
        (("simpo",), {"simpo_gamma": "0.5", "cpo_alpha": "0"}),
        (("cpo",), {"cpo_alpha": "1.0"}),
        (("reward",), {"learning_rate": "1e-4"}),
        (ONLINE, {"learning_rate": "1e-6", "max_completion_length": "256", "num_generations": "8"}),
        (GROUPED, {"beta": "0.0", "epsilon": "0.2", "loss_type": "dapo", "scale_rewards": "group"}),
        (("rloo",), {"beta": "0.05", "num_generations": "2", "epsilon": "0.2"}),
        (("ppo",), {"learning_rate": "3e-6", "num_generations": "1", "response_length": "53"}),
    ),
)
