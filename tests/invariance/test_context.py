"""Context ranks divide the tokens of packs, also where samples share their beginnings, by the ragged kernel, and where
a rank owns nothing that counts; what cannot be divided is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

from posttrain.config import ModelConfig, UpdateConfig
from posttrain.errors import UsageError
from posttrain.learner import Learner
from posttrain.models import layers, steps
from posttrain.models.shard import Layout
from posttrain.types import Loss, Objective, Request, Sample, count
from tests.invariance.worlds import once, run_world
from tests.tiny import tiny_folder
from tests.unit.models.test_sharing import rows, twin_of_the_kernel

GROUPS = [(40, (5, 12, 1)), (33, (9, 9)), (70, (4,))]
CASES = ("shared beginnings", "ragged kernel", "nothing counts")


def samples(case: str) -> list[Sample]:
    made = rows(GROUPS)
    if case == "nothing counts":  # but the last two tokens, which are on the last rank
        for sample in made[:-1]:
            sample.mask[:] = False
        made[-1].mask[:-2] = False
    return made


def outcome(case: str, folder: str, layout: Layout) -> dict[str, Any]:
    """Log-probabilities, loss and norm of two steps."""
    learner = Learner(ModelConfig(path=folder), UpdateConfig(tokens_per_device=150), layout=layout)
    if case == "ragged kernel":
        torch.nn.attention.varlen.varlen_attn = twin_of_the_kernel(behind=True)
        learner.trunk.ragged_kernel = True
        learner.inside(layers.speed_up, learner.model, steps)
    made, wanted = samples(case), Request(names=frozenset({"logprobs", "entropy"}))
    objective = Objective(request=wanted, loss=lambda out, _: Loss(total=-out.logprobs.sum()), unit="token")
    assert learner.shared_tokens and learner.shared_tokens < 33
    found: dict[str, Any] = {"logprobs": np.concatenate(learner.logprobs(made)).tolist(), "steps": []}
    for _ in range(2):
        sums = learner.forward_backward(made, objective, count(made, "token"), 1)
        found["steps"].append([sums["loss"][0], learner.step(1e-2)["grad_norm"]])
    return found


def as_rank(rank: int, folders: dict[str, str]) -> dict[str, Any]:
    layout = Layout(context_parallel=2)
    found: dict[str, Any] = {}
    for name, path in (("heads", folders["odd"]), ("keys", folders["llama"])):
        try:
            wrong = Layout(context_parallel=2) if name == "heads" else Layout(context_parallel=3)
            Learner(ModelConfig(path=path), UpdateConfig(), layout=wrong)
        except UsageError as error:
            found[name] = str(error)
    return found | {case: outcome(case, folders["llama"], layout) for case in CASES}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(place: Path) -> dict[str, Any]:
        folders = {"llama": str(tiny_folder("llama", place))}
        odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
        folders["odd"] = str(tiny_folder("llama", place / "odd", **odd))
        return {"folders": folders, "answers": run_world(2, place / "world", as_rank, folders)}

    return once(tmp_path_factory, "context", make)


@pytest.mark.parametrize("case", [case for case in CASES if case != "ragged kernel"])
def test_two_ranks_find_what_one_does(made, case):
    alone = outcome(case, made["folders"]["llama"], Layout())
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
    assert "cp=2 does not divide the 3 attention heads (and 3 heads of keys)" in made["answers"][0]["heads"]
    assert "tp=1 and cp=3 together do not divide the 2 processes" in made["answers"][0]["keys"]
