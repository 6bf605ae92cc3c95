"""Training passes over tensors that stay where they are: losses and gradients are those of the plain passes."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import ForwardRequest, Loss, Objective, Sample, count_units
from posttrain.data.packing import collate
from posttrain.nn import layers, lm_head, training_graphs
from posttrain.nn.forward import ModelRunner
from posttrain.nn.kernels import reference
from posttrain.nn.training_graphs import GraphShape, TrainingGraphs
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from tests.tiny import tiny_folder
from tests.unit.nn.test_layers import model_of
from tests.unit.nn.test_sharing import rows, twin_of_the_kernel

GROUPS = [(20, (5, 12, 1)), (30, (4,)), (16, (0, 7, 16)), (40, (17, 17)), (20, (32, 32))]
TINY = model_of("llama")
SLIGHTLY_LESS = [(20, (5, 12, 1)), (29, (4,)), (16, (0, 7, 15)), (40, (17, 16)), (20, (32, 32))]


@pytest.fixture
def kernel(monkeypatch):
    """What stands behind the last piece is garbage, as a kernel leaves it."""
    twin = twin_of_the_kernel(behind=True)

    def varlen_attn(q, k, v, starts, key_starts, *most, **how):
        end = int(key_starts[-1])
        behind = torch.full_like(k[end:], torch.nan)
        for stream in (k, v):
            if stream.requires_grad:
                stream.register_hook(lambda gradient: torch.cat([gradient[:end], behind]))
        return twin(q, k, v, starts, key_starts, *most, **how)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)


def runner_for(model) -> ModelRunner:
    layers.use_fused_layers(model, reference)
    return ModelRunner(model, True, shares_prefixes=True, fused_head=lm_head.FusedHead.from_model(model, reference))


def outcome(runner: ModelRunner, batch) -> dict[str, torch.Tensor]:
    runner.model.zero_grad()
    hidden = runner.run_layers(batch).last_hidden_state[0]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden * weights).sum().backward()
    return {n: p.grad.clone() for n, p in runner.model.named_parameters() if p.grad is not None} | {"": hidden.detach()}


@pytest.mark.parametrize("share", [0, 8])
@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "qwen3", "mistral"])
def test_gradients_are_those_of_plain_passes(family, share, kernel):
    model = model_of(family).train()
    runner = runner_for(model)
    batches = [collate(rows(g, seed), "cpu", share) for g, seed in ((GROUPS, 0), (SLIGHTLY_LESS, 1), (GROUPS, 2))]
    expected = [outcome(runner, batch) for batch in batches]
    runner.graphs = TrainingGraphs(model)
    assert runner.graphs.last_hidden_state(batches[0]) is None, "a size that may never come again is not worth a graph"
    for batch, wanted in zip(batches, expected, strict=True):
        found = outcome(runner, batch)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)
    assert len(runner.graphs.by_shape) == 1, "all of them fit into one"
    assert runner.graphs.number == 3


def pack_of(*lengths: int):
    return collate([Sample(tokens=np.ones(n, np.int32), mask=np.arange(n) > 0) for n in lengths], "cpu")


def test_what_fits_into_a_shape():
    shape = GraphShape(tokens=1024, pieces=16, max_length=128)
    assert shape.holds(pack_of(*[128] * 8))
    assert not shape.holds(pack_of(*[128] * 8, 1)), "too many tokens"
    assert not shape.holds(pack_of(129)), "too long"
    assert shape.holds(pack_of(*[60] * 12)), "12 samples, 304 tokens of padding are 3"
    assert not shape.holds(pack_of(*[10] * 9)), "9 samples, 934 tokens of padding are 8"
    shared = collate(rows(GROUPS), "cpu", 8)
    assert shared.sharing is not None
    assert not GraphShape(1024, 64, 128).holds(shared), "another attention"
    assert not GraphShape(1024, 64, 128, keys=4096, max_keys=128).holds(pack_of(128))
    keys = sum(shared.sharing.key_lengths) + 1024 - len(shared.sharing.tokens)
    assert GraphShape(1024, 64, 128, keys=keys, max_keys=128).holds(shared)
    assert not GraphShape(1024, 64, 128, keys=keys - 1, max_keys=128).holds(shared)
    assert not GraphShape(1024, 64, 128, keys=keys, max_keys=max(shared.sharing.key_lengths) - 1).holds(shared)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(0, 2**32), st.booleans())
def test_whatever_a_shape_holds_can_be_filled_in(lengths, seed, share):
    """Into the shape that was made for it, and into those that were made for others."""
    rng = np.random.default_rng(seed)

    def batch_of(scale: float):
        groups = [(int(max(1, n * scale)), tuple(rng.integers(0, 40, 2))) for n in lengths]
        return collate(rows(groups, seed), "cpu", 8 if share else 0)

    batches = [batch_of(scale) for scale in (1.0, *rng.uniform(0.6, 1.0, 3))]
    shape = GraphShape.from_batch(batches[0])
    one = training_graphs.TrainingGraph(TINY, shape)
    assert shape.holds(batches[0])
    for batch in filter(shape.holds, batches):
        one.fill(batch)
        starts = one.packing.starts
        assert int(starts[-1]) == shape.tokens
        assert int(starts.diff().min()) >= 0
        assert int(starts.diff().max()) <= shape.max_length
        if shape.keys:
            many = one.packing.key_starts.diff()
            assert torch.all(many >= starts.diff())
            assert int(many.max()) <= shape.max_keys


def test_a_pass_must_go_back_before_the_next_goes_forward(kernel):
    model = model_of("llama").train()
    graphs = TrainingGraphs(model)
    batch = collate(rows(GROUPS), "cpu")
    assert graphs.last_hidden_state(batch) is None
    first = graphs.last_hidden_state(batch)
    assert first is not None
    graphs.last_hidden_state(batch)
    with pytest.raises(AssertionError, match="a second forward pass"):
        first.sum().backward()


def test_weights_that_have_moved_are_found_again(kernel):
    model = model_of("llama").train()
    runner = runner_for(model)
    runner.graphs = TrainingGraphs(model)
    batch = collate(rows(GROUPS), "cpu")
    for _ in range(3):
        outcome(runner, batch)
    before = list(runner.graphs.by_shape.values())
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data.clone()
    outcome(runner, batch)
    assert list(runner.graphs.by_shape.values()) != before


def test_a_larger_pack_begins_anew_and_the_smaller_ones_follow(kernel):
    """Graphs share memory: what a small one has taken is too small for a large one, but not the other way round."""
    model = model_of("llama").train()
    runner = runner_for(model)
    small, large = collate(rows(GROUPS), "cpu"), collate(rows(GROUPS * 8), "cpu")
    expected = outcome(runner, small)
    runner.graphs = TrainingGraphs(model)
    sizes = []
    for batch in (small, small, large, large, small, large, small):
        found = outcome(runner, batch)
        sizes.append(sorted(shape.tokens for shape in runner.graphs.by_shape))
    tokens = [GraphShape.from_batch(batch).tokens for batch in (small, large)]
    assert sizes == [[], tokens[:1], tokens[:1], tokens[1:], tokens, tokens, tokens]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


def test_a_pack_that_is_too_large_costs_the_smaller_ones_nothing(kernel, monkeypatch):
    def capture(self, pool):
        if self.shape.tokens > 1000:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(training_graphs.TrainingGraph, "capture", capture)
    runner = runner_for(model_of("llama").train())
    runner.graphs = TrainingGraphs(runner.model)
    runner.graphs.on_gpu, runner.graphs.clear = True, lambda: runner.graphs.by_shape.clear()
    small, large = collate(rows(GROUPS), "cpu"), collate(rows(GROUPS * 8), "cpu")
    served = []
    for batch in (small, small, large, large, large, small, large, small):
        served.append(runner.graphs.graph_for(batch) is not None)
    assert served == [False, True, False, False, False, True, False, True]
    assert runner.graphs.alive and not runner.graphs.full


@pytest.mark.gpu
def test_many_sizes_hold_little_more_than_the_largest(tmp_path):
    learner = Learner(ModelConfig(path=str(tiny_folder("llama", tmp_path))), TrainConfig(micro_batch_tokens=65536))
    held = []
    for copies in (10, 10, 20, 20, 40, 40, 40, 10, 20, 20, 15, 15, 30, 30):
        made = rows(GROUPS * copies)
        learner.forward_backward(made, total(), count_units(made, "token"), 1)
        learner.step(1e-3)
        held.append(training_graphs.graph_memory_bytes())
    assert learner.runner.graphs is not None and len(learner.runner.graphs.by_shape) >= 4
    assert 0 < max(held) < 1.3 * held[6]


def total() -> Objective:
    return Objective(request=ForwardRequest(), loss=lambda out, batch: Loss(total=-out.logprobs.sum()), unit="token")


def trained(learner: Learner, passes: int, offset: int = 0) -> list[float]:
    losses = []
    for step in range(passes):
        made = rows(GROUPS if step % 3 else SLIGHTLY_LESS, seed=offset + step)
        found = learner.forward_backward(made, total(), count_units(made, "token"), 1)
        losses.append(found["loss"][0])
        learner.step(1e-2)
    return losses


def test_a_learner_trains_as_without(tmp_path, kernel):
    folder = str(tiny_folder("llama", tmp_path))
    plain, fast = (Learner(ModelConfig(path=folder), TrainConfig(micro_batch_tokens=256)) for _ in range(2))
    for learner in (plain, fast):
        layers.use_fused_layers(learner.model, reference)
        learner.runner.varlen_kernel = True
    fast.runner.graphs = TrainingGraphs(fast.model)
    np.testing.assert_allclose(trained(fast, 8), trained(plain, 8), rtol=1e-5)
    assert fast.runner.graphs.by_shape
    for one, other in zip(fast.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_gradients_stay_where_they_are_and_no_step_is_made_without_any(tmp_path, kernel):
    learner = Learner(ModelConfig(path=str(tiny_folder("llama", tmp_path))), TrainConfig())
    optimizer = learner.optimizer
    assert optimizer is not None
    learner.runner.graphs = TrainingGraphs(learner.model)
    made = rows(GROUPS)
    learner.forward_backward(made, total(), count_units(made, "token"), 1)
    first = {name: (master.grad.data_ptr(), master.grad.clone()) for name, master in optimizer.masters.items()}
    optimizer.clear_gradients()
    weights = copy.deepcopy(learner.model.state_dict())
    learner.step(1e-2)
    assert all(torch.equal(weights[name], value) for name, value in learner.model.state_dict().items())
    learner.forward_backward(made, total(), count_units(made, "token"), 1)
    for name, master in optimizer.masters.items():
        address, gradient = first[name]
        assert master.grad.data_ptr() == address
        torch.testing.assert_close(master.grad, gradient, rtol=1e-4, atol=1e-6)
    learner.forward_backward(made, total(), count_units(made, "token"), 1)
    torch.testing.assert_close(
        optimizer.masters[name].grad, 2 * first[name][1], rtol=1e-4, atol=1e-6
    )  # a second call adds


def test_a_run_that_lends_memory_has_no_graphs(tmp_path, monkeypatch):
    """What is free while a part is away would be gone when it comes back."""
    monkeypatch.setattr(TrainingGraphs, "from_model", classmethod(lambda cls, model, tokens: cls(model)))
    config = ModelConfig(path=str(tiny_folder("llama", tmp_path)))
    assert Learner(config, TrainConfig()).runner.graphs is not None
    assert Learner(config, TrainConfig(), trainable=False).runner.graphs is None
    assert Learner(config, TrainConfig(), layout=ParallelLayout(offload=frozenset({"optimizer"}))).runner.graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_graphs_are_no_less_exact_than_plain_passes(name, share, tmp_path):
    """Both in half precision, against float32, after steps that the graphs must have seen."""
    folder = str(tiny_folder(name, tmp_path))
    fast, plain = (Learner(ModelConfig(path=folder), TrainConfig(micro_batch_tokens=2048)) for _ in range(2))
    plain.runner.graphs = None
    assert fast.runner.graphs is not None
    for learner in (fast, plain):
        learner.runner.shares_prefixes = learner.runner.shares_prefixes and share
    np.testing.assert_allclose(trained(fast, 8), trained(plain, 8), rtol=0.01)
    assert fast.runner.graphs.by_shape and fast.runner.graphs.number >= 5
    exact = Learner(ModelConfig(path=folder, dtype="float32"), TrainConfig())
    made = rows(GROUPS, seed=99)
    for learner in (plain, exact):  # the same weights for all
        learner.model.load_state_dict(fast.model.state_dict())
    gradients = []
    for learner in (fast, plain, exact):
        learner.forward_backward(made, total(), count_units(made, "token"), 1)
        assert learner.optimizer is not None
        gradients.append({key: master.grad.clone() for key, master in learner.optimizer.masters.items()})
    quick, slow, right = gradients
    for key, value in right.items():
        errors = [float((found[key] - value).norm() / value.norm()) for found in (quick, slow)]
        assert errors[0] < 1.5 * errors[1] + 0.01, (key, errors)


@pytest.mark.gpu
def test_without_memory_to_spare_there_are_no_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(training_graphs, "SPARE_MEMORY", 1e9)
    learner = Learner(ModelConfig(path=str(tiny_folder("llama", tmp_path))), TrainConfig())
    losses = trained(learner, 6)
    assert learner.runner.graphs is not None and not learner.runner.graphs.alive
    assert losses[-1] < losses[0]
    assert learner.optimizer is not None and not learner.optimizer.kept_gradients
