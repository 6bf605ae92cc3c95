"""Runs on Ray: the numbers of one process, wherever the roles live."""

import importlib.util

import pytest

from posttrain.cli.main import main
from tests.ray.nodes import ROOT, SECONDS, Run, agree, rows_of
from tests.tiny import tiny_folder

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here", allow_module_level=True)

EXAMPLES = ROOT / "examples/data"
STEPS = 5
COMMON = ["--train.batch_size", 4, "--train.learning_rate", 1e-3, "--steps", STEPS]
SHORT = ["--rollout.max_tokens", 6, "--rollout.samples_per_prompt", 4]
VERBS = {
    "sft": ["--data.train", EXAMPLES / "chat.jsonl"],
    "dpo": ["--data.train", EXAMPLES / "pairs.jsonl"],
    "grpo": ["--data.train", EXAMPLES / "questions.jsonl", "--reward", f"{__file__}:digits", *SHORT],
}


def digits(completions, **columns):
    """The share of digits in a completion: a random model generates some."""
    return [sum(character.isdigit() for character in text) / 4 for text in completions]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A policy and two reward models."""
    folder = tmp_path_factory.mktemp("models")
    policy = tiny_folder("qwen2", folder)  # tied embeddings
    return policy, [tiny_folder("llama", folder / str(seed), head="score", seed=seed) for seed in (1, 2)]


def posttrain(*args):
    return main([str(arg) for arg in (*args, "--quiet")])


def on_ray(nodes, devices, *layout):
    options = ["--cluster.ray", nodes.address, "--cluster.devices", devices, "--cluster.limits", 0, SECONDS]
    return [*options, *(["--cluster.layout", *layout] if layout else [])]


@pytest.mark.parametrize("verb", VERBS)
def test_two_actors_compute_what_one_process_does(verb, both, models, tmp_path):
    options = [verb, "--model.path", models[0], *VERBS[verb], *COMMON]
    assert posttrain(*options, "--out", tmp_path / "one") == 0
    assert posttrain(*options, "--out", tmp_path / "two", *on_ray(both, 2)) == 0
    agree(tmp_path / "two", tmp_path / "one")
    assert len(rows_of(tmp_path / "two")) == STEPS and all(row["grad_norm"] > 0 for row in rows_of(tmp_path / "two"))
    assert sorted(file.name for file in (tmp_path / "two/logs").glob("worker-*")) == ["worker-0.log", "worker-1.log"]


APART = ["critic.devices=1", "reference.devices=1", "reward-0.devices=1", "reward-1.devices=1"]


def ppo(models, steps=STEPS):
    policy, rewards = models
    options = ["ppo", "--model.path", policy, "--data.train", EXAMPLES / "questions.jsonl", "--algo.kl_coef", 0.05]
    return [*options, "--reward", *(f"model:{reward}" for reward in rewards), *SHORT, *COMMON, "--steps", steps]


def test_roles_of_ppo_on_actors_of_their_own_and_together(both, models, tmp_path):
    assert posttrain(*ppo(models), "--out", tmp_path / "one") == 0
    apart = Run(tmp_path / "apart", *ppo(models), *on_ray(both, 5, *APART))
    assert apart.wait() == 0, apart.said()
    places = [apart.worker(number) for number in range(5)]
    assert len({process for process, _ in places}) == 5 and len({node for _, node in places}) == 2
    names = ("loss", "grad_norm", "reward", "kl", "critic/loss", "critic/grad_norm")
    agree(tmp_path / "apart", tmp_path / "one", names)
    together = Run(tmp_path / "together", *ppo(models), *on_ray(both, 4))  # which do not fit on one node
    assert together.wait() == 0, together.said()
    assert len({together.worker(number)[1] for number in range(4)}) == 2
    agree(tmp_path / "together", tmp_path / "one", names)
