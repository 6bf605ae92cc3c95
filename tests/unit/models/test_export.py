"""Export: a plain folder whose model is the run's, or nothing at all."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.checkpoints.checkpoint import write_checkpoint
from posttrain.checkpoints.tensor_files import save_tensors
from posttrain.core.errors import CheckpointError, PosttrainError, UsageError
from posttrain.models import adapters, loading, saving
from posttrain.models import export as export_module
from posttrain.models.export import export
from tests.tiny import tiny_folder, tiny_tokenizer
from tests.unit.models.test_adapters import adapted, train
from tests.unit.models.test_loading import load_tiny, output

STOCK = {"token": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}


def make_run(model, tmp_path, average=None):
    """A run folder with one checkpoint of the model."""

    def write(folder):
        saving.save_model(model, tiny_tokenizer(), folder / "model")
        if average is not None:
            save_tensors(folder / "ema.safetensors", average)

    write_checkpoint(tmp_path / "run" / "checkpoints", 7, write)
    return tmp_path / "run"


@pytest.mark.parametrize("head", ["token", "score"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral", "deepseek_v3"])
def test_a_run_becomes_a_plain_folder(name, head, tmp_path):
    model = train(load_tiny(tiny_folder(name, tmp_path), head, trainable=True)).eval()
    model.config.score_mean = 0.5
    result = export(str(make_run(model, tmp_path)), tmp_path / "deep" / "out")
    stock = STOCK[head].from_pretrained(tmp_path / "deep" / "out")
    assert torch.equal(output(stock), output(model))
    assert type(stock).__name__ == result["architecture"] and result["dtype"] == "float32" and not result["merged"]
    assert stock.config.score_mean == 0.5 and result["difference"] < 1e-6
    assert AutoTokenizer.from_pretrained(tmp_path / "deep" / "out").chat_template == tiny_tokenizer().chat_template
    assert (tmp_path / "deep" / "out" / "generation_config.json").is_file() == (head == "token")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


@pytest.mark.parametrize("head", ["token", "score"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_adapters_are_merged(name, head, tmp_path):
    pytest.importorskip("peft")
    model = train(adapted(tiny_folder(name, tmp_path), head))
    checkpoint = make_run(model, tmp_path) / "checkpoints" / "step-00000007"
    result = export(str(checkpoint), tmp_path / "out")
    assert result["merged"] and not (tmp_path / "out" / "adapter_config.json").exists()
    stock = STOCK[head].from_pretrained(tmp_path / "out")
    assert torch.allclose(output(stock), output(model), atol=1e-5, rtol=1e-4)


def test_adapters_may_stay_adapters(tmp_path):
    pytest.importorskip("peft")
    model = train(adapted(tiny_folder("llama", tmp_path)))
    result = export(str(make_run(model, tmp_path)), tmp_path / "out", merge=False)
    assert not result["merged"] and not (tmp_path / "out" / "model.safetensors").exists()
    assert torch.equal(output(loading.read_model(str(tmp_path / "out"), "token", torch.float32)), output(model))


def test_a_half_precision_base_stays_so(tmp_path):
    pytest.importorskip("peft")
    folder = tiny_folder("llama", tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    model = train(adapted(folder, dtype="bfloat16"))
    result = export(str(make_run(model, tmp_path)), tmp_path / "out")
    assert result["dtype"] == "bfloat16" and 0 < result["rounding"] < 0.05
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("rank", [0, 4])
def test_the_average_is_taken(rank, tmp_path):
    if rank:
        pytest.importorskip("peft")
    model = train(load_tiny(tiny_folder("qwen2", tmp_path), trainable=True, lora_rank=rank)).eval()
    average = {name: parameter + 0.1 for name, parameter in loading.trainable_parameters(model).items()}
    run = make_run(model, tmp_path, average)
    assert export(str(run), tmp_path / "out", use_ema=True)["averaged"]
    export(str(run), tmp_path / "last")
    last = output(AutoModelForCausalLM.from_pretrained(tmp_path / "last"))
    assert torch.allclose(last, output(model), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        for name, parameter in loading.trainable_parameters(model).items():
            parameter.copy_(average[name])
    averaged = output(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert torch.allclose(averaged, output(model), atol=1e-5, rtol=1e-4) and not torch.allclose(averaged, last)


def test_an_average_that_is_not_there_or_does_not_fit(tmp_path):
    model = load_tiny(tiny_folder("llama", tmp_path))
    with pytest.raises(UsageError, match=r"train\.ema_decay"):
        export(str(make_run(model, tmp_path)), tmp_path / "out", use_ema=True)
    run = make_run(model, tmp_path / "other", {"stranger": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="stranger"):
        export(str(run), tmp_path / "out", use_ema=True)
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    source = str(make_run(load_tiny(tiny_folder("llama", tmp_path)), tmp_path))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        export(source, tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        export(source, tmp_path / "out" / "precious")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def damage(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1e-3
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def misconfigure(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


@pytest.mark.parametrize(("harm", "said"), [(damage, r"differs .* in model\.norm\.weight"), (misconfigure, "output")])
def test_a_copy_that_differs_is_an_error_and_leaves_nothing(harm, said, tmp_path, monkeypatch):
    run = make_run(load_tiny(tiny_folder("llama", tmp_path)), tmp_path)

    def save_badly(model, tokenizer, folder):
        saving.save_model(model, tokenizer, folder)
        harm(folder)

    monkeypatch.setattr(export_module, "save_model", save_badly)
    with pytest.raises(PosttrainError, match=said):
        export(str(run), tmp_path / "new" / "out")
    assert not list((tmp_path / "new").iterdir())


def test_a_merge_that_differs_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    run = make_run(train(adapted(tiny_folder("llama", tmp_path))), tmp_path)

    def forget(model):
        for name, layer in adapters.adapted_layers(model):
            model.set_submodule(name, layer.get_base_layer())
        return model

    monkeypatch.setattr(adapters, "merge", forget)
    with pytest.raises(PosttrainError, match="merged model differs"):
        export(str(run), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        export(str(tmp_path / "run"), tmp_path / "out")
