"""The launch form: every option of a trainer, the command and YAML that values mean, and who may check and start."""

import json
import re
import shlex

import pytest
import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.board.control import OUTPUT_BYTES
from posttrain.board.launch import NOT_IN_THE_FORM, Launch, Launcher, changed_options, form, values_of_run
from posttrain.config.parsing import entries_of_words, option_keys, parse, read_entries
from posttrain.config.sections import as_mapping, with_algorithm
from posttrain.core.errors import UsageError
from posttrain.endpoint.errors import ApiError
from tests.unit.board.made import PATIENCE, ask, board, get, make_run, run_of

TOKEN = "a-long-secret"
CHOSEN = {
    "model.path": "pico",
    "data.train": ["a b.jsonl", "c.jsonl"],
    "reward.functions": ["gsm8k"],
    "train.optimizer": "muon",
    "train.max_steps": "3",
    "train.learning_rate": "1e-3",
    "data.shuffle": False,
    "data.map_keys": '{"prompt": "question"}',
    "rollout.stop": ["\n", "$(id)"],
}


@pytest.mark.parametrize("verb", ["sft", "grpo", "prm"])
def test_the_form_has_every_option_of_the_trainer(verb):
    shown = form(verb)
    assert {option["key"] for option in shown} == set(option_keys(with_algorithm(ALGORITHMS[verb]))) - NOT_IN_THE_FORM
    assert all(option["help"] for option in shown)
    (optimizer,) = [option for option in shown if option["key"] == "train.optimizer"]
    assert {"adamw", "muon"} < set(optimizer["choices"]) and optimizer["default"] == "adamw"


def test_command_and_yaml_mean_the_chosen_values(tmp_path):
    launch = Launch.read({"trainer": "grpo", "values": CHOSEN})
    assert launch.problem == "" and shlex.split(launch.command) == ["posttrain", *launch.words]
    assert launch.words[:6] == ["grpo", "--model", "pico", "--data", "a b.jsonl", "c.jsonl"]
    file = tmp_path / "grpo.yaml"
    file.write_text(launch.yaml)
    for words in ([str(file)], launch.words[1:]):
        assert as_mapping(parse("grpo", ALGORITHMS["grpo"], words)) == as_mapping(launch.config)
    assert launch.config.rollout.stop == ("\n", "$(id)") and launch.config.data.shuffle is False
    assert set(yaml.safe_load(launch.yaml)) == {"verb", "model", "data", "reward", "train", "rollout"}


def test_what_is_missing_or_wrong_is_named():
    assert "model.path is not set" in Launch.read({"trainer": "sft", "values": {}}).problem
    for values, words in (
        ({"train.max_steps": "many"}, "--train.max_steps is 'many'; it must be a whole number"),
        ({"no.option": "1"}, "--no.option: no such option"),
        ({"model.path": "--help"}, "model.path: this value cannot be written on a command line"),
        ({"data.train": ["x", "--output_dir", "/tmp/y"]}, "data.train: this value cannot be written"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            Launch.read({"trainer": "sft", "values": values})
    for values in ([], {"model.path": 3}, {"model.path": "x\0"}, {"resume": True}, {"seed": "1" * 30_000}):
        with pytest.raises(ApiError):
            Launch.read({"trainer": "sft", "values": values})


def test_a_data_check_is_that_of_the_chosen_data():
    launch = Launch.read({"trainer": "grpo", "values": CHOSEN})
    words = launch.data_check()
    from posttrain.cli.data import DataCheckArgs

    options = read_entries("data check", "", DataCheckArgs(), list(entries_of_words(words[2:], DataCheckArgs(), "")))
    assert options.files == ("a b.jsonl", "c.jsonl") and options.trainer == "grpo" and options.json
    assert options.map_keys == {"prompt": "question"} and options.model == "pico"


def test_a_run_starts_only_below_the_directories_that_are_shown(tmp_path):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    for folder in (root, outside, root / "used"):
        folder.mkdir()
    (root / "used/file").touch()
    (root / "link").symlink_to(outside)
    launcher = Launcher([root])
    assert launcher.run_directory("", "sft") == root / "sft-001"
    assert launcher.run_directory("new", "sft") == root / "new"
    for wanted in (str(outside / "x"), "../x", "link/x", str(root / "link/x"), "/etc/x", ".", "used"):
        with pytest.raises(UsageError, match=r"must be below|something already"):
            launcher.run_directory(wanted, "sft")
    for wanted in ("~nobody-of-this-name/x", "x" * 300, "\ud800"):
        with pytest.raises(UsageError, match=r"output_dir is .*Choose another name"):
            launcher.run_directory(wanted, "sft")


def test_a_run_fills_the_form(tmp_path):
    run = run_of(make_run(tmp_path / "run", steps=5, rate=0.25))
    assert values_of_run(run) == {
        "trainer": "grpo",
        "values": {"model.path": "pico", "train.max_steps": "5", "train.learning_rate": "0.25"},
    }
    (tmp_path / "run/config.yaml").write_text("verb: sft\ndata: {map_keys: {a: b}, train: [<i>]}\nmodel: 3\nx: [1]\n")
    assert values_of_run(run)["values"] == {"data.map_keys": '{"a": "b"}', "data.train": ["<i>"]}
    (tmp_path / "run/config.yaml").write_text(f"verb: sft\nupdate: {{warmup: {10**400}}}\n")  # an earlier option
    with pytest.raises(ApiError, match="cannot be read"):
        values_of_run(run)
    assert changed_options(run) == set()
    (tmp_path / "run/config.yaml").write_text("verb: ../../bin/sh\n")
    assert changed_options(run) == set()
    with pytest.raises(ApiError, match="names no trainer"):
        values_of_run(run)


def test_who_may_do_what(tmp_path):
    """Nothing is read or started without a token; runs start only where control is allowed."""
    make_run(tmp_path / "runs/a")
    body = {"trainer": "sft", "values": {"model.path": "pico", "data.train": ["x.jsonl"]}}
    actions = {"check": body | {"check": "plan"}, "launch": body, "preview": body}

    def statuses(server, **headers):
        found = {name: ask(server, f"/api/{name}", sent, **headers)[0] for name, sent in actions.items()}
        found["preset"] = ask(server, "/api/values?trainer=sft&preset=sft.yaml", **headers)[0]
        found["job"] = ask(server, "/api/job?job=x", **headers)[0]
        return list(found.values())

    with board(tmp_path / "runs") as server:
        assert statuses(server) == [403, 403, 200, 403, 403]
        assert get(server, "form", trainer="sft")["presets"] == [] and not get(server, "trainers")["checks"]
        assert ask(server, "/api/preview", body, Content_Type="text/plain")[0] == 415  # what any page may send
    with board(tmp_path / "runs", token=TOKEN) as server:
        assert statuses(server) == [401] * 5
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        assert statuses(server, **allowed) == [200, 403, 200, 200, 404]
        wrong = {"trainer": "sft", "values": {"train.max_steps": "x"}}
        assert "must be a whole number" in json.loads(ask(server, "/api/preview", wrong, **allowed)[2])["problem"]
        status, _, reply = ask(server, "/api/check", wrong | {"check": "plan"}, **allowed)
        assert status == 400 and "must be a whole number" in json.loads(reply)["error"]["message"]
        (job,) = server.board.launcher.jobs.values()
        server.board.launcher.end_checks()
        assert job.started.process.returncode is not None  # a check does not outlive the board
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_checks_say_what_the_commands_say(tmp_path):
    """The data check as an object, the plan as text; a second check of a kind ends the first."""
    data = tmp_path / "<b>.jsonl"
    turns = [("<i>2+2=</i>", "4")], [("question " * 50, "answer " * 60)] * (OUTPUT_BYTES // 500)
    rows = [
        [
            {"role": role, "content": text}
            for pair in one
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        for one in turns
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    launcher = Launcher([tmp_path])
    values = {"model.path": "pico", "data.train": [str(data)], "data.max_length": str(20 * OUTPUT_BYTES)}
    launch = Launch.read({"trainer": "sft", "values": values})
    first, job, plan = launcher.check("data", launch), launcher.check("data", launch), launcher.check("plan", launch)
    assert first.started.process.poll() is not None
    for each in (job, plan):
        each.started.process.wait(PATIENCE)
    (source,) = job.describe()["report"]["sources"]
    trained = [part["text"] for part in source["rendered"][0]["samples"][0] if part["trained"]]
    assert source["examples"] == 2 and trained == ["4<|end|>"] and source["source"] == str(data)
    assert "memory on" in plan.describe()["output"] and plan.describe()["exit_code"] == 0
    with pytest.raises(ApiError):
        launcher.check("shell", launch)
