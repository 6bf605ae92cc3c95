"""Rows that are prompts: the tokens a model is asked with, and all columns for reward functions."""

import pytest

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.records import Record
from tests.unit.data.made import byte_level

ROWS = [
    {"prompt": [{"role": "user", "content": "Hello"}], "reward_model": {"ground_truth": "4"}, "level": 3},
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "<|im_end|>"}, "level": 1},
]


def questions(rows):
    source = SourceFormat("prompt", "x")
    return [example for line, row in enumerate(rows, 1) for example in source.examples(Record(row, f"f:{line}"))]


def test_prompts_are_what_generation_sees():
    tokenizer = byte_level(None)
    encoder = Encoder(tokenizer, DataConfig(chat_template="qwen_r1"), "prompt", vocab_size=len(tokenizer))
    for row, prompt in zip(ROWS, encoder.prompts(questions(ROWS)), strict=True):
        rendered = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n") and "\\boxed{}.\n" in rendered
        assert prompt.tokens.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert prompt.messages == row["prompt"] and prompt.origin.startswith("f:")
        assert prompt.columns == {**row, "ground_truth": row["reward_model"]["ground_truth"]}


def test_texts_without_a_template_are_asked_as_they_are():
    tokenizer = byte_level(None, adds_bos=True)
    encoder = Encoder(tokenizer, DataConfig(), "prompt", vocab_size=len(tokenizer))
    [prompt] = encoder.prompts(questions([{"prompt": "2 + 2 ="}]))
    assert prompt.tokens.tolist() == tokenizer("2 + 2 =")["input_ids"]


def test_long_prompts_are_dropped_or_refused_but_never_cut():
    tokenizer = byte_level()
    long = {"prompt": "Hello there " * 50}
    encoder = Encoder(tokenizer, DataConfig(max_length=50, on_overlong="drop"), "prompt", vocab_size=len(tokenizer))
    short, dropped = encoder.prompts(questions([{"prompt": "a"}, long]))
    assert short is not None and dropped is None
    encoder = Encoder(tokenizer, DataConfig(max_length=50), "prompt", vocab_size=len(tokenizer))
    with pytest.raises(DataError, match=r"f:1: the prompt has \d+ tokens, more than data.max_length = 50, and cannot"):
        encoder.prompts(questions([long]))
