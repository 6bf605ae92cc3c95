"""Text as it grows: whole characters, and nothing that a terminal would obey."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from posttrain.endpoint.text_stream import TextStream
from posttrain.inference.terminal_text import WordWrap, escape_controls
from posttrain.models.pico import build_tokenizer

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
    assert escape_controls(text) == shown


def screen(text, width=24, pieces=3):
    """What a terminal shows of a text that comes in pieces; it never writes into the last column."""
    lines, at = [[]], 0

    def write(shown):
        nonlocal at
        for left, letter in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", shown, re.DOTALL):
            if left:
                at -= int(left)
                del lines[-1][at:]
            elif letter == "\n":
                lines.append([])
                at = 0
            else:
                cells = 8 - at % 8 if letter == "\t" else cell_len(letter)
                lines[-1] += [letter, *[""] * (cells - 1)]
                at += cells
                assert len(lines[-1]) == at < width

    wrap = WordWrap(write, lambda: width)
    for start in range(0, len(text), pieces):
        wrap(text[start : start + pieces])
    return ["".join(line) for line in lines]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four five six seven", ["one two three four five", "six seven"]),
        ("one two three four  fives six", ["one two three four  ", "fives six"]),
        ("one\n  two\n\nthree", ["one", "  two", "", "three"]),
        ("a " + "b" * 50, ["a ", "b" * 23, "b" * 23, "b" * 4]),
        ("\u4f60\u597d" * 8 + " and", ["\u4f60\u597d" * 5 + "\u4f60", "\u597d" + "\u4f60\u597d" * 2 + " and"]),
        ("1234567890 234567890 23 5 x", ["1234567890 234567890 23", "5 x"]),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_lines_break_between_words(text, lines, pieces):
    assert screen(text, pieces=pieces) == lines


@settings(max_examples=200, deadline=None)
@given(st.text(" \n\tabcdefgh\u4f60\U0001f642"), st.integers(1, 50))
def test_nothing_but_spaces_at_the_edge_is_lost(text, pieces):
    assert "".join("".join(screen(text, pieces=pieces)).split()) == "".join(text.split())
