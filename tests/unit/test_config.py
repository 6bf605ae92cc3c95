"""The configuration: what is read is what was written, wherever it was written; and what cannot work is refused."""

import dataclasses

import pytest
import yaml

from posttrain import config as configs
from posttrain.algos import ALGORITHMS
from posttrain.config import as_mapping, as_yaml, check, check_key, flatten, from_mapping, option_keys, parse, value_of
from posttrain.errors import UsageError

LEAST = {"model": {"path": "pico"}, "data": {"train": ["a.jsonl"]}}
# Another value than the default for every option that all verbs have.
OTHERS = {
    "steps": 7,
    "epochs": 2.5,
    "out": "some folder/run",
    "seed": 11,
    "resume": True,
    "quiet": True,
    "model.path": "folder/model",
    "model.tokenizer": "folder/tokenizer",
    "model.dtype": "bfloat16",
    "model.lora_rank": 8,
    "model.lora_alpha": 4.5,
    "model.lora_dropout": 0.25,
    "model.lora_targets": ["q_proj", "v_proj"],
    "model.load_in_4bit": True,
    "model.router_loss": 0.01,
    "model.checkpoint_activations": True,
    "data.train": ["a.jsonl", "b c.jsonl"],
    "data.eval": ["e.jsonl"],
    "data.eval_fraction": 0.0,  # does not go with data.eval
    "data.max_rows": 100,
    "data.max_tokens": 64,
    "data.on_long": "drop",
    "data.input_template": 'Human: {}\n"Assistant": ',
    "data.shuffle": False,
    "update.rows_per_step": 5,
    "update.tokens_per_device": 99,
    "update.learning_rate": 3e-07,
    "update.schedule": "linear",
    "update.min_lr_ratio": 0.5,
    "update.warmup_steps": 3,
    "update.warmup_fraction": 0.0,  # does not go with update.warmup_steps
    "update.weight_decay": 0.1,
    "update.betas": [0.8, 0.999],
    "update.max_grad_norm": 0.5,
    "update.ema_decay": 0.99,
    "eval.every": 4,
    "eval.max_rows": 10,
    "save.every": 0,
    "save.keep": 1,
    "save.keep_gigabytes": 1.5,
    "log.every": 9,
    "log.tensorboard": True,
    "log.wandb": "project",
}
ALGO = {bool: lambda value: not value, float: lambda value: value + 0.25, str: lambda value: value + " x"}
CHOICES = {"loss": "robust", "variant": "vanilla", "divergence": "jsd", "reward_tokens": ["#", "-"]}


def others(verb):
    """Another value than the default for every option of a verb."""
    algorithm = ALGORITHMS[verb].Config()
    changed = dict(OTHERS)
    for entry in dataclasses.fields(algorithm):
        value = getattr(algorithm, entry.name)
        other = CHOICES[entry.name] if entry.name in CHOICES else ALGO[type(value)](value)
        changed[f"algo.{entry.name}"] = "logexp" if (verb, entry.name) == ("reward", "loss") else other
    return changed


def made(verb, mapping):
    return from_mapping(verb, ALGORITHMS[verb].Config, ALGORITHMS[verb].defaults, mapping)


def typed(verb, *args):
    return parse(verb, ALGORITHMS[verb].Config, ALGORITHMS[verb].defaults, list(map(str, args)))


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
    ("update.min_lr_ratio", [-0.1, 1.1]),
    ("update.warmup_steps", [-1]),
    ("update.warmup_fraction", [-0.1, 1.1]),
    ("update.weight_decay", [-0.1]),
    ("update.max_grad_norm", [-1]),
    ("update.ema_decay", [-0.1, 1.0]),
    ("update.betas", [(0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)]),
    ("data.eval_fraction", [-0.1, 1.0]),
    ("data.max_tokens", [1]),
    ("data.max_rows", [0, -1]),
    ("model.lora_rank", [-1]),
    ("model.lora_dropout", [-0.1, 1.0]),
    ("model.router_loss", [-0.1]),
    ("eval.max_rows", [0]),
    ("save.every", [-1]),
    ("save.keep", [0]),
    ("save.keep_gigabytes", [-1]),
    ("log.every", [0]),
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
        assert str(refused.value).startswith(f"{key} is {shown}; ")


def test_what_is_at_the_bound_is_allowed():
    edges = {
        "update": {"learning_rate": 0, "min_lr_ratio": 1, "betas": (0, 0)},
        "data": {"train": "x", "max_tokens": 2},
    }
    made("sft", LEAST | edges | {"seed": 2**63 - 1, "steps": 0, "epochs": 1e-9})


CONFLICTS = [
    ({"model": {"path": ""}}, "model.path is not set"),
    ({"data": {"train": []}}, "data.train is not set"),
    ({"update": {"warmup_steps": 2, "warmup_fraction": 0.5}}, "update.warmup_steps 2 and update.warmup_fraction 0.5"),
    ({"model": {"path": "pico", "load_in_4bit": True}}, "model.load_in_4bit .* --model.lora_rank"),
    ({"data": {"train": ["a"], "eval": ["b"], "eval_fraction": 0.5}}, "data.eval and data.eval_fraction 0.5"),
    ({"eval": {"every": 2}}, "eval.every is 2 .* data.eval or data.eval_fraction"),
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
            "^update.schedule is 'sine'; it must be one of 'cosine', 'linear', 'constant'",
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
    entries = [f"{key}: {json_like(value)}" for key, value in OTHERS.items() if "." not in key]
    for place in range(len(entries)):
        lines = list(entries)
        lines[place] = lines[place].split(":")[0] + ": [no, value, for, it]"
        (tmp_path / "c.yaml").write_text("\n".join(lines))
        key = lines[place].split(":")[0]
        with pytest.raises(UsageError, match=rf"c\.yaml:{place + 1}: {key} is "):
            typed("sft", tmp_path / "c.yaml")


def json_like(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_a_key_is_known_or_its_neighbour_is_named():
    start = configs.with_algorithm(ALGORITHMS["dpo"].Config, {})
    check_key("algo.beta", start, "")
    for wrong, meant in (("algo.bta", "algo.beta"), ("data.beta", "algo.beta"), ("uptade.betas", "update.betas")):
        with pytest.raises(UsageError, match=f"^f:1: {wrong}: no such option. Did you mean {meant}"):
            check_key(wrong, start, "f:1: ")


def test_the_verb_of_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    for text, verb in (("verb: dpo\nsteps: 1\n", "dpo"), ("steps: 1\n", ""), ("", "")):
        file.write_text(text)
        assert configs.verb_of_file(file) == verb
