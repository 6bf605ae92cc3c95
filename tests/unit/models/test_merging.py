"""Merged models against slow loops over single numbers of mergekit's formulas; models that do not fit are refused."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.checkpoints.tensor_files import TensorFiles
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models import merging
from posttrain.models.export import export
from posttrain.models.merging import MergeSettings, merge_models
from tests.tiny import saved_adapter, tiny_folder

WEIGHTS = (1.0, 0.5, -0.3)


def tensors(count=3, shape=(7, 5)):
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(shape, generator=generator)
    return base, [base + torch.randn(shape, generator=generator) * 0.3 for _ in range(count)]


def merged(method, values, base=None, weights=WEIGHTS, **options):
    settings = MergeSettings(method=method, **options)
    return merging.merged_tensor("w", values, base, settings=settings, weights=weights)


def slow_ties(base, values, weights, kept, normalize):
    """mergekit's GeneralizedTaskArithmeticMerge with consensus "sum", one number at a time."""
    found = []
    for place, start in enumerate(base.flatten().tolist()):
        deltas = [delta.flatten().tolist()[place] * weight for delta, weight in zip(kept, weights, strict=True)]
        sign = 1 if sum(deltas) >= 0 else -1
        chosen = [(d, w) for d, w in zip(deltas, weights, strict=True) if d * sign > 0]
        divisor = sum(w for _, w in chosen) if normalize else 1
        found.append(start + sum(d for d, _ in chosen) / (divisor or 1))
    return torch.tensor(found).view(base.shape)


def test_linear():
    _, values = tensors()
    found = merged("linear", values)
    for index in ((0, 0), (6, 4)):
        expected = sum(w * float(v[index]) for w, v in zip(WEIGHTS, values, strict=True)) / sum(WEIGHTS)
        assert float(found[index]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp(t):
    _, (a, b) = tensors(2)
    b = -0.5 * a + b  # far from parallel
    flat = list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    norms = [math.sqrt(sum(pair[side] ** 2 for pair in flat)) for side in (0, 1)]
    angle = math.acos(sum(x * y for x, y in flat) / norms[0] / norms[1])
    expected = [(math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle) for x, y in flat]
    assert merged("slerp", [a, b], t=t).flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert torch.allclose(merged("slerp", [a, a * 2], t=0.25), a * 1.25)  # parallel: linear


def test_ties():
    base, values = tensors()
    kept = []
    for value in values:
        delta = value - base
        limit = sorted(delta.abs().flatten().tolist(), reverse=True)[int(0.4 * delta.numel()) - 1]
        kept.append(torch.where(delta.abs() >= limit, delta, 0))
    expected = slow_ties(base, values, WEIGHTS, kept, normalize=True)
    assert torch.allclose(merged("ties", values, base, density=0.4), expected, atol=1e-5)
    half = base + 0.5 * (expected - base)
    assert torch.allclose(merged("ties", values, base, density=0.4, scale=0.5), half, atol=1e-5)


def test_dare():
    base, values = tensors(shape=(60, 50))
    kept = [merging.keep_random(v - base, 0.25, merging.seed_of(7, n, "w")) for n, v in enumerate(values)]
    for delta, value in zip(kept, values, strict=True):
        zero = delta == 0
        assert 0.7 < float(zero.float().mean()) < 0.8
        assert torch.allclose(delta[~zero], ((value - base) * 4)[~zero])
    expected = base + sum(w * d for w, d in zip(WEIGHTS, kept, strict=True))
    assert torch.allclose(merged("dare_linear", values, base, density=0.25, seed=7), expected, atol=1e-5)
    slow = slow_ties(base[:4], values, WEIGHTS, [d[:4] for d in kept], normalize=False)
    assert torch.allclose(merged("dare_ties", values, base, density=0.25, seed=7)[:4], slow, atol=1e-5)
    other = merged("dare_linear", values, base, density=0.25, seed=8)
    assert not torch.allclose(other, expected)


def three_models(tmp_path):
    return [tiny_folder("qwen2", tmp_path / str(seed), seed=seed) for seed in range(3)]


def test_files_are_merged_and_load(tmp_path):
    base, a, b = map(str, three_models(tmp_path))
    report = merge_models([a, b], tmp_path / "out", MergeSettings(weights=(3.0, 1.0)))
    assert report["tensors"] == report["changed"] > 20
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (a, b))
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, 0.75 * first[name] + 0.25 * second[name], atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    settings = MergeSettings(method="dare_ties", density=0.3, seed=5)
    for name in ("one", "two"):
        merge_models([a, b], tmp_path / name, settings, base)
    one, two = (TensorFiles(tmp_path / name, "model") for name in ("one", "two"))
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.places)


def test_adapters_count_as_their_base_with_them(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    paths = []
    for rank in (2, 3):
        model = AutoModelForCausalLM.from_pretrained(folder)
        paths.append(str(saved_adapter(model, tmp_path / f"adapter-{rank}", rank)))
        export(paths[-1], tmp_path / f"whole-{rank}")
    settings = MergeSettings(method="ties", density=0.5)
    merge_models(paths, tmp_path / "out", settings, str(folder))
    merge_models([str(tmp_path / f"whole-{rank}") for rank in (2, 3)], tmp_path / "same", settings, str(folder))
    found, expected = (TensorFiles(tmp_path / name, "model") for name in ("out", "same"))
    for name in found.places:
        torch.testing.assert_close(found.read(name), expected.read(name), atol=1e-5, rtol=1e-5)


def test_adapters_that_change_their_base_are_refused(tmp_path):
    """peft's PiSSA and others take the adapter's first values from the base weights; only peft repeats that."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama", tmp_path))
    path = saved_adapter(model, tmp_path / "adapter", 2)
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    (path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}), encoding="utf-8")
    with pytest.raises(UsageError, match="init_lora_weights"):
        merge_models([str(path), str(path)], tmp_path / "out", MergeSettings())


def test_models_that_do_not_fit_are_refused(tmp_path):
    base, a, b = map(str, three_models(tmp_path))
    untied = str(tiny_folder("qwen2_untied", tmp_path))
    wider = str(tiny_folder("qwen2", tmp_path / "wider", intermediate_size=64))
    llama = str(tiny_folder("llama", tmp_path))
    other = tmp_path / "other"
    shutil.copytree(a, other)
    parts = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    words = parts["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    (other / "tokenizer.json").write_text(json.dumps(parts), encoding="utf-8")
    for models, settings, origin, reason in [
        ([a, untied], {}, "", "same tensors: lm_head.weight"),
        ([a, wider], {}, "", "has shape"),
        ([a, llama], {}, "", "same tensors"),
        ([a, str(other)], {}, "", "different vocabularies"),
        ([a], {}, "", "at least two"),
        ([a, b, base], {"method": "slerp"}, "", "two models, not 3"),
        ([a, b], {"method": "slerp", "weights": (1.0, 1.0)}, "", "set --t"),
        ([a, b], {"method": "ties"}, "", "needs --base"),
        ([a, b], {}, base, "leave out --base"),
        ([a, b], {"weights": (1.0,)}, "", "one per model"),
        ([a, b], {"weights": (1.0, -1.0)}, "", "add up to 0"),
        ([a, b], {"method": "ties", "density": 0.0}, base, "density"),
        ([a, b], {"t": 0.3}, "", "--t has no effect with linear"),
        ([a, b], {"method": "slerp", "density": 0.3}, "", "--density has no effect with slerp"),
        ([a, b], {"method": "ties", "seed": 3}, base, "--seed has no effect with ties"),
    ]:
        with pytest.raises(UsageError, match=reason):
            merge_models(models, tmp_path / "out", MergeSettings(**settings), origin)
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_are_refused(tmp_path):
    _, a, b = map(str, three_models(tmp_path))
    with pytest.raises(PosttrainError, match="not finite"):
        merge_models([a, b], tmp_path / "out", MergeSettings(weights=(3e38, 3e38)))
    assert not (tmp_path / "out").exists()
