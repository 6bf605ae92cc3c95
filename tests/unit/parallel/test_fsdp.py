"""Cutting models: which part is whose; and, on a GPU, one process that does what many do."""

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Outputs, Sample, count_units
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.models.tensors import module_tensors
from posttrain.parallel.fsdp import anchor_outputs
from posttrain.parallel.layouts import ParallelLayout
from posttrain.parallel.shards import chunk_bounds, shard_slices
from posttrain.train.learner import Learner
from tests.tiny import tiny_folder


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_are_those_of_torch(size, parts):
    numbers = torch.arange(size)
    cut = [numbers[slice(*chunk_bounds((0, size), parts, index))].tolist() for index in range(parts)]
    assert cut == [part.tolist() for part in numbers.chunk(parts)] + [[]] * (parts - len(numbers.chunk(parts)))
    assert shard_slices(torch.empty(size, 3)) == (slice(0, size), slice(0, 3))  # no other process has a part


def test_layouts_that_are_none():
    with pytest.raises(UsageError, match="zero_stage is 1; it must be 2 or 3"):
        ParallelLayout(zero=1)
    with pytest.raises(UsageError, match="tensor_parallel_size is 0; it must be at least 1"):
        ParallelLayout(tensor_parallel=0)
    assert not ParallelLayout().is_sharded() and ParallelLayout(always=True).is_sharded()
    assert (
        ParallelLayout(offload=frozenset({"parameters"})).is_sharded()
        and not ParallelLayout(offload=frozenset({"critic"})).is_sharded()
    )


def test_a_touched_loss_is_the_same_and_gives_every_output_a_gradient():
    """Also where an output is not a number: nothing of it may get into the loss or the gradients."""
    used, unused = torch.ones(3, requires_grad=True), torch.full((2,), torch.nan, requires_grad=True)
    out = Outputs(logprobs=used * 2, scores=unused * 3, entropy=torch.ones(3))
    total = anchor_outputs(out.logprobs.sum(), out)
    total.backward()
    assert total.item() == 6.0 and used.grad.tolist() == [2.0] * 3 and unused.grad.tolist() == [0.0] * 2


@pytest.fixture
def group():
    """A learner makes a group of one where it needs it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def samples():
    rng = np.random.default_rng(0)
    return [
        Sample(tokens=rng.integers(6, 100, n).astype(np.int32), mask=np.arange(n) > 1, group=n) for n in (5, 17, 3, 30)
    ]


def learn(learner, steps=3):
    algo = ALGORITHMS["sft"](ALGORITHMS["sft"].Config())
    objective = algo.objective(algo.forward_request(int))
    made, found = samples(), []
    for _ in range(steps):
        sums = learner.forward_backward(made, objective, count_units(made, "token"), 1)
        found.append((sums["loss"][0], learner.step(1e-3)["grad_norm"]))
    return found


def test_one_process_may_keep_parameters_in_host_memory(tmp_path, group):
    model = ModelConfig(path=str(tiny_folder("qwen2", tmp_path)), dtype="float32")
    layouts = (None, ParallelLayout(always=True), ParallelLayout(offload=frozenset({"parameters"})))
    alone, shared, away = (Learner(model, TrainConfig(ema_decay=0.9), layout=layout) for layout in layouts)
    assert alone.shards is None and shared.shards is not None and away.shards is not None
    wanted = learn(alone)
    for learner in (shared, away):
        found = learn(learner)
        assert np.allclose(found, wanted, rtol=1e-5)


def test_parameters_that_were_moved_are_still_those_that_are_trained(tmp_path, group):
    model = ModelConfig(path=str(tiny_folder("qwen2", tmp_path)), dtype="float32")
    stays, moves = (Learner(model, TrainConfig(ema_decay=0.9), layout=ParallelLayout(always=True)) for _ in range(2))
    learn(stays), learn(moves)
    before = [parameter.to_local().data_ptr() for parameter in moves.model.parameters()]
    moves.shards.root._apply(torch.clone)  # as to another device and back
    assert all(p.to_local().data_ptr() != place for p, place in zip(moves.model.parameters(), before, strict=True))
    moves.optimizer.move(moves.device)
    assert learn(moves) == learn(stays)
    for one, other in zip(moves.logprobs(samples()), stays.logprobs(samples()), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora_rank": 4}], ids=str)
def test_one_process_does_in_half_precision_what_many_do(tmp_path, group, options):
    """float32 parameters that are computed with in bfloat16, as a part of a group of one."""
    model = ModelConfig(path=str(tiny_folder("qwen2", tmp_path, hidden_size=64)), **options)
    alone, shared = (Learner(model, TrainConfig(), layout=layout) for layout in (None, ParallelLayout(always=True)))
    assert shared.shards is not None and all(p.dtype == torch.float32 for p in shared.parameters().values())
    assert shared.runner.varlen_kernel == alone.runner.varlen_kernel
    seen = []
    shared.model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    shared.with_full_parameters(
        lambda: shared.runner.logits(torch.zeros(1, 64, dtype=torch.bfloat16, device=shared.device))
    )
    assert seen == [torch.bfloat16]
    shared.reshard()
    for (loss, norm), (wanted_loss, wanted_norm) in zip(learn(shared), learn(alone), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=0.02) and norm == pytest.approx(wanted_norm, rel=0.1)
    for one, other in zip(shared.logprobs(samples()), alone.logprobs(samples()), strict=True):
        np.testing.assert_allclose(one, other, atol=0.15)


@pytest.mark.gpu
def test_parts_leave_the_device_and_come_back(tmp_path, group):
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path)))
    stays, goes = (Learner(model, TrainConfig(), layout=ParallelLayout(always=True)) for _ in range(2))
    learn(stays), learn(goes)
    held = torch.cuda.memory_allocated()
    goes.offload("model")
    assert torch.cuda.memory_allocated() < held
    assert all(parameter.device.type == "cpu" for parameter in goes.model.parameters())
    goes.onload("model")
    assert learn(goes) == learn(stays)
    goes.offload("optimizer")
    goes.onload("optimizer")
    assert learn(goes) == learn(stays)


def test_the_copy_that_generates_is_freed_while_the_policy_trains(tmp_path, group):
    """With cluster.offload engine; completions are the same as with a copy that stays."""
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path)))
    stays, goes = (
        Learner(model, TrainConfig(), layout=ParallelLayout(always=True, offload=frozenset(offload)))
        for offload in ((), ("engine",))
    )
    requests = [GenerationRequest(prompt=np.array([1, 7, 9], dtype=np.int32), seed=n) for n in range(2)]
    for _ in range(2):
        drawn = [
            [sample.tokens.tolist() for sample in one.generate(requests, Sampling(max_tokens=4))]
            for one in (stays, goes)
        ]
        assert drawn[0] == drawn[1]
        kept, freed = copy_storages(stays), copy_storages(goes)
        assert kept and freed and not any(storage.expired() for storage in (*kept, *freed))
        assert learn(goes) == learn(stays)
        assert not any(storage.expired() for storage in kept) and all(storage.expired() for storage in freed)
        assert not goes.generator.unsharded and not goes.generator.engines


def copy_storages(learner):
    """The memory of the copy that generates and of its KV cache, by storage: {reference that keeps nothing: bytes}."""
    (engine,) = learner.generator.engines.values()
    (copy,) = learner.generator.unsharded.values()
    cached = [stream for layer in engine.executor.cache.layers.values() for stream in layer] if engine.executor else []
    storages = [tensor.untyped_storage() for tensor in (*module_tensors(copy.model).values(), *cached)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


@pytest.mark.gpu
def test_the_freed_copy_leaves_its_memory_to_training(tmp_path, group):
    """Every storage of it is freed, and the device has its bytes back.

    The first generation comes before the comparison: libraries then allocate what they keep, such as the workspace of
    cuBLAS for the stream of captures (32 MiB).
    """
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path, hidden_size=256, intermediate_size=1024)))
    learner = Learner(model, TrainConfig(), layout=ParallelLayout(always=True, offload=frozenset({"engine"})))
    request = GenerationRequest(prompt=np.array([1, 7, 9], dtype=np.int32))
    for _ in range(2):
        learn(learner)
        held = torch.cuda.memory_allocated()
        learner.generate([request], Sampling(max_tokens=4))
        of_copy = copy_storages(learner)
        size = sum(of_copy.values())
        assert size > 2**21 and torch.cuda.memory_allocated() >= held + size
        learn(learner)
        assert all(storage.expired() for storage in of_copy)
    assert torch.cuda.memory_allocated() < held + size / 10


@pytest.mark.gpu
def test_parameters_in_host_memory_learn_the_same(tmp_path, group):
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path)))
    here = Learner(model, TrainConfig(), layout=ParallelLayout(always=True))
    there = Learner(model, TrainConfig(), layout=ParallelLayout(offload=frozenset({"parameters"})))
    assert all(parameter.device.type == "cpu" for parameter in there.model.parameters())
    for (loss, norm), (wanted_loss, wanted_norm) in zip(learn(there), learn(here), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=0.01) and norm == pytest.approx(wanted_norm, rel=0.05)


@pytest.mark.gpu
def test_saved_by_parts_and_generated_with_a_whole(tmp_path, group):
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path)))
    learner = Learner(model, TrainConfig(), layout=ParallelLayout(always=True))
    learn(learner)
    folder = tmp_path / "saved"
    folder.mkdir()
    learner.save(folder)
    wanted = learn(learner)
    again = Learner(model, TrainConfig(), layout=ParallelLayout(always=True))
    again.load(folder)
    assert learn(again) == wanted
    asked = [GenerationRequest(prompt=np.array([7, 8, 9], dtype=np.int32), seed=i) for i in range(4)]
    found = learner.generate(asked, Sampling(max_tokens=8))
    whole = Learner(ModelConfig(path=model.path), TrainConfig(), trainable=False, layout=None)
    whole.set_weights(learner.weights())
    assert [s.tokens.tolist() for s in found] == [
        s.tokens.tolist() for s in whole.generate(asked, Sampling(max_tokens=8))
    ]
