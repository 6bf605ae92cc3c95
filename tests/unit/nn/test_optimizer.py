import math

import pytest
import torch

from posttrain.config.sections import TrainConfig
from posttrain.core.errors import CheckpointError
from posttrain.nn.optimizer import LossScale, Optimizer
from posttrain.nn.weights import FROZEN_PART

SIZES = {"matrix": (16, 17), "norm": (130,), "small": (3, 2)}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(4, 3, dtype=dtype)),
        "norm": torch.nn.Parameter(torch.randn(3, dtype=dtype)),
    }


def give_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    loss = sum((torch.randn(p.shape, generator=generator).to(p.dtype) * scale * p).sum() for p in params.values())
    loss.backward()


def test_equals_plain_adamw_with_clipping_and_decay_on_matrices_only():
    config = TrainConfig(weight_decay=0.1, max_grad_norm=0.5)
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, config)
    reference = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["norm"]], "weight_decay": 0.0}],
        betas=(config.adam_beta1, config.adam_beta2),
    )
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(0.01 * (step + 1))["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        for name in ours:
            assert torch.allclose(ours[name], theirs[name], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_host_memory_give_the_same_bits_and_resume(dtype, monkeypatch, tmp_path):
    monkeypatch.setattr("posttrain.nn.optimizer.STAGED_ELEMENTS", 64)

    def weights():
        torch.manual_seed(0)
        return {name: torch.nn.Parameter(torch.randn(size, dtype=dtype)) for name, size in SIZES.items()}

    config = TrainConfig(weight_decay=0.1, ema_decay=0.9)
    plain, staged = Optimizer(weights(), config), Optimizer(weights(), config, host_moments=True)
    for step in range(4):
        if step == 2:  # what was saved with moments in host memory is read by either
            staged.save(tmp_path)
            resumed = weights()
            for name, parameter in resumed.items():
                parameter.data.copy_(staged.parameters[name])
            staged = Optimizer(resumed, config, host_moments=True)
            staged.load(tmp_path)
        for optimizer in (plain, staged):
            give_gradients(optimizer.parameters, step)
            optimizer.step(0.01)
        for name, tensor in plain.state().items():
            assert torch.equal(tensor, staged.state()[name]), name
        assert all(torch.equal(plain.parameters[name], staged.parameters[name]) for name in SIZES)


def test_half_precision_weights_follow_masters_that_move_in_small_steps():
    params = parameters(torch.bfloat16)
    address = params["matrix"].data_ptr()
    before = params["matrix"].detach().clone()
    optimizer = Optimizer(params, TrainConfig(max_grad_norm=0))
    give_gradients(params, 0)
    give_gradients(params, 1)  # accumulates in float32
    assert params["matrix"].grad is None and optimizer.masters["matrix"].grad.dtype == torch.float32
    for _ in range(3):
        give_gradients(params, 2)
        optimizer.step(1e-6)
    assert torch.equal(params["matrix"], before), "a bfloat16 weight does not move by 1e-6"
    assert not torch.equal(optimizer.masters["matrix"], before.float()), "but its master does"
    for _ in range(20):
        give_gradients(params, 2)
        optimizer.step(1e-2)
    assert torch.equal(params["matrix"], optimizer.masters["matrix"].bfloat16())
    assert not torch.equal(params["matrix"], before)
    assert params["matrix"].data_ptr() == address


def test_gradients_that_are_not_finite_change_nothing():
    params = parameters()
    optimizer = Optimizer(params, TrainConfig(ema_decay=0.9))
    give_gradients(params, 0)
    optimizer.step(0.1)
    before = {name: p.detach().clone() for name, p in params.items()}
    state = {name: t.clone() for name, t in optimizer.state().items()}
    give_gradients(params, 1, scale=float("nan"))
    assert optimizer.step(0.1)["skipped"] == 1.0
    assert all(torch.equal(before[name], params[name]) for name in params)
    assert all(torch.equal(state[name], tensor) for name, tensor in optimizer.state().items())
    assert all(p.grad is None for p in params.values())


def test_average_of_the_weights():
    params = parameters()
    optimizer = Optimizer(params, TrainConfig(ema_decay=0.75))
    expected = params["norm"].detach().clone()
    for step in range(4):
        give_gradients(params, step)
        optimizer.step(0.1)
        expected = 0.75 * expected + 0.25 * params["norm"].detach()
    assert torch.allclose(optimizer.average["norm"], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_is_exact(dtype, tmp_path):
    first, second = parameters(dtype), parameters(dtype)
    one, two = Optimizer(first, TrainConfig()), Optimizer(second, TrainConfig())
    for step in range(3):
        give_gradients(first, step)
        one.step(0.01)
    for name in second:
        second[name].data.copy_(first[name])
    one.save(tmp_path)
    two.load(tmp_path)
    for step in range(3, 6):
        for params, optimizer in ((first, one), (second, two)):
            give_gradients(params, step)
            optimizer.step(0.01)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.equal(one.masters[name], two.masters[name])


def test_the_loss_scale_grows_after_many_good_steps():
    scale = LossScale(2.0**23, good_steps=LossScale.GROW_EVERY - 2)
    values = []
    for _ in range(2 * LossScale.GROW_EVERY):
        scale.count_good_step()
        values.append(scale.value)
    assert values[:2] == [2.0**23, 2.0**24] and values[-1] == 2.0**24, "there is a largest one"
    scale.halve()
    assert scale == LossScale(2.0**23, 0, before=2.0**24)
    scale.value = 1.0
    scale.halve()
    assert scale.value == 1.0


def test_what_stays_not_finite_is_skipped_in_float16_too():
    params = parameters(torch.float16)
    optimizer = Optimizer(params, TrainConfig())
    tries = 0
    while True:
        give_gradients(params, 0, scale=float("inf"))
        found = optimizer.step(0.1)
        if "rescaled" not in found:
            break
        tries += 1
    assert found["skipped"] and tries == 16 and optimizer.steps == 0
    assert optimizer.scale == LossScale(2.0**16), "what no scale helps must not lower it for all that follows"


LAYER = {
    "embed.weight": (40, 128),
    "layers.0.up.weight": (64, 80),
    "layers.0.norm.weight": (80,),
    "head.weight": (7, 9),
}
EMBEDDINGS = frozenset({"embed.weight"})
RULES = {
    "adamw": {},
    "adamw_8bit": {"layers.0.up.weight": "adamw_8bit"},
    "muon": {"layers.0.up.weight": "muon"},
    "adafactor": dict.fromkeys(LAYER, "adafactor"),
    "schedule_free": dict.fromkeys(LAYER, "schedule_free"),
}
EACH = pytest.mark.parametrize("name", RULES)


def layer_weights(dtype=torch.float32):
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, dtype=dtype) * 0.1) for name, shape in LAYER.items()}


def library_optimizers(name, weights, config):
    """The optimizers of the libraries, each over the weights that the documentation gives it."""
    mine = [p for n, p in weights.items() if n in RULES[name]]
    rest = [p for n, p in weights.items() if n not in RULES[name]]
    decay, flat = [p for p in rest if p.ndim > 1], [p for p in rest if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": flat, "weight_decay": 0.0}]
    betas = (config.adam_beta1, config.adam_beta2)
    found = [torch.optim.AdamW(groups, lr=1e-2, betas=betas, fused=True)] if rest else []
    if name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        found.append(AdamW8bit(mine, lr=1e-2, betas=betas, weight_decay=config.weight_decay))
    if name == "muon":
        kind = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        found.append(torch.optim.Muon(mine, lr=1e-2, **kind))
    if name == "adafactor":
        from transformers.optimization import Adafactor

        groups = [{"params": [p for p in mine if (p.ndim > 1) == matrix]} for matrix in (True, False)]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = config.weight_decay, 0.0
        found.append(Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False))
    if name == "schedule_free":
        schedulefree = pytest.importorskip("schedulefree", reason="needs schedulefree: pip install schedulefree")
        groups = [{"params": [p for p in mine if (p.ndim > 1) == matrix]} for matrix in (True, False)]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = config.weight_decay, 0.0
        found.append(schedulefree.AdamWScheduleFree(groups, lr=1e-2, betas=betas, foreach=False))
        found[-1].train()
    return found


@EACH
def test_each_optimizer_equals_its_library(name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = TrainConfig(optimizer=name, weight_decay=0.1, max_grad_norm=0)
    ours, theirs = layer_weights(), layer_weights()
    optimizer = Optimizer(ours, config, embeddings=EMBEDDINGS)
    assert {n: rule for n, rule in optimizer.rules.items() if rule != "adamw"} == RULES[name]
    libraries = library_optimizers(name, theirs, config)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(1e-2)
        for library in libraries:
            library.step()
            library.zero_grad()
    for n in ours:
        assert torch.equal(ours[n], theirs[n]), n


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_optimizer_resumes_bit_for_bit(name, dtype, tmp_path):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = TrainConfig(optimizer=name, weight_decay=0.1, ema_decay=0.9)
    first, second = layer_weights(dtype), layer_weights(dtype)
    one = Optimizer(first, config, embeddings=EMBEDDINGS)
    for step in range(3):
        give_gradients(first, step)
        one.step(0.01)
    one.save(tmp_path)
    for n in second:
        second[n].data.copy_(first[n])
    two = Optimizer(second, config, embeddings=EMBEDDINGS)
    two.load(tmp_path)
    assert two.steps == 3
    for step in range(3, 6):
        for params, optimizer in ((first, one), (second, two)):
            give_gradients(params, step)
            optimizer.step(0.01)
    for n in first:
        assert torch.equal(one.masters[n], two.masters[n]) and torch.equal(first[n], second[n]), n
        assert torch.equal(one.average[n], two.average[n])
    other = "muon" if name != "muon" else "adafactor"
    with pytest.raises(CheckpointError, match=r"Resume with the train.optimizer that the run began with"):
        Optimizer(layer_weights(dtype), TrainConfig(optimizer=other, ema_decay=0.9)).load(tmp_path)


@EACH
def test_a_frozen_part_never_changes_and_has_no_gradient(name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    weights = layer_weights()
    frozen = weights["layers.0.up.weight"]
    setattr(frozen, FROZEN_PART, (slice(32, None), slice(None)))
    before = frozen.detach().clone()
    optimizer = Optimizer(weights, TrainConfig(optimizer=name, weight_decay=0.5, max_grad_norm=0))
    for step in range(3):
        give_gradients(weights, step)
        gradients = [p.grad.clone() for p in weights.values()]
        gradients[1][32:] = 0
        assert optimizer.step(0.1)["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)))
    assert torch.equal(frozen[32:], before[32:]) and (frozen[:32] != before[:32]).all()


@EACH
def test_bytes_that_a_step_still_needs(name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    weights = layer_weights()
    optimizer = Optimizer(weights, TrainConfig(optimizer=name), embeddings=EMBEDDINGS)
    cpu, before = torch.device("cpu"), optimizer.missing_bytes(torch.device("cpu"))
    give_gradients(weights, 0)
    gradients = sum(4 * p.numel() for p in weights.values())
    assert optimizer.missing_bytes(cpu) == before - gradients > 0
    optimizer.step(0.01)
    assert optimizer.missing_bytes(cpu) == gradients


def slow_schedule_free(weights, gradients, rates, decay, beta1, beta2):
    """The paper's algorithm with its three points, element by element, in float64: the last y and x."""
    y, x = [], []
    for start, given in zip(weights, gradients, strict=True):
        point = mean = start
        second = total = highest = 0.0
        for number, (gradient, rate) in enumerate(zip(given, rates, strict=True), 1):
            at = (1 - beta1) * point + beta1 * mean
            second = beta2 * second + (1 - beta2) * gradient**2
            point -= rate * (gradient / (math.sqrt(second / (1 - beta2**number)) + 1e-8) + decay * at)
            highest = max(highest, rate)
            total += highest**2
            share = highest**2 / total if total else 0.0
            mean = (1 - share) * mean + share * point
        y.append((1 - beta1) * point + beta1 * mean)
        x.append(mean)
    return y, x


def test_schedule_free_is_the_algorithm_of_the_paper_and_is_evaluated_at_its_average():
    config = TrainConfig(optimizer="schedule_free", weight_decay=0.1, max_grad_norm=0)
    params = parameters()
    optimizer = Optimizer(params, config)
    starts = {name: p.detach().double().flatten().tolist() for name, p in params.items()}
    rates, given = [0.0, 0.02, 0.04, 0.04, 0.04], {name: [] for name in params}
    for step, rate in enumerate(rates):
        give_gradients(params, step)
        for name, p in params.items():
            given[name].append(p.grad.double().flatten().tolist())
        optimizer.step(rate)
    trained = {name: p.detach().clone() for name, p in params.items()}
    optimizer.write_average()
    for name, p in params.items():
        decay, columns = 0.1 if p.ndim > 1 else 0.0, list(zip(*given[name], strict=True))
        y, x = slow_schedule_free(starts[name], columns, rates, decay, config.adam_beta1, config.adam_beta2)
        assert torch.allclose(trained[name].double().flatten(), torch.tensor(y).double(), atol=1e-6)
        assert torch.allclose(p.double().flatten(), torch.tensor(x).double(), atol=1e-6)
        assert (p - trained[name]).abs().max() > 1e-3, "two different points"
    optimizer.write_trained()
    assert all(torch.equal(params[name], trained[name]) for name in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_schedule_free_resumes_from_the_average_that_the_model_is_saved_at(dtype, tmp_path):
    config = TrainConfig(optimizer="schedule_free", weight_decay=0.5)
    first, second = layer_weights(dtype), layer_weights(dtype)
    for weights in (first, second):  # a part as of PiSSA
        setattr(weights["layers.0.up.weight"], FROZEN_PART, (slice(32, None), slice(None)))
    before = first["layers.0.up.weight"].detach().clone()
    one = Optimizer(first, config)
    for step in range(3):
        give_gradients(first, step)
        one.step(0.01)
    one.write_average()
    saved = {n: p.detach().clone() for n, p in first.items()}
    one.write_trained()
    one.save(tmp_path)
    assert torch.equal(saved["layers.0.up.weight"][32:], before[32:]), "a frozen part is the same at every point"
    two = Optimizer(second, config)
    for n, p in second.items():
        p.data.copy_(saved[n])
    two.load(tmp_path)
    assert all(torch.equal(first[n], second[n]) and not torch.equal(first[n], saved[n]) for n in first)
    for step in range(3, 6):
        for params, optimizer in ((first, one), (second, two)):
            give_gradients(params, step)
            optimizer.step(0.01)
    assert all(torch.equal(one.masters[n], two.masters[n]) for n in first)


@pytest.mark.gpu
@EACH
def test_each_optimizer_resumes_on_an_accelerator_also_after_its_states_were_in_host_memory(name, tmp_path):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    device = torch.accelerator.current_accelerator()

    def on_device():
        return {n: torch.nn.Parameter(p.detach().to(device)) for n, p in layer_weights(torch.bfloat16).items()}

    def give(params, seed):
        generator = torch.Generator().manual_seed(seed)
        sum((torch.randn(p.shape, generator=generator).to(p) * p).sum() for p in params.values()).backward()

    config = TrainConfig(optimizer=name, weight_decay=0.1)
    first, second = on_device(), on_device()
    one = Optimizer(first, config, embeddings=EMBEDDINGS)
    for step in range(3):
        give(first, step)
        one.step(0.01)
    one.save(tmp_path)
    for n in second:
        second[n].data.copy_(first[n])
    two = Optimizer(second, config, embeddings=EMBEDDINGS)
    two.load(tmp_path)
    one.move(torch.device("cpu"))
    assert one.missing_bytes(device) > two.missing_bytes(device)
    one.move(device)
    for step in range(3, 6):
        for params, optimizer in ((first, one), (second, two)):
            give(params, step)
            optimizer.step(0.01)
    assert all(torch.equal(one.masters[n], two.masters[n]) and torch.equal(first[n], second[n]) for n in first)
