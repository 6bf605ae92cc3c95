"""Where sentences end, and where they only seem to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.preprocessing.sentences import sentences


@pytest.mark.parametrize(
    "expected",
    [
        ["One.", "Two!", "Three?", "Four"],
        ["Wait...", "Wait... no?!", "Yes."],
        ["We saw, e.g. Venus and i.e. Mars at 3.14 degrees.", "Then it rained."],
        ["Dr. Smith met Mrs. J. R. Jones vs. Prof. Lee.", "They talked."],
        ["See Fig. 3 and No. 5 on pp. 7 of it.", "No.", "Never."],
        ["He said (at 5 p.m. London time) so.", "It was late."],
        ['She said "Stop!" and he stopped.', "“Why?”", "(Nobody knew.)", "The end."],
        ["It costs approx. 5 euros.", "1. Milk is white.", "2. Bread is not."],
        ["Visit example.com or v1.2.3 today.", "Done."],
    ],
)
def test_english(expected):
    assert sentences(" ".join(expected)) == expected
    assert sentences("\n" + "\n ".join(expected) + " \n") == expected


def test_chinese_needs_no_spaces():
    expected = ["你好。", "他说：“真的吗？”", "是的！！", "《圆周率》是3.14。", "完"]
    assert sentences("".join(expected)) == expected


def test_empty_lines_end_what_has_no_stop():
    assert sentences("A heading\n \nA line\nand its end. \n\n\n") == ["A heading", "A line\nand its end."]
    assert sentences(" \n ") == []


@given(st.text(st.sampled_from("ab AZ1.!?。！？\"'”)\n…"), max_size=60))
def test_nothing_but_spaces_is_lost(text):
    found = sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in found)


def test_long_runs_take_no_long_time():
    for run in (".", "\n", " ", "a. ", '."', "\n ", "。", ". a"):  # with a step for each two of them: an hour
        assert "".join("".join(sentences(run * 300_000)).split()) == "".join((run * 300_000).split())
