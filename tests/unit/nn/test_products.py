"""Linear layers in 8 bits while a model trains: which products change, by how much, and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch

from posttrain.cli.main import main
from posttrain.core.errors import UsageError
from posttrain.data.packing import collate
from posttrain.nn import layers
from posttrain.nn.forward import ModelRunner
from posttrain.nn.kernels import reference
from posttrain.nn.kernels.reference import FP8, FP8_LARGEST
from posttrain.nn.products import FULL, Fp8Products
from tests.tiny import tiny_model
from tests.unit.nn.test_layers import loss_of, model_of, some_samples


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What 8 bits keep of x if every row has the scale of its largest element, one element at a time."""
    rows = []
    for row in x.tolist():
        scale = max(map(abs, row)) / FP8_LARGEST
        rows.append([float(torch.tensor(value / scale).to(FP8)) * scale for value in row])
    return torch.tensor(rows)


def test_output_and_input_gradient_are_products_of_rounded_rows_and_the_weight_gradient_is_exact():
    torch.manual_seed(0)
    x, weight, d_out = torch.randn(5, 32).requires_grad_(), torch.randn(16, 32).requires_grad_(), torch.randn(5, 16)
    x.data[0] *= 1e3  # a large row does not cost the others their precision
    out = layers.MasterLinear.apply(x, weight, Fp8Products(reference))
    out.backward(d_out)
    torch.testing.assert_close(out, rounded(x.detach()) @ rounded(weight.detach()).t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad, rounded(d_out) @ rounded(weight.detach().t()).t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight.grad, d_out.t() @ x.detach())


def gradients_of(model: torch.nn.Module, *, fp8: bool) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    layers.use_fused_layers(model, reference)
    if fp8:
        layers.use_fp8_products(model)
    loss_of(ModelRunner(model, varlen_kernel=False), collate(some_samples())).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_gradients_in_8_bits_are_near_the_exact_ones(family):
    model = model_of(family)
    exact, found = (gradients_of(model, fp8=fp8) for fp8 in (False, True))
    errors = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    # 3 bits of mantissa: each product has an error of about 3%, and a gradient passes a dozen of them
    assert 1e-3 < max(errors.values()) < 0.25, errors


def test_without_the_option_nothing_changes():
    model = model_of("qwen2")
    layers.use_fused_layers(model, reference)
    assert all(getattr(layer, layers.PRODUCTS, FULL) is FULL for layer in model.model.layers)


def test_what_cannot_be_computed_in_8_bits_is_refused():
    with pytest.raises(UsageError, match="has no fused layers"):
        layers.use_fp8_products(tiny_model("gpt2"))
    with pytest.raises(UsageError, match="has no fused layers"):
        layers.use_fp8_products(model_of("llama"))  # on a CPU its own code runs
    mixture = model_of("mixtral")
    layers.use_fused_layers(mixture, reference)
    with pytest.raises(UsageError, match="experts of MixtralForCausalLM"):
        layers.use_fp8_products(mixture)
    uneven = model_of("llama", intermediate_size=72)
    layers.use_fused_layers(uneven, reference)
    with pytest.raises(UsageError, match="multiples of 16"):
        layers.use_fp8_products(uneven)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.lora_rank", "4"], "train.fp8 is for layers without adapters, but model.lora_rank is set"),
        (["--cluster.devices", "2"], "train.fp8 is for one device, but cluster.devices is 2"),
        ([], "train.fp8: LlamaForCausalLM has no fused layers on this device"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(tmp_path, capsys, more, message):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n' * 4)
    arguments = ["sft", "--model", "pico", "--data", str(data), "--train.max_steps", "1", "--train.fp8", *more]
    assert main([*arguments, "--output_dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_kernels_of_the_gpu_round_as_the_reference_does():
    from posttrain.nn.kernels import triton

    torch.manual_seed(0)
    x, d_out = torch.randn(48, 256, dtype=torch.bfloat16), torch.randn(48, 512, dtype=torch.bfloat16)
    weight = torch.randn(512, 256, dtype=torch.bfloat16)
    by = SimpleNamespace(cpu=Fp8Products(reference), cuda=Fp8Products(triton))
    for name, one in (("output", x), ("input_gradient", d_out)):
        expected = getattr(by.cpu, name)(one, weight).float()
        found = getattr(by.cuda, name)(one.cuda(), weight.cuda()).float().cpu()
        assert float((found - expected).norm() / expected.norm()) < 0.01, name
