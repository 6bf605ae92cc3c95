"""A hostile model folder is refused in one line before a model or a tokenizer is built from it."""

import json
from pathlib import Path

import pytest

from posttrain.config.sections import ModelConfig
from posttrain.convert.source import read_model_config
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.model_limits import check_model_config
from posttrain.models.loading import read_config
from posttrain.models.tokenizers import load_tokenizer
from tests.tiny import tiny_folder


def nested(depth):
    return {"text_config": nested(depth - 1)} if depth else {}


CONFIGS = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to 1,024"),
    "no layer": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "no head": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be from 1 to"),
    "no key head": ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    "negative": ({"hidden_size": -1}, "hidden_size is -1"),
    "a text": ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
    "a boolean": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    "positions": ({"max_position_embeddings": 10**15}, "max_position_embeddings is "),
    "width": ({"intermediate_size": 10**13}, "intermediate_size is "),
    "experts": ({"text_config": {"num_experts": 10**9}}, "num_experts is 1000000000"),
    "a matrix": ({"intermediate_size": 2**22}, "and intermediate_size make a matrix of 32 x 4,194,304, but the weight"),
    "nested sections": (nested(200), "nested more than 8 deep"),
    "many values": ({"layer_types": ["full_attention"] * 300_000}, "more than 200,000 values"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(tiny_folder("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def config(folder):
    """Writes another configuration into the model's folder for one test."""
    file = folder / "config.json"
    before = file.read_text(encoding="utf-8")
    yield lambda text: file.write_text(text, encoding="utf-8")
    file.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_beyond_the_limits(case, folder, config):
    values, words = CONFIGS[case]
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written["hidden_size"] == 32
    config(json.dumps(written | values))
    with pytest.raises(UsageError) as caught:
        read_config(str(folder), "token")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    if case != "a matrix":  # sizes of files are compared where a model is loaded
        for read in (read_model_config, lambda folder: load_tokenizer(ModelConfig(path=str(folder)))):
            with pytest.raises(UsageError) as caught:
                read(folder)
            assert words in str(caught.value)


def test_json_that_is_nested_too_deeply(folder, config):
    config('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UsageError, match="cannot be loaded: maximum recursion depth exceeded"):
        read_config(str(folder), "token")
    with pytest.raises(PosttrainError, match="damaged: not JSON"):
        read_model_config(folder)


def test_a_value_of_another_type(folder, config):
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config(json.dumps(written | {"rms_norm_eps": "small"}))
    with pytest.raises(UsageError, match=r"cannot be loaded: .*rms_norm_eps.*small"):
        read_config(str(folder), "token")


def test_many_added_tokens(folder):
    file = folder / "tokenizer.json"
    before = file.read_text(encoding="utf-8")
    described = json.loads(before)
    first = 1 + max(described["model"]["vocab"].values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"] += [
        {"id": first + n, "content": f"<{n}>", "special": True, **flags} for n in range(25_000)
    ]
    file.write_text(json.dumps(described), encoding="utf-8")
    try:
        with pytest.raises(UsageError, match=r"tokenizer\.json: 25,\d+ added tokens; at most 20,000 are allowed"):
            load_tokenizer(ModelConfig(path=str(folder)))
    finally:
        file.write_text(before, encoding="utf-8")


def test_large_models_are_within_the_limits():
    """Sizes of published models: DeepSeek-V3, Llama 3.1 405B and one whose heads differ by layer."""
    deepseek = {"num_hidden_layers": 61, "hidden_size": 7168, "n_routed_experts": 256, "intermediate_size": 18432}
    check_model_config(deepseek | {"vocab_size": 129280, "qk_nope_head_dim": 128, "q_lora_rank": 1536}, "x")
    llama = {"num_hidden_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "intermediate_size": 53248}
    check_model_config(llama | {"vocab_size": 128256}, "x", weight_bytes=800 * 10**9)
    check_model_config({"num_attention_heads": [12, 16], "num_key_value_heads": None, "n_inner": None}, "x")
