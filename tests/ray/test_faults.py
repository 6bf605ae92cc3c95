"""Runs on Ray that lose a node or an actor: they say whom, and go on where they may, with the same numbers."""

import importlib.util
import os
import signal

import pytest

from tests.ray.nodes import SECONDS, Run, agree, gone
from tests.ray.test_runs import APART, COMMON, VERBS, models, on_ray, posttrain, ppo

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)

__all__ = ["models"]


def test_a_lost_node_is_named(both, models, tmp_path):
    options = ["sft", "--model.path", models[0], *VERBS["sft"], *COMMON, "--steps", 100000, "--save.every", 0]
    run = Run(tmp_path / "run", *options, *on_ray(both, 4))
    run.until_step(2)
    workers = [run.worker(number) for number in range(4)]
    assert len({node for _, node in workers}) == 2, "four do not fit on one"
    lost = both.lose()
    assert run.wait() == 1, run.said()
    rank = [node for _, node in workers].index(lost)
    assert f"posttrain: actor worker, rank {rank} (on " in run.said()
    assert f"Ray node {lost} at " in run.said() and "was lost with its node" in run.said() and ", step " in run.said()
    assert all(gone(int(process)) for process, _ in workers)


def test_a_run_that_lost_a_node_goes_on_when_there_is_another(both, models, tmp_path):
    options = ppo(models, steps=4)
    assert posttrain(*options, "--out", tmp_path / "one") == 0
    run = Run(tmp_path / "run", *options, *on_ray(both, 5, *APART), "--save.every", 1, "--cluster.limits", 1, SECONDS)
    run.until_step(1)
    lost = both.lose()
    run.until(lambda: "waiting for Ray to find places" in run.said(), "a wait for another node")
    assert f"Ray node {lost} at " in run.said() and "starting again from the last checkpoint" in run.said()
    both.bring_back()
    assert run.wait() == 0, run.said()
    agree(tmp_path / "run", tmp_path / "one", ("loss", "grad_norm", "reward", "critic/loss"))


ROLES = ["actor", "critic", "reference", "reward", "rollout"]  # by number of their worker


def test_a_killed_actor_of_each_role(both, models, tmp_path):
    """One after the other in one run, which goes on each time."""
    options = ppo(models, steps=2 * len(ROLES))
    assert posttrain(*options, "--out", tmp_path / "one") == 0
    layout = [f"{role}.devices=1" for role in ROLES[1:]]
    limits = ["--save.every", 1, "--cluster.limits", len(ROLES) - 1, SECONDS]
    run = Run(tmp_path / "run", *options, *on_ray(both, len(ROLES), *layout), *limits)
    for number, role in enumerate(ROLES):
        run.until_step(2 * number + 1)
        process = run.worker(number)[0]
        os.kill(int(process), signal.SIGKILL)
        named = f"{role}-0" if role == "reward" else role
        run.until(lambda: run.said().count(f"{named} worker, rank 0 (on "), f"{role} is named")  # noqa: B023
        run.until(lambda: run.worker(number)[0] != process, f"another {role}")  # noqa: B023
    assert run.wait() == 0, run.said()
    assert run.said().count("starting again from the last checkpoint") == len(ROLES) - 1
    assert run.said().count("another rollout worker takes its place") == 1
    agree(tmp_path / "run", tmp_path / "one", ("loss", "grad_norm", "reward", "critic/loss"), 1e-4)
