"""What processes save together any number of them can go on with; a model in parts generates like a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from posttrain.algorithms import ALGORITHMS, RolloutSettings
from posttrain.cluster.base import split_evenly
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import ForwardRequest, Sample, count_units
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.nn.forward import forward
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from tests.invariance.test_split import algorithm, prepared
from tests.invariance.worlds import once, run_world
from tests.tiny import tiny_folder

CASES: dict[str, dict[str, Any]] = {
    "tied": {"family": "qwen2"},
    "value head": {"family": "llama", "verb": "ppo", "algo": {"share_critic": True, "value_loss_coef": 0.5}},
    "adapters": {"family": "qwen3", "lora_rank": 4},
    "half precision": {"family": "llama", "dtype": "bfloat16"},
    "experts": {"family": "mixtral"},
    "adapters on experts": {"family": "qwen2_moe", "lora_rank": 4},
}
BY_FOUR = ("tied", "experts", "adapters on experts")
FOLDERS = ("qwen2", "qwen3", "llama", "mixtral", "qwen2_moe", "gpt2")
MIXTURES = ("experts", "adapters on experts")
FOUR: dict[str, dict[str, Any]] = {
    "four": {},
    "two by two": {"tensor_parallel": 2},
    "two copies": {"replicate": 2},
    "tokens and vocabulary": {"tensor_parallel": 2, "sequence_parallel": True},
    "expert groups": {"expert_parallel": 2},
    "experts by heads": {"expert_parallel": 2, "tensor_parallel": 2},
}
SAVED_BY_FOUR = ("two copies", "tokens and vocabulary", "expert groups", "experts by heads")
DIVIDED = {case: ParallelLayout(tensor_parallel=2) for case in CASES} | {"experts": ParallelLayout(expert_parallel=2)}


class Trained:
    """A learner and what it learns from."""

    cases = CASES

    def __init__(self, case: str, folders: dict[str, str], layout: ParallelLayout | None = None) -> None:
        chosen = dict(self.cases[case])
        settings = RolloutSettings(max_completion_tokens=30)
        self.algo: Any = algorithm(chosen.pop("verb", "sft"), settings, **chosen.pop("algo", {}))
        layout = layout or ParallelLayout()
        self.model = ModelConfig(path=folders[chosen.pop("family")], **chosen)
        update = TrainConfig(micro_batch_tokens=60, ema_decay=0.9)
        self.learner = Learner(self.model, update, value_head="values" in self.algo.outputs(), layout=layout)
        shared = self.learner.shards is not None
        self.ranks = dist.get_world_size() // layout.tensor_parallel if shared else 1
        self.rank = dist.get_rank() // layout.tensor_parallel if shared else 0

    def learn(self, steps: int, rate: float = 1e-3) -> list[list[float]]:
        """This data rank's part of the loss, and the norm, of each step."""
        online = self.algo.online
        samples = prepared(
            self.algo, Learner(self.model, TrainConfig(), trainable=False, layout=None) if online else None
        )
        request = self.algo.forward_request(lambda text: 5)
        objective = self.algo.objective(request)
        mine, by = split_evenly(samples, self.ranks)[self.rank], count_units(samples, self.algo.unit)
        found = []
        for _ in range(steps):
            sums = self.learner.forward_backward(mine, objective, by, sum(map(len, samples)))
            self.sums = sums
            found.append([sums.get("loss", (0.0, None))[0] / by, self.learner.step(rate)["grad_norm"]])
        return found


def answers(learner: Learner, **options: Any) -> list[list[int]]:
    prompts = [GenerationRequest(prompt=np.array([7, 8, 9 + i], dtype=np.int32), seed=i) for i in range(3)]
    made = learner.generate(prompts, Sampling(max_tokens=8, temperature=1.0), **options)
    return [sample.tokens.tolist() for sample in made]


def saved_by(case: str, layout: str, place: Path) -> Path:
    folder = place / f"{case}-{layout}"
    folder.mkdir(exist_ok=True)
    return folder


def two(rank: int, folders: dict[str, str], place: Path) -> dict[str, Any]:
    """Two processes: train, save and go on; then load what one process saved, and split the heads instead."""
    found: dict[str, Any] = {}
    for case in CASES:
        first = Trained(case, folders)
        first.learn(2)
        folder = saved_by(case, "two", place)
        first.learner.save(folder)
        dist.barrier()
        found[f"{case}: went on"] = first.learn(2)
        found[f"{case}: answers"] = answers(first.learner)
        other = Trained(case, folders)
        other.learner.load(saved_by(case, "one", place))
        found[f"{case}: from one"] = other.learn(2)
        if case in DIVIDED:
            split = Trained(case, folders, DIVIDED[case])
            split.learn(1, 0.1)  # elsewhere
            split.learner.load(folder)
            split.learner.save(saved_by(case, "divided", place))
            found[f"{case}: divided"] = split.learn(2)
            found[f"{case}: answers of the divided"] = answers(split.learner)
    found |= weights_that_travel(folders) | sampler(folders) | looks(folders) | refusals(folders)
    idle_experts(folders)
    imbalance_of_experts(folders)
    found["saved activations"] = [saved_per_token(folders, options) for options in ACTIVATIONS]
    return found


ACTIVATIONS: list[dict[str, Any]] = [{}, {"tensor_parallel": 2, "sequence_parallel": True}]


def saved_per_token(folders: dict[str, str], options: dict[str, Any]) -> float:
    """Return the bytes per token that this rank keeps from the forward to the backward pass."""
    layout = ParallelLayout(**options) if options else None
    learner = Learner(ModelConfig(path=folders["llama"]), TrainConfig(), layout=layout)
    request = ForwardRequest(names=frozenset({"logprobs"}))
    found = []
    for tokens in (64, 128):
        batch = collate([Sample(tokens=np.arange(6, 6 + tokens, dtype=np.int32) % 100, mask=np.arange(tokens) > 0)])
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = learner.with_full_parameters(lambda b: forward(learner.runner, b, request).logprobs.sum(), batch)
        total.backward()
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    return (found[1] - found[0]) / 64  # without the parameters, which are saved as well


def idle_experts(folders: dict[str, str]) -> None:
    """Experts that no token came to in a step have a gradient of 0, not none: Adam goes on with them."""
    trained = Trained("experts", folders, DIVIDED["experts"])
    trained.learn(1)
    optimizer, parameters = trained.learner.optimizer, trained.learner.parameters()
    assert optimizer is not None
    names = [name for name in parameters if ".experts." in name]
    before = {name: optimizer.adam.state[optimizer.masters[name]]["exp_avg"].clone() for name in names}
    assert names and any(moment.any() for moment in before.values())
    for name, parameter in parameters.items():
        parameter.grad = None if name in names else torch.zeros_like(parameter)
    trained.learner.step(1e-3)
    for name, moment in before.items():
        now = optimizer.adam.state[optimizer.masters[name]]["exp_avg"]
        torch.testing.assert_close(now, moment * optimizer.adam.defaults["betas"][0])


def imbalance_of_experts(folders: dict[str, str]) -> None:
    """The metric is what the routers' choices say: the rows of the rank with the most, over the mean, by layers."""
    trained = Trained("experts", folders, DIVIDED["experts"])
    loads: list[torch.Tensor] = []

    def count(router: Any, inputs: Any, output: Any) -> None:
        loads.append(output[2].reshape(-1).bincount(minlength=4).view(2, 2).sum(1).double())

    for layer in trained.learner.model.model.layers:
        layer.mlp.gate.register_forward_hook(count)
    trained.learn(1)
    whole = torch.stack(loads)
    dist.all_reduce(whole)
    most, mean = trained.sums["expert_imbalance"]
    assert most == whole.max(1).values.sum() and mean == whole.mean(1).sum() and mean < most <= 2 * mean


def looks(folders: dict[str, str]) -> dict[str, Any]:
    """Ranks may have different numbers of samples, or none; without adapters there is the base model."""
    trained = Trained("adapters", folders)
    trained.learn(2, 0.05)
    samples = prepared(ALGORITHMS["sft"](ALGORITHMS["sft"].Config()))
    mine = samples if dist.get_rank() else []
    base = Learner(ModelConfig(path=trained.model.path), TrainConfig(), trainable=False, layout=None)
    found, without = trained.learner.logprobs(mine), trained.learner.logprobs(mine, adapters=False)
    assert len(found) == len(mine) and trained.learn(1)[0][1] > 0  # the adapters are still what is trained
    for stream, plain, expected in zip(found, without, base.logprobs(mine), strict=True):
        assert np.allclose(plain, expected, atol=1e-5)
        assert not expected.any() or not np.allclose(stream, expected, atol=1e-3)
    critic = Learner(ModelConfig(path=folders["qwen2"]), TrainConfig(), head="score", trainable=False)
    whole = Learner(ModelConfig(path=folders["qwen2"]), TrainConfig(), head="score", trainable=False, layout=None)
    assert critic.scores(mine) == pytest.approx(whole.scores(mine), abs=1e-5)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(critic.values(mine), whole.values(mine), strict=True))
    return {}


def weights_that_travel(folders: dict[str, str]) -> dict[str, Any]:
    """From a model in parts into a whole one."""
    found: dict[str, Any] = {}
    travelling = [("tied", ParallelLayout(tensor_parallel=2, sequence_parallel=True)), ("experts", DIVIDED["experts"])]
    travelling += [("adapters", ParallelLayout()), ("adapters on experts", ParallelLayout(expert_parallel=2))]
    for case, layout in travelling:
        source = Trained(case, folders, layout)
        source.learn(2, 0.05)
        plain = ModelConfig(path=source.model.path)
        target = Learner(plain, TrainConfig(), trainable=False, layout=None)
        before = answers(target)
        places = [parameter.data_ptr() for parameter in target.model.parameters()]
        target.set_weights(source.learner.weights())
        assert places == [parameter.data_ptr() for parameter in target.model.parameters()]
        assert answers(target) == answers(source.learner) != before
        found[f"{case}: names"] = [name for name, _ in source.learner.weights()]
    tensors = list(source.learner.weights())
    for wrong in (tensors[:-1], [*tensors, tensors[0]], [*tensors, ("more", torch.zeros(1))]):
        try:
            target.set_weights(wrong)
        except PosttrainError:
            continue
        raise AssertionError("every tensor must come once")
    return found


def sampler(folders: dict[str, str]) -> dict[str, Any]:
    """A sampler of its own keeps its weights until it is refreshed; without one there are always the newest."""
    path = ModelConfig(path=folders["qwen2"])
    keeps, shares = (Learner(path, TrainConfig(), sampler_copy=own) for own in (True, False))
    old = answers(keeps)
    for learner in (keeps, shares):
        trained = Trained.__new__(Trained)
        trained.algo, trained.model = ALGORITHMS["sft"](ALGORITHMS["sft"].Config()), path
        trained.learner, trained.ranks, trained.rank = learner, 2, dist.get_rank()
        trained.learn(2, 0.1)
    new = answers(shares)
    assert old != new and answers(keeps) == old and answers(keeps, current=True) == new
    keeps.update_generator(1)
    assert answers(keeps) == new
    return {}


def refusals(folders: dict[str, str]) -> dict[str, Any]:
    found = {}
    heads, experts = ParallelLayout(tensor_parallel=2), ParallelLayout(expert_parallel=2)
    for name, family, layout, rank in (
        ("family", "gpt2", heads, 0),
        ("heads", "one head", heads, 0),
        ("no experts", "llama", experts, 0),
        ("three", "mixtral", ParallelLayout(expert_parallel=3), 0),
        ("odd experts", "odd experts", experts, 0),
    ):
        try:
            Learner(ModelConfig(path=folders[family], lora_rank=rank), TrainConfig(), layout=layout)
        except UsageError as error:
            found[name] = str(error)
    return found


def four(rank: int, folders: dict[str, str], place: Path) -> dict[str, Any]:
    found = {}
    for case in BY_FOUR:
        for name, sizes in FOUR.items():
            if "expert_parallel" not in sizes or case in MIXTURES:
                trained = Trained(case, folders, ParallelLayout(**sizes))
                trained.learner.load(saved_by(case, "two", place))
                found[f"{case}: {name}"] = trained.learn(2)
                if name in SAVED_BY_FOUR:
                    trained.learner.save(saved_by(case, name, place))
        trained = Trained(case, folders, ParallelLayout())
        trained.learner.load(saved_by(case, "one", place))
        found[f"{case}: from one"] = trained.learn(2)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Tiny models, what one process, two and four say, and the folder where they left their checkpoints."""

    def make(base: Path) -> dict[str, Any]:
        folders = {name: str(tiny_folder(name, base)) for name in FOLDERS}
        folders["one head"] = str(tiny_folder("llama", base / "odd", num_key_value_heads=1))
        folders["odd experts"] = str(tiny_folder("mixtral", base / "odd", num_local_experts=3))
        alone, place = {}, base / "checkpoints"
        place.mkdir()
        for case in CASES:
            trained = Trained(case, folders)
            trained.learn(2)
            trained.learner.save(saved_by(case, "one", place))
            alone[f"{case}: went on"] = trained.learn(2)
        worlds = {"2": run_world(2, base / "two", two, folders, place)}
        worlds["4"] = run_world(4, base / "four", four, folders, place)
        return {"folders": folders, "alone": alone, "place": str(place), **worlds}

    made = once(tmp_path_factory, "layouts", make)
    return made | {"place": Path(made["place"])}


def together(answers: list[dict[str, Any]], name: str, tensor: int = 1) -> list[list[float]]:
    """Losses of data ranks added up, and the norm that all of them must have found."""
    steps = zip(*(answer[name] for answer in answers[::tensor]), strict=True)
    assert len({tuple(norm for _, norm in answer[name]) for answer in answers}) == 1
    return [[sum(loss for loss, _ in ranks), ranks[0][1]] for ranks in steps]


@pytest.mark.parametrize("case", CASES)
def test_any_layout_goes_on_with_what_another_saved(found, case):
    rough = CASES[case].get("dtype") == "bfloat16"  # sums are rounded otherwise
    expected = together(found["2"], f"{case}: went on")
    resumed = Trained(case, found["folders"])
    resumed.learner.load(found["place"] / f"{case}-two")
    results = {"one": resumed.learn(2)}
    if case in BY_FOUR:
        results["four"] = together(found["4"], f"{case}: four")
        for layout in SAVED_BY_FOUR[: None if case in MIXTURES else 2]:
            results[layout] = together(found["4"], f"{case}: {layout}", FOUR[layout].get("tensor_parallel", 1))
            again = Trained(case, found["folders"])
            again.learner.load(found["place"] / f"{case}-{layout}")
            assert again.learn(1)[0][1] > 0, "what copies saved one process can load"
    if case in DIVIDED:
        results["divided"] = together(found["2"], f"{case}: divided", DIVIDED[case].ranks_per_sample)
        if not rough:
            assert found["2"][0][f"{case}: answers of the divided"] == found["2"][0][f"{case}: answers"]
    if case in BY_FOUR:
        results["two by two"] = together(found["4"], f"{case}: two by two", 2)
    for layout, result in results.items():
        for (loss, norm), (wanted_loss, wanted_norm) in zip(result, expected, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-2 if rough else 1e-6, abs=1e-6), layout
            assert norm == pytest.approx(wanted_norm, rel=5e-2 if rough else 1e-5), layout
    for ranks in ("2", "4") if case in BY_FOUR else ("2",):
        from_one = together(found[ranks], f"{case}: from one")
        for (loss, _), (wanted_loss, _) in zip(from_one, found["alone"][f"{case}: went on"], strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-2 if rough else 1e-6, abs=1e-6), ranks
    assert found["2"][0][f"{case}: answers"] == found["2"][1][f"{case}: answers"]


@pytest.mark.parametrize("case", DIVIDED)
def test_what_is_saved_does_not_depend_on_the_layout(found, case):
    """Loaded by heads or experts and saved again: the same tensors, in files of the same names."""
    from safetensors.torch import load_file

    for part in ("model", "."):
        mine, theirs = (saved_by(case, layout, found["place"]) / part for layout in ("two", "divided"))
        names = sorted(path.name for path in mine.glob("*"))
        assert names == sorted(path.name for path in theirs.glob("*"))
        for name in (name for name in names if name.endswith(".safetensors")):
            a, b = load_file(mine / name), load_file(theirs / name)
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name


@pytest.mark.parametrize("case", ["tied", "experts"])
def test_a_checkpoint_of_many_is_a_plain_hugging_face_folder(found, case):
    stock, report = AutoModelForCausalLM.from_pretrained(found["place"] / f"{case}-two/model", output_loading_info=True)
    assert not any(report.values()) and stock.generation_config.eos_token_id is not None
    again = AutoModelForCausalLM.from_pretrained(found["place"] / f"{case}-one/model")
    described = [(found["place"] / f"{case}-{layout}/model/config.json").read_text() for layout in ("one", "two")]
    assert described[0] == described[1]
    for one, other in zip(stock.parameters(), again.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    if case == "experts":
        assert any("experts.3.w2.weight" in name for name in found["2"][0]["experts: names"])


def test_sequence_parallelism_divides_what_is_kept_for_the_backward_pass(found):
    for rank in found["2"]:
        one, divided = rank["saved activations"]
        assert 0.5 * one <= divided < 0.55 * one, (one, divided)


def test_what_cannot_be_split_is_said(found):
    assert "GPT2LMHeadModel (gpt2) cannot be split" in found["2"][0]["family"]
    assert "size is 2, which does not divide the model's num key value heads, which is 1" in found["2"][0]["heads"]
    assert "size is 2, but LlamaForCausalLM has no experts to divide" in found["2"][0]["no experts"]
    assert "cluster.expert_parallel_size is 3; it must divide 2, the devices among which FSDP" in found["2"][0]["three"]
    assert "size is 2, which does not divide the 3 experts of a layer" in found["2"][0]["odd experts"]
