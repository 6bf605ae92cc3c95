"""GGUF files: read back by gguf and by transformers, with tokenizers that llama.cpp splits in the same way."""

import json

import gguf
import pytest
import torch
from tokenizers import AddedToken

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models.export import load_source
from posttrain.publish import gguf_file, gguf_model
from posttrain.publish.formats import export
from posttrain.publish.gguf_tokenizer import CHECK_TEXTS, CONTROL, NORMAL, UNUSED, USER_DEFINED, describe_tokenizer
from tests.tiny import tiny_folder
from tests.unit.publish.models import VOCABULARY, byte_level, model_folder, sentencepiece_like

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen2_untied", "qwen3", "gemma2", "gemma3")


def field(reader, name):
    return reader.fields[name].contents()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_back_with_nearly_the_same_outputs(name, tmp_path):
    folder = model_folder(name, tmp_path / "model", byte_level())
    report = export(str(folder), tmp_path / "f16", target_format="gguf", gguf_type="f16")
    assert report["kl"] < 1e-6 and report["tokens"] > 300
    report = export(str(folder), tmp_path / "q8", target_format="gguf", gguf_type="q8_0")
    assert 0 < report["kl"] < 1e-3 and report["bytes"] < (tmp_path / "f16/f16-f16.gguf").stat().st_size


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_mixed_types_of_q4_k_m(name, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 8, "head_dim": 8}
    folder = model_folder(name, tmp_path / "model", byte_level(), **sizes)
    report = export(str(folder), tmp_path / "out", target_format="gguf", gguf_type="q4_k_m")
    assert report["kl"] < 0.1
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out/out-q4_k_m.gguf").tensors}
    assert types["output.weight" if name == "llama" else "token_embd.weight"] == "Q6_K"
    assert types["blk.0.attn_v.weight"] == "Q6_K" and types["blk.1.attn_v.weight"] == "Q4_K"
    assert types["blk.3.attn_v.weight"] == "Q6_K" and types["blk.7.attn_v.weight"] == "Q6_K"
    assert types["blk.1.ffn_gate.weight"] == "Q4_K" and types["blk.1.attn_norm.weight"] == "F32"
    assert types["blk.1.ffn_down.weight"] == "Q5_0" and types["blk.0.ffn_down.weight"] == "Q8_0"  # rows of 96


def test_metadata_says_what_the_model_and_its_tokenizer_are(tmp_path):
    tokenizer = byte_level("llama-bpe", bos=True)
    tokenizer.add_tokens(["word7"])
    folder = model_folder("qwen3", tmp_path / "model", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    export(str(folder), tmp_path / "out", target_format="gguf", gguf_type="f16")
    reader = gguf.GGUFReader(tmp_path / "out/out-f16.gguf")
    assert field(reader, "general.architecture") == "qwen3" and field(reader, "general.name") == "out"
    for key, name in {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}.items():
        assert field(reader, f"qwen3.{key}") == config[name]
    assert field(reader, "qwen3.attention.key_length") == 8 and field(reader, "qwen3.attention.head_count_kv") == 2
    assert field(reader, "qwen3.rope.freq_base") == config["rope_parameters"]["rope_theta"]
    assert field(reader, "tokenizer.ggml.pre") == "llama-bpe" and field(reader, "tokenizer.ggml.model") == "gpt2"
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == VOCABULARY == len(types)
    for number in range(len(tokenizer)):
        assert tokens[number] == tokenizer.convert_ids_to_tokens(number)
    assert types[1] == CONTROL and types[50] == NORMAL and types[len(tokenizer) - 1] == 4 and types[-1] == UNUSED
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert field(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]
    assert field(reader, "tokenizer.ggml.eos_token_id") == 5 and field(reader, "tokenizer.ggml.bos_token_id") == 1
    assert field(reader, "tokenizer.ggml.add_bos_token") and not field(reader, "tokenizer.ggml.add_eos_token")
    assert field(reader, "tokenizer.chat_template") == tokenizer.chat_template


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_the_name_of_the_pre_tokenizer(split):
    assert describe_tokenizer(byte_level(split), VOCABULARY, []).pre == split


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies(prefix, tmp_path):
    tokenizer = sentencepiece_like(prefix)
    found = describe_tokenizer(tokenizer, VOCABULARY, [])
    assert found.model == "llama" and found.adds_space is prefix and found.adds_bos
    ids = tokenizer.get_vocab()
    assert found.types[ids["<0x0A>"]] == 6 and found.types[ids["<unk>"]] == 2 and found.types[ids["<s>"]] == CONTROL
    folder = model_folder("llama", tmp_path / "model", tokenizer)
    export(str(folder), tmp_path / "out", target_format="gguf", gguf_type="f16")
    reader = gguf.GGUFReader(tmp_path / "out/out-f16.gguf")
    assert len(field(reader, "tokenizer.ggml.scores")) == VOCABULARY
    assert field(reader, "tokenizer.ggml.add_space_prefix") is prefix


def test_added_tokens_of_spaces_are_stored_as_spaces():
    """Gemma has them; llama.cpp prints a user-defined token as it is stored."""
    tokenizer = sentencepiece_like(prefix=False)
    tokenizer.add_tokens([AddedToken("▁" * 9, normalized=False)])
    found = describe_tokenizer(tokenizer, VOCABULARY, [])
    number = len(tokenizer) - 1
    assert found.tokens[number] == " " * 9 and found.types[number] == USER_DEFINED
    assert "▁" in "".join(token for token, kind in zip(found.tokens, found.types, strict=True) if kind == NORMAL)


def ids(merges):
    return {left + right for left, right in merges}


def test_a_sentencepiece_vocabulary_with_a_token_that_is_never_merged_is_refused():
    tokenizer = sentencepiece_like()
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = parts["model"]["merges"]
    token = next(token for token in tokenizer.tokenize(CHECK_TEXTS[1]) if len(token) > 1 and token in ids(merges))
    parts["model"]["merges"] = [pair for pair in merges if "".join(pair) != token]
    broken = type(tokenizer.backend_tokenizer).from_str(json.dumps(parts))
    tokenizer._tokenizer = broken
    with pytest.raises(UsageError, match=r"llama\.cpp has no equal"):
        describe_tokenizer(tokenizer, VOCABULARY, [])


def test_what_llama_cpp_does_not_have_is_refused(tmp_path):
    other = tiny_folder("llama", tmp_path)  # its tokenizer has one token per word
    with pytest.raises(UsageError, match="WordLevel"):
        export(str(other), tmp_path / "out", target_format="gguf")
    mixture = model_folder("mixtral", tmp_path / "mixture", byte_level())
    with pytest.raises(UsageError, match="mixtral are not supported"):
        export(str(mixture), tmp_path / "out", target_format="gguf")
    scaled = model_folder("gemma2", tmp_path / "scaled", byte_level(), query_pre_attn_scalar=16)
    with pytest.raises(UsageError, match="query_pre_attn_scalar"):
        export(str(scaled), tmp_path / "out", target_format="gguf")
    biased = model_folder("qwen3", tmp_path / "biased", byte_level(), attention_bias=True)
    with pytest.raises(UsageError, match="a bias in"):
        export(str(biased), tmp_path / "out", target_format="gguf")
    gelu = model_folder("llama", tmp_path / "gelu", byte_level(), hidden_act="gelu")
    with pytest.raises(UsageError, match="activation"):
        export(str(gelu), tmp_path / "out", target_format="gguf")
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    dynamic = model_folder("llama", tmp_path / "dynamic", byte_level(), **rope)
    with pytest.raises(UsageError, match="rope_type"):
        export(str(dynamic), tmp_path / "out", target_format="gguf")
    score = tiny_folder("llama", tmp_path, head="score")
    with pytest.raises(UsageError, match="reward model"):
        export(str(score), tmp_path / "out", target_format="gguf")
    assert not (tmp_path / "out").exists()


def test_an_unknown_regular_expression_is_refused():
    tokenizer = byte_level("qwen2")
    text = tokenizer.backend_tokenizer.to_str().replace("p{N}|", "p{N}{1,2}|")
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(text)
    with pytest.raises(UsageError, match="regular expression"):
        describe_tokenizer(tokenizer, VOCABULARY, [])


def test_a_window_that_llama_cpp_ignores_bounds_the_context(tmp_path):
    folder = model_folder("mistral", tmp_path / "model", byte_level())
    report = export(str(folder), tmp_path / "out", target_format="gguf")
    assert "the context is 8 tokens" in report["remarks"][0]
    assert field(gguf.GGUFReader(tmp_path / "out/out-q8_0.gguf"), "llama.context_length") == 8


def test_a_wrong_file_is_noticed(tmp_path):
    """The rows of query and key in the wrong order: transformers' reader finds other weights."""
    folder = model_folder("llama", tmp_path / "model", byte_level())
    loaded = load_source(str(folder))
    vocabulary = describe_tokenizer(loaded.tokenizer, VOCABULARY, [])
    straight = dict(gguf_model.FAMILIES, llama=gguf_model.GgufFamily("llama", biases=("q_proj",)))
    file = tmp_path / "wrong.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_model, "FAMILIES", straight)
        gguf_file.write_gguf(loaded.model, vocabulary, file, "f16", "wrong")
    with pytest.raises(PosttrainError, match=r"q_proj\.weight .* relative error"):
        gguf_file.load_gguf(file, loaded.model.float(), "f16")


def test_llama_3_frequencies_are_those_of_transformers(tmp_path):
    folder = model_folder("llama3", tmp_path / "model", byte_level())
    model = load_source(str(folder)).model
    plain = 1 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    factors = gguf_model.frequency_factors(model.config)
    assert torch.allclose(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-5) and factors.max() > 1.5
