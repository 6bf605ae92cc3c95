"""Workers on Ray write the same file of completions as one process, even if a worker is killed."""

import importlib.util
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.config.sections import ClusterConfig, DataConfig, ModelConfig
from posttrain.engines.base import Sampling
from posttrain.inference.generate import Generation, generate
from tests.ray.nodes import ROOT

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)


def test_the_same_file(both, tmp_path, caplog):
    alone = Generation(
        model=ModelConfig(path="pico"),
        data=DataConfig(train=(str(ROOT / "examples/data/questions.jsonl"),)),
        out=str(tmp_path / "alone.jsonl"),
        sampling=Sampling(max_tokens=16),
        n=4,
        batch=4,
    )
    generate(alone)
    cluster = ClusterConfig(devices=2, ray_address=both.address)
    shared = replace(alone, out=str(tmp_path / "shared.jsonl"), cluster=cluster)
    log = Path(f"{shared.out}.logs/worker-0.log")

    def kill_one(progress):
        if progress.done == 4:
            os.kill(int(re.search(r"process (\d+)", log.read_text())[1]), signal.SIGKILL)

    generate(shared, kill_one)
    assert Path(shared.out).read_bytes() == Path(alone.out).read_bytes()
    assert "the worker is replaced" in caplog.text
