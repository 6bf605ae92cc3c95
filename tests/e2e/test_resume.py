"""A run that is stopped after any step and resumed equals the run that was not, bit for bit."""

import json
import os
import signal

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.checkpoint import newest_valid, verify, write_checkpoint
from posttrain.core.errors import CheckpointError, Stopped, UsageError
from posttrain.core.logging import Log
from posttrain.core.metrics_sinks import is_wall_clock
from posttrain.train.launch import train
from tests.e2e.rows import write_judge, write_rows
from tests.tiny import tiny_folder

STEPS = 5  # of 3 rows from 7: epochs end inside steps 3 and 5


def options(verb, folder, out, **changes):
    rows = write_rows(ALGORITHMS[verb].example_kind, folder)
    algo = {"distill": {"teacher": "pico"}, "opd": {"teacher": "pico"}}.get(verb, {})
    online = {
        "reward": [write_judge(folder)],
        "rollout": {"samples_per_prompt": 3, "max_tokens": 6},
        "rewards": {"workers": 1},
    }
    return (
        (online if ALGORITHMS[verb].online else {})
        | {
            "model": {"path": "pico"},
            "data": {"train": [rows], "eval": [rows]},
            "update": {"rows_per_step": 3, "learning_rate": 1e-3, "ema_decay": 0.9},
            "eval": {"every": 2},
            "save": {"every": 2},
            "steps": STEPS,
            "out": str(folder / out),
            "quiet": True,
            "algo": algo,
        }
        | changes
    )


def stop_after(monkeypatch, step):
    """Send ourselves SIGTERM while step `step` is being logged."""
    plain = Log.step

    def logged(self, number, metrics):
        plain(self, number, metrics)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Log, "step", logged)


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{key: value for key, value in row.items() if not is_wall_clock(key)} for row in rows]


def bytes_of(folder):
    newest = newest_valid(folder / "checkpoints")
    verify(newest)
    files = {str(f.relative_to(newest)): f.read_bytes() for f in sorted(newest.rglob("*")) if f.is_file()}
    del files["manifest.json"]
    for name in {"online/pending.jsonl", "online/partial.jsonl"} & files.keys():
        rows = [json.loads(line) for line in files[name].splitlines()]
        files[name] = [row | {"seconds": 0} for row in rows]  # how long a reward took is another time's business
    state = json.loads(files.pop("state.json"))
    state["config"] = {key: value for key, value in state["config"].items() if key not in ("output_dir", "resume")}
    return files, state


VARIANTS = [(verb, {}) for verb in ALGORITHMS] + [
    ("sft", {"model": {"path": "pico", "lora_rank": 4, "lora_dropout": 0.3}}),
    ("dpo", {"model": {"path": "pico", "lora_rank": 4, "lora_dropout": 0.3}}),
    ("sft", {"model": {"path": "pico", "dtype": "float16"}}),
    ("sft", {"train": {"optimizer": "adamw_8bit", "neftune_noise_alpha": 5.0}}),
    ("sft", {"train": {"optimizer": "muon"}, "model": {"path": "pico", "trainable_layers": 1}}),
    ("dpo", {"train": {"optimizer": "adafactor"}, "model": {"path": "pico", "lora_rank": 4, "lora_init": "pissa"}}),
    ("reward", {"train": {"optimizer": "schedule_free", "lr_scheduler": "constant", "ema_decay": 0.0}}),
    ("grpo", {"model": {"path": "pico", "lora_rank": 4, "use_dora": True, "use_rslora": True}}),
    ("dpo", {"algo": {"precompute_reference": True}}),
    ("kto", {"algo": {"variant": "vanilla"}, "data": "balanced"}),
    ("reward", {"model": {"path": "pico", "lora_rank": 4}}),
    ("grpo", {"rollout": {"ahead": 1, "samples_per_prompt": 3, "max_tokens": 6, "dynamic_sampling": 2}}),
    (
        "grpo",
        {
            "rollout": {
                "samples_per_prompt": 3,
                "max_tokens": 6,
                "skip_epochs": 1,
                "prompt_sampling": "difficulty",
            }
        },
    ),
    (
        "grpo",
        {
            "rollout": {
                "ahead": 1,
                "samples_per_prompt": 3,
                "max_tokens": 24,
                "partial_prompts": 2,
                "partial_tokens": 3,
                "stop": ["e"],
            }
        },
    ),
    ("grpo", {"model": {"path": "pico", "lora_rank": 4}, "algo": {"kl_coef": 0.1, "mini_batch_size": 4}}),
    ("ppo", {"algo": {"share_critic": True, "pretrain_data": ["text.jsonl"], "pretrain_coef": [0.05]}}),
    (
        "rloo",
        {
            "rewards": {"normalize": "running", "clip": 2.0},
            "rollout": {"ahead": 1, "samples_per_prompt": 3, "max_tokens": 6},
        },
    ),
    ("rloo", {"model": "mixtral", "rollout": {"ahead": 1, "samples_per_prompt": 3, "router_replay": True}}),
]
EVERY_STEP = ("sft", "kto", "grpo", "ppo")  # the others run in the same loops, over the same examples or groups of them


@pytest.mark.parametrize(
    ("verb", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
def test_stopped_and_resumed_equals_uninterrupted(verb, changes, tmp_path, monkeypatch):
    if changes.get("data") == "balanced":  # both labels in every step
        rows = write_rows("labelled", tmp_path)
        changes = changes | {"data": {"train": [rows], "eval": [rows]}}
    if changes.get("model") == "mixtral":
        changes = changes | {"model": {"path": str(tiny_folder("mixtral", tmp_path))}}
    if "pretrain_data" in changes.get("algo", {}):
        write_rows("text", tmp_path)
        monkeypatch.chdir(tmp_path)
    train(verb, **options(verb, tmp_path, "whole", **changes))
    expected_files, expected_state = bytes_of(tmp_path / "whole")
    assert expected_state["step"] == STEPS
    often = verb in EVERY_STEP and (not changes or "rollout" in changes)  # what a loop keeps between steps
    steps = range(1, STEPS) if often else [3]  # an epoch has just ended
    for step in steps:
        again = options(verb, tmp_path, f"stopped-{step}", **changes)
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            with pytest.raises(Stopped) as stopped:
                train(verb, **again)
        assert stopped.value.exit_code == 143 and "--resume" in str(stopped.value)
        train(verb, **again, resume=True)
        assert metrics_of(tmp_path / f"stopped-{step}") == metrics_of(tmp_path / "whole"), f"stopped after step {step}"
        files, state = bytes_of(tmp_path / f"stopped-{step}")
        assert state == expected_state
        assert files.keys() == expected_files.keys()
        differing = [name for name in files if files[name] != expected_files[name]]
        assert not differing, f"stopped after step {step}: {differing}"


def test_training_changes_what_it_should(tmp_path):
    """The comparison above means nothing if the weights did not move."""
    train("sft", **options("sft", tmp_path, "one", steps=2))
    train("sft", **options("sft", tmp_path, "two", steps=3))
    one, two = bytes_of(tmp_path / "one")[0], bytes_of(tmp_path / "two")[0]
    assert one["model/model.safetensors"] != two["model/model.safetensors"]
    assert one["optimizer.safetensors"] != two["optimizer.safetensors"]
    assert one["ema.safetensors"] != two["ema.safetensors"]


def test_resuming_a_finished_run_does_nothing_and_succeeds(tmp_path):
    chosen = options("sft", tmp_path, "run")
    train("sft", **chosen)
    before = bytes_of(tmp_path / "run")
    result = train("sft", **chosen, resume=True)
    assert result.steps == STEPS and bytes_of(tmp_path / "run") == before


def test_a_run_can_be_lengthened(tmp_path):
    chosen = options("sft", tmp_path, "run", steps=2)
    train("sft", **chosen)
    train("sft", **(chosen | {"steps": 4}), resume=True)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_changed_data_is_refused_by_name(tmp_path):
    chosen = options("sft", tmp_path, "run", steps=2)
    train("sft", **chosen)
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n')
    with pytest.raises(CheckpointError, match="data changed"):
        train("sft", **(chosen | {"steps": 4}), resume=True)


def test_changed_model_is_refused_by_name(tmp_path):
    train("sft", **options("sft", tmp_path, "base", steps=1))
    chosen = options("sft", tmp_path, "run", steps=2, model={"path": str(tmp_path / "base")})
    train("sft", **chosen)
    train("sft", **(options("sft", tmp_path, "base", steps=3)), resume=True)  # a newer checkpoint in the base run
    with pytest.raises(CheckpointError, match="model changed"):
        train("sft", **(chosen | {"steps": 4}), resume=True)


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    chosen = options("sft", tmp_path, "run", steps=1)
    train("sft", **chosen)
    with pytest.raises(UsageError, match="--resume"):
        train("sft", **chosen)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    chosen = options("sft", tmp_path, "run")
    train("sft", **chosen)
    newest = newest_valid(tmp_path / "run/checkpoints")
    weights = newest / "model/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    train("sft", **options("sft", tmp_path, "whole"))
    train("sft", **chosen, resume=True)
    assert bytes_of(tmp_path / "run")[0] == bytes_of(tmp_path / "whole")[0]


def test_old_checkpoints_that_a_killed_process_did_not_delete_are_deleted_on_resume(tmp_path):
    again = options("sft", tmp_path, "run", steps=3, save={"every": 1, "keep": 9})
    train("sft", **again)
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 3
    train("sft", **again | {"save": {"every": 1, "keep": 1}}, resume=True)
    best = json.loads((tmp_path / "run/checkpoints/step-00000003/state.json").read_text())["progress"]["best_step"]
    kept = {f"step-{step:08d}" for step in (3, best) if step}
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == kept
    assert "deleted checkpoints beyond save.max_checkpoints" in (tmp_path / "run/logs/run.log").read_text()


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again(tmp_path):
    again = options("sft", tmp_path, "run", steps=2)
    train("sft", **again)
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    for state in (tmp_path / "run/checkpoints").glob("step-*/state.json"):
        state.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the . checkpoints can be used"):
        train("sft", **again, resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics


def test_a_checkpoint_that_no_run_has_written_is_refused_by_name(tmp_path):
    again = options("sft", tmp_path, "run", steps=2)
    train("sft", **again)
    newest = newest_valid(tmp_path / "run/checkpoints")
    write_checkpoint(newest.parent, 9, lambda folder: (folder / "state.json").write_text("{}"))
    with pytest.raises(CheckpointError, match=r"state.json: has no step, position, .*rng, config;"):
        train("sft", **again, resume=True)


def test_changed_data_and_order_are_named_and_can_be_forced(tmp_path):
    data = {"train": [write_rows("chat", tmp_path)], "eval": ["0.3"]}  # of version 0.1: a part of the examples
    again = options("sft", tmp_path, "run", steps=2, data=data)
    train("sft", **again)
    with pytest.raises(CheckpointError, match=r"seed was 0, is 7, which changes the order .* are held out"):
        train("sft", **again | {"seed": 7}, resume=True)
    other = again | {"data": data | {"eval": ["0.5"]}}
    with pytest.raises(CheckpointError, match=r"the data changed .*\(data.eval_fraction was 0.3, is 0.5\).*--allow_ch"):
        train("sft", **other, resume=True)
    train("sft", **other | {"seed": 7, "steps": 3}, resume=True, allow_changed_data=True)
    state = bytes_of(tmp_path / "run")[1]
    assert [change["step"] for change in state["data_changes"]] == [2] and state["step"] == 3
    assert "seed was 0, is 7" in state["data_changes"][0]["change"] and not state["config"]["allow_changed_data"]
    train("sft", **other | {"seed": 7, "steps": 4}, resume=True)
    assert bytes_of(tmp_path / "run")[1]["data_changes"] == state["data_changes"], "kept; no need to allow it again"


def test_options_that_changed_are_listed_and_another_order_of_the_data_is_refused(tmp_path, capsys):
    again = options("sft", tmp_path, "run", steps=2)
    train("sft", **again)
    for change in ({"seed": 7}, {"data": again["data"] | {"shuffle": False}}):
        with pytest.raises(CheckpointError, match=r"(seed|shuffle) was .*which changes the order of the examples"):
            train("sft", **again | change, resume=True)
    capsys.readouterr()
    train(
        "sft", **again | {"steps": 3, "quiet": False, "update": again["update"] | {"learning_rate": 0.5}}, resume=True
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "train.max_steps was 2, is 3" in shown and "is 0.5" in shown
