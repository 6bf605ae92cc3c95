"""How many processes hold a model, and how they share it, does not change loss or gradients, for any algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from posttrain.algorithms import RolloutSettings
from posttrain.cluster.base import split_evenly
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import ForwardRequest, Objective, count_units
from posttrain.nn import forward, layers
from posttrain.nn.activation_offload import ActivationOffload
from posttrain.nn.kernels import reference as plain_steps
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from tests.invariance.test_split import algorithm, prepared
from tests.invariance.worlds import WORLDS, once, run_world
from tests.tiny import tiny_folder

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and how they divide the model
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "sp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2}),
    "ep2 x tp2": (4, {"expert_parallel": 2, "tensor_parallel": 2}),
    "fsdp4": (4, {}),
    "fsdp2 x tp2": (4, {"tensor_parallel": 2}),
    "fsdp2 x cp2": (4, {"context_parallel": 2}),
    "cp2 x sp2": (4, {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    "ep2 x sp2": (4, {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    "hsdp of 2 copies x sp2": (4, {"replicate": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    "cp2 x tp2": (4, {"context_parallel": 2, "tensor_parallel": 2}),
    "cp4": (4, {"context_parallel": 4}),
    "ring of 2": (2, {"context_parallel": 2, "ulysses_degree": 1}),
    "ring of 2 x 2 that exchange heads": (4, {"context_parallel": 4, "ulysses_degree": 2}),
    "ring of 2 x tp2": (4, {"context_parallel": 2, "ulysses_degree": 1, "tensor_parallel": 2}),
    "ring of 2 x sp2": (
        4,
        {"context_parallel": 2, "ulysses_degree": 1, "tensor_parallel": 2, "sequence_parallel": True},
    ),
    "ep4 x cp2": (4, {"expert_parallel": 4, "context_parallel": 2}),
    "ep2 in 2 groups": (4, {"expert_parallel": 2}),
    "ep2 in 2 groups x cp2": (4, {"expert_parallel": 2, "context_parallel": 2}),
    "hsdp 2 x 2": (4, {"replicate": 2}),
    "hsdp of 2 copies x tp2": (4, {"replicate": 2, "tensor_parallel": 2}),
    "2 copies": (2, {"replicate": 2}),
    "ep2 in 2 copies": (4, {"replicate": 2, "expert_parallel": 2}),
    "reduced once a step": (2, {"defer_reduction": True}),
    "hsdp reduced once a step": (4, {"replicate": 2, "defer_reduction": True}),
    "ray": (2, {}),  # tests/ray runs the same test on it
}


@dataclass
class Case:
    """What is trained. Where packs are small, ranks have different numbers of them."""

    verb: str
    family: str = "qwen2"  # embeddings tied, biases
    algo: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    zero: int = 3
    offload: bool = False
    critic: bool = False
    splits: bool = True  # whether tensor parallelism is tried
    experts: bool = False  # whether expert parallelism is
    steps: int = 2
    tokens: int = 1000  # in a pack
    copies: bool = False  # whether copies of the model and later reductions are tried
    everywhere: bool = False  # or by two processes only, which saves time
    fat: bool = False  # with the layers that a GPU runs
    moved: bool = False  # inputs of checkpointed layers are copied and brought back
    samples: int = 0  # at most so many; fewer than there are data ranks leave some without any; 0: all


CASES = {
    "sft": Case("sft", steps=3, tokens=50, everywhere=True, copies=True),
    "dpo": Case("dpo", steps=3, everywhere=True),
    "kto": Case("kto", steps=3, everywhere=True),
    "reward": Case("reward", steps=3, everywhere=True),
    "ppo": Case("ppo", steps=3, everywhere=True),
    "ppo critic": Case("ppo", critic=True, steps=3, everywhere=True),
    "grpo": Case("grpo", steps=3, tokens=100, everywhere=True, copies=True),
    "ppo with a shared critic": Case("ppo", "llama_odd", {"share_critic": True, "value_loss_coef": 0.5}, tokens=60),
    "distill": Case("distill", "qwen2_untied", tokens=30),
    "distill, jsd": Case("distill", "qwen2_untied", {"divergence": "jsd"}, tokens=30),
    "adapters": Case("sft", "llama", model={"lora_rank": 4}, tokens=60, everywhere=True, copies=True),
    "adapters on a score": Case("reward", "qwen3", model={"lora_rank": 4}),
    "zero 2, activations checkpointed": Case("sft", "qwen3", model={"gradient_checkpointing": True}, zero=2),
    "activations checkpointed": Case("sft", "gemma2", model={"gradient_checkpointing": True}),
    "activations offloaded": Case("sft", "llama", model={"gradient_checkpointing": True}, tokens=60, moved=True),
    "parameters in host memory": Case("sft", "llama", offload=True, splits=False),
    "sliding window, decay": Case("dpo", "mistral", update={"weight_decay": 0.1}),
    "experts": Case(
        "sft",
        "mixtral",
        model={"router_aux_loss_coef": 0.1},
        experts=True,
        tokens=30,
        copies=True,
        everywhere=True,
    ),
    "adapters on experts": Case("sft", "mixtral", model={"lora_rank": 4}, experts=True, everywhere=True),
    "adapters beside experts": Case(
        "sft",
        "mixtral",
        model={"lora_rank": 4, "lora_target_modules": ("q_proj", "o_proj")},
        experts=True,
    ),
    "latent attention": Case("sft", "deepseek_v3", experts=True),
    "latent attention, adapters": Case("grpo", "deepseek_v2", model={"lora_rank": 4}, experts=True),
    "shared experts": Case("dpo", "qwen2_moe", model={"gradient_checkpointing": True}, experts=True),
    "norms of heads, experts": Case("reward", "qwen3_moe", model={"router_aux_loss_coef": 0.1}, experts=True),
    "experts in host memory": Case("sft", "mixtral", offload=True, experts=True),
    "fat layers": Case("sft", "qwen3", fat=True, tokens=60),
    "fat layers and adapters": Case("sft", "llama", model={"lora_rank": 4}, fat=True),
    "odd vocabulary, rank without samples": Case("sft", "llama_odd", samples=1, tokens=50, everywhere=True),
    "positions learnt": Case("sft", "gpt2", splits=False),
}


def tried(case: Case, layout: str) -> bool:
    size, options = LAYOUTS[layout]
    able = (case.splits or "tensor_parallel" not in options) and (case.experts or "expert_parallel" not in options)
    if case.fat and "sequence_parallel" in options:  # which runs the model's own layers
        return False
    if {"replicate", "defer_reduction"} & options.keys():
        return able and case.copies
    return able and (case.everywhere or size == 2)


def train(case: Case, folder: str, layout: ParallelLayout, rank: int = 0, ranks: int = 1) -> list[list[float]]:
    """Sum of losses and norm of gradients of each step, of the part of a data rank."""
    teacher = ModelConfig(path=folder.replace(case.family, "llama")) if case.verb == "distill" else None
    taught = {"teacher": teacher.path} if teacher else {}
    algo = algorithm(case.verb, RolloutSettings(max_completion_tokens=30), **case.algo, **taught)
    model = ModelConfig(path=folder, **case.model)
    head = "score" if case.critic else algo.head
    options = {"head": head, "teacher": teacher, "value_head": "values" in algo.outputs(), "layout": layout}
    learner = Learner(model, TrainConfig(micro_batch_tokens=case.tokens, **case.update), **options)
    if case.fat:
        assert learner.with_full_parameters(layers.use_fused_layers, learner.model, plain_steps)
    policy = Learner(model, learner.train_config, trainable=False, layout=layout) if case.critic else learner
    if case.moved:
        ActivationOffload(learner.device).install(learner.model)
    samples = prepared(algo, policy)
    samples = samples[: case.samples or len(samples)]
    request = replace(algo.forward_request(lambda text: {"+": 5, "-": 6}[text]), router_loss=model.router_aux_loss_coef)
    objective = algo.objective(request)
    if case.critic:
        objective = Objective(request=ForwardRequest(names=frozenset({"values"})), loss=algo.critic_loss, unit="token")
    mine = split_evenly(samples, ranks, objective.group_size)[rank]
    by, tokens = count_units(samples, objective.unit), sum(map(len, samples))
    steps = []
    for _ in range(case.steps):
        sums = learner.forward_backward(mine, objective, by, tokens)
        steps.append([sums.get("loss", (0.0, None))[0], learner.step(1e-3)["grad_norm"]])
    steps.append([learner.evaluate(mine, objective).get("loss", (0.0, None))[0], 0.0])
    return steps


def as_rank(rank: int, folders: dict[str, str], layouts: list[str]) -> dict[str, Any]:
    """What a process of a world does: everything that its world can do."""
    found = {}
    for name in layouts:
        options = LAYOUTS[name][1]
        if "ulysses_degree" in options:
            forward.TOKEN_MULTIPLE = 8  # so that short rows reach all chunks
        for case_name, case in CASES.items():
            if tried(case, name):
                offload = frozenset({"parameters"} if case.offload else ())
                layout = ParallelLayout(zero=case.zero, offload=offload, **options)
                place = rank // layout.ranks_per_sample, dist.get_world_size() // layout.ranks_per_sample
                found[f"{name}: {case_name}"] = train(case, folders[case.family], layout, *place)
    return found


def folders_for_all(place: Path) -> dict[str, str]:
    return {family: str(tiny_folder(family, place)) for family in {case.family for case in CASES.values()}}


@pytest.fixture(scope="module", params=WORLDS)
def made(request, tmp_path_factory):
    """Tiny models, and by layout the answers of its ranks; each world is started once."""
    size = request.param

    def make(place: Path) -> dict[str, Any]:
        folders = folders_for_all(place)
        layouts = [name for name, (processes, *_) in LAYOUTS.items() if processes == size and name != "ray"]
        found = run_world(size, place / "world", as_rank, folders, layouts)
        return {"folders": folders, "answers": dict.fromkeys(layouts, found)}

    return once(tmp_path_factory, f"ranks-{size}", make)


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_not_matter(made, name):
    case = CASES[name]
    if not any(tried(case, layout) for layout in made["answers"]):
        return  # not by as many processes
    alone = train(case, made["folders"][case.family], ParallelLayout())
    assert len({round(norm, 9) for _, norm in alone}) == case.steps + 1  # it learns
    for layout, ranks in made["answers"].items():
        if not tried(case, layout):
            continue
        answers = [answer[f"{layout}: {name}"] for answer in ranks]
        size, options = LAYOUTS[layout]
        ranks_per_sample = ParallelLayout(**options).ranks_per_sample
        for step, (loss, norm) in enumerate(alone):
            together = sum(answer[step][0] for answer in answers[::ranks_per_sample])
            assert together == pytest.approx(loss, rel=1e-5, abs=1e-5), (layout, step)
            assert [answer[step][1] for answer in answers] == [pytest.approx(norm, rel=1e-5)] * size, (layout, step)
