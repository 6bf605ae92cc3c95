"""An unmodified notebook trains, shows progress, plots, is interrupted and resumed; so is a cell from outside."""

import re
import time
from pathlib import Path

import pytest

import posttrain
from tests.e2e.commands import PATIENCE, rows_of

nbformat = pytest.importorskip("nbformat", reason="notebooks need the packages of posttrain[test]")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel

ROOT = Path(__file__).parents[2]


def outputs(cell):
    """All text that a cell printed or returned."""
    texts = [output.get("text", output.get("data", {}).get("text/plain", "")) for output in cell["outputs"]]
    return "".join(texts)


def test_the_notebook_of_the_examples(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    by_source = {cell["source"]: cell for cell in notebook.cells if cell["cell_type"] == "code"}

    def cell_with(text):
        (found,) = [cell for source, cell in by_source.items() if text in source]
        return found

    stopped = outputs(cell_with("StopButton"))
    assert (
        re.search(r"step 1/20  eta \d+:\d\d  loss", stopped) and "step 4  eval/loss" in stopped
    )  # progress, as plain lines
    assert "stopped by SIGINT after step 8; saved. Resume: posttrain.load_run('runs/notebook-sft').resume()" in stopped
    resumed = outputs(cell_with("run.resume()"))
    assert "8 steps so far, checkpoint step-00000008" in resumed and "20 steps, loss" in resumed
    pictures = [output for output in cell_with("run.plot()")["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert "reward" in outputs(cell_with("GRPOTrainer"))
    assert "accuracy (mean@1)" in outputs(cell_with("posttrain.evaluate"))

    # The same run without the interruption has the same numbers.
    monkeypatch.chdir(tmp_path)
    values = {}
    exec(cell_with("examples = [")["source"], values)
    posttrain.sft(
        "pico",
        values["training"],
        eval_data=values["held_out"],
        eval={"every_steps": 4},
        max_steps=20,
        batch_size=5,
        learning_rate=3e-3,
        output_dir="whole",
        quiet=True,
    )
    kept = ("step", "loss", "eval/loss", "grad_norm", "epoch")
    whole, parts = (
        [{name: row.get(name) for name in kept} for row in rows_of(tmp_path / place / "metrics.jsonl")]
        for place in ("whole", "runs/notebook-sft")
    )
    assert whole == parts and len(whole) == 20


def test_the_stop_button_of_jupyter(tmp_path, monkeypatch):
    """The kernel is interrupted from outside, as Jupyter does it, while a cell trains."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        client.execute(
            "import posttrain\n"
            "rows = [{'prompt': '1+1=', 'completion': '2'}] * 4\n"
            "posttrain.sft('pico', rows, max_steps=100_000, batch_size=4, output_dir='run')",
            stop_on_error=False,
        )
        interrupted, deadline = False, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            message = client.get_iopub_msg(timeout=PATIENCE)
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and "step 1/100000" in content["text"] and not interrupted:
                manager.interrupt_kernel()
                interrupted = True
            if kind == "error":
                break
        assert content["ename"] == "Stopped" and "posttrain.load_run('run').resume()" in content["evalue"]
        last = rows_of(tmp_path / "run/metrics.jsonl")[-1]["step"]
        resume = f"steps = posttrain.load_run('run').resume(max_steps={last + 1}).steps"
        reply = client.execute_interactive(resume, user_expressions={"steps": "steps"}, timeout=PATIENCE)
        assert reply["content"]["user_expressions"]["steps"]["data"]["text/plain"] == str(last + 1)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
