"""Memory worked out without weights, against what real models and a real optimizer take."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import ForwardRequest, Sample
from posttrain.data.packing import collate
from posttrain.models import memory
from posttrain.models.loading import load_model, trainable_parameters
from posttrain.models.memory import MemoryEstimate, ModelMemory, PassMemory
from posttrain.nn import layers
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.kernels import reference
from posttrain.nn.optimizer import Optimizer
from posttrain.nn.optimizer_rules import embedding_names
from tests.tiny import tiny_folder

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sample(length: int) -> Sample:
    return Sample(tokens=np.arange(length, dtype=np.int32) % 100, mask=np.arange(length) > 0)


def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measured(config: ModelConfig, head: str = "token", name: str = "adamw") -> ModelMemory:
    """Bytes that a real model, its gradients and its optimizer hold."""
    model = load_model(config, head, device=CPU, trainable=True, seed=0)
    settings = TrainConfig(ema_decay=0.9, optimizer=name)
    optimizer = Optimizer(trainable_parameters(model), settings, embeddings=embedding_names(model))
    out = forward(
        ModelRunner.from_model(model), collate([sample(8), sample(5)]), ForwardRequest(names=frozenset({NAMES[head]}))
    )
    (out.logprobs if head == "token" else out.scores).sum().backward()
    masters = optimizer.masters
    gradients = [master.grad for master in masters.values()]
    gradients += [p.grad for p in model.parameters() if p.grad is not None and not any(p.grad is g for g in gradients)]
    held = size(gradients)
    optimizer.step(1e-3)
    return ModelMemory(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in masters.values()),
        weights=size(model.parameters()),
        masters=size(master for name, master in masters.items() if master is not optimizer.parameters[name]),
        gradients=held,
        optimizer=sum(size(states(optimizer, name)) for name in masters),
        average=size(optimizer.average.values()),
    )


def states(optimizer: Optimizer, name: str) -> list[torch.Tensor]:
    """Tensors of the optimizer's states; the two quantization maps of bitsandbytes are one for all weights."""
    found = {key: value for key, value in optimizer.states_of(name).items() if isinstance(value, torch.Tensor)}
    return [value for key, value in found.items() if key not in ("qmap1", "qmap2", "RMS")]


NAMES = {"token": "logprobs", "score": "scores"}


@pytest.mark.parametrize("name", ["adamw_8bit", "muon", "adafactor", "schedule_free"])
@pytest.mark.parametrize("options", [{}, {"freeze_layers": 1}, {"lora_rank": 4}, {"lora_rank": 4, "use_dora": True}])
def test_states_of_every_optimizer_are_exact(name, options, tmp_path):
    pytest.importorskip("bitsandbytes" if name == "adamw_8bit" else "peft")
    config = ModelConfig(path="pico", **options)
    counted = memory.model_memory(memory.empty_model(config, "token", torch.float32), average=True, optimizer=name)
    assert counted == measured(config, name=name)
    plain = memory.model_memory(memory.empty_model(config, "token", torch.float32), average=True)
    assert (
        counted.optimizer < plain.optimizer
        or name == "schedule_free"
        or (name == "adamw_8bit" and options.get("lora_rank"))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "mixtral"])
def test_what_stands_is_exact(name, dtype, tmp_path):
    config = ModelConfig(path=str(tiny_folder(name, tmp_path)), dtype=dtype)
    counted = memory.model_memory(memory.empty_model(config, "token", DTYPES[dtype]), average=True)
    if name == "mixtral":  # an expert that no token chose has no gradient yet in a real step: its bytes may be missing
        assert counted.weights == measured(config).weights
    else:
        assert counted == measured(config)
    assert (counted.masters == 0) == (dtype == "float32")
    per_weight = {"float32": 4 + 4 + 8 + 4, "bfloat16": 2 + 4 + 4 + 8 + 4}[dtype]
    held = counted.weights + counted.masters + counted.gradients + counted.optimizer + counted.average
    assert 0 < held - per_weight * counted.parameters < 1000, "and a step counter a tensor"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", NAMES)
def test_what_stands_is_exact_with_adapters_and_score_heads(head, dtype, tmp_path):
    pytest.importorskip("peft")
    config = ModelConfig(path=str(tiny_folder("llama", tmp_path)), dtype=dtype, lora_rank=4)
    counted = memory.model_memory(memory.empty_model(config, head, DTYPES[dtype]), average=True)
    assert counted == measured(config, head)
    assert 0 < counted.trained < counted.parameters


@pytest.mark.parametrize("dtype", DTYPES)
def test_four_bits(dtype, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    changes = {"hidden_size": 128, "intermediate_size": 256}
    config = ModelConfig(
        path=str(tiny_folder("llama", tmp_path, **changes)), lora_rank=2, dtype=dtype, load_in_4bit=True
    )
    real = load_model(config, "token", device=CPU, trainable=True, seed=0)
    states = [p.quant_state for p in real.parameters() if hasattr(p, "quant_state")]
    scales = [tensor for state in states for tensor in (state.absmax, state.state2.absmax)]
    counted = memory.model_memory(memory.empty_model(config, "token", DTYPES[dtype]), average=False, in_4bit=True)
    assert counted.weights == pytest.approx(size(real.parameters()) + size(scales), rel=0.01)
    trained = trainable_parameters(real).values()
    assert counted.trained == sum(p.numel() for p in trained)
    assert counted.masters == 4 * sum(p.numel() for p in trained if p.dtype != torch.float32)


def really_kept(config: ModelConfig, samples: list[Sample], *, fused: bool = False) -> int:
    """Bytes that autograd saves in a real forward pass, parameters aside; with an accelerator's layers, or without."""
    model = load_model(config, "token", device=CPU, trainable=True, seed=0)
    runner = ModelRunner.from_model(model)
    assert not fused or layers.use_fused_layers(model, reference)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward(runner, collate(samples), ForwardRequest())
    assert out.logprobs is not None
    return sum(storage.nbytes() for storage in saved.values())


# DeepSeek is left out in bfloat16: on a CPU torch has no fused kernel for it and keeps all scores.
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", "float32"), ("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "bfloat16"), ("mixtral", "float32"),
     ("mixtral", "bfloat16"), ("gemma2", "bfloat16"), ("deepseek_v3", "float32")],
)  # fmt: skip
def test_activations_are_those_of_a_real_forward_pass(name, dtype, checkpointing, tmp_path):
    changes = {"n_layer": 4} if name == "gpt2" else {"num_hidden_layers": 4}
    folder = tiny_folder(name, tmp_path, **changes)
    config = ModelConfig(path=str(folder), dtype=dtype, gradient_checkpointing=checkpointing)
    samples = [sample(64), sample(64)]
    counted = memory.pass_memory(memory.empty_model(config, "token", DTYPES[dtype]), samples, ForwardRequest())
    assert counted.activations == pytest.approx(really_kept(config, samples), rel=0.3 if checkpointing else 0.15)
    assert counted.peak > counted.activations > 0
    assert counted.forward_only < counted.peak


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_pass_leaves_the_model_as_it_was(name, tmp_path):
    config = ModelConfig(path=str(tiny_folder(name, tmp_path)), dtype="float32")
    model = memory.empty_model(config, "token", torch.float32)
    first = memory.pass_memory(model, [sample(16)], ForwardRequest())
    assert memory.pass_memory(model, [sample(16)], ForwardRequest()) == first
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


def test_logits_do_not_grow_with_tokens(tmp_path):
    config = ModelConfig(path=str(tiny_folder("llama", tmp_path, vocab_size=2**16)))
    model = memory.empty_model(config, "token", torch.float32)
    short, long = (memory.pass_memory(model, [sample(n)], ForwardRequest()) for n in (512, 4096))
    assert long.activations > 6 * short.activations
    chunk = 4 * 2**25
    assert short.peak - short.activations > 2 * chunk, "a chunk of logits and its gradient"
    assert (long.peak - long.activations) - (short.peak - short.activations) < chunk


def test_every_output_can_be_counted(tmp_path):
    folder = str(tiny_folder("mixtral", tmp_path))
    config = ModelConfig(path=folder)
    token, score = (memory.empty_model(config, head, torch.bfloat16) for head in NAMES)
    teacher = memory.empty_model(config, "token", torch.bfloat16, trainable=False)
    plain = memory.pass_memory(token, [sample(32)], ForwardRequest())
    divergence = memory.pass_memory(token, [sample(32)], ForwardRequest(names=frozenset({"divergence"})), teacher)
    assert divergence.forward_only > plain.forward_only
    assert memory.pass_memory(score, [sample(32)], ForwardRequest(names=frozenset({"scores"}))).activations > 0
    choices = ForwardRequest(names=frozenset({"choices"}), choice_ids=(1, 2), router_loss=0.01)
    assert memory.pass_memory(token, [sample(32)], choices).activations > 0


def test_phases_add_up_what_is_there_at_the_same_time():
    standing = ModelMemory(
        parameters=1, trained=1, weights=1, masters=10, gradients=100, optimizer=1000, average=10_000
    )
    passing = PassMemory(activations=7, peak=9, forward_only=3)
    needs = MemoryEstimate(model=standing, step=passing, reference=100_000, teacher=1_000_000)
    assert needs.phases == {"forward and backward": 1111120, "optimizer step": 1111111, "evaluation": 1111014}
    assert needs.peak == 1111120
    freed = MemoryEstimate(model=standing, step=passing, reference=100_000, reference_stays=False)
    assert freed.phases["reference beforehand"] == 110_014
    assert freed.phases["optimizer step"] == 11_111


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_of_a_real_step_on_an_accelerator(checkpointing, tmp_path):
    from posttrain.core.devices import default_device
    from posttrain.core.types import Loss, Objective
    from posttrain.train.learner import Learner

    big = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    big |= {"num_key_value_heads": 4, "vocab_size": 65536, "max_position_embeddings": 2048}
    folder = str(tiny_folder("llama", tmp_path, **big))
    config = ModelConfig(path=folder, gradient_checkpointing=checkpointing)
    samples = [sample(2048) for _ in range(8)]
    for number, own in enumerate(samples):
        own.tokens[:] = number  # else they begin alike and are computed once
    model = memory.empty_model(config, "token", torch.bfloat16)
    passing = memory.pass_memory(model, samples[:4], ForwardRequest(), kernels=True)
    needs = MemoryEstimate(model=memory.model_memory(model, average=False), step=passing)
    gc.collect()  # what earlier tests left
    before = torch.accelerator.memory_allocated(default_device())
    learner = Learner(config, TrainConfig(micro_batch_tokens=8192))
    learner.runner.graphs = None  # what graphs hold is not counted as allocated
    objective = Objective(
        request=ForwardRequest(), loss=lambda out, batch: Loss(total=-out.logprobs.sum()), unit="token"
    )
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats()
        learner.forward_backward(samples, objective, denominator=1, tokens=1)
        real = torch.accelerator.max_memory_allocated(default_device()) - before
        reserved = torch.accelerator.max_memory_reserved(default_device())
        learner.step(1e-3)
    print({"counted": needs.phases, "real": real, "reserved": reserved, "pass": needs.step})
    assert needs.phases["forward and backward"] == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_activations_of_the_layers_that_an_accelerator_runs(name, checkpointing, tmp_path):
    folder = tiny_folder(name, tmp_path, num_hidden_layers=4)
    config = ModelConfig(path=str(folder), dtype="bfloat16", gradient_checkpointing=checkpointing)
    samples = [sample(64), sample(64)]
    empty = memory.empty_model(config, "token", torch.bfloat16)
    plain, fused = (memory.pass_memory(empty, samples, ForwardRequest(), kernels=kernels) for kernels in (False, True))
    assert fused.activations == pytest.approx(
        really_kept(config, samples, fused=True), rel=0.3 if checkpointing else 0.15
    )
    assert checkpointing or fused.activations < 0.7 * plain.activations
    assert plain.peak > fused.peak > fused.activations > 0
    with torch.inference_mode():  # as in generation, which must leave room for it
        whole = memory.max_pass_bytes(config, "token", torch.bfloat16, 128)
    assert whole == pytest.approx(fused.peak, rel=0.1)


def test_what_an_optimizer_will_still_take(tmp_path):
    config = ModelConfig(path=str(tiny_folder("llama", tmp_path)), dtype="bfloat16")
    model = load_model(config, "token", device=CPU, trainable=True, seed=0)
    optimizer = Optimizer(trainable_parameters(model), TrainConfig())
    count = sum(parameter.numel() for parameter in model.parameters())
    counters = 4 * len(optimizer.masters)
    assert optimizer.missing_bytes(CPU) == 12 * count + counters, "gradients, two averages and step counters"
    assert optimizer.missing_bytes(torch.device("cuda")) == 16 * count + counters, (
        "and the masters, which are in host memory"
    )
    forward(ModelRunner.from_model(model), collate([sample(8)]), ForwardRequest()).logprobs.sum().backward()
    assert optimizer.missing_bytes(CPU) == 8 * count + counters
    optimizer.step(1e-3)
    assert optimizer.missing_bytes(CPU) == 4 * count
