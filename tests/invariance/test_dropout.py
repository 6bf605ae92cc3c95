"""What adapters' dropout drops on several processes does not depend on whether the run was stopped on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.algorithms import ALGORITHMS
from posttrain.cluster.base import split_evenly
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import Objective, count_units
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from tests.invariance.test_split import prepared
from tests.invariance.worlds import run_world
from tests.tiny import tiny_folder


def steps(learner: Learner, rank: int, number: int) -> list[list[float]]:
    """Loss of this rank's part and norm of the gradients, of `number` steps in two passes each."""
    algo = ALGORITHMS["sft"](ALGORITHMS["sft"].Config())
    samples = prepared(algo, learner)
    objective = Objective(request=algo.forward_request(len), loss=algo.loss, unit=algo.unit)
    mine = split_evenly(samples, 2)[rank]
    by, tokens = count_units(samples, algo.unit), sum(map(len, samples))
    found = []
    for _ in range(number):
        losses = [learner.forward_backward(mine, objective, by, tokens)["loss"][0] for _ in range(2)]
        found.append([*losses, learner.step(1e-2)["grad_norm"]])
    return found


def as_rank(rank: int, path: str, folder: str) -> dict[str, Any]:
    def made(dropout: float) -> Learner:
        model = ModelConfig(path=path, lora_rank=4, lora_dropout=dropout)
        return Learner(model, TrainConfig(micro_batch_tokens=64), seed=5, layout=ParallelLayout())

    plain = steps(made(0.0), rank, 2)
    whole = made(0.4)
    first = steps(whole, rank, 2)
    whole.save(Path(folder))
    rest = steps(whole, rank, 2)
    resumed = made(0.4)
    resumed.load(Path(folder))
    return {"plain": plain, "first": first, "rest": rest, "resumed": steps(resumed, rank, 2)}


def test_a_run_that_was_stopped_drops_the_same(tmp_path):
    (tmp_path / "saved").mkdir()
    model = str(tiny_folder("llama", tmp_path))
    one, other = run_world(2, tmp_path / "world", as_rank, model, str(tmp_path / "saved"))
    for found in (one, other):
        assert found["resumed"] == found["rest"]
        once, again, _ = found["rest"][0]
        assert once != again, "every pass drops something else"
        once, again, _ = found["plain"][1]
        assert once == again, "nothing else differs between two passes"
