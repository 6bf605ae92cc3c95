"""One engine per process, and one engine that two processes share."""

import importlib.util
import subprocess
import sys

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)


@pytest.mark.parametrize(("divided", "kind"), [(1, "other"), (2, "other"), (2, "same"), (2, "parts")])
def test_two_processes(divided, kind):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.vllm.workers", str(divided), kind], capture_output=True, text=True, timeout=600
    )
    answers = [9, 9] if kind == "same" else [2, 3]
    for rank, count in enumerate(answers):
        assert f"rank {rank} agrees on {count} answers" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0


def test_a_model_cannot_be_divided_among_one(tmp_path):
    from posttrain.config.sections import ModelConfig, TrainConfig
    from posttrain.core.errors import UsageError
    from posttrain.engines.vllm.engine import VllmEngine
    from posttrain.train.learner import Learner

    learner = Learner(ModelConfig(path="pico"), TrainConfig())
    with pytest.raises(UsageError, match=r"tensor_parallel_size is 2, but there are 1 workers"):
        VllmEngine(learner.model.config, learner.tokenizer, {"tensor_parallel_size": 2})
