"""The configuration: what is read is what was written, wherever it was written; and what cannot work is refused."""

import typing

import pytest
import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.config import sections as configs
from posttrain.config.parsing import check_key, flatten, from_mapping, option_keys, parse, verb_of_file
from posttrain.config.sections import as_mapping, as_yaml, check, value_of
from posttrain.core.errors import UsageError

LEAST = {"model": {"path": "pico"}, "data": {"train": ["a.jsonl"]}}
# Where what `another` finds would be out of bounds, or would not go with the rest.
SPECIAL = {
    "epochs": 2.5,
    "out": "some folder/run",
    "model.lora_rank": 8,
    "data.train": ["a.jsonl", "b c.jsonl"],
    "data.template": 'Human: {}\n"Assistant": ',
    "update.learning_rate": 3e-07,
    "update.betas": [0.8, 0.999],
    "update.ema_decay": 0.99,
    "algo.reward_tokens": ["#", "-"],
    "algo.reference": "there",
    "algo.kl": 0.25,
    "algo.kl_target": [2.5, 100],
    "algo.clip_low": 0.45,
    "reward": ["gsm8k", "a.py:b"],
    "rollout.top_p": 0.5,
    "rollout.replay": "",  # does not go with rollout.ahead
    "rollout.engine": ["vllm", "max_num_seqs=3"],
    "cluster.devices": 8,
    "cluster.layout": ["tp=2", "zero=2", "reference.tp=1"],
    "cluster.offload": ["parameters", "reference"],
    "cluster.limits": [2, 60.5],
    "rewards.weights": [0.5, 2.0],
    "rewards.overlong": [4, 0.5],
    "rewards.limits": [5.0, 0.5, 0.25],
    "update.schedule": "linear:0.25",
    "log.to": ["tensorboard", "wandb:project"],
}


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
        holder = value_of(start, section) if section else start
        changed[key] = another(typing.get_type_hints(type(holder)).get(name), getattr(holder, name))
    return changed | {key: value for key, value in SPECIAL.items() if key in changed}


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
            yield from value if isinstance(value, list) else [value]


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_defaults_survive_too_and_are_the_algorithms(verb, tmp_path):
    mapping = LEAST | ({"algo": {"teacher": "pico"}} if verb == "distill" else {})
    mapping |= {"reward": ["gsm8k"]} if ALGORITHMS[verb].online else {}
    config = made(verb, mapping)
    file = tmp_path / "c.yaml"
    file.write_text(as_yaml(verb, config), encoding="utf-8")
    assert as_mapping(typed(verb, file)) == as_mapping(config)
    assert yaml.safe_load(file.read_text())["verb"] == verb
    for key, value in ALGORITHMS[verb].defaults.items():
        assert value_of(config, key) == value
    assert made(verb, mapping).update is not config.update  # no two runs share a section


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "ü", "'\"", "null", "None", "true", "1e3", "a: b", "{}", "a\nb", "[x]", "#"]
)
def test_odd_texts(text, tmp_path):
    config = made("sft", LEAST | {"out": text})
    assert config.out == text
    (tmp_path / "c.yaml").write_text(as_yaml("sft", config), encoding="utf-8")
    assert typed("sft", tmp_path / "c.yaml").out == text


def test_what_is_typed_wins_over_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 3\nquiet: true\nmodel: {path: a, lora_rank: 4}\ndata: {train: [x, y]}\n")
    config = typed("sft", tmp_path / "c.yaml", "--steps", 5, "--no_quiet", "--model.path", "b", "--data.train", "z")
    assert (config.steps, config.quiet, config.model.path, config.data.train) == (5, False, "b", ("z",))
    assert config.model.lora_rank == 4


@pytest.mark.parametrize(("old", "new"), [("false", "none"), ("true", "saved")])
def test_a_run_of_old_goes_on_with_the_name_that_an_option_had(old, new, tmp_path):
    (tmp_path / "c.yaml").write_text(f"model: {{path: a}}\nrewards:\n  normalize_models: {old}\n")
    more = ("--data.train", "z", "--reward", "acc")
    assert typed("grpo", tmp_path / "c.yaml", *more).rewards.normalize == new


def test_a_file_begins_with_those_it_names(tmp_path):
    """What is written nearer to the user wins, wherever in the file `defaults` stands."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("model: {path: small, lora_rank: 4}\nsteps: 1\n")
    (tmp_path / "base.yaml").write_text("defaults: model/small.yaml\nsteps: 2\nseed: 7\ndata: {train: [x]}\n")
    (tmp_path / "c.yaml").write_text("verb: sft\nsteps: 3\ndefaults: [base.yaml]\nmodel: {lora_rank: 8}\n")
    config = typed("sft", tmp_path / "c.yaml", "--seed", 9)
    assert (config.steps, config.seed, config.model.path, config.model.lora_rank) == (3, 9, "small", 8)
    (tmp_path / "d.yaml").write_text("defaults: [base.yaml, model/small.yaml]\n")
    assert typed("sft", tmp_path / "d.yaml").steps == 1  # of several the last


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [c.yaml]\n", r"c\.yaml: defaults: .*c\.yaml is the file itself"),
        ("defaults: [other.yaml]\n", r"other\.yaml: defaults: .*c\.yaml is the file itself, or one that names it"),
        ("steps: 1\ndefaults: [{model: a}]\n", r"c\.yaml:2: defaults must be files"),
        ("defaults: nowhere.yaml\n", r"nowhere\.yaml: no such configuration file"),
        ("defaults: wrong.yaml\n", r"wrong\.yaml:2: stepps: no such option. Did you mean steps"),
        ("defaults: dpo.yaml\n", r"dpo\.yaml: is for `posttrain dpo`, not for `posttrain sft`"),
    ],
)
def test_files_that_cannot_be_begun_with(text, words, tmp_path):
    (tmp_path / "other.yaml").write_text("defaults: c.yaml\n")
    (tmp_path / "wrong.yaml").write_text("seed: 1\nstepps: 1\n")
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
    ("steps", [-1]),
    ("seed", [-1, 2**63]),
    ("epochs", [0, -1, float("inf"), float("nan")]),
    ("update.rows_per_step", [0]),
    ("update.tokens_per_device", [0]),
    ("update.learning_rate", [-1e-9, float("nan"), float("inf")]),
    ("update.schedule", ["cosine:-0.1", "cosine:1.1", "linear:x", "constant:0.5", "sine"]),
    ("cluster.devices", [0]),
    ("cluster.limits", [(-1, 3.0), (0, 0.0), (0, float("inf"))]),
    ("update.warmup", [-0.1]),
    ("update.weight_decay", [-0.1]),
    ("update.max_grad_norm", [-1]),
    ("update.ema_decay", [-0.1, 1.0]),
    ("update.betas", [(0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)]),
    ("data.eval", [("-0.1",), ("1.0",), ("0.1", "b.jsonl"), ("nan",)]),
    ("data.max_tokens", [1]),
    ("data.max_rows", [0, -1]),
    ("model.lora_rank", [-1]),
    ("model.lora_dropout", [-0.1, 1.0]),
    ("model.router_loss", [-0.1]),
    ("save.every", [-1]),
    ("save.keep", [0]),
    ("save.keep_gigabytes", [-1]),
]


@pytest.mark.parametrize(("key", "values"), BOUNDS, ids=[key for key, _ in BOUNDS])
def test_bounds(key, values):
    for value in values:
        config = made("sft", LEAST)
        section, _, name = key.rpartition(".")
        holder = value_of(config, section) if section else config
        setattr(holder, name, value)
        with pytest.raises(UsageError) as refused:
            check(config)
        shown = str(list(value)) if isinstance(value, tuple) else str(value)
        if key == "update.schedule":
            shown = repr(value)
        if key == "data.eval":
            shown = " ".join(value)
        assert str(refused.value).startswith(f"{key} is {shown}; ")


def test_what_is_at_the_bound_is_allowed():
    edges = {
        "update": {"learning_rate": 0, "schedule": "cosine:1", "betas": (0, 0)},
        "data": {"train": "x", "max_tokens": 2},
    }
    made("sft", LEAST | edges | {"seed": 2**63 - 1, "steps": 0, "epochs": 1e-9})


CONFLICTS = [
    ({"model": {"path": ""}}, "model.path is not set"),
    ({"data": {"train": []}}, "data.train is not set"),
    ({"model": {"path": "pico", "load_in_4bit": True}}, "model.load_in_4bit .* --model.lora_rank"),
    ({"eval": {"every": 2}}, "eval.every is 2 .* data.eval files, or a part"),
    ({"cluster": {"offload": ["optimizer", "critic"]}}, "no phase without optimizer and critic. cluster.offload param"),
]


@pytest.mark.parametrize(("options", "words"), CONFLICTS)
def test_conflicts_name_both_settings(options, words):
    with pytest.raises(UsageError, match=words):
        made("sft", LEAST | options)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"steps": "two"}, "^steps is 'two'; it must be a whole number"),
        ({"steps": 1.5}, "^steps is 1.5; it must be a whole number"),
        ({"quiet": "yes"}, "^quiet is 'yes'; it must be true or false"),
        ({"update": {"learning_rate": True}}, "^update.learning_rate is True; it must be a number"),
        ({"update": {"betas": [0.9]}}, "^update.betas is .0.9.; it must be two numbers"),
        (
            {"update": {"schedule": "sine"}},
            "^update.schedule is 'sine'; it must be constant, or cosine or linear",
        ),
        ({"data": {"train": "a", "max_rows": "all"}}, "^data.max_rows is 'all'; it must be a whole number"),
        ({"model": {"path": "p", "lora_rnk": 3}}, "^model.lora_rnk: no such option. Did you mean model.lora_rank"),
        ({"lr": 3}, "^lr: no such option"),
        ({"learning_rate": 3}, "^learning_rate: no such option. Did you mean update.learning_rate"),
        ({"algo": {"beta": 3}}, "^algo.beta: no such option"),
    ],
)
def test_python_gets_an_error_that_names_the_key(mapping, words, capsys):
    with pytest.raises(UsageError, match=words):
        made("sft", LEAST | mapping)
    assert capsys.readouterr() == ("", "")


def test_the_first_wrong_entry_of_many_is_named(tmp_path):
    keys = ["steps", "epochs", "seed", "quiet", "resume"]
    for place, wrong in enumerate(keys):
        lines = [f"{key}: [some, values]" if key == wrong else f"{key}: {DEFAULTS[key]}" for key in keys]
        (tmp_path / "c.yaml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match=rf"c\.yaml:{place + 1}: {wrong} is \['some', "):
            typed("sft", tmp_path / "c.yaml")


DEFAULTS = {"steps": 0, "epochs": 1.0, "seed": 0, "quiet": "false", "resume": "false"}


def test_a_key_is_known_or_its_neighbour_is_named():
    start = configs.with_algorithm(ALGORITHMS["dpo"])
    check_key("algo.beta", start, "")
    for wrong, meant in (("algo.bta", "algo.beta"), ("data.beta", "algo.beta"), ("uptade.betas", "update.betas")):
        with pytest.raises(UsageError, match=f"^f:1: {wrong}: no such option. Did you mean {meant}"):
            check_key(wrong, start, "f:1: ")


def test_the_verb_of_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    for text, verb in (("verb: dpo\nsteps: 1\n", "dpo"), ("steps: 1\n", ""), ("", "")):
        file.write_text(text)
        assert verb_of_file(file) == verb


def test_a_number_in_place_of_evaluation_files_is_the_part_to_set_aside():
    part, files = made("sft", LEAST | {"data": {"train": "a", "eval": 0.25}}), made("sft", LEAST)
    assert (part.data.eval_fraction, part.data.eval_files) == (0.25, ())
    files.data.eval = ("b.jsonl", "c.jsonl")
    assert (files.data.eval_fraction, files.data.eval_files) == (0.0, ("b.jsonl", "c.jsonl"))


@pytest.mark.parametrize(
    ("written", "shape", "end"),
    [("cosine", "cosine", 0.1), ("linear:0", "linear", 0.0), ("cosine:0.02", "cosine", 0.02)],
)
def test_the_schedule_says_where_it_ends(written, shape, end):
    update = made("sft", LEAST | {"update": {"schedule": written}}).update
    assert (update.shape, update.min_lr_ratio) == (shape, end)


ONLINE = LEAST | {"reward": ["gsm8k"]}


def test_layouts_of_roles():
    layout = ["tp=2", "zero=2", "rollout.devices=4", "rollout.tp=1", "critic.devices=2", "reward.devices=critic"]
    cluster = made("ppo", ONLINE | {"cluster": {"devices": 10, "layout": layout}}).cluster
    assert cluster.of("actor") == configs.RoleLayout("actor", 4, 2, 1, 1, 2)
    assert cluster.of("reference") == cluster.of("actor")
    assert cluster.of("rollout") == configs.RoleLayout("rollout", 4, 1, 1, 1, 3)
    assert cluster.of("critic") == cluster.of("reward-1") == configs.RoleLayout("critic", 2, 2, 1, 1, 2)
    other = made(
        "ppo", ONLINE | {"cluster": {"devices": 4, "layout": ["reward-0.devices=1", "reward.devices=2"]}}
    ).cluster
    assert [other.of(role).place for role in ("actor", "reward-0", "reward-1")] == ["actor", "reward-0", "reward"]
    assert made("sft", LEAST).cluster.of("actor") == configs.RoleLayout("actor", 1, 1, 1, 1, 3)
    long = made("ppo", ONLINE | {"cluster": {"devices": 9, "layout": ["cp=2", "tp=2", "rollout.devices=1"]}}).cluster
    assert long.of("actor") == configs.RoleLayout("actor", 8, 2, 2, 1, 3) and long.of("actor").alike == 4
    assert long.of("rollout") == configs.RoleLayout("rollout", 1, 1, 1, 1, 3), "answers are made token by token"


LAYOUTS = [
    (["tp"], "must be .role..key=value"),
    (["tpp=2"], "with a key of devices, tp, cp, ep, zero"),
    (["tp=x"], "and a whole number"),
    (["zero=1"], "1 is too small"),
    (["zero=4"], "zero is 2 or 3"),
    (["judge.tp=1"], "and a role of actor, critic"),
    (["actor.devices=1"], "the devices that cluster.devices leaves it"),
    (["rollout.devices=4"], "cluster.devices is 4, but roles of cluster.layout take 4"),
    (["critic.devices=reference", "reference.devices=reward"], "reference has no devices of its own"),
    (["tp=3"], "actor has 4 devices, which tp=3 does not divide"),
    (["tp=2", "cp=4"], "actor has 4 devices, which tp=2 times cp=4 does not divide"),
    (["rollout.devices=2", "rollout.cp=2"], "answers are made by whole models"),
    (["ep=2"], "ep is 2 for actor; it must be 4, the devices among which FSDP divides"),
]


@pytest.mark.parametrize(("layout", "words"), LAYOUTS)
def test_layouts_that_cannot_be(layout, words):
    with pytest.raises(UsageError, match=words):
        made("ppo", ONLINE | {"cluster": {"devices": 4, "layout": layout}})


@pytest.mark.parametrize("engine", [["fast"], ["local", "a=1"], ["vllm", "a"], []])
def test_engines_that_there_are_not(engine):
    with pytest.raises(UsageError, match=r"^rollout.engine "):
        made("ppo", ONLINE | {"rollout": {"engine": engine}})


def test_weights_in_the_middle_of_answers_need_workers_that_make_them_ahead():
    apart = {"devices": 4, "layout": ["rollout.devices=2"]}
    for engine in (["local", "inflight"], ["vllm", "inflight", "max_num_seqs=3"]):
        found = made("ppo", ONLINE | {"rollout": {"engine": engine, "ahead": 1}, "cluster": apart})
        assert found.rollout.inflight
        for rollout, cluster in (({"ahead": 1}, {"devices": 4}), ({}, apart), ({}, {})):
            with pytest.raises(
                UsageError, match=r"inflight, but answers are not made while the model learns: .*ahead 1"
            ):
                made("ppo", ONLINE | {"rollout": {"engine": engine, **rollout}, "cluster": cluster})
    assert not made("ppo", ONLINE).rollout.inflight
