"""Parts of the vLLM engine that need no vLLM; the rest is in tests/vllm."""

import importlib.util

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import ModelConfig, TrainConfig, with_algorithm
from posttrain.core.errors import UsageError
from posttrain.engines.base import EngineSpec
from posttrain.engines.vllm.engine import distinct
from posttrain.train.learner import Learner
from posttrain.train.setup import make_online_algorithm


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is installed")
def test_without_vllm_the_error_says_how_to_get_it():
    with pytest.raises(UsageError, match=r"engine vllm needs vLLM, see docs/vllm\.md"):
        Learner(ModelConfig(path="pico"), TrainConfig(), engine=EngineSpec("vllm"))


@pytest.mark.parametrize(("engine", "first"), [("local", False), ("vllm", True)])
def test_the_trainer_truncates_in_the_order_of_the_engine(engine, first):
    config = with_algorithm(ALGORITHMS["grpo"])
    config.rollout.engine, config.rollout.min_p, config.rollout.top_p = engine, 0.1, 0.9
    assert make_online_algorithm("grpo", config).distribution.min_p_first is first


def test_equal_prompts_of_several_processes_run_once():
    one, other = [([1, 2], 3), ([1, 2], 4)], [([5], 6)]
    assert distinct([one, one, other, other]) == [one, other]
    assert distinct([[], one, []]) == [[], one]
