"""The configuration: what is read is what was written, wherever it was written; and what cannot work is refused."""

import json
import typing
from itertools import pairwise

import pytest
import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.config import sections as configs
from posttrain.config.checks import check
from posttrain.config.foreign.commands import uses_of_config
from posttrain.config.parsing import Entry, check_keys, flatten, from_mapping, option_keys, parse, verb_of_file
from posttrain.config.sections import as_mapping, as_yaml, option_value
from posttrain.core.errors import UsageError

LEAST = {"model": {"path": "pico"}, "data": {"train": ["a.jsonl"]}}
# Where what `another` finds would be out of bounds, or would not go with the rest.
SPECIAL = {
    "output_dir": "some folder/run",
    "train.epochs": 2.5,
    "model.lora_rank": 8,
    "data.train": ["a.jsonl", "b c.jsonl"],
    "data.weights": [0.5, 2.0],
    "data.eval_fraction": 0.0,  # does not go with data.eval
    "data.map_keys": {"prompt": "question", "tags": {"role_tag": "who"}},
    "data.chat_template": 'Human: {}\n"Assistant": ',
    "train.learning_rate": 3e-07,
    "eval.harness": "lm-eval",  # all options of tasks go with it
    "train.min_lr_ratio": 0.25,
    "train.warmup_ratio": 0.0,  # does not go with train.warmup_steps
    "train.adam_beta1": 0.8,
    "train.adam_beta2": 0.999,
    "train.ema_decay": 0.99,
    "train.profile_ranks": [0, 1],
    "train.fp8": False,  # refused beside model.lora_rank
    "algo.positive_token": "#",
    "algo.credit": "conversation",  # others do not go with reward.clip
    "algo.reference": "there",
    "algo.reference_mixup_alpha": 0.5,
    "algo.precompute_reference": False,  # does not go with algo.reference_sync_steps
    "algo.resample_by_reward": "power",
    "reward.clip": 0.0,  # does not go with the two bounds
    "reward.clip_min": -2.5,
    "reward.clip_max": 5.0,
    "algo.kl_coef": 0.25,
    "algo.kl_target": 2.5,
    "algo.kl_horizon": 100,
    "algo.clip_low": 0.45,
    "algo.pretrain_coef": [0.5, 2.0],
    "reward.functions": ["gsm8k", "a.py:b"],
    "rollout.top_p": 0.5,
    "rollout.replay": "",  # does not go with rollout.ahead and rollout.skip_epochs
    "rollout.vllm_options": {"max_num_seqs": 3, "dtype": "half", "enforce_eager": True},
    "cluster.devices": 8,
    "cluster.tensor_parallel_size": 2,
    "cluster.context_parallel_size": 1,
    "cluster.ulysses_degree": 1,
    "cluster.expert_parallel_size": 1,
    "cluster.pipeline_parallel_size": 1,  # stages are refused beside cluster.offload parameters
    "cluster.pipeline_schedule": "1f1b",
    "cluster.virtual_pipeline_parallel_size": 1,
    "cluster.pipeline_layers_per_stage": [],
    "cluster.zero_stage": 2,
    "cluster.reference_devices": 0,  # does not go with cluster.reference_colocate_with
    "cluster.reference_colocate_with": "critic",
    "cluster.reference_tensor_parallel_size": 2,
    "cluster.reference_context_parallel_size": 1,
    "cluster.reference_pipeline_parallel_size": 1,
    "cluster.reference_expert_parallel_size": 1,
    "cluster.critic_devices": 2,
    "cluster.critic_colocate_with": "actor",
    "cluster.critic_tensor_parallel_size": 1,
    "cluster.critic_context_parallel_size": 2,
    "cluster.critic_pipeline_parallel_size": 1,
    "cluster.critic_expert_parallel_size": 1,
    "cluster.reward_devices": [1, 0],
    "cluster.reward_colocate_with": ["actor", "rollout"],
    "cluster.reward_tensor_parallel_size": [1, 1],
    "cluster.reward_context_parallel_size": [1],
    "cluster.reward_pipeline_parallel_size": [1],
    "cluster.reward_expert_parallel_size": [],
    "cluster.reward_zero_stage": [2, 3],
    "cluster.replicate_size": 2,
    "cluster.rollout_devices": 1,
    "cluster.rollout_tensor_parallel_size": 1,
    "cluster.offload": ["parameters", "reference"],
    "reward.weights": [0.5, 2.0],
    "reward.overlong_penalty": 0.5,
    "reward.max_failure_rate": 0.25,
    "log.report_to": ["tensorboard", "wandb"],
    "train.lr_scheduler": "linear",  # train.lr_decay_steps needs one that decays, after the warm-up
    "train.lr_decay_steps": 9,
    "algo.loss_types": ["sigmoid", "hinge"],
    "algo.loss_weights": [0.5, 2.0],
    "rollout.partial_prompts": 0,  # refused beside most others
    "rollout.prompts_per_stage": 0,  # refused beside rollout.ahead and rollout.replay
    "rollout.router_replay": False,  # refused beside another rollout.engine and rollout.replay
    "rollout.quantization": "none",  # likewise
    "rollout.kv_cache_dtype": "auto",  # likewise
    "rollout.speculative_tokens": 0,  # likewise
    "rollout.agent": "",  # refused beside rollout.environment
    "rollout.tools": [],  # refused beside rollout.environment
    "train.optimizer": "adamw",  # others are refused on several devices
    "train.neftune_noise_alpha": 0.0,  # refused for online trainers
    "model.use_dora": False,  # refused on several devices
    "model.lora_init": "zeros",  # likewise
    "model.freeze_layers": 0,  # refused beside model.lora_rank
    "model.trainable_layers": 0,  # likewise
    "model.frozen_parameters": [],  # likewise
    "model.trainable_parameters": [],  # likewise
    "log.prometheus_file": "some folder/a.prom",
}
ALONE = {
    "train.optimizer": "muon",
    "train.neftune_noise_alpha": 5.5,
    "model.freeze_layers": 1,
    "model.trainable_layers": -2,
    "model.frozen_parameters": ["a.*", "b c"],
    "model.trainable_parameters": ["lm_head"],
}
"""Options that do not go with those above."""


def another(annotation, value):
    """A value of an option's type that is not its default."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)[-1]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float) or value is None:
        return (value or 0) + (0.25 if annotation is float else 3)
    return f"{value} x" if isinstance(value, str) else ["a", "b c"]


def others(verb):
    """Another value than the default for every option of a verb."""
    start = configs.with_algorithm(ALGORITHMS[verb])
    changed = {}
    for key in option_keys(start):
        section, _, name = key.rpartition(".")
        holder = option_value(start, section) if section else start
        changed[key] = another(typing.get_type_hints(type(holder)).get(name), getattr(holder, name))
    return changed | {key: value for key, value in SPECIAL.items() if key in changed}


@pytest.mark.parametrize("kind", [{"model.use_dora": True}, {"model.lora_init": "pissa_niter_16"}, ALONE])
def test_options_that_need_one_device(kind):
    rank = {} if kind is ALONE else {"model.lora_rank": 4}
    mapping = {"model.path": "m", "data.train": ["d"]} | rank | kind
    config = made("sft", mapping)
    assert {key: configs.tuple_as_list(option_value(config, key)) for key in kind} == kind
    assert configs.as_mapping(made("sft", configs.as_mapping(config))) == configs.as_mapping(config)


def made(verb, mapping):
    return from_mapping(verb, ALGORITHMS[verb], mapping)


def typed(verb, *args):
    return parse(verb, ALGORITHMS[verb], list(map(str, args)))


def flat(config):
    return flatten(as_mapping(config))


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_every_option_survives_every_way(verb, tmp_path):
    wanted = others(verb)
    config = made(verb, wanted)
    assert set(wanted) == set(option_keys(config))
    assert flat(config) == wanted
    assert as_mapping(made(verb, as_mapping(config))) == as_mapping(config)
    (tmp_path / "c.yaml").write_text(as_yaml(verb, config), encoding="utf-8")
    assert as_mapping(typed(verb, tmp_path / "c.yaml")) == as_mapping(config)
    assert as_mapping(typed(verb, *as_typed(wanted))) == as_mapping(config)


def as_typed(options):
    for key, value in options.items():
        if isinstance(value, bool):
            section, dot, name = key.rpartition(".")
            yield f"--{key}" if value else f"--{section}{dot}no_{name}"
        else:
            yield f"--{key}"
            yield from value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_defaults_survive_too_and_are_the_algorithms(verb, tmp_path):
    mapping = LEAST | ({"algo": {"teacher": "pico"}} if verb in ("distill", "opd") else {})
    mapping |= {"reward": ["gsm8k"]} if ALGORITHMS[verb].online else {}
    config = made(verb, mapping)
    file = tmp_path / "c.yaml"
    file.write_text(as_yaml(verb, config), encoding="utf-8")
    assert as_mapping(typed(verb, file)) == as_mapping(config)
    assert yaml.safe_load(file.read_text())["verb"] == verb
    for key, value in ALGORITHMS[verb].defaults.items():
        assert option_value(config, key) == value
    assert made(verb, mapping).train is not config.train  # no two runs share a section


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "ü", "'\"", "null", "None", "true", "1e3", "a: b", "{}", "a\nb", "[x]", "#"]
)
def test_odd_texts(text, tmp_path):
    config = made("sft", LEAST | {"output_dir": text})
    assert config.output_dir == text
    (tmp_path / "c.yaml").write_text(as_yaml("sft", config), encoding="utf-8")
    assert typed("sft", tmp_path / "c.yaml").output_dir == text


def test_empty_sections_dashes_and_misplaced_files(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train:\n  # learning_rate: 1\nmodel: {path: a}\ndata: {train: x, map-keys: {completion: text}}\n")
    config = typed("sft", file)
    assert config.train.learning_rate == typed("sft", "--model", "a", "--data", "x").train.learning_rate
    assert config.data.map_keys == {"completion": "text"}
    with pytest.raises(UsageError, match=r"comes first: posttrain sft c.yaml --option"):
        typed("sft", "--model", "a", "--data", "x", "--data.shuffle", "c.yaml")
    with pytest.raises(UsageError, match=r"algo.beta is 'nan'; it must be a number"):
        ALGORITHMS["dpo"](typed("dpo", "--model", "a", "--data", "x", "--algo.beta", "nan").algo).check()


def test_what_is_typed_wins_over_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 3\nquiet: true\nmodel: {path: a, lora_rank: 4}\ndata: {train: [x, y]}\n")
    config = typed("sft", tmp_path / "c.yaml", "--seed", 5, "--no_quiet", "--model.path", "b", "--data.train", "z")
    assert (config.seed, config.quiet, config.model.path, config.data.train) == (5, False, "b", ("z",))
    assert config.model.lora_rank == 4


def test_a_file_begins_with_those_it_names(tmp_path):
    """What is written nearer to the user wins, wherever in the file `defaults` stands."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("model: {path: small, lora_rank: 4}\ntrain: {max_steps: 1}\n")
    (tmp_path / "base.yaml").write_text("defaults: model/small.yaml\ntrain: {max_steps: 2}\nseed: 7\ndata: [x]\n")
    (tmp_path / "c.yaml").write_text("verb: sft\ntrain: {max_steps: 3}\ndefaults: [base.yaml]\nmodel: {lora_rank: 8}\n")
    config = typed("sft", tmp_path / "c.yaml", "--seed", 9)
    assert (config.train.max_steps, config.seed, config.model.path, config.model.lora_rank) == (3, 9, "small", 8)
    (tmp_path / "d.yaml").write_text("defaults: [base.yaml, model/small.yaml]\n")
    assert typed("sft", tmp_path / "d.yaml").train.max_steps == 1  # of several the last


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [c.yaml]\n", r"c\.yaml: defaults: .*c\.yaml is the file itself"),
        ("defaults: [other.yaml]\n", r"other\.yaml: defaults: .*c\.yaml is the file itself, or one that names it"),
        ("seed: 1\ndefaults: [{model: a}]\n", r"c\.yaml:2: defaults must be files"),
        ("defaults: nowhere.yaml\n", r"nowhere\.yaml: no such configuration file"),
        ("defaults: wrong.yaml\n", r"wrong\.yaml:2: quite: no such option. Did you mean quiet"),
        ("defaults: dpo.yaml\n", r"dpo\.yaml: is for `posttrain dpo`, not for `posttrain sft`"),
    ],
)
def test_files_that_cannot_be_begun_with(text, words, tmp_path):
    (tmp_path / "other.yaml").write_text("defaults: c.yaml\n")
    (tmp_path / "wrong.yaml").write_text("seed: 1\nquite: true\n")
    (tmp_path / "dpo.yaml").write_text("verb: dpo\n")
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        typed("sft", tmp_path / "c.yaml", "--model.path", "a", "--data.train", "b")


def test_spellings_of_other_libraries(tmp_path):
    least = LEAST | {"reward": ["gsm8k"]}
    (tmp_path / "c.yaml").write_text("algo: {shuffle_minibatch: false}\n")
    options = ["--model.path", "a", "--data.train", "b", "--reward", "gsm8k"]
    assert typed("grpo", *options).algo.shuffle_mini_batch
    assert not typed("grpo", *options, "--algo.no_shuffle_minibatch").algo.shuffle_mini_batch
    assert not typed("grpo", tmp_path / "c.yaml", *options).algo.shuffle_mini_batch
    assert typed("grpo", tmp_path / "c.yaml", *options, "--algo.shuffle_minibatch").algo.shuffle_mini_batch
    assert not made("grpo", least | {"algo": {"shuffle_minibatch": False}}).algo.shuffle_mini_batch


def test_an_empty_file_is_no_option(tmp_path):
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert typed("sft", tmp_path / "c.yaml", "--model.path", "a", "--data.train", "b").model.path == "a"


BOUNDS = [
    ("seed", [-1, 2**63]),
    ("train.max_steps", [-1]),
    ("train.epochs", [0, -1, float("inf"), float("nan")]),
    ("train.batch_size", [0]),
    ("train.micro_batch_tokens", [0]),
    ("train.learning_rate", [-1e-9, float("nan"), float("inf")]),
    ("train.min_lr_ratio", [-0.1, 1.1]),
    ("cluster.devices", [0]),
    ("cluster.max_restarts", [-1]),
    ("cluster.worker_timeout_seconds", [0.0, float("inf")]),
    ("train.warmup_steps", [-1]),
    ("train.warmup_ratio", [-0.1, 1.1]),
    ("train.weight_decay", [-0.1]),
    ("train.max_grad_norm", [-1]),
    ("train.ema_decay", [-0.1, 1.0]),
    ("train.profile_steps", [-1]),
    ("train.adam_beta1", [-0.1, 1.0, float("nan")]),
    ("train.adam_beta2", [-0.1, 1.0, float("nan")]),
    ("data.eval_fraction", [-0.1, 1.0, float("nan")]),
    ("data.weights", [(0.0,), (-1.0,), (float("inf"),), (float("nan"),)]),
    ("data.max_length", [1]),
    ("data.max_examples", [-1]),
    ("model.lora_rank", [-1]),
    ("model.lora_dropout", [-0.1, 1.0]),
    ("model.router_aux_loss_coef", [-0.1]),
    ("save.every_steps", [-1]),
    ("save.max_checkpoints", [0]),
    ("save.max_gigabytes", [-1]),
]


@pytest.mark.parametrize(("key", "values"), BOUNDS, ids=[key for key, _ in BOUNDS])
def test_bounds(key, values):
    for value in values:
        config = made("sft", LEAST)
        section, _, name = key.rpartition(".")
        holder = option_value(config, section) if section else config
        setattr(holder, name, value)
        with pytest.raises(UsageError) as refused:
            check(config)
        shown = str(list(value)) if isinstance(value, tuple) else str(value)
        if key == "data.weights":
            shown = " ".join(map(str, value))
        assert str(refused.value).startswith(f"{key} is {shown}; ")


def test_what_is_at_the_bound_is_allowed():
    edges = {
        "train": {"learning_rate": 0, "min_lr_ratio": 1, "adam_beta1": 0, "max_steps": 0, "epochs": 1e-9},
        "data": {"train": "x", "max_length": 2},
    }
    made("sft", LEAST | edges | {"seed": 2**63 - 1})


CONFLICTS = [
    ({"model": {"path": ""}}, "model.path is not set"),
    ({"data": {"train": []}}, "data.train is not set"),
    ({"model": {"path": "pico", "load_in_4bit": True}}, "model.load_in_4bit .* --model.lora_rank"),
    ({"eval": {"every_steps": 2}}, "eval.every_steps is 2 .* Set data.eval or data.eval_fraction"),
    (
        {"data": {"train": "a", "eval": "b", "eval_fraction": 0.1}},
        "data.eval .* and data.eval_fraction is 0.1; set one",
    ),
    ({"data": {"train": "a", "weights": [1, 2]}}, "data.weights has 2 numbers for 1 sources in data.train"),
    ({"train": {"warmup_steps": 2, "warmup_ratio": 0.1}}, "train.warmup_steps is 2 and train.warmup_ratio is 0.1"),
    ({"log": {"report_to": "tensorboard", "group": "g"}}, "log.group is g, but log.report_to names no tracker"),
    ({"log": {"wandb_project": "p"}}, "log.project is p, but log.report_to names no tracker that has it"),
    ({"log": {"prometheus_file": "x.txt"}}, "log.prometheus_file is x.txt; node_exporter reads files whose names end"),
    ({"cluster": {"offload": ["optimizer", "critic"]}}, "no phase without optimizer and critic. cluster.offload param"),
]


@pytest.mark.parametrize(("options", "words"), CONFLICTS)
def test_conflicts_name_both_settings(options, words):
    with pytest.raises(UsageError, match=words):
        made("sft", LEAST | options)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"seed": "two"}, "^seed is 'two'; it must be a whole number"),
        ({"seed": 1.5}, "^seed is 1.5; it must be a whole number"),
        ({"quiet": "yes"}, "^quiet is 'yes'; it must be true or false"),
        ({"train": {"learning_rate": True}}, "^train.learning_rate is True; it must be a number"),
        (
            {"train": {"lr_scheduler": "sine"}},
            "^train.lr_scheduler is 'sine'; it must be one of .cosine., .linear., .con",
        ),
        ({"data": {"train": "a", "max_examples": "all"}}, "^data.max_examples is 'all'; it must be a whole number"),
        ({"data": {"train": "a", "weights": ["x"]}}, "^data.weights is .'x'.; it must be a list of numbers"),
        ({"data": {"train": "a", "map_keys": "x"}}, "^data.map_keys is 'x'; it must be a mapping; on the command line"),
        ({"data": {"train": "a", "map_keys": "[1]"}}, "^data.map_keys is '.1.'; it must be a mapping"),
        ({"log": {"report_to": ["a"]}}, "^log.report_to is .'a'.; it must be any of"),
        ({"model": {"path": "p", "lora_rnk": 3}}, "^model.lora_rnk: no such option. Did you mean model.lora_rank"),
        ({"lr": 3}, "^lr: no such option; here it is train.learning_rate"),
        ({"learning_rate": 3}, "^learning_rate: no such option; here it is train.learning_rate"),
        ({"algo": {"beta": 3}}, "^algo.beta: no such option"),
    ],
)
def test_python_gets_an_error_that_names_the_key(mapping, words, capsys):
    with pytest.raises(UsageError, match=words):
        made("sft", LEAST | mapping)
    assert capsys.readouterr() == ("", "")


def test_the_first_wrong_entry_of_many_is_named(tmp_path):
    keys = ["output_dir", "seed", "quiet", "resume"]
    for place, wrong in enumerate(keys):
        lines = [f"{key}: [some, values]" if key == wrong else f"{key}: {DEFAULTS[key]}" for key in keys]
        (tmp_path / "c.yaml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match=rf"c\.yaml:{place + 1}: {wrong} is \['some', "):
            typed("sft", tmp_path / "c.yaml")


DEFAULTS = {"output_dir": "x", "seed": 0, "quiet": "false", "resume": "false"}


def test_a_key_is_known_or_its_neighbour_is_named():
    start = configs.with_algorithm(ALGORITHMS["dpo"])
    check_keys("dpo", [Entry("", "", "algo.beta", 1)], start)
    for wrong, meant in (
        ("algo.bta", "algo.beta"),
        ("data.beta", "algo.beta"),
        ("trian.batch_size", "train.batch_size"),
        ("learning_rte", "train.learning_rate"),
        ("update.row_per_step", "train.batch_size"),  # almost a previous spelling
    ):
        with pytest.raises(UsageError, match=f"^f:1: {wrong}: no such option. Did you mean {meant}\\?$"):
            check_keys("dpo", [Entry("f:1: ", "", wrong, 1)], start)


@pytest.mark.parametrize("wrong", ["algo.gamma", "rollout.temperature", "foo", "model.name", "bits", "data.cache"])
def test_what_is_not_near_gets_no_suggestion(wrong):
    with pytest.raises(UsageError, match=f"^{wrong}: no such option. posttrain dpo --help-all lists all options.$"):
        made("dpo", LEAST | {wrong: 1})


def test_all_unknown_keys_are_named_at_once(tmp_path):
    (tmp_path / "c.yaml").write_text("model: a\nlr: 3\nnum_generations: 2\nsave_steps: 3\n")
    with pytest.raises(UsageError) as refused:
        typed("grpo", tmp_path / "c.yaml")
    first, second, third = str(refused.value).splitlines()
    assert first.endswith("c.yaml:2: lr: no such option; here it is train.learning_rate.")
    assert second.endswith("c.yaml:3: num_generations: no such option; here it is rollout.samples_per_prompt.")
    assert third.endswith("c.yaml:4: save_steps: no such option; here it is save.every_steps.")
    with pytest.raises(
        UsageError, match=r"^--foo: no such option.*\n--model.pth: no such option. Did you mean --model.path"
    ):
        typed("grpo", "--foo", 1, "--model.pth", 2)


def test_a_bare_section_is_its_main_option(tmp_path):
    (tmp_path / "c.yaml").write_text("model: pico\ndata: [a.jsonl, b.jsonl]\nreward: gsm8k\n")
    for config in (
        typed("grpo", tmp_path / "c.yaml"),
        typed("grpo", "--model", "pico", "--data", "a.jsonl", "b.jsonl", "--reward", "gsm8k"),
        typed("grpo", "--model=pico", "--data", "a.jsonl", "b.jsonl", "--reward", "gsm8k"),
        made("grpo", {"model": "pico", "data": ["a.jsonl", "b.jsonl"], "reward": "gsm8k"}),
    ):
        assert (config.model.path, config.data.train) == ("pico", ("a.jsonl", "b.jsonl"))
    with pytest.raises(UsageError, match=r"^train: no such option"):
        made("sft", LEAST | {"train": 3})


def test_dashes_and_underscores(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {max-steps: 3}\n")
    config = typed("sft", tmp_path / "c.yaml", "--model", "a", "--data", "b", "--train.batch-size", 2, "--output-dir=x")
    assert (config.train.max_steps, config.train.batch_size, config.output_dir) == (3, 2, "x")
    assert not typed("sft", "--model", "a", "--data", "b", "--data.no-shuffle").data.shuffle


def test_texts_that_look_like_options_or_nothing(tmp_path):
    odd = "--data.chat_template=--{}"
    assert typed("sft", "--model", "a", "--data", "b", odd).data.chat_template == "--{}"
    assert typed("sft", "--model", "a", "--data", "b", "--data.chat_template", "-{}").data.chat_template == "-{}"
    (tmp_path / "c.yaml").write_text("model: a\ndata: b\ntrain:\n  batch_size:\n")
    with pytest.raises(UsageError, match=r"c.yaml:4: train.batch_size is None; it must be a whole number"):
        typed("sft", tmp_path / "c.yaml")
    assert made("sft", LEAST | {"output_dir": None}).output_dir == ""


DOUBLED = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwx"))
HOSTILE_YAML = {
    "aliases that double": (DOUBLED, r"its aliases \(\*name\) stand for more than 100,000 values"),
    "an alias in itself": ("a: &a [*a]\n", "nested too deeply, or an alias .* that contains itself"),
    "nested lists": ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    "an object": ("model: !!python/object/apply:os.system [id]\ndata: b\n", "could not determine a constructor"),
}


@pytest.mark.parametrize("case", HOSTILE_YAML)
def test_a_hostile_file(case, tmp_path):
    text, words = HOSTILE_YAML[case]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=rf"c\.yaml.* cannot be read.*: {words}") as refused:
        typed("sft", file)
    assert "\n" not in str(refused.value)
    if case != "an object":  # `posttrain import` constructs none: it reads entries as they are written
        with pytest.raises(UsageError):
            uses_of_config(file)


def test_the_verb_of_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    for text, verb in (("verb: dpo\nseed: 1\n", "dpo"), ("seed: 1\n", ""), ("", "")):
        file.write_text(text)
        assert verb_of_file(file) == verb


ONLINE = LEAST | {"reward": ["gsm8k"]}


def test_layouts_of_roles():
    options = {"tensor_parallel_size": 2, "zero_stage": 2, "rollout_devices": 4, "critic_devices": 2}
    options |= {"devices": 10, "reward_colocate_with": "critic"}
    cluster = made("ppo", ONLINE | {"cluster": options}).cluster
    assert cluster.of("actor") == configs.RoleLayout("actor", 4, 2, 1, 1, 2)
    assert cluster.of("reference") == cluster.of("actor")
    assert cluster.of("rollout") == configs.RoleLayout("rollout", 4, 1, 1, 1, 3)
    assert cluster.of("critic") == cluster.of("reward-1") == configs.RoleLayout("critic", 2, 2, 1, 1, 2)
    both = ONLINE | {"reward": ["model:a", "model:b"]}
    other = made("ppo", both | {"cluster": {"devices": 4, "reward_devices": [1, 2]}}).cluster
    assert [other.of(role).place for role in ("actor", "reward-0", "reward-1")] == ["actor", "reward-0", "reward-1"]
    assert [other.of(role).devices for role in ("actor", "reward-0", "reward-1")] == [1, 1, 2]
    one = made(
        "ppo", both | {"cluster": {"devices": 4, "reward_devices": 2, "reward_tensor_parallel_size": [2, 1]}}
    ).cluster
    assert one.of("reward-0") == configs.RoleLayout("reward", 2, 2, 1, 1, 3)
    assert one.of("reward-1") == configs.RoleLayout("reward", 2, 1, 1, 1, 3)
    assert made("sft", LEAST).cluster.of("actor") == configs.RoleLayout("actor", 1, 1, 1, 1, 3)
    sizes = {"devices": 9, "context_parallel_size": 2, "tensor_parallel_size": 2, "rollout_devices": 1}
    long = made("ppo", ONLINE | {"cluster": sizes}).cluster
    assert long.of("actor") == configs.RoleLayout("actor", 8, 2, 2, 1, 3) and long.of("actor").ranks_per_sample == 4
    assert long.of("rollout") == configs.RoleLayout("rollout", 1, 1, 1, 1, 3), "completions are made token by token"


LAYOUTS = [
    ({"tensor_parallel_size": 0}, "^cluster.tensor_parallel_size is 0; it must be at least 1"),
    ({"critic_devices": -1}, "^cluster.critic_devices is -1; it must be at least 0"),
    ({"reward_devices": [1, -1]}, "^cluster.reward_devices is -1"),
    ({"zero_stage": 1}, "^cluster.zero_stage is 1; it must be one of 2, 3"),
    ({"worker_timeout_seconds": 0}, "^cluster.worker_timeout_seconds is 0.0; it must be above 0"),
    ({"max_restarts": -1}, "^cluster.max_restarts is -1"),
    ({"rollout_devices": 4}, "^cluster.devices is 4, but rollout take 4 of them, and the policy needs one too"),
    (
        {"critic_colocate_with": "reference", "reference_colocate_with": "reward"},
        "^cluster.critic_colocate_with is reference, which has no devices of its own: set cluster.reference_devices",
    ),
    (
        {"critic_devices": 1, "critic_colocate_with": "rollout"},
        "^cluster.critic_devices is 1 and cluster.critic_colocate",
    ),
    ({"tensor_parallel_size": 3}, "^actor has 4 devices, which cluster.tensor_parallel_size 3 does not divide"),
    (
        {"tensor_parallel_size": 2, "context_parallel_size": 4},
        "^actor has 4 devices, which cluster.tensor_parallel_size 2 times cluster.context_parallel_size 4 does not",
    ),
    (
        {"expert_parallel_size": 3},
        "^cluster.expert_parallel_size is 3; it must divide 4, the devices among which FSDP",
    ),
    ({"pipeline_parallel_size": 3}, "^actor has 4 devices, which cluster.pipeline_parallel_size 3 does not divide"),
    (
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 4},
        "^each pipeline stage of actor has 2 devices, which cluster.tensor_parallel_size 4 does not divide",
    ),
    (
        {"pipeline_parallel_size": 2, "reference_pipeline_parallel_size": 3},
        "^reference has 4 devices, which cluster.reference_pipeline_parallel_size 3 does not divide",
    ),
    ({"pipeline_layers_per_stage": [1, 1]}, "^cluster.pipeline_parallel_size is 1, so that there are no stages"),
    (
        {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
        "^cluster.virtual_pipeline_parallel_size is 2, but cluster.pipeline_schedule 1f1b has one stage per device",
    ),
    (
        {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
        "^cluster.pipeline_schedule interleaved needs several stages per device",
    ),
    (
        {"pipeline_parallel_size": 2, "offload": ["parameters"]},
        "^cluster.offload parameters and cluster.pipeline_parallel_size cannot be combined",
    ),
    (
        {"sequence_parallel": True},
        "^cluster.sequence_parallel divides activations .* but cluster.tensor_parallel_size is 1",
    ),
    ({"reward_zero_stage": [2], "reward_devices": [1, 1, 1]}, "^cluster.reward_devices has 3 values for 1 rewards"),
]


@pytest.mark.parametrize(("options", "words"), LAYOUTS)
def test_layouts_that_cannot_be(options, words):
    with pytest.raises(UsageError, match=words):
        made("ppo", ONLINE | {"cluster": {"devices": 4} | options})


@pytest.mark.parametrize(
    ("section", "options"), [("model", {"router_aux_loss_coef": 0.1}), ("rollout", {"router_replay": True})]
)
def test_what_needs_all_layers_is_refused_with_stages(section, options):
    words = rf"^{section}.{next(iter(options))}.* and cluster.pipeline_parallel_size cannot be combined"
    with pytest.raises(UsageError, match=words):
        made("grpo", ONLINE | {section: ONLINE.get(section, {}) | options, "cluster": STAGES})


STAGES = {"devices": 2, "pipeline_parallel_size": 2}


@pytest.mark.parametrize("engine", ["fast", []])
def test_engines_that_there_are_not(engine):
    with pytest.raises(UsageError, match=r"^rollout.engine is .*; it must be one of 'local', 'vllm'"):
        made("ppo", ONLINE | {"rollout": {"engine": engine}})


def test_only_the_local_engine_drafts():
    with pytest.raises(UsageError, match=r"^rollout.speculative_tokens is of the local engine. .*speculative_config"):
        made("ppo", ONLINE | {"rollout": {"engine": "vllm", "speculative_tokens": 4}})
    for wrong in ({"speculative_tokens": -1}, {"speculative_max_sequences": 0}):
        with pytest.raises(UsageError, match="must be at least"):
            made("ppo", ONLINE | {"rollout": wrong})


def test_the_local_engine_is_not_divided():
    cluster = {"devices": 4, "rollout_devices": 2, "rollout_tensor_parallel_size": 2}
    with pytest.raises(UsageError, match=r"^cluster.rollout_tensor_parallel_size is 2, but the local engine"):
        made("ppo", ONLINE | {"cluster": cluster})
    made("ppo", ONLINE | {"cluster": cluster, "rollout": {"engine": "vllm"}})


@pytest.mark.parametrize("names", [("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")])
def test_all_checks_read_the_number_of_launched_processes(names, monkeypatch):
    """torchrun and srun set cluster.devices, and no check may see the default instead."""
    for name, value in zip(names, ("2", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"^train.fp8 is for one device, but cluster.devices is 2"):
        made("sft", LEAST | {"train": {"fp8": True}})
    profile = {"profile_steps": 1, "profile_ranks": [0, 1]}
    assert made("sft", LEAST | {"train": profile}).cluster.devices == 2
    with pytest.raises(UsageError, match=r"^train.profile_ranks is \(2,\); ranks count from 0"):
        made("sft", LEAST | {"train": profile | {"profile_ranks": [2]}})


def test_weights_in_flight_need_workers_that_generate_ahead():
    apart = {"devices": 4, "rollout_devices": 2}
    for engine in ("local", "vllm"):
        chosen = {"engine": engine, "inflight_updates": True}
        assert made("ppo", ONLINE | {"rollout": chosen | {"ahead": 1}, "cluster": apart}).rollout.inflight_updates
        for rollout, cluster in (({"ahead": 1}, {"devices": 4}), ({}, apart), ({}, {})):
            with pytest.raises(UsageError, match=r"inflight_updates is set, but .* set --rollout.ahead 1"):
                made("ppo", ONLINE | {"rollout": chosen | rollout, "cluster": cluster})


def test_rewards_that_cannot_be():
    for reward, words in (
        ({}, "reward.functions is not set: what scores completions"),
        ({"functions": "gsm8k", "weights": [1, 2]}, "reward.weights has 2 numbers for 1 rewards"),
        ({"functions": "gsm8k", "timeout_seconds": 0}, "reward.timeout_seconds is 0.0; it must be at least 0.01"),
        ({"functions": "gsm8k", "memory_gib": 0}, "reward.memory_gib is 0.0"),
        (
            {"functions": "gsm8k", "max_failure_rate": 1.5},
            "reward.max_failure_rate is 1.5; it must be at least 0 and at",
        ),
        (
            {"functions": "gsm8k", "overlong_tokens": 513},
            "reward.overlong_tokens is 513; it must be at least 0 and at most 512",
        ),
    ):
        with pytest.raises(UsageError, match=f"^{words}"):
            made("grpo", LEAST | {"reward": reward})


@pytest.mark.parametrize("key", ["algo.sft_coef", "model.lora_alpha", "train.learning_rate", "data.weights"])
def test_nan_is_refused_wherever_it_is_written(key, tmp_path):
    section, name = key.split(".")
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}:\n  {name}: .nan\n")
    for read in (
        lambda: from_mapping("dpo", ALGORITHMS["dpo"], flatten(LEAST) | {key: float("nan")}),
        lambda: parse("dpo", ALGORITHMS["dpo"], ["--model", "pico", "--data", "a.jsonl", f"--{key}", "nan"]),
        lambda: parse("dpo", ALGORITHMS["dpo"], [str(file), "--model", "pico", "--data", "a.jsonl"]),
    ):
        with pytest.raises(UsageError, match=rf"{key} is '?nan'?; it must be a (list of )?number"):
            read()


@pytest.mark.parametrize(
    ("key", "value"), [("train.max_steps", [{"steps": 3}]), ("data.train", [{"path": "a.jsonl"}]), ("seed", [[1]])]
)
def test_mappings_and_lists_inside_a_list_are_refused(key, value, tmp_path):
    with pytest.raises(UsageError, match=rf"{key} is \[.*; it must be "):
        from_mapping("sft", ALGORITHMS["sft"], flatten(LEAST) | {key: value})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({key: value}))
    with pytest.raises(UsageError, match=rf"config\.yaml:1: {key} is \[.*; it must be "):
        parse("sft", ALGORITHMS["sft"], [str(file), "--model", "pico"])


@pytest.mark.parametrize("text", ["<<: *base\nseed: 1\n", "train:\n  <<: *base\n"])
def test_merge_keys_are_refused_with_what_to_do(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"verb: sft\nmodel: &base\n  path: pico\n{text}")
    with pytest.raises(
        UsageError, match=r"config\.yaml:[45]: the merge key << is not supported: .*defaults: \[base.yaml\]"
    ):
        parse("sft", ALGORITHMS["sft"], [str(file)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollout.engine": "vllm"}, "which rollout.engine vllm does not support"),
        ({"rollout.dynamic_sampling": True}, "which rollout.dynamic_sampling does not support"),
        ({"rollout.tools": ["t.py:f"]}, "which rollout.tools does not support"),
        ({"rollout.prompts_per_stage": 1}, "which rollout.prompts_per_stage does not support"),
        ({"rollout.partial_prompts": 9}, "rollout.partial_prompts is 9, more than train.batch_size 8"),
    ],
)
def test_partial_rollouts_are_refused_where_they_cannot_work(options, words):
    base = {"model.path": "pico", "data.train": ["a.jsonl"], "reward.functions": ["gsm8k"], "train.batch_size": 8}
    made("grpo", base | {"rollout.partial_prompts": 8})
    with pytest.raises(UsageError, match=words):
        made("grpo", base | {"rollout.partial_prompts": 2} | options)
