"""Previous spellings of options: every one is read as what it means now, wherever it is written."""

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.api.arguments import prepare_pipeline
from posttrain.cli.tools import args_of
from posttrain.config import renames
from posttrain.config.help import negative
from posttrain.config.parsing import from_mapping, option_keys, parse
from posttrain.config.renames import renamed, renamed_settings, split_weights
from posttrain.config.sections import option_value, tuple_as_list, with_algorithm
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.pipelines.settings import RECIPES, parse_pipeline, pipeline_defaults

LEAST = {"model": "pico", "data": "a.jsonl"}

# verb, old option, old value, new options with their values
RENAMED = [
    ("sft", "out", "runs/x", {"output_dir": "runs/x"}),
    ("sft", "steps", 7, {"train.max_steps": 7}),
    ("sft", "epochs", 2.5, {"train.epochs": 2.5}),
    ("sft", "model.lora_targets", ["q_proj"], {"model.lora_target_modules": ("q_proj",)}),
    ("sft", "model.router_loss", 0.01, {"model.router_aux_loss_coef": 0.01}),
    ("sft", "model.checkpoint_activations", True, {"model.gradient_checkpointing": True}),
    ("sft", "data.train", ["a.jsonl:0.7", "b.csv:3"], {"data.train": ("a.jsonl", "b.csv"), "data.weights": (0.7, 3.0)}),
    ("sft", "data.eval", [0.2], {"data.eval_fraction": 0.2, "data.eval": ()}),
    ("sft", "data.eval", ["b.jsonl"], {"data.eval_fraction": 0.0, "data.eval": ("b.jsonl",)}),
    ("sft", "data.max_rows", 9, {"data.max_examples": 9}),
    ("sft", "data.on_bad_row", "quarantine", {"data.on_bad_example": "quarantine"}),
    ("sft", "data.template", "chatml", {"data.chat_template": "chatml"}),
    ("sft", "data.max_tokens", 99, {"data.max_length": 99}),
    ("sft", "data.on_long", "drop", {"data.on_overlong": "drop"}),
    ("sft", "data.map_keys", '{"prompt": "q"}', {"data.map_keys": {"prompt": "q"}}),
    ("sft", "update.rows_per_step", 5, {"train.batch_size": 5}),
    ("sft", "update.tokens_per_device", 512, {"train.micro_batch_tokens": 512}),
    ("sft", "update.learning_rate", 3e-4, {"train.learning_rate": 3e-4}),
    ("sft", "update.schedule", "cosine:0.05", {"train.lr_scheduler": "cosine", "train.min_lr_ratio": 0.05}),
    ("sft", "update.schedule", "constant", {"train.lr_scheduler": "constant", "train.min_lr_ratio": 0.1}),
    ("sft", "update.warmup", 0.03, {"train.warmup_ratio": 0.03, "train.warmup_steps": 0}),
    ("sft", "update.warmup", 20, {"train.warmup_ratio": 0.0, "train.warmup_steps": 20}),
    ("sft", "update.weight_decay", 0.1, {"train.weight_decay": 0.1}),
    ("sft", "update.betas", [0.8, 0.99], {"train.adam_beta1": 0.8, "train.adam_beta2": 0.99}),
    ("sft", "update.max_grad_norm", 0.5, {"train.max_grad_norm": 0.5}),
    ("sft", "update.ema_decay", 0.9, {"train.ema_decay": 0.9}),
    ("sft", "save.every", 50, {"save.every_steps": 50}),
    ("sft", "save.keep", 2, {"save.max_checkpoints": 2}),
    ("sft", "save.keep_gigabytes", 1.5, {"save.max_gigabytes": 1.5}),
    ("sft", "log.to", ["tensorboard"], {"log.report_to": ("tensorboard",), "log.project": ""}),
    ("sft", "log.to", ["wandb:P"], {"log.report_to": ("wandb",), "log.project": "P"}),
    ("grpo", "eval.max_rows", 3, {"eval.max_examples": 3}),
    ("grpo", "rewards.weights", [2.0], {"reward.weights": (2.0,)}),
    ("grpo", "rewards.limits", [3.0, 1.5, 0.2], {"reward.timeout_seconds": 3.0, "reward.memory_gib": 1.5}),
    ("grpo", "rewards.limits", [3.0, 1.5, 0.2], {"reward.max_failure_rate": 0.2}),
    ("grpo", "rewards.workers", 4, {"reward.workers": 4}),
    ("grpo", "rewards.clip", 5.0, {"reward.clip": 5.0}),
    ("grpo", "rewards.normalize", "running", {"reward.normalize": "running"}),
    ("grpo", "rewards.normalize_models", True, {"reward.normalize": "saved"}),
    ("grpo", "rewards.overlong", [40, 0.5], {"reward.overlong_tokens": 40, "reward.overlong_penalty": 0.5}),
    (
        "grpo",
        "rollout.dynamic_sampling",
        3,
        {"rollout.dynamic_sampling": True, "rollout.dynamic_sampling_max_batches": 3},
    ),
    ("grpo", "rollout.dynamic_sampling", 0, {"rollout.dynamic_sampling": False}),
    ("grpo", "rollout.engine", ["vllm"], {"rollout.engine": "vllm", "rollout.vllm_options": {}}),
    (
        "grpo",
        "rollout.engine",
        ["vllm", "max_num_seqs=64", "dtype=half"],
        {"rollout.engine": "vllm", "rollout.vllm_options": {"max_num_seqs": "64", "dtype": "half"}},
    ),
    ("grpo", "algo.kl", 0.1, {"algo.kl_coef": 0.1}),
    ("grpo", "algo.entropy", 0.01, {"algo.entropy_coef": 0.01}),
    ("grpo", "algo.average", "token", {"algo.loss_aggregation": "token_mean"}),
    ("gspo", "algo.average", "length", {"algo.loss_aggregation": "fixed_length"}),
    ("ppo", "algo.average", "sample", {"algo.loss_aggregation": "sample_mean"}),
    ("ppo", "algo.kl_target", [6.0, 500], {"algo.kl_target": 6.0, "algo.kl_horizon": 500}),
    ("ppo", "algo.kl_target", 3.0, {"algo.kl_target": 3.0, "algo.kl_horizon": 10_000}),
    ("grpo", "algo.reference", "every:50", {"algo.reference": "", "algo.reference_sync_steps": 50}),
    ("grpo", "algo.reference", "there", {"algo.reference": "there", "algo.reference_sync_steps": 0}),
    ("dpo", "algo.reference", "every:50", {"algo.reference": "", "algo.reference_sync_steps": 50}),
    ("ppo", "algo.whiten", False, {"algo.whiten_advantages": False}),
    ("ppo", "algo.shared_trunk", 0.5, {"algo.share_critic": True, "algo.value_loss_coef": 0.5}),
    ("ppo", "algo.shared_trunk", 0.0, {"algo.share_critic": False}),
    ("ppo", "algo.pretrain_data", ["a.jsonl"], {"algo.pretrain_data": ("a.jsonl",), "algo.pretrain_coef": (1.0,)}),
    (
        "ppo",
        "algo.pretrain_data",
        ["a.jsonl:0.05", "b.jsonl:2"],
        {"algo.pretrain_data": ("a.jsonl", "b.jsonl"), "algo.pretrain_coef": (0.05, 2.0)},
    ),
    ("dpo", "algo.loss", "ipo", {"algo.loss_type": "ipo"}),
    ("dpo", "algo.pref_ftx", 0.5, {"algo.sft_coef": 0.5}),
    ("distill", "algo.sft_weight", 0.5, {"algo.sft_coef": 0.5}),
    ("reward", "algo.loss", "logexp", {"algo.loss_type": "logexp"}),
    ("reward", "algo.center", 0.01, {"algo.center_coef": 0.01}),
    ("orpo", "algo.odds_weight", 0.2, {"algo.odds_ratio_coef": 0.2}),
    ("prm", "algo.reward_tokens", ["y", "n"], {"algo.positive_token": "y", "algo.negative_token": "n"}),
    ("sft", "cluster.ray", "auto", {"cluster.ray_address": "auto"}),
    ("sft", "cluster.limits", [2, 60.5], {"cluster.max_restarts": 2, "cluster.worker_timeout_seconds": 60.5}),
    ("sft", "cluster.layout", [], {"cluster.tensor_parallel_size": 1, "cluster.zero_stage": 3}),
    ("sft", "cluster.layout", ["zero=2"], {"cluster.zero_stage": 2}),
    ("sft", "cluster.layout", ["actor.zero=2"], {"cluster.zero_stage": 2, "cluster.reference_zero_stage": 3}),
]


def least(verb):
    return LEAST | ({"reward": "gsm8k"} if ALGORITHMS[verb].online else {})


def as_words(key, value):
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--{negative(key)}"]
    return [f"--{key}", *map(str, value if isinstance(value, list | tuple) else [value])]


@pytest.mark.parametrize(("verb", "old", "value", "new"), RENAMED, ids=[f"{r[1]}={r[2]}" for r in RENAMED])
def test_previous_spellings(verb, old, value, new, tmp_path, capsys):
    """From Python, from a file and typed, each with the same result."""
    algorithm, given = ALGORITHMS[verb], least(verb)
    made = from_mapping(verb, algorithm, given | {old: value})
    section, _, name = old.rpartition(".")
    file = tmp_path / "c.yaml"
    file.write_text(f"{section}: {{{name}: {written(value)}}}\n" if section else f"{name}: {written(value)}\n")
    others = [word for key, entry in given.items() for word in as_words(key, entry)]
    others = others if old != "data.train" else ["--model", "pico", *others[4:]]
    filed = parse(verb, algorithm, [str(file), *others])
    typed = parse(verb, algorithm, [*others, *as_words(old, value)])
    for key, wanted in new.items():
        assert option_value(made, key) == option_value(filed, key) == option_value(typed, key) == wanted, key
    noted = capsys.readouterr().err
    known = option_keys(with_algorithm(algorithm))
    words = "is now --" if value != [] else "sets defaults only"
    assert noted.startswith(f"posttrain: --{old} {words}") if old not in known else not noted


def written(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_every_name_of_the_table_leads_to_an_option():
    trainers = [with_algorithm(algorithm) for algorithm in ALGORITHMS.values()]
    pipelines = [pipeline_defaults(verb) for verb in RECIPES]
    known = {key for defaults in (*trainers, *pipelines) for key in option_keys(defaults)}
    for old, new in renames.NAMES.items():
        assert old not in known, old
        assert set([new] if isinstance(new, str) else new) <= known, old
    of_tools = {key for verb in TOOLS for args in args_of(verb) for key in option_keys(args())}
    assert set(renames.VALUE_FORMS) - {"engine"} <= known | of_tools and not set(renames.TRANSFORMS) & known
    for old, new in renames.TOOL_NAMES.items():
        assert set([new] if isinstance(new, str) else new) <= of_tools, old


LAYOUTS = [
    (["tp=2", "cp=2"], {"tensor_parallel_size": 2, "context_parallel_size": 2, "reference_tensor_parallel_size": 0}),
    (["ep=8"], {"expert_parallel_size": 8}),
    (["rollout.devices=4", "rollout.tp=2"], {"rollout_devices": 4, "rollout_tensor_parallel_size": 2}),
    (
        ["reference.devices=1", "reference.tp=1", "zero=2"],
        {"reference_devices": 1, "reference_tensor_parallel_size": 1},
    ),
    (["critic.devices=1", "reference.devices=critic"], {"critic_devices": 1, "reference_colocate_with": "critic"}),
    (["reference.devices=actor"], {"reference_colocate_with": "actor", "reference_devices": 0}),
    (["reward.devices=2"], {"reward_devices": (2,), "reward_colocate_with": ()}),
    (["reward-1.devices=2"], {"reward_devices": (0, 2)}),
    (["reward-0.devices=2"], {"reward_devices": (2, 0)}),
    (["reward-0.devices=1", "reward.devices=2"], {"reward_devices": (1, 2)}),
    (
        ["reward-1.devices=critic", "critic.devices=2"],
        {"reward_colocate_with": ("actor", "critic"), "critic_devices": 2},
    ),
    (["reward.tp=2"], {"reward_tensor_parallel_size": (2,)}),
    (
        ["actor.tp=2"],
        {"tensor_parallel_size": 2, "reference_tensor_parallel_size": 1, "reward_tensor_parallel_size": (1,)},
    ),
    (["tp=4", "actor.tp=2", "critic.tp=1"], {"tensor_parallel_size": 2, "reference_tensor_parallel_size": 4}),
    (["tp=4", "actor.tp=2", "critic.tp=1"], {"critic_tensor_parallel_size": 1, "reward_tensor_parallel_size": (4,)}),
]


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=[" ".join(layout) for layout, _ in LAYOUTS])
def test_layouts(layout, options):
    reward = ["model:a", "model:b"]
    cluster = from_mapping(
        "ppo", ALGORITHMS["ppo"], LEAST | {"reward": reward, "cluster.devices": 16} | given(layout)
    ).cluster
    for name, wanted in options.items():
        assert getattr(cluster, name) == wanted, name


def test_the_note_names_what_is_not_a_default(capsys):
    words = ["--model", "a", "--data", "b", "--cluster.devices", "4", "--cluster.layout", "tp=2", "zero=3"]
    parse("sft", ALGORITHMS["sft"], [*words, "--update.schedule", "linear:0.1"])
    noted = "--cluster.layout is now --cluster.tensor_parallel_size; --update.schedule is now --train.lr_scheduler"
    assert capsys.readouterr().err == f"posttrain: {noted}\n"


def given(layout):
    """Some of them need an engine that can be divided, or experts on all devices."""
    needed = {"rollout.engine": "vllm"} if "rollout.tp=2" in layout else {}
    return needed | {"cluster.layout": layout} | ({"cluster.devices": 8} if "ep=8" in layout else {})


def test_a_layout_is_all_there_is(tmp_path):
    """What is typed replaces the file's, as it always did, under either name."""
    for text in ("cluster: {layout: [tp=2]}\n", "cluster: {tensor_parallel_size: 2}\n"):
        (tmp_path / "c.yaml").write_text("model: pico\ndata: a.jsonl\n" + text)
        found = parse("sft", ALGORITHMS["sft"], [str(tmp_path / "c.yaml"), "--cluster.layout", "cp=1", "zero=2"])
        assert (found.cluster.tensor_parallel_size, found.cluster.zero_stage) == (1, 2)


@pytest.mark.parametrize("layout", [["tp"], ["tpp=2"], ["actor.devices=1"], ["devices=3"]])
def test_layouts_that_never_were(layout):
    with pytest.raises(UsageError, match=r"^cluster.layout has .*; use cluster.tensor_parallel_size, cluster.r"):
        from_mapping("sft", ALGORITHMS["sft"], LEAST | {"cluster.layout": layout})
    with pytest.raises(UsageError, match=r"^cluster.critic_devices: no such option"):
        from_mapping("sft", ALGORITHMS["sft"], LEAST | {"cluster.layout": ["critic.devices=1"]})


def test_weights_in_flight():
    words = {"rollout.engine": ["local", "inflight"], "rollout.ahead": 1, "cluster.layout": ["rollout.devices=1"]}
    found = from_mapping("grpo", ALGORITHMS["grpo"], least("grpo") | words | {"cluster.devices": 2})
    assert found.rollout.inflight_updates and found.rollout.engine == "local" and not found.rollout.vllm_options


def test_switches_that_are_off():
    off = parse("sft", ALGORITHMS["sft"], ["--model", "a", "--data", "b", "--model.no_checkpoint_activations"])
    assert not off.model.gradient_checkpointing


def test_an_absent_limit_is_none():
    for verb, key, new in (
        ("sft", "data.max_rows", "data.max_examples"),
        ("grpo", "eval.max_rows", "eval.max_examples"),
    ):
        known = option_keys(with_algorithm(ALGORITHMS[verb]))
        assert renamed(key, None, known) == renamed(key, ["None"], known) == {new: 0}


def test_names_of_another_verb_are_not_renamed():
    known = option_keys(with_algorithm(ALGORITHMS["sft"]))
    assert renamed("eval.max_rows", 3, known) is None and renamed("model.path", "x", known) is None


def test_errors_keep_the_place(tmp_path):
    (tmp_path / "c.yaml").write_text("model: pico\nupdate:\n  schedule: cosine:x\n")
    with pytest.raises(UsageError, match=r"c\.yaml:3: update\.schedule is 'x'; it must be a number"):
        parse("sft", ALGORITHMS["sft"], [str(tmp_path / "c.yaml")])
    (tmp_path / "c.yaml").write_text("steps: [a, b]\n")
    with pytest.raises(UsageError, match=r"c\.yaml:1: train\.max_steps is \['a', 'b'\]; it must be a whole number"):
        parse("sft", ALGORITHMS["sft"], [str(tmp_path / "c.yaml")])


def test_stored_settings_by_the_names_of_today():
    old = {"data": {"max_tokens": 9, "train": ["aa:1", "bb:2"]}, "update": {"betas": [0.9, 0.95]}, "n": 3, "out": "x"}
    new = {"data.max_length": 9, "data.train": ["aa", "bb"], "data.weights": [1.0, 2.0]}
    new |= {"train.adam_beta1": 0.9, "train.adam_beta2": 0.95, "n": 3}
    assert renamed_settings(old, {*new, "out"}) == new | {"out": "x"}
    assert renamed_settings(old, {*new, "output_dir"}) == new | {"output_dir": "x"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.jsonl:0.7", "b.parquet:0.3"], (["a.jsonl", "b.parquet"], [0.7, 0.3])),
        (["a.jsonl", "b.jsonl"], (["a.jsonl", "b.jsonl"], [])),
        (["a.jsonl:2", "b/*.csv:.5", "cc:1e-1"], (["a.jsonl", "b/*.csv", "cc"], [2.0, 0.5, 0.1])),
        ([r"C:\data\a.jsonl"], ([r"C:\data\a.jsonl"], [])),
        ([r"C:\data\a.jsonl:3", "D:/b.jsonl:1"], ([r"C:\data\a.jsonl", "D:/b.jsonl"], [3.0, 1.0])),
        (["C:5"], (["C:5"], [])),
        (["folder:test", "owner/name@part:train"], (["folder:test", "owner/name@part:train"], [])),
        (["folder:test:0.5", "owner/name:train:1"], (["folder:test", "owner/name:train"], [0.5, 1.0])),
        (["12:34.jsonl"], (["12:34.jsonl"], [])),
        ([], ([], [])),
    ],
)
def test_names_and_weights(names, expected):
    assert split_weights(names) == expected


def test_a_file_that_exists_under_the_whole_name_has_no_weight(tmp_path):
    path = tmp_path / "a.jsonl:1"
    path.write_text("{}")
    assert split_weights([str(path)]) == ([str(path)], [])


@pytest.mark.parametrize("names", [["a.jsonl:1", "b.jsonl"], ["b.jsonl", "a.jsonl:1"]])
def test_some_with_and_some_without_weight(names):
    with pytest.raises(UsageError, match=r"b.jsonl has no weight, but another source has"):
        split_weights(names)


# old option, old value, new option, its value
OF_PIPELINES = [
    ("steps", 3, "train.max_steps", 3),
    ("update.rows_per_step", 2, "train.batch_size", 2),
    ("prompts", 4, "prompts_per_iteration", 4),
    ("reward", ["gsm8k", "a.py:b"], "reward.functions", ("gsm8k", "a.py:b")),
    ("score.weights", [1.0, 0.5], "reward.weights", (1.0, 0.5)),
    ("score.timeout_seconds", 20.0, "reward.timeout_seconds", 20.0),
    ("score.memory_gib", 3.0, "reward.memory_gib", 3.0),
    ("score.workers", 1, "reward.workers", 1),
    ("score.max_failure_rate", 0.5, "reward.max_failure_rate", 0.5),
    ("score.template", "chatml", "reward.model_chat_template", "chatml"),
    ("generate.n", 3, "generate.samples_per_prompt", 3),
    ("generate.batch", 6, "generate.batch_size", 6),
    ("generate.engine", ["vllm", "max_num_seqs=64"], "generate.vllm_options", {"max_num_seqs": "64"}),
    ("eval.n", 2, "eval.samples_per_prompt", 2),
    ("algo.loss", "ipo", "algo.loss_type", "ipo"),
]


@pytest.mark.parametrize(("old", "value", "new", "wanted"), OF_PIPELINES, ids=[row[0] for row in OF_PIPELINES])
def test_previous_spellings_of_pipelines(old, value, new, wanted, tmp_path):
    section, _, name = old.rpartition(".")
    nested = {section: {name: value}} if section else {name: value}
    file = tmp_path / "c.yaml"
    file.write_text(f"{section}: {{{name}: {written(value)}}}\n" if section else f"{name}: {written(value)}\n")
    for found in (
        prepare_pipeline("iterative-dpo", nested),
        parse_pipeline("iterative-dpo", [str(file)]),
        parse_pipeline("iterative-dpo", as_words(old, value)),
    ):
        assert option_value(found, new) == wanted
    assert renamed_settings(nested, [new, "generate.engine"])[new] in (wanted, tuple_as_list(wanted))
