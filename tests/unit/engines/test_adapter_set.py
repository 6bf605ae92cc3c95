"""Several adapters in one batch give what each gives alone."""

import json
from dataclasses import replace
from http.client import HTTPConnection

import numpy as np
import pytest
import torch

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import UsageError
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.inference.model import InferenceModel
from posttrain.models.adapters import CONFIG, add_adapters, inject_saved
from posttrain.models.loading import load_model
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner
from tests.tiny import saved_adapter, tiny_model, tiny_tokenizer
from tests.unit.engines.test_local import AsOnAGPU
from tests.unit.server.serving import PATIENCE, serving

TARGETS = {"gpt2": ("c_attn", "c_fc"), "mixtral": ("q_proj", "v_proj")}
SAMPLING = Sampling(max_tokens=12, stop_ids=(8,))


def engine_for(model, kind=LocalEngine, **options):
    model.set_attn_implementation(attention.NAME)
    return kind(ModelRunner.from_model(model.eval()), tiny_tokenizer(), frozen=True, **options)


def requests(adapters):
    """The same prompts for every adapter, next to each other: neither their prefill nor their blocks may be shared."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 60, n).astype(np.int32) for n in (5, 20, 9)]
    return [
        GenerationRequest(prompt=prompt, seed=3 * i + k, adapter=adapter, reuse_prefix=True)
        for i, prompt in enumerate(prompts)
        for adapter in adapters
        for k in range(2)
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral"])
def test_each_sequence_has_its_own_adapter(name, tmp_path):
    targets = TARGETS.get(name, ("all-linear",))
    folders = {
        "two": saved_adapter(tiny_model(name), tmp_path / "two", 2, targets),
        "five": saved_adapter(tiny_model(name), tmp_path / "five", 5, targets),
        "part": saved_adapter(tiny_model(name), tmp_path / "part", 3, targets[:1] if name in TARGETS else ("up_proj",)),
    }
    expected = {"": engine_for(tiny_model(name)).generate(requests([""]), SAMPLING)}
    for adapter, folder in folders.items():
        alone = tiny_model(name)
        inject_saved(alone, folder)
        expected[adapter] = engine_for(alone).generate(requests([""]), SAMPLING)
    texts = [tuple(token for sample in samples for token in sample.tokens.tolist()) for samples in expected.values()]
    assert len(set(texts)) == 4, "the adapters change nothing"
    engine = engine_for(tiny_model(name), AsOnAGPU if name == "llama" else LocalEngine, block_size=4, slots=10)
    engine.use_adapters(folders)
    asked = requests(list(expected))
    for _ in range(2):  # the second time with prefixes from the cache
        found = engine.generate(asked, SAMPLING)
        for adapter, samples in expected.items():
            own = [sample for sample, request in zip(found, asked, strict=True) if request.adapter == adapter]
            for a, b in zip(own, samples, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    assert all(sample.reused for sample, request in zip(found, asked, strict=True) if len(request.prompt) > 8)
    engine.runner.model.set_attn_implementation("sdpa")
    with torch.no_grad():  # outside of the engine the model is the base model
        out, plain = (model(torch.tensor([[9, 10, 11]])).logits for model in (engine.runner.model, tiny_model(name)))
    assert torch.allclose(out, plain, atol=1e-6)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    engine = engine_for(tiny_model("llama"))
    with pytest.raises(UsageError, match="no adapter is named 'other'; there are none"):
        engine.generate([replace(requests([""])[0], adapter="other")], SAMPLING)
    with pytest.raises(UsageError, match="no adapter there"):
        engine.use_adapters({"a": tmp_path})
    folder = saved_adapter(tiny_model("gpt2"), tmp_path / "gpt2", 2, ("c_attn",))
    with pytest.raises(UsageError, match="LlamaForCausalLM has no linear layer"):
        engine.use_adapters({"a": folder})
    folder = saved_adapter(tiny_model("llama", intermediate_size=56), tmp_path / "wide", 2, ("up_proj",))
    with pytest.raises(UsageError, match=r"has shape \(48, 32\), the adapter A \(2, 32\) and B \(56, 2\)"):
        engine.use_adapters({"a": folder})
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UsageError, match="use_dora is True"):
        engine.use_adapters({"a": folder})
    adapted = tiny_model("llama")
    add_adapters(adapted, ModelConfig(lora_rank=2), "token")
    with pytest.raises(UsageError, match="adapters of its own"):
        engine_for(adapted).use_adapters({"a": folder})


def test_a_server_has_them_under_their_names(tmp_path):
    config = ModelConfig(path="pico")
    folders = {
        name: str(
            saved_adapter(
                load_model(config, "token", trainable=False, device=torch.device("cpu"), seed=0), tmp_path / name, rank
            )
        )
        for name, rank in (("two", 2), ("five", 5))
    }
    model = InferenceModel(config, DataConfig(max_length=2**20, on_overlong="error"), folders)
    prompt = np.arange(10, 20, dtype=np.int32)
    expected = {}
    for name in ("", *folders):
        (sample,) = model.generate(
            [GenerationRequest(prompt=prompt, adapter=name)], Sampling(max_tokens=8, temperature=0)
        )
        expected[name or "pico"] = model.tokenizer.decode(sample.tokens[10:], skip_special_tokens=True)
    with serving(model) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)

        def ask(method, path, **body):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

        _, listed = ask("GET", "/v1/models")
        assert [entry["id"] for entry in listed["data"]] == ["pico", "two", "five"]
        assert ask("GET", "/v1/models/five")[1]["id"] == "five"
        for name, text in expected.items():
            status, found = ask(
                "POST",
                "/v1/completions",
                model=name,
                prompt=prompt.tolist(),
                max_tokens=8,
                temperature=0,
                ignore_eos=True,
            )
            assert status == 200 and found["model"] == name
            assert found["choices"][0]["text"] == text
        status, refused = ask("POST", "/v1/completions", model="six", prompt="a", max_tokens=2)
        assert status == 404 and "pico, two, five" in refused["error"]["message"]
