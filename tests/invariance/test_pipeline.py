"""Pipeline stages do not change loss, gradients, outputs, completions or checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import SamplingDistribution
from posttrain.parallel.layouts import ParallelLayout
from posttrain.parallel.pipeline import FAMILIES, Pipeline
from posttrain.train.learner import Learner
from tests.e2e.commands import command, rows_of
from tests.invariance.test_layouts import Trained, answers, saved_by
from tests.invariance.test_ranks import Case, train
from tests.invariance.test_split import prepared
from tests.invariance.worlds import WORLDS, once, run_world
from tests.tiny import tiny_folder, tiny_model

LAYERS = 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and how they divide the model
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2 uneven": (2, {"pipeline_parallel": 2, "layers_per_stage": (3, 1)}),
    "pp2 interleaved": (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    "pp2 x fsdp2": (4, {"pipeline_parallel": 2}),
    "pp4": (4, {"pipeline_parallel": 4}),
    "pp2 x tp2": (4, {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "pp2 x sp2": (4, {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    "pp2 x cp2": (4, {"pipeline_parallel": 2, "context_parallel": 2}),
    "pp2 x ring of 2": (4, {"pipeline_parallel": 2, "context_parallel": 2, "ulysses_degree": 1}),
    "pp2 x ep2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "pp2 interleaved x 2 copies": (4, {"pipeline_parallel": 2, "virtual_stages": 2, "replicate": 2}),
    "pp2 interleaved x fsdp2 reduced once": (
        4,
        {"pipeline_parallel": 2, "virtual_stages": 2, "defer_reduction": True},
    ),
}
CASES = {
    "sft": Case("sft", tokens=50, everywhere=True),  # tied embeddings
    "dpo": Case("dpo", tokens=100),
    "reward": Case("reward", tokens=60),
    "grpo": Case("grpo", tokens=60, everywhere=True),
    "ppo critic": Case("ppo", critic=True),
    "ppo with a shared critic": Case("ppo", "llama", {"share_critic": True, "value_loss_coef": 0.5}, tokens=60),
    "adapters": Case("sft", "llama", model={"lora_rank": 4}, tokens=60, everywhere=True),
    "zero 2, activations checkpointed": Case("sft", "qwen3", model={"gradient_checkpointing": True}, zero=2, tokens=60),
    "first layers frozen": Case("sft", "llama", model={"freeze_layers": 2}),  # of stages without a trained weight
    "noise on embeddings": Case("sft", "qwen3", update={"neftune_noise_alpha": 50.0}, tokens=60),
    "fused layers": Case("sft", "qwen3", fat=True, tokens=60),
    "experts": Case("sft", "mixtral", tokens=30, experts=True, everywhere=True),
}


def tried(case: Case, layout: str) -> bool:
    options = LAYOUTS[layout][1]
    able = (case.splits or "tensor_parallel" not in options) and (case.experts or "expert_parallel" not in options)
    return able and (case.everywhere or layout in ("pp2", "pp2 interleaved"))


def as_rank(rank: int, folders: dict[str, str], layouts: list[str]) -> dict[str, Any]:
    found = {}
    for name in layouts:
        for case_name, case in CASES.items():
            if tried(case, name):
                layout = ParallelLayout(zero=case.zero, **LAYOUTS[name][1])
                stage = dist.get_world_size() // layout.pipeline_parallel
                place = rank % stage // layout.ranks_per_sample, stage // layout.ranks_per_sample
                found[f"{name}: {case_name}"] = train(case, folders[case.family], layout, *place)
    return found


@pytest.fixture(scope="module", params=WORLDS)
def made(request, tmp_path_factory):
    size = request.param

    def make(place: Path) -> dict[str, Any]:
        families = {case.family for case in CASES.values()}
        folders = {family: str(tiny_folder(family, place, num_hidden_layers=LAYERS)) for family in families}
        layouts = [name for name, (processes, *_) in LAYOUTS.items() if processes == size]
        found = run_world(size, place / "world", as_rank, folders, layouts)
        return {"folders": folders, "answers": dict.fromkeys(layouts, found)}

    return once(tmp_path_factory, f"pipeline-{size}", make)


@pytest.mark.parametrize("name", CASES)
def test_stages_do_not_change_loss_and_gradients(made, name):
    case = CASES[name]
    if not any(tried(case, layout) for layout in made["answers"]):
        return  # not by as many processes
    alone = train(case, made["folders"][case.family], ParallelLayout())
    assert len({round(norm, 9) for _, norm in alone}) == case.steps + 1, "it learns"
    for layout, ranks in made["answers"].items():
        if not tried(case, layout):
            continue
        answers = [answer[f"{layout}: {name}"] for answer in ranks]
        size, options = LAYOUTS[layout]
        last = answers[-(size // options["pipeline_parallel"]) :]  # which compute the loss
        for step, (loss, norm) in enumerate(alone):
            together = sum(answer[step][0] for answer in last[:: ParallelLayout(**options).ranks_per_sample])
            assert together == pytest.approx(loss, rel=1e-6, abs=1e-6), (layout, step)
            assert [answer[step][1] for answer in answers] == [pytest.approx(norm, rel=1e-6)] * size, (layout, step)


# Checkpoints, completions and weights


RESUMED: dict[str, dict[str, Any]] = {
    "tied": {"family": "qwen2"},
    "adapters": {"family": "qwen3", "lora_rank": 4},
    "value head": {"family": "llama", "verb": "ppo", "algo": {"share_critic": True, "value_loss_coef": 0.5}},
    "experts": {"family": "mixtral"},
}


class Staged(Trained):
    """A learner whose model may be divided into stages."""

    cases = RESUMED

    def __init__(self, case: str, folders: dict[str, str], layout: ParallelLayout | None = None) -> None:
        super().__init__(case, folders, layout)
        stages = self.learner.pipeline
        self.ranks //= stages.size if stages else 1
        self.rank %= self.ranks


def checkpoints(rank: int, folders: dict[str, str], place: Path) -> dict[str, Any]:
    """Load what one process saved, train on, save for one process; generate, and send weights."""
    found: dict[str, Any] = {}
    for case in RESUMED:
        layout = ParallelLayout(pipeline_parallel=2, virtual_stages=2 if case == "tied" else 1)
        first = Staged(case, folders, layout)
        first.learn(1, 0.1)  # elsewhere
        first.learner.load(place / f"{case}-one")
        found[f"{case}: from one"] = first.learn(1)
        first.learner.save(saved_by(case, "stages", place))
        found[f"{case}: went on"] = first.learn(1)
        found[f"{case}: answers"] = answers(first.learner)
        found[f"{case}: logprobs"] = [stream.tolist() for stream in first.learner.logprobs(probes())]
        if case != "value head":
            target = Learner(ModelConfig(path=first.model.path), TrainConfig(), trainable=False, layout=None)
            target.set_weights(first.learner.weights())
            assert answers(target) == found[f"{case}: answers"]
    return found | outputs(folders["llama"], {"pipeline_parallel": 2, "virtual_stages": 2})


def outputs(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a critic and reward model, and a policy that samples at another temperature, compute for samples."""
    how: dict[str, Any] = {"trainable": False, "layout": ParallelLayout(**options)}
    scorer = Learner(ModelConfig(path=folder), TrainConfig(micro_batch_tokens=60), head="score", **how)
    policy = Learner(ModelConfig(path=folder), TrainConfig(micro_batch_tokens=60), **how)
    statistics = policy.token_statistics(probes(), SamplingDistribution(temperature=0.7, top_p=0.9), "ignore")
    return {
        "scores": scorer.scores(probes()),
        "values": np.concatenate(scorer.values(probes())).tolist(),
        "log-probabilities and entropies": np.concatenate(statistics).flatten().tolist(),
    }


def probes() -> list[Any]:
    return prepared(ALGORITHMS["sft"](ALGORITHMS["sft"].Config()))[:5]


def test_checkpoints_do_not_depend_on_stages(tmp_path):
    families = {case["family"] for case in RESUMED.values()}
    folders = {family: str(tiny_folder(family, tmp_path, num_hidden_layers=LAYERS)) for family in families}
    place, alone = tmp_path / "checkpoints", {}
    place.mkdir()
    for case in RESUMED:
        trained = Staged(case, folders)
        trained.learn(1)
        trained.learner.save(saved_by(case, "one", place))
        alone[case] = trained.learn(1)
    ranks = run_world(2, tmp_path / "world", checkpoints, folders, place)
    for name, expected in outputs(folders["llama"], {}).items():
        assert any(expected), name
        for rank in ranks:
            assert rank[name] == pytest.approx(expected, abs=1e-5), name
    for case in RESUMED:
        assert ranks[-1][f"{case}: from one"][0] == pytest.approx(alone[case][0], rel=1e-6), case
        resumed = Staged(case, folders)
        resumed.learner.load(place / f"{case}-stages")
        assert resumed.learn(1)[0] == pytest.approx(ranks[-1][f"{case}: went on"][0], rel=1e-6), case
        assert [rank[f"{case}: answers"] for rank in ranks] == [answers(resumed.learner)] * 2, case
        streams = [stream.tolist() for stream in resumed.learner.logprobs(probes())]
        for rank in ranks:
            for stream, wanted in zip(rank[f"{case}: logprobs"], streams, strict=True):
                assert stream == pytest.approx(wanted, abs=1e-5), case
        if case in ("tied", "experts"):
            _, report = AutoModelForCausalLM.from_pretrained(place / f"{case}-stages/model", output_loading_info=True)
            assert not any(report.values()), "a plain Hugging Face folder"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_of_every_family_continues_the_one_before(family, tmp_path):
    """Without processes: each rank's part of the model runs on what the one before returned."""
    name = {"qwen2": "qwen2_untied"}.get(family, family)
    ids = torch.randint(0, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    whole = tiny_model(name, num_hidden_layers=LAYERS).eval()
    assert whole.config.model_type == family
    expected = getattr(whole, whole.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
    hidden, sizes = None, []
    for stage in range(4):
        part = tiny_model(name, num_hidden_layers=LAYERS).eval()
        pipeline = Pipeline(None, stage % 2, 2, 2, (), torch.device("cpu"))
        pipeline.cut(part)
        sizes.append(sum(p.numel() for p in part.parameters()))
        with pipeline.selected(part, stage):
            source = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
            hidden = getattr(part, part.base_model_prefix)(**source, use_cache=False).last_hidden_state
    assert torch.equal(hidden, expected)
    twice = whole.get_input_embeddings().weight.numel() if whole.config.tie_word_embeddings else 0
    assert sum(sizes[:2]) == sum(p.numel() for p in whole.parameters()) + twice


def test_a_run_with_stages_is_the_run_of_one_process(tmp_path):
    """All of it: the controller, the workers, completions of the policy, the reference, and a resume without stages."""
    options = ["--model", "pico", "--data", "examples/data/questions.jsonl", "--reward", "examples/reward.py:letters"]
    options += ["--rollout.max_tokens", "6", "--train.batch_size", "3", "--rollout.samples_per_prompt", "3"]
    options += ["--algo.kl_coef", "0.1", "--train.micro_batch_tokens", "64", "--train.learning_rate", "0.01"]
    stages = ["--cluster.devices", "2", "--cluster.pipeline_parallel_size", "2"]
    whole = ["--cluster.devices", "1", "--cluster.pipeline_parallel_size", "1"]
    for name, layout in (("one", []), ("stages", stages)):
        assert command("grpo", *options, *layout, "--train.max_steps", 2, "--output_dir", tmp_path / name) == 0
    assert command("grpo", "--output_dir", tmp_path / "stages", "--resume", "--train.max_steps", 3, *whole) == 0
    assert command("grpo", "--output_dir", tmp_path / "one", "--resume", "--train.max_steps", 3) == 0
    found = [rows_of(tmp_path / name / "metrics.jsonl") for name in ("one", "stages")]
    assert [len(rows) for rows in found] == [3, 3]
    for one, divided in zip(*found, strict=True):
        for key in ("reward", "loss", "kl", "entropy", "grad_norm"):
            assert divided[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), (key, one["step"])
    texts = [[row["text"] for row in rows_of(tmp_path / n / "rollouts.jsonl")] for n in ("one", "stages")]
    assert texts[0] == texts[1] and len(texts[0]) == 27
