"""Text as it grows: whole characters, and nothing that a terminal would obey."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.pico import build_tokenizer
from posttrain.serve.stream import TextStream, visible

TOKENIZER = build_tokenizer()


def streamed(tokens):
    stream = TextStream(TOKENIZER)
    return [stream.add(token) for token in tokens], stream.finish()


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20))  # "<s>" is no text
def test_a_text_comes_in_whole_characters(text):
    parts, rest = streamed(TOKENIZER.encode(text, add_special_tokens=False))
    assert "".join(parts) + rest == text
    if "\ufffd" not in text:
        assert not rest and all("\ufffd" not in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60))
def test_any_tokens_give_what_decoding_them_all_gives(tokens):
    parts, rest = streamed(tokens)
    assert "".join(parts) + rest == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_bytes_that_are_no_text_do_not_hold_up_the_rest():
    broken = TOKENIZER.encode("é", add_special_tokens=False)[1]  # the second half of a character, again and again
    parts, rest = streamed([broken] * 40)
    assert "".join(parts) + rest == "\ufffd" * 40 and len("".join(parts)) > 20


def test_half_a_character_is_held_back():
    tokens = TOKENIZER.encode("a€", add_special_tokens=False)
    assert streamed(tokens) == (["a", "", "", "€"], "")
    assert streamed(tokens[:-1]) == (["a", "", ""], "\ufffd")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand é €", "two\nlines\tand é €"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("back\r\x08", "back\\r\\x08"),
        ("turn\u202e", "turn\\u202e"),
        ("\udc80", "\\udc80"),
        ("\U0001f469\u200d\U0001f4bb", "\U0001f469\u200d\U0001f4bb"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text, shown):
    assert visible(text) == shown
