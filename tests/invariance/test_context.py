"""Context ranks divide the tokens of packs, also where samples share their beginnings, by the ragged kernel, and where
a rank owns nothing that counts; what cannot be divided is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest, Loss, Objective, Sample, count_units
from posttrain.nn import layers
from posttrain.nn.kernels import reference
from posttrain.parallel.context import ContextGroup, HeadExchange
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from tests.invariance.worlds import once, run_world
from tests.tiny import tiny_folder
from tests.unit.nn.test_sharing import rows, twin_of_the_kernel

GROUPS = [(40, (5, 12, 1)), (33, (9, 9)), (70, (4,))]
CASES = ("shared beginnings", "ragged kernel", "little counts", "nothing counts")


def samples(case: str) -> list[Sample]:
    made = rows(GROUPS)
    if case in ("little counts", "nothing counts"):
        for sample in made:
            sample.mask[:] = False
    if case == "little counts":  # on one rank alone
        made[-1].mask[-2:] = True
    return made


def outcome(case: str, folder: str, layout: ParallelLayout) -> dict[str, Any]:
    """Log-probabilities, loss and norm of two steps."""
    learner = Learner(ModelConfig(path=folder), TrainConfig(micro_batch_tokens=150), layout=layout)
    if case == "ragged kernel":
        torch.nn.attention.varlen.varlen_attn = twin_of_the_kernel(behind=True)
        learner.runner.varlen_kernel = True
        learner.with_full_parameters(layers.use_fused_layers, learner.model, reference)
    made, wanted = samples(case), ForwardRequest(names=frozenset({"logprobs", "entropy"}))
    objective = Objective(request=wanted, loss=lambda out, _: Loss(total=-out.logprobs.sum()), unit="token")
    assert learner.min_shared_prefix and learner.min_shared_prefix < 33
    found: dict[str, Any] = {"logprobs": np.concatenate(learner.logprobs(made)).tolist(), "steps": []}
    for _ in range(2):
        sums = learner.forward_backward(made, objective, max(1, count_units(made, "token")), 1)
        found["steps"].append([sums["loss"][0], learner.step(1e-2)["grad_norm"]])
    return found


def as_rank(rank: int, folders: dict[str, str]) -> dict[str, Any]:
    layout = ParallelLayout(context_parallel=2)
    found: dict[str, Any] = {}
    for name, family, ranks, ulysses in (("heads", "odd", 2, 2), ("processes", "llama", 3, 0), ("rope", "rope", 2, 0)):
        try:
            wrong = ParallelLayout(context_parallel=ranks, ulysses_degree=ulysses)
            Learner(ModelConfig(path=folders[family]), TrainConfig(), layout=wrong)
        except UsageError as error:
            found[name] = str(error)
    found["scores"] = scores(folders["llama"], layout)
    return found | {case: outcome(case, folders["llama"], layout) for case in CASES}


def scores(folder: str, layout: ParallelLayout) -> list[float]:
    """Of samples without any token that counts, as reward models are asked."""
    learner = Learner(ModelConfig(path=folder), TrainConfig(), head="score", trainable=False, layout=layout)
    return learner.scores(samples("nothing counts"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(place: Path) -> dict[str, Any]:
        folders = {"llama": str(tiny_folder("llama", place))}
        odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
        folders["odd"] = str(tiny_folder("llama", place / "odd", **odd))
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        folders["rope"] = str(tiny_folder("llama", place / "rope", rope_parameters=rope))
        return {"folders": folders, "answers": run_world(2, place / "world", as_rank, folders)}

    return once(tmp_path_factory, "context", make)


@pytest.mark.parametrize("case", [case for case in CASES if case != "ragged kernel"])
def test_two_ranks_find_what_one_does(made, case):
    alone = outcome(case, made["folders"]["llama"], ParallelLayout())
    for answer in made["answers"]:
        np.testing.assert_allclose(answer[case]["logprobs"], alone["logprobs"], atol=1e-5)
        np.testing.assert_allclose(answer[case]["steps"], alone["steps"], rtol=1e-5)


def test_the_ragged_kernel_gives_the_same(made):
    for answer in made["answers"]:
        for key in ("logprobs", "steps"):
            np.testing.assert_allclose(
                answer["ragged kernel"][key], answer["shared beginnings"][key], rtol=1e-4, atol=1e-5
            )


def test_what_cannot_be_divided_is_said(made):
    assert "cluster.ulysses_degree is 2, but it must divide" in made["answers"][0]["heads"]
    assert "has 3 attention heads and 3 key-value heads. Set it to 1, or to 0." in made["answers"][0]["heads"]
    assert (
        "2 devices, which cluster.tensor_parallel_size 1 times cluster.context_parallel_size 3 does not divide"
        in made["answers"][0]["processes"]
    )
    assert "depends on the longest position of a pass" in made["answers"][0]["rope"]


def test_reward_models_score_whole_samples(made):
    alone = scores(made["folders"]["llama"], ParallelLayout())
    assert len(set(alone)) == len(alone)
    assert [answer["scores"] for answer in made["answers"]] == [pytest.approx(alone, abs=1e-5)] * 2


def test_rows_are_cut_at_the_same_places_whatever_they_are_padded_to():
    """A teacher whose kernel wants another padding must see the student's tokens."""
    row = torch.arange(1, 301)
    for rank in range(3):
        context = ContextGroup(None, rank, 3, HeadExchange(None, rank, 3))
        plain, padded = (context.slice_tokens(torch.nn.functional.pad(row, (0, n)), 300, 256) for n in (0, 212))
        assert torch.equal(plain, padded) and len(plain) == 171
