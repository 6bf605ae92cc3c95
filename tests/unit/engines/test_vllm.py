"""Parts of the vLLM engine that need no vLLM; the rest is in tests/vllm."""

import importlib.util

import pytest

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.engines.base import EngineSpec, Sampling
from posttrain.engines.vllm.engine import distinct
from posttrain.engines.vllm.options import check_sampling
from posttrain.train.learner import Learner


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is installed")
def test_without_vllm_the_error_says_how_to_get_it():
    with pytest.raises(UsageError, match=r"engine vllm needs vLLM, see docs/vllm\.md"):
        Learner(ModelConfig(path="pico"), TrainConfig(), engine=EngineSpec("vllm"))


def test_min_p_with_top_p_is_refused():
    with pytest.raises(UsageError, match="another order than the trainer"):
        check_sampling(Sampling(top_p=0.9, min_p=0.1))
    for fine in (
        {"top_p": 0.9, "top_k": 5},
        {"min_p": 0.1, "top_k": 5},
        {"top_p": 0.9, "min_p": 0.1, "temperature": 0},
    ):
        check_sampling(Sampling(**fine))


def test_equal_prompts_of_several_processes_run_once():
    one, other = [([1, 2], 3), ([1, 2], 4)], [([5], 6)]
    assert distinct([one, one, other, other]) == [one, other]
    assert distinct([[], one, []]) == [[], one]
