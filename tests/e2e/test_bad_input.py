"""Bad input gets one clear message and an exit code that says whose fault it is; nothing is lost, nothing half done.

2: the command or its configuration is wrong. 1: the data, the disk or the training failed.
"""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from posttrain.algorithms.sft import SFT
from posttrain.checkpoints.checkpoint import is_run_directory, newest_valid, verify
from posttrain.checkpoints.tensor_files import load_tensors
from posttrain.core.files import read_json
from posttrain.core.types import Loss
from posttrain.train.run import Run
from tests.e2e.commands import PATIENCE, command, rows_of, start
from tests.e2e.rows import write_rows
from tests.e2e.test_resume import bytes_of
from tests.tiny import tiny_folder

GOOD = {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("chat", "pair", "labelled", "stepwise", "text"):
        write_rows(kind, tmp_path)


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Runs a command that must fail before a model is loaded, and looks at how it does."""

    def check(code, words, *argv):
        def load(*_args, **_options):
            raise AssertionError("a model was loaded")

        with monkeypatch.context() as patch:
            patch.setattr("posttrain.train.learner.load_model", load)
            found = command(*argv)
        said = capsys.readouterr()
        message = " ".join(said.err.replace("│", " ").split())  # the parser draws a box and breaks lines
        assert found == code, said
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"
        assert "Traceback" not in said.out + said.err
        assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("checkpoints"))
        assert not is_run_directory(tmp_path / "run")
        return message

    return check


def lines(name, *rows):
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    Path(name).write_text(text, encoding="utf-8")
    return name


def sft(*more, path="pico", train="chat.jsonl"):
    return "sft", "--model.path", path, "--data.train", train, "--output_dir", "run", *more


# Rows


LONG = {"messages": [{"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "y"}]}
NULL = {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": None}]}
ROWS = {
    "a missing column": ([GOOD, {"mesages": GOOD["messages"]}], (), ["d.jsonl:2: messages: missing column"]),
    "no column that is known": (
        [{"foo": 1}],
        (),
        ["d.jsonl:1: no known format has the columns foo", "docs/data.md lists all formats"],
    ),
    "a null": ([GOOD, NULL], (), ["d.jsonl:2: messages[1].content: null"]),
    "a null column": ([GOOD, GOOD, {"messages": None}], (), ["d.jsonl:3: messages: null"]),
    "an empty file": ([], (), ["d.jsonl: the file has no examples"]),
    "a broken line": ([GOOD, '{"messages": [{"role"\n', GOOD], (), ["d.jsonl:2: broken JSON"]),
    "a line that was cut off": ([GOOD, '{"messages"'], (), ["d.jsonl:2: broken JSON", "is it truncated?"]),
    "a truncated response": (
        [GOOD, LONG],
        ("--data.max_length", 32),
        ["d.jsonl:2: no token of the completion", "= 32"],
    ),
    "a long row": ([LONG], ("--data.max_length", 32, "--data.on_overlong", "error"), ["d.jsonl:1: 66 tokens", "= 32"]),
    "only long rows": (
        [LONG],
        ("--data.max_length", 32, "--data.on_overlong", "drop"),
        ["d.jsonl: no examples", "1 dropped"],
    ),
    "pairs": ([{"prompt": "a", "chosen": "b", "rejected": "c"}], (), ["d.jsonl:1: the format is preference", "dpo"]),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows(case, refused):
    rows, options, words = ROWS[case]
    refused(1, words, *sft(*options, train=lines("d.jsonl", *rows)))


def test_a_bad_evaluation_file_is_found_before_the_training(refused):
    refused(1, ["d.jsonl:1: messages: null"], *sft("--data.eval", lines("d.jsonl", {"messages": None})))


def test_an_id_outside_the_vocabulary(refused, tmp_path):
    words = ["chat.jsonl:1: token id", "vocabulary of 90"]
    path = tiny_folder("llama", tmp_path, vocab_size=90)  # its tokenizer has 102 tokens
    refused(1, words, *sft(path=path))


def test_a_row_longer_than_a_table_of_positions(refused, tmp_path):
    path = tiny_folder("gpt2", tmp_path)
    row = {"messages": [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y" * 90}]}
    lines("d.jsonl", GOOD, row)
    refused(1, ["d.jsonl:2:", "128 positions", "data.max_length to 128"], *sft(path=path, train="d.jsonl"))
    assert command(*sft("--data.max_length", 128, path=path, train="d.jsonl")) == 0


def test_a_row_longer_than_the_model_has_seen_is_a_warning(tmp_path, capsys):
    path = tiny_folder("llama", tmp_path)  # computes its positions, so it can go on
    row = {"messages": [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y" * 90}]}
    lines("d.jsonl", GOOD, row)
    assert command(*sft(path=path, train="d.jsonl")) == 0
    assert "but the model was trained for 128" in capsys.readouterr().err
    assert command(*sft("--data.max_length", 128, "--output_dir", "short", path=path, train="d.jsonl")) == 0
    assert "was made for" not in capsys.readouterr().err


def test_missing_files(refused):
    refused(2, ["nofile.jsonl: no such file"], *sft(train="nofile.jsonl"))
    refused(2, ["chat.jsonl", "cannot be used as run directory"], *sft("--output_dir", "chat.jsonl"))


def test_pairs_are_wanted(refused):
    words = ["chat.jsonl:1: the format is chat", "Usual formats for reward, dpo"]
    refused(1, words, "dpo", "--model.path", "pico", "--data.train", "chat.jsonl", "--output_dir", "run")


def test_the_corrected_command_is_not_in_its_own_way(refused, capsys):
    refused(1, ["d.jsonl"], *sft(train=lines("d.jsonl", NULL)))
    assert command(*sft("--model.lora_rank", 2, "--model.lora_target_modules", "nothing")) == 2
    assert "model.lora_target_modules" in capsys.readouterr().err
    assert command(*sft()) == 0


# Models


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("notes", ["model.path", "no model in notes", "config.json", "readme.txt"]),
        ("empty", ["model.path", "no model in empty", "It is empty"]),
        ("chat.jsonl", ["model.path", "chat.jsonl", "It is a file"]),
        ("no/such/folder", ["model.path", "no folder no/such/folder"]),
        ("no-such-model", ["model.path", "no-such-model", "not a local folder"]),
    ],
)
def test_a_place_without_a_model(path, words, refused, tmp_path):
    for folder in ("notes", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes/readme.txt").write_text("hello")
    refused(2, words, *sft(path=path))
    refused(2, words[1:], *sft("--model.tokenizer", path))


def test_a_run_without_a_checkpoint_is_no_model(tmp_path, capsys):
    (tmp_path / "dead/checkpoints").mkdir(parents=True)
    assert command(*sft(path="dead")) == 1
    assert "dead: the run has no valid checkpoint" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_helper_models_are_looked_for_first(refused):
    helpers = (("dpo", "reference", "pair"), ("kto", "reference", "labelled"), ("distill", "teacher", "chat"))
    for verb, option, data in helpers:
        argv = (verb, "--model.path", "pico", "--data.train", f"{data}.jsonl", "--output_dir", "run")
        refused(2, [f"algo.{option}: no-such-model"], *argv, f"--algo.{option}", "no-such-model")
        refused(2, [f"algo.{option}: there is no folder a/b/c"], *argv, f"--algo.{option}", "a/b/c")


def test_a_teacher_of_another_vocabulary(tmp_path, capsys):
    teacher = tiny_folder("llama", tmp_path, vocab_size=120)
    argv = (
        "distill",
        "--model.path",
        "pico",
        "--data.train",
        "chat.jsonl",
        "--output_dir",
        "run",
        "--algo.teacher",
        teacher,
    )
    assert command(*argv) == 2
    said = capsys.readouterr().err
    assert "algo.teacher" in said and "120" in said and "263" in said
    assert not is_run_directory(tmp_path / "run")


@pytest.mark.parametrize(("model", "words"), [("pico", "'✓' is 3 tokens"), ("tiny", "does not know '✓'")])
def test_reward_tokens_that_are_none(model, words, tmp_path, monkeypatch, capsys):
    path = "pico" if model == "pico" else tiny_folder("llama", tmp_path)
    monkeypatch.setattr("posttrain.train.learner.load_model", None)
    argv = ("prm", "--model.path", path, "--data.train", "stepwise.jsonl", "--output_dir", "run")
    assert command(*argv, "--algo.positive_token", "✓", "--algo.negative_token", "✗") == 2
    said = capsys.readouterr().err
    assert "algo.positive_token" in said and words in said and not is_run_directory(tmp_path / "run")


# The command line and the file


CONFIGS = {
    "an unknown key": ("model:\n  path: pico\n  lora_rnk: 4\n", ["c.yaml:3: model.lora_rnk", "mean model.lora_rank?"]),
    "a key elsewhere": ("model:\n  learning_rate: 1\n", ["c.yaml:2: model.learning_rate", "train.learning_rate?"]),
    "a key without its section": ("seed: 1\nbeta: 1\n", ["c.yaml:2: beta: no such option"]),
    "a value for a section": ("eval: 3\n", ["c.yaml:1: eval: no such option. Did you mean data.eval?"]),
    "text for a number": ("quiet: true\nseed: two\n", ["c.yaml:2: seed is 'two'", "a whole number"]),
    "a fraction for a whole number": ("seed: 2.5\n", ["c.yaml:1: seed is 2.5", "a whole number"]),
    "a truth for a number": ("seed: true\n", ["c.yaml:1: seed is True", "a whole number"]),
    "a number for a truth": ("seed: 3\nquiet: 3\n", ["c.yaml:2: quiet is 3", "true or false"]),
    "a list for a number": ("seed: [1, 2]\n", ["c.yaml:1: seed is [1, 2]", "a whole number"]),
    "nothing for a number": (
        "seed: 1\ntrain:\n  batch_size:\n",
        ["c.yaml:3: train.batch_size is None", "a whole number"],
    ),
    "an unknown choice": ("model: {dtype: float8}\n", ["c.yaml:1: model.dtype is 'float8'", "'bfloat16'"]),
    "a foreign tag": ("seed: !!python/object:os.system x\n", ["c.yaml:1: seed: cannot be read", "python/object"]),
    "no YAML": ("model:\n  path: [\n", ["c.yaml:3: cannot be read as YAML"]),
    "indentation": (
        "model:\n  path: pico\n train:\n  max_steps: 2\n",
        ["c.yaml:3: cannot be read as YAML", "check the indentation of this line and of the one before"],
    ),
    "a tab": ("model:\n\tpath: pico\n", ["c.yaml:2: cannot be read as YAML", "a tab: indent with spaces"]),
    "a list": ("- a\n", ["c.yaml", "not a sequence"]),
    "another verb": ("verb: dpo\n", ["c.yaml: is for `posttrain dpo`, not for `posttrain sft`"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_files(case, refused, tmp_path):
    text, words = CONFIGS[case]
    (tmp_path / "c.yaml").write_text(text)
    refused(2, words, "sft", "c.yaml", "--model.path", "pico", "--data.train", "chat.jsonl", "--output_dir", "run")


def test_a_second_configuration_file(refused, tmp_path):
    (tmp_path / "c").mkdir()
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / "c" / name).write_text("seed: 1\n")
    words = ["c/b.yaml: a second configuration file", "`defaults: [b.yaml]` in c/a.yaml"]
    refused(2, words, "sft", "c/a.yaml", "c/b.yaml")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("sftt",), ["no verb 'sftt'", "Did you mean sft?"]),
        (("--nothing",), ["no verb '--nothing'", "posttrain --help"]),
        (("sft", "nofile.yaml"), ["nofile.yaml: no such configuration file"]),
        (("sft",), ["model.path is not set"]),
        (("sft", "--model.path", "pico"), ["data.train is not set"]),
        (
            sft("--train.lerning_rate", 1),
            ["--train.lerning_rate: no such option. Did you mean --train.learning_rate?"],
        ),
        (("sft", "--modle", "pico"), ["--modle: no such option. Did you mean --model?"]),
        (sft("--rollout.max_tokens", 8), ["--rollout.max_tokens: no such option of sft", "as grpo"]),
        (sft("--learning_rate", 1), ["--learning_rate", "--train.learning_rate"]),
        (sft("--algo.beta", 1), ["--algo.beta"]),
        (sft("--lr", 1), ["--lr: no such option; here it is --train.learning_rate."]),
        (sft("-steps", 1), ["-steps: options begin with --"]),
        (sft("--train.max_steps", "two"), ["--train.max_steps is 'two'; it must be a whole number."]),
        (sft("--train.max_steps=1.5"), ["--train.max_steps is '1.5'; it must be a whole number."]),
        (sft("--train.max_steps"), ["--train.max_steps has no value; it must be a whole number."]),
        (
            sft("--quiet", "true"),
            ["--quiet is a switch and takes no value: write --quiet or --no_quiet, without 'true'."],
        ),
        (sft("--seed", 1, "c.yaml"), ["c.yaml: a configuration file comes first: posttrain sft c.yaml --seed ..."]),
        (sft("--model.dtype", "float8"), ["--model.dtype", "'float8'", "'bfloat16'"]),
        (("sft", "--resume"), ["no run to resume in runs/sft-*", "--output_dir"]),
        (("sft", "--resume", "--output_dir", "nowhere"), ["nowhere: no run to resume"]),
        (("export",), ["SOURCE is not set", "Example: posttrain export runs/sft my-model"]),
        (("export", "nowhere", "out"), ["nowhere"]),
        (("plan", "c.yaml"), ["c.yaml: no such configuration file"]),
        (("plan",), ["VERB or CONFIG.yaml is not set", "Example: posttrain plan sft"]),
    ],
    ids=lambda value: "-".join(map(str, value[:1] + value[7:])) if isinstance(value, tuple) else "",
)
def test_commands(argv, words, refused):
    refused(2, words, *argv)


CONFLICTS = [
    (sft("--model.load_in_4bit"), ["model.load_in_4bit", "--model.lora_rank"]),
    (
        sft("--data.eval", "chat.jsonl", "--data.eval_fraction", 0.1),
        ["data.eval", "data.eval_fraction is 0.1", "one of"],
    ),
    (sft("--eval.every_steps", 3), ["eval.every_steps is 3", "Set data.eval or data.eval_fraction"]),
    (sft("--train.epochs", 0), ["epochs is 0.0", "above 0"]),
    (sft("--train.epochs", "inf"), ["epochs is inf"]),
    (sft("--train.learning_rate", "inf"), ["train.learning_rate is inf; it must be finite and at least 0."]),
    (sft("--train.adam_beta2", 1.5), ["train.adam_beta2 is 1.5", "below 1"]),
    (sft("--data.max_examples", 1, "--data.eval_fraction", 0.5), ["data.eval_fraction: one example"]),
    (sft("--train.optimizer", "muon", "--cluster.devices", 2), ["train.optimizer is muon", "Use adamw, or one device"]),
    (
        sft("--train.optimizer", "adafactor", "--cluster.offload", "moments"),
        ["train.optimizer is adafactor", "moments"],
    ),
    (sft("--train.optimizer", "schedule_free"), ["train.lr_scheduler is cosine"]),
    (
        sft("--train.optimizer", "schedule_free", "--train.lr_scheduler", "constant", "--train.ema_decay", "0.9"),
        ["train.ema_decay is 0.9", "schedule_free"],
    ),
    (sft("--model.use_dora"), ["model.use_dora", "--model.lora_rank 16"]),
    (sft("--model.use_dora", "--model.lora_rank", 4, "--cluster.devices", 2), ["model.use_dora", "one device"]),
    (sft("--model.use_dora", "--model.lora_rank", 4, "--model.lora_init", "pissa"), ["use_dora", "lora_init pissa"]),
    (sft("--model.lora_init", "pissa", "--model.lora_rank", 4, "--model.load_in_4bit"), ["lora_init pissa", "4bit"]),
    (
        sft("--model.lora_init", "pissa", "--model.lora_rank", 4, "--cluster.devices", 2),
        ["lora_init pissa", "one device"],
    ),
    (sft("--model.freeze_layers", 1, "--model.lora_rank", 4), ["model.freeze_layers", "only adapters are trained"]),
    (sft("--model.frozen_parameters", "("), ["model.frozen_parameters", "not a regular expression"]),
    (sft("--model.freeze_layers", 1, "--cluster.devices", 2, "--cluster.pipeline_parallel_size", 2), ["freeze_layers"]),
    (sft("--cluster.offload", "activations"), ["cluster.offload activations needs model.gradient_checkpointing"]),
    (sft("--cluster.ulysses_degree", 2), ["cluster.ulysses_degree is 2", "context_parallel_size 1"]),
    (sft("--train.neftune_noise_alpha", 5, "--cluster.devices", 2, "--cluster.pipeline_parallel_size", 2), ["neftune"]),
    (sft("--train.neftune_noise_alpha", 5, "--cluster.devices", 2, "--cluster.context_parallel_size", 2), ["neftune"]),
]
ALGORITHMS = [
    ("dpo", ("--algo.beta", 0), ["algo.beta is 0.0", "above 0"]),
    (
        "dpo",
        ("--algo.loss_type", "hinge", "--algo.label_smoothing", 0.1),
        ["algo.label_smoothing 0.1", "algo.loss_type hinge"],
    ),
    (
        "dpo",
        ("--algo.loss_type", "ipo", "--algo.label_smoothing", 0.1),
        ["algo.label_smoothing 0.1", "algo.loss_type ipo"],
    ),
    ("dpo", ("--algo.label_smoothing", 0.7), ["algo.label_smoothing is 0.7", "at most 0.5"]),
    ("dpo", ("--algo.loss_type", "robust", "--algo.label_smoothing", 0.5), ["label_smoothing is 0.5", "below 0.5"]),
    ("simpo", ("--algo.beta", -1), ["algo.beta is -1.0"]),
    ("cpo", ("--algo.beta", -1), ["algo.beta is -1.0"]),
    ("orpo", ("--algo.odds_ratio_coef", -1), ["algo.odds_ratio_coef is -1.0"]),
    ("kto", ("--algo.beta", 0), ["algo.beta is 0.0"]),
    ("kto", ("--algo.precompute_reference",), ["algo.precompute_reference", "algo.variant kto"]),
    ("kto", ("--train.batch_size", 1), ["kto needs at least 2 examples per step", "train.batch_size is 1"]),
    ("kto", ("--data.max_rows", 1), ["kto needs at least 2 examples per step", "there are 1 examples"]),
    ("kto", ("--data.eval", 0.1), ["kto needs at least 2 examples to evaluate on, but there are 1"]),
    ("distill", (), ["algo.teacher is not set"]),
    ("distill", ("--algo.teacher", "pico", "--algo.jsd_beta", 1), ["algo.jsd_beta is 1.0", "reverse_kl"]),
    ("distill", ("--algo.teacher", "pico", "--algo.temperature", 0), ["algo.temperature is 0.0"]),
    (
        "prm",
        ("--algo.reward_tokens", "+"),
        ["algo.reward_tokens is '+'; use algo.positive_token and algo.negative_token"],
    ),
    (
        "prm",
        ("--algo.negative_token", "+"),
        ["algo.positive_token and algo.negative_token are both '+'", "two different"],
    ),
    ("prm", ("--algo.placeholder", "+"), ["algo.placeholder '+'", "algo.positive_token"]),
]
KINDS = {"kto": "labelled", "distill": "chat", "prm": "stepwise"}


@pytest.mark.parametrize(("argv", "words"), CONFLICTS)
def test_conflicting_settings(argv, words, refused):
    refused(2, words, *argv)


@pytest.mark.parametrize(("verb", "options", "words"), ALGORITHMS)
def test_conflicting_settings_of_an_algorithm(verb, options, words, refused):
    argv = ("--model.path", "pico", "--data.train", f"{KINDS.get(verb, 'pair')}.jsonl", "--output_dir", "run")
    refused(2, words, verb, *argv, *options)


@pytest.mark.parametrize(
    ("code", "word", "argv"),
    [(2, "c.yaml:1: sted: no such option", ("sft", "c.yaml")), (1, "d.jsonl:1: messages: null", sft(train="d.jsonl"))],
)
def test_the_exit_code_of_the_process(code, word, argv, tmp_path):
    (tmp_path / "c.yaml").write_text("sted: 1\n")
    lines("d.jsonl", {"messages": None})
    process = start(*argv)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == code and said.startswith("posttrain: ") and word in said
    assert said.count("\n") == 1


# Little data


def test_fewer_rows_than_a_batch_are_one_step_of_all_of_them(tmp_path):
    assert command(*sft("--quiet")) == 0
    (row,) = rows_of(tmp_path / "run/metrics.jsonl")
    tokens = sum(entry["tokens"] for entry in every_row(tmp_path))
    assert row["step"] == 1 and row["epoch"] == 1.0 and row["tokens"] == tokens
    assert read_json(newest_valid(tmp_path / "run/checkpoints") / "state.json")["position"] == 7


def every_row(tmp_path):
    """Metrics of a run that takes the seven rows one by one."""
    assert command(*sft("--quiet", "--output_dir", "single", "--train.batch_size", 1)) == 0
    found = rows_of(tmp_path / "single/metrics.jsonl")
    assert len(found) == 7
    return found


def test_with_steps_the_rows_come_again(tmp_path):
    assert command(*sft("--quiet", "--train.max_steps", 2)) == 0
    found = rows_of(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2] and found[-1]["epoch"] == 64 / 7
    tokens = sum(entry["tokens"] for entry in every_row(tmp_path))
    assert all(4 * tokens < row["tokens"] < 5 * tokens for row in found)  # 32 of 7 rows


def test_one_row_is_enough(tmp_path):
    assert command(*sft("--quiet", "--data.max_rows", 1)) == 0
    assert [row["epoch"] for row in rows_of(tmp_path / "run/metrics.jsonl")] == [1.0]


@pytest.mark.parametrize(("epochs", "sizes"), [(2, [3, 3, 3, 3, 2]), (0.5, [3, 1]), (0.01, [1])])
def test_without_steps_epochs_decide(epochs, sizes, tmp_path):
    options = ("--train.max_steps", 0, "--train.epochs", epochs, "--train.batch_size", 3)
    assert command(*sft("--quiet", *options)) == 0
    seen = [round(7 * row["epoch"]) for row in rows_of(tmp_path / "run/metrics.jsonl")]
    assert [after - before for before, after in zip([0, *seen], seen, strict=False)] == sizes


# Losses and gradients that are not finite


def spoil(monkeypatch, steps, how, first=1):
    """From now on the loss (or its gradient alone) of these steps is not finite; there is one pack a step."""
    plain, seen = SFT.loss, []  # a loss may be asked for twice of one pack

    def loss(self, out, batch):
        good = plain(self, out, batch)
        if not seen or seen[-1] is not batch:
            seen.append(batch)
        if first + len(seen) - 1 not in steps:
            return good
        nought = (out.logprobs * 0).sum()
        return Loss(total=good.total + (torch.sqrt(nought) if how == "gradient" else nought + float(how)))

    monkeypatch.setattr(SFT, "loss", loss)


def weights_at(folder, step):
    return load_tensors(folder / f"checkpoints/step-{step:08d}/model/model.safetensors")


def equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def training(*more, steps=6, save=1):
    options = (
        "--train.max_steps",
        steps,
        "--save.every_steps",
        save,
        "--save.max_checkpoints",
        9,
        "--train.batch_size",
        3,
    )
    return sft("--quiet", "--train.learning_rate", 1e-3, *options, *more)


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_its_batch_kept(how, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, {2, 4, 5}, how)
    assert command(*training()) == 0
    said = capsys.readouterr()
    run = tmp_path / "run"
    found = {row["step"]: row for row in rows_of(run / "metrics.jsonl")}
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert [step for step, row in found.items() if row["skipped"]] == [2, 4, 5]
    bad = "grad_norm" if how == "gradient" else "loss"
    assert found[2][bad] is None and found[2]["not_finite"] == [bad] and "not_finite" not in found[3]
    assert "3 skipped" in said.out and "Traceback" not in said.err
    for step in (2, 4, 5):
        kept = run / f"bad-batches/step-{step:08d}.jsonl"
        assert f"step {step}: " in said.err and f"run/bad-batches/step-{step:08d}.jsonl" in said.err
        rows = rows_of(kept)
        assert len(rows) == 3 and all(row["origin"].startswith("chat.jsonl:") for row in rows)
        assert all(len(row["tokens"]) == len(row["mask"]) for row in rows)
    assert equal(weights_at(run, 1), weights_at(run, 2)) and equal(weights_at(run, 3), weights_at(run, 5))
    assert not equal(weights_at(run, 2), weights_at(run, 3)) and not equal(weights_at(run, 5), weights_at(run, 6))
    assert all(tensor.isfinite().all() for tensor in weights_at(run, 6).values())


@pytest.mark.parametrize("save", [0, 1, 2])
def test_three_in_a_row_end_the_run_which_can_go_on(save, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, {2, 3, 4}, "nan")
        assert command(*training(save=save)) == 1
    said = capsys.readouterr().err
    assert "3 steps in a row" in said and "run/bad-batches" in said and "Traceback" not in said
    assert "posttrain sft --output_dir run --resume" in said
    newest = newest_valid(run / "checkpoints")
    assert newest.name == "step-00000004" and read_json(newest / "state.json")["progress"]["skipped"] == 3
    if save == 1:
        assert equal(weights_at(run, 4), weights_at(run, 1))
    spoil(monkeypatch, {5}, "nan", first=5)  # the count begins anew: one more is no reason to give up
    assert command("sft", "--output_dir", "run", "--resume") == 0
    assert [row["step"] for row in rows_of(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [row["skipped"] for row in rows_of(run / "metrics.jsonl")] == [0, 1, 1, 1, 1, 0]
    assert not equal(weights_at(run, 4), weights_at(run, 6))


def test_a_run_in_which_nothing_was_learnt_is_no_success(tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, {1, 2}, "nan")
    assert command(*training(steps=2)) == 1
    assert "not finite in any of the 2 steps" in capsys.readouterr().err


# Disks


def full(*_args, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


@pytest.mark.parametrize(
    "broken", ["posttrain.nn.optimizer.save_tensors", "posttrain.train.learner.save_model", "os.fsync"]
)
def test_a_disk_that_is_full_costs_one_save(broken, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    assert command(*training("--output_dir", "whole", save=2)) == 0
    plain = Run.save

    def save(self, step, policy, **options):
        if step == 4:
            self.finish_save()  # the checkpoint of step 2 is complete before the disk is full
            patch.setattr(broken, full)
        return plain(self, step, policy, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save)
        assert command(*training(save=2)) == 1
    said = capsys.readouterr().err
    assert "checkpoint of step 4 was not saved" in said and "No space left" in said and "run/checkpoints" in said
    assert "Free some space" in said and "--resume" in said and "Traceback" not in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    verify(run / "checkpoints/step-00000002")
    assert command("sft", "--output_dir", "run", "--resume") == 0
    assert bytes_of(run) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("what", ["config", "bad batch"])
def test_a_disk_that_is_full_at_other_times(what, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("posttrain.train.run_directory.atomic_write_text", full)
    if what == "bad batch":
        monkeypatch.setattr("posttrain.train.run.Run.write_config", lambda run: None)
        spoil(monkeypatch, {2}, "nan")
    assert command(*training()) == (what == "config")
    said = capsys.readouterr().err
    assert "No space left" in said and "Traceback" not in said
    assert said.startswith("posttrain: " if what == "config" else "warning: step 2: loss or gradient is not finite")
