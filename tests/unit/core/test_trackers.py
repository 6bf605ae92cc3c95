"""Trackers, with their real libraries where these are installed: metrics, tables, names, one run across a resume."""

import json
import math

import pytest

from posttrain.core.metrics_sinks import Trackers, markdown_table, prometheus_text
from tests.unit.core.test_logging import new_log

NASTY = "<b>x</b> | a\n*b* `c`"
ROWS = [{"prompt": "1+1", "completion": NASTY, "reward": 0.5}, {"prompt": "2+2", "completion": "4", "reward": 1.0}]


def tracked(folder, name, where):
    """A run that was stopped after step 2 and resumed from step 1."""
    trackers = Trackers(names=(name,), project="maths", run_name="first", group="trials", directory=str(where))
    config = {"seed": 1, "train": {"learning_rate": 0.1}}
    with new_log(folder, trackers=trackers, config=config, quiet=True) as log:
        log.step(1, {"loss": 1.0, "eval/loss": 0.25})
        log.completions(1, ROWS)
    with new_log(folder, trackers=trackers, config=config, quiet=True, start_step=1) as log:
        log.step(2, {"loss": 2.0})
    return where


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'posttrain[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    where = tracked(tmp_path / "run", "mlflow", tmp_path / "files")
    client = mlflow.MlflowClient(tracking_uri=f"file://{where}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("maths").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["group"]) == ("first", "FINISHED", "trials")
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [(1, 1.0), (2, 2.0)]
    assert run.data.metrics["eval/loss"] == 0.25 and run.data.params["train.learning_rate"] == "0.1"
    (table,) = client.list_artifacts(run.info.run_id, "completions")
    saved = json.loads(
        (where / "mlruns" / run.info.experiment_id / run.info.run_id / "artifacts" / table.path).read_text()
    )
    assert saved["columns"] == ["prompt", "completion", "reward"] and saved["data"][0] == ["1+1", NASTY, 0.5]


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="needs trackio: pip install 'posttrain[trackio]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "files" / "trackio"))  # it is read once per process
    from trackio.sqlite_storage import SQLiteStorage

    tracked(tmp_path / "run", "trackio", tmp_path / "files")
    assert SQLiteStorage.get_runs("maths") == ["first"]
    logged = SQLiteStorage.get_logs("maths", "first")
    assert [(row["step"], row["loss"]) for row in logged if "loss" in row] == [(1, 1.0), (2, 2.0)]
    (table,) = [row["completions"] for row in logged if "completions" in row]
    assert NASTY in json.dumps(table, ensure_ascii=False).replace("\\n", "\n")


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'posttrain[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    where = tracked(tmp_path / "run", "wandb", tmp_path / "files")
    parts = sorted((where / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2 and len({part.stem for part in parts}) == 1, "one run, in two parts"
    content = b"".join(part.read_bytes() for part in parts)
    assert all(word in content for word in (b"maths", b"first", b"trials", b"eval/loss"))
    (table,) = (where / "wandb").glob("offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["data"][0] == ["1+1", NASTY, 0.5]


def test_swanlab_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="needs swanlab: pip install 'posttrain[swanlab]'")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    where = tracked(tmp_path / "run", "swanlab", tmp_path / "files")
    assert any(path.is_file() for path in where.rglob("*"))


def test_tensorboard_has_a_table_in_which_text_stays_text(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked(tmp_path / "run", "tensorboard", tmp_path / "files")
    events = EventAccumulator(str(tmp_path / "run" / "logs" / "tensorboard")).Reload()
    (event,) = events.Tensors("completions/text_summary")
    (text,) = event.tensor_proto.string_val
    lines = text.decode().splitlines()
    assert len(lines) == 4 and lines[0] == "| prompt | completion | reward |"
    assert "<b>" not in lines[2] and r"\| a<br>\*b\*" in lines[2] and lines[2].count(" | ") == 2
    assert markdown_table(ROWS) == text.decode()


def test_prometheus_file_has_the_last_step_and_says_when_the_run_ended(tmp_path):
    path = tmp_path / "metrics" / "run.prom"
    with new_log(tmp_path / 'a "run"', trackers=Trackers(prometheus_file=str(path))) as log:
        assert 'posttrain_run_up{run="a \\"run\\""} 1.0' in path.read_text()
        log.step(3, {"loss": 1.5, "eval/pass@1": math.nan, "kl": math.inf})
        lines = path.read_text().splitlines()
        assert 'posttrain_loss{run="a \\"run\\""} 1.5' in lines and "# TYPE posttrain_loss gauge" in lines
        assert (
            'posttrain_eval_pass_1{run="a \\"run\\""} NaN' in lines and 'posttrain_step{run="a \\"run\\""} 3.0' in lines
        )
    assert 'posttrain_run_up{run="a \\"run\\""} 0.0' in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["run.prom"], "replaced at once, nothing is left beside it"
    assert prometheus_text("x", {"a": -math.inf}) == '# TYPE posttrain_a gauge\nposttrain_a{run="x"} -Inf\n'
