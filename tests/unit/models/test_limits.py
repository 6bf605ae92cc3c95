"""A hostile model folder is refused in one line before a model or a tokenizer is built from it."""

import json
import os
from pathlib import Path

import pytest
import torch

from posttrain.config.sections import ModelConfig
from posttrain.convert.source import read_model_config
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.model_limits import check_model_config
from posttrain.data.encoding.tokens import Segment, TextPart, TokenEncoder
from posttrain.models.loading import read_config, read_model, vocabulary_size
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


GENERATION = {
    "a text": ("x", "eos_token_id is 'x', which is no token id"),
    "in a list": ([1, None, 2.5], "eos_token_id is 2.5"),
    "huge": (10**30, "eos_token_id is 10000000000"),
    "many": (list(range(100_000)), "100,000 end tokens; at most 1,000 are allowed"),
}


@pytest.mark.parametrize("case", GENERATION)
def test_end_tokens_of_the_generation_config(case, folder):
    value, words = GENERATION[case]
    file = folder / "generation_config.json"
    before = file.read_text(encoding="utf-8")
    file.write_text(json.dumps({"eos_token_id": value}), encoding="utf-8")
    try:
        with pytest.raises(UsageError) as caught:
            read_config(str(folder), "token")
    finally:
        file.write_text(before, encoding="utf-8")
    assert f"generation_config.json: {words}" in str(caught.value) and "\n" not in str(caught.value)
    read_config(str(folder), "token")


@pytest.fixture
def tokenizer_json(folder):
    """Changes tokenizer.json for one test."""
    file = folder / "tokenizer.json"
    before = file.read_text(encoding="utf-8")
    yield lambda **changes: file.write_text(json.dumps(json.loads(before) | changes), encoding="utf-8")
    file.write_text(before, encoding="utf-8")


def replacing(pattern, content, times=1):
    return {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": pattern, "content": content}] * times}


def test_normalizers_that_multiply_a_text(folder, tokenizer_json):
    """A prompt of a few letters would fill the memory."""
    words = r"tokenizer\.json: its normalizers could make a text more than 4,096 times as long"
    bombs = [replacing({"String": "a"}, "aaaa", 16), replacing({"Regex": "a"}, "a" * 5000)]
    bombs.append({"type": "Sequence", "normalizers": [replacing({"String": "a"}, "aa", 10)] * 2})
    for bomb in (*bombs, replacing({"String": "ab"}, "b", 1000)):
        tokenizer_json(normalizer=bomb)
        with pytest.raises(UsageError, match=words):
            load_tokenizer(ModelConfig(path=str(folder)))
    sentencepiece = replacing({"String": " "}, "\u2581")["normalizers"]
    tokenizer_json(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, *sentencepiece]})
    assert load_tokenizer(ModelConfig(path=str(folder)))("a b")["input_ids"]


def test_a_pattern_that_needs_too_many_steps(folder, tokenizer_json):
    """The tokenizers library panics, which is no Exception: it would end the threads of a server."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$b"}, "behavior": "Isolated", "invert": False}
    usual = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, usual]})
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    with pytest.raises(UsageError, match=r"'aaaa.*: the tokenizer failed: .*retry-limit"):
        TokenEncoder(tokenizer).encode([[Segment((TextPart("a" * 40 + "!", False),))]])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_files_that_cannot_be_read_to_their_end(name, kind, folder):
    """Reading a pipe waits for ever, a device has no end, and a sparse file needs no disk."""
    file = folder / name
    before = file.rename(folder / "before")
    try:
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        else:
            file.touch()
            os.truncate(file, 2**40)
        words = f"{name} has 1,099,511,627,776 bytes" if kind == "huge" else f"{name} is not a regular file"
        readers = [lambda: load_tokenizer(ModelConfig(path="pico", tokenizer=str(folder)))]
        readers += [lambda: read_config(str(folder), "token")]
        readers += [] if name == "config.json" and kind != "huge" else [lambda: read_model_config(folder)]
        for read in readers:
            with pytest.raises(UsageError, match=words):
                read()
    finally:
        file.unlink()
        before.rename(file)


def test_adapters_that_are_their_own_base(tmp_path):
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        described = {"base_model_name_or_path": str(tmp_path / base), "peft_type": "LORA"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    for read in (load_tokenizer, vocabulary_size):
        with pytest.raises(UsageError, match=r"a/adapter_config\.json: base_model_name_or_path leads .*back to itself"):
            read(ModelConfig(path=str(tmp_path / "a")))


def test_an_adapter_of_an_impossible_rank(folder, tmp_path):
    described = {"base_model_name_or_path": str(folder), "peft_type": "LORA", "r": 10**9, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(UsageError, match=r"adapter_config\.json: a rank is 1000000000; it must be from 1 to 16,384"):
        read_model(str(tmp_path), "token", torch.float32)


def test_large_models_are_within_the_limits():
    """Sizes of published models: DeepSeek-V3, Llama 3.1 405B and one whose heads differ by layer."""
    deepseek = {"num_hidden_layers": 61, "hidden_size": 7168, "n_routed_experts": 256, "intermediate_size": 18432}
    check_model_config(deepseek | {"vocab_size": 129280, "qk_nope_head_dim": 128, "q_lora_rank": 1536}, "x")
    llama = {"num_hidden_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "intermediate_size": 53248}
    check_model_config(llama | {"vocab_size": 128256}, "x", weight_bytes=800 * 10**9)
    check_model_config({"num_attention_heads": [12, 16], "num_key_value_heads": None, "n_inner": None}, "x")
