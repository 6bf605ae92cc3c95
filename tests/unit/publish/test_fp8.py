"""FP8 folders in the layout of compressed-tensors."""

import json

import pytest
import torch
from safetensors import safe_open

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models.export import load_source
from posttrain.publish import fp8
from posttrain.publish.formats import export
from tests.tiny import tiny_folder


def test_weights_scales_and_configuration(tmp_path):
    folder = tiny_folder("qwen2_untied", tmp_path)
    report = export(str(folder), tmp_path / "out", target_format="fp8")
    assert 0 < report["kl"] < 0.01
    model = load_source(str(folder)).model
    files = safe_open(tmp_path / "out/model-00001-of-00001.safetensors", framework="pt")
    names = set(files.keys())
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        stored = files.get_tensor(f"{name}.weight")
        if name == "lm_head":
            assert stored.dtype == torch.float32 and f"{name}.weight_scale" not in names
            continue
        scale = files.get_tensor(f"{name}.weight_scale")
        assert stored.dtype == torch.float8_e4m3fn and scale.shape == (module.out_features, 1)
        assert torch.allclose(stored.float() * scale, module.weight, rtol=1 / 16, atol=float(scale.max()) * 2**-9)
        assert stored.float().abs().amax(1).eq(448).all()  # the whole range of each channel is used
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "float-quantized"
    assert config["ignore"] == ["lm_head"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["strategy"]) == (8, "float", "channel")
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_the_divergence_includes_rounded_activations(tmp_path):
    loaded = load_source(str(tiny_folder("llama", tmp_path)))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = loaded.model(ids).logits
        for layer in fp8.quantized_layers(loaded.model).values():
            layer.register_forward_pre_hook(fp8.round_inputs)
        after = loaded.model(ids).logits
    assert 1e-4 < float((before - after).norm() / before.norm()) < 0.2


def test_damage_and_mixtures_are_refused(tmp_path):
    with pytest.raises(UsageError, match="mixtures of experts"):
        export(str(tiny_folder("mixtral", tmp_path)), tmp_path / "out", target_format="fp8")
    assert not (tmp_path / "out").exists()
    loaded = load_source(str(tiny_folder("llama", tmp_path)))
    out = tmp_path / "written"
    out.mkdir()
    fp8.write_fp8(loaded.model, loaded.tokenizer, out)
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(PosttrainError, match=r"layers\.1\.mlp\.up_proj\.weight was read back"):
        fp8.load_fp8(out, loaded.model)
