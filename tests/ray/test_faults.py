"""Runs on Ray that lose a node or an actor: they name it, and continue where allowed, with the same numbers."""

import importlib.util
import os
import re
import signal

import pytest

from posttrain.cluster.placement import Placement
from tests.ray.nodes import SECONDS, Run, agree, gone
from tests.ray.test_runs import APART, COMMON, VERBS, models, on_ray, posttrain, ppo

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)

__all__ = ["models"]


def test_a_lost_node_is_named(both, models, tmp_path):
    options = ["sft", "--model.path", models[0], *VERBS["sft"], *COMMON, "--steps", 100000, "--save.every_steps", 0]
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


def test_a_run_that_lost_a_node_continues_when_there_is_another(both, models, tmp_path):
    options = ppo(models)
    assert posttrain(*options, "--out", tmp_path / "one") == 0
    run = Run(
        tmp_path / "run", *options, *on_ray(both, 5, *APART), "--save.every_steps", 1, "--cluster.limits", 1, SECONDS
    )
    run.until_step(1)
    lost = both.lose()
    run.until(lambda: "waiting for Ray to place" in run.said(), "a wait for another node")
    assert f"Ray node {lost} at " in run.said() and "restarting from the last checkpoint" in run.said()
    both.bring_back()
    assert run.wait() == 0, run.said()
    agree(tmp_path / "run", tmp_path / "one", ("loss", "grad_norm", "reward", "critic/loss"))


# Each role, on a worker of its own: the number of its log.
ROLES = {"actor": 0, "reference": 1, "critic": 2, "rollout": 3, "reward-0": 4, "reward-1": 5}


class Disturbed(Placement):
    """Loses workers: `plan` says at which step, of which role and by which signal."""

    plan: dict[int, tuple[str, signal.Signals]]

    @property
    def step(self):
        return self.now

    @step.setter
    def step(self, value):
        self.now = value
        if value in self.plan:
            self.lose(*self.plan.pop(value))

    def lose(self, role, how):
        """Lose the worker at its next call; for rollout workers at the next `generate`."""
        pool = self.slots[0].pool if role == "rollout" else self.pools[role]
        submit = pool.submit

        def disturbed(asked, method, *args, **kwargs):
            if asked == role and (role != "rollout" or method == "generate"):
                pool.submit = submit
                os.kill(processes_in(self.logs / f"worker-{ROLES[role]}.log")[-1], how)
                pool.timeout_seconds = (
                    2.0 if how == signal.SIGSTOP else pool.timeout_seconds
                )  # the others' deadlines stay generous
            return submit(asked, method, *args, **kwargs)

        pool.submit = disturbed


def processes_in(log):
    return [int(process) for process in re.findall(r"--- worker process (\d+)", log.read_text())]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("transport", ["processes", "ray"])
def test_a_worker_of_each_role_is_lost_in_turn(transport, how, both, models, tmp_path, monkeypatch, caplog, capsys):
    """The run continues after each loss, until max_restarts is used up."""
    steps = len(ROLES) + 2
    options = [*ppo(models, steps), "--save.every_steps", 1]
    assert posttrain(*options, "--steps", steps - 1, "--out", tmp_path / "one") == 0
    plan = {2 + number: (role, how) for role, number in ROLES.items()} | {steps: ("actor", how)}
    monkeypatch.setattr(Disturbed, "plan", plan, raising=False)
    monkeypatch.setattr("posttrain.train.run.Placement", Disturbed)
    layout = [f"{role}.devices=1" for role in ROLES if role != "actor"]
    cluster = on_ray(both, len(ROLES), *layout)
    cluster = cluster if transport == "ray" else cluster[2:]
    again = len(ROLES) - 1
    assert posttrain(*options, *cluster, "--cluster.limits", again, SECONDS, "--out", tmp_path / "run") == 1
    said = " ".join(caplog.text.split())
    for role, number in ROLES.items():
        assert said.count(f"{role} worker, rank 0 (on ") == 1 and f", step {2 + number}) " in said, said
    assert said.count("restarting from the last checkpoint") == again
    assert said.count("the worker is replaced") == 1
    stops = said.count("and does not answer a ping: it is stopped or stuck") + said.count("sent no heartbeat")
    assert stops == (len(ROLES) if how == signal.SIGSTOP else 0)
    last = " ".join(capsys.readouterr().err.split())
    assert "posttrain: actor worker, rank 0 (on " in last and f", step {steps}) " in last, last
    agree(tmp_path / "run", tmp_path / "one", ("loss", "grad_norm", "reward", "critic/loss"), 1e-4)
    logs = sorted((tmp_path / "run/logs").glob("worker-*.log"))
    assert len(logs) == len(ROLES)
    assert all(gone(process) for log in logs for process in processes_in(log))
