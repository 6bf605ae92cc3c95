"""A row is one line, whoever reads it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.jsonl import as_line, as_lines


@given(st.text())
def test_a_row_is_one_line_for_every_reader(text):
    line = as_line({"said": text})
    assert line.splitlines(keepends=True) == [line] and json.loads(line) == {"said": text}


def test_what_terminals_obey_is_written_out_and_letters_stay():
    assert as_lines([{"said": "a\x7f"}]).__next__() == '{"said": "a\\u007f"}\n'
    (line, other) = as_lines([{"said": "a\u2028b\u2029c\x85d\x9be\x7f"}, {"said": "\u00e9\u4f60"}])
    assert line.isascii() and line.isprintable() is False and line[:-1].isprintable()
    assert other == '{"said": "\u00e9\u4f60"}\n'
