"""Tokenizers from vocab.json and merges.txt alone."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import UsageError
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.cells import make_message
from posttrain.data.reading.examples import ChatExample
from posttrain.models.tokenizers import load_tokenizer
from tests.unit.data.made import byte_level


def bare_folder(folder, **extra):
    """The two files of a byte-level tokenizer, and nothing else."""
    model = json.loads(byte_level(specials=()).backend_tokenizer.to_str())["model"]
    vocabulary = model["vocab"]
    for token in extra.values():
        vocabulary[token] = len(vocabulary)
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder, len(vocabulary)


def load(folder):
    return load_tokenizer(ModelConfig(path="pico", tokenizer=str(folder)))


def test_qwen_has_its_control_tokens_after_the_vocabulary(tmp_path):
    folder, size = bare_folder(tmp_path / "qwen")
    tokenizer = load(folder)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(control) == [size, size + 1, size + 2] and len(tokenizer) == size + 3
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>" and tokenizer.bos_token is None
    text = "Hello there, 1234 — naïve 你好\n\n  <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and ids[-1] == size + 2
    assert len(tokenizer("1234")["input_ids"]) == 4  # digits by themselves

    encoder = Encoder(tokenizer, DataConfig(chat_template="qwen_r1"), "chat", vocab_size=len(tokenizer))
    chat = ChatExample(origin="f:1", messages=[make_message("user", "Hello"), make_message("assistant", "Hi!")])
    [sample] = encoder.encode(chat)
    assert tokenizer.decode(sample.tokens[sample.mask]) == "Hi!<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(text)["input_ids"] == ids and again.eos_token == "<|im_end|>"


def test_gpt2_has_its_end_token_in_the_vocabulary(tmp_path):
    folder, size = bare_folder(tmp_path / "gpt2", end="<|endoftext|>")
    tokenizer = load(folder)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == size - 1 and len(tokenizer) == size
    assert tokenizer.decode(tokenizer("Hello there\n")["input_ids"]) == "Hello there\n"


@pytest.mark.parametrize("damage", ["vocab.json", "merges.txt"])
def test_damaged_files_are_one_message(tmp_path, damage):
    folder, _ = bare_folder(tmp_path / "bare")
    Path(folder / damage).write_text('{"a": ' if damage == "vocab.json" else "#version: 0.2\nno such merge at all\n")
    with pytest.raises(UsageError, match=r"^model.tokenizer: .* cannot be loaded: "):
        load(folder)
