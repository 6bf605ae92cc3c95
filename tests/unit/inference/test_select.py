"""Selection against brute force; and every answer is used or counted."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError, UsageError
from posttrain.data.reading.formats import recognise
from posttrain.data.reading.records import Record
from posttrain.inference.completion_files import CompletionExample, read_completions
from posttrain.inference.select import METHODS, best_of_n, condition, pairs, threshold, top_fraction

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-10, 10))
ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", " ", "a", "b", "b ", "c"]), REWARDS), max_size=20)


def made(rows):
    return [
        CompletionExample(
            prompt=[{"role": "user", "content": f"prompt {prompt}"}],
            plain=False,
            text=text,
            row={"index": prompt, "reward": reward},
            origin=f"rows.jsonl:{number}",
        )
        for number, (prompt, text, reward) in enumerate(rows, 1)
    ]


def usable(rows):
    return [(prompt, text, reward) for prompt, text, reward in rows if reward is not None and text.strip()]


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_best_of_n(rows):
    found = {row["prompt"][0]["content"]: row for row in best_of_n(made(rows)).rows}
    assert set(found) == {f"prompt {prompt}" for prompt, _, _ in usable(rows)}
    for prompt, text, reward in usable(rows):
        best = found[f"prompt {prompt}"]
        assert best["reward"] >= reward
        first_of_equals = next(t for p, t, r in usable(rows) if p == prompt and r == best["reward"])
        assert best["completion"] == first_of_equals, (text, reward)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_pairs(rows):
    found = {row["prompt"][0]["content"]: row for row in pairs(made(rows)).rows}
    for prompt in range(4):
        group = [(reward, text) for p, text, reward in usable(rows) if p == prompt]
        highest, lowest = (max(group), min(group)) if group else ((0, ""), (0, ""))
        row = found.get(f"prompt {prompt}")
        if row is None:
            firsts = [next((t for r, t in group if r == edge[0]), "") for edge in (highest, lowest)]
            assert len(group) < 2 or highest[0] == lowest[0] or firsts[0].strip() == firsts[1].strip()
            continue
        assert (row["chosen_reward"], row["rejected_reward"]) == (highest[0], lowest[0])
        assert row["chosen_reward"] > row["rejected_reward"] and row["chosen"].strip() != row["rejected"].strip()
        assert (row["chosen_reward"], row["chosen"]) in group and (row["rejected_reward"], row["rejected"]) in group


@settings(max_examples=100, deadline=None)
@given(ROWS, st.floats(0.01, 1))
def test_top_fraction(rows, fraction):
    found = top_fraction(made(rows), fraction).rows
    rewards = sorted((reward for _, _, reward in usable(rows)), reverse=True)
    assert sorted((row["reward"] for row in found), reverse=True) == rewards[: math.ceil(fraction * len(rewards))]


@settings(max_examples=100, deadline=None)
@given(ROWS, st.floats(-10, 10))
def test_every_answer_is_used_or_counted(rows, least):
    for name, method in METHODS.items():
        extra = {"threshold": [least], "top-fraction": [0.5]}.get(name, [])
        found = method(made(rows), *extra)
        assert found.counts["read"] == len(rows) == sum(found.counts.values()) - found.counts["read"]
        assert found.counts["used"] == len(found.rows) * (2 if name == "pairs" else 1)
        assert found.counts["failed"] == sum(reward is None for _, _, reward in rows)
        for row in found.rows:  # trainers can read them
            kind = "pair" if name == "pairs" else "chat"
            form = recognise(Record(row, "x"), kind)
            form.parse(Record(row, "x"), "")
    assert [row["reward"] for row in threshold(made(rows), least).rows] == [
        reward for _, _, reward in usable(rows) if reward >= least
    ]


def test_why_there_is_no_pair():
    tied, same = [(0, "a", 1.0), (0, "b", 1.0), (0, "c", 1.0)], [(1, "a", 1.0), (1, "a ", 0.0)]
    alone, whole = [(2, "a", 1.0), (2, "", 0.0)], [(3, "a", 1.0), (3, "b", 0.5), (3, "c", None), (3, "d", 0.0)]
    assert pairs(made(tied + same + alone + whole)).counts == {
        "read": 11,
        "used": 2,
        "failed": 1,
        "empty": 1,
        "alone": 1,
        "ties": 3,
        "equal_texts": 2,
        "between": 1,
    }


def test_a_prompt_says_what_its_answer_is_worth():
    (row,) = condition(made([(0, "yes", 1.256)])).rows
    assert row["prompt"] == [{"role": "user", "content": "prompt 0 <rm_score>: 1.26 "}]
    (row,) = condition(made([(0, "{yes}", -2.0)]), "[{reward:+.1f}] {prompt}").rows
    assert row["prompt"][0]["content"] == "[-2.0] prompt 0" and row["completion"] == "{yes}"
    with pytest.raises(UsageError, match=r"needs \{prompt\}"):
        condition(made([(0, "a", 1.0)]), "{reward}")
    with pytest.raises(UsageError, match="cannot be filled"):
        condition(made([(0, "a", 1.0)]), "{prompt} {score}")


def test_braces_in_a_prompt_are_text():
    (answer,) = made([(0, "a", 1.0)])
    answer.prompt[0]["content"] = "{x} {prompt} {reward}"
    (row,) = condition([answer]).rows
    assert row["prompt"][0]["content"] == "{x} {prompt} {reward} <rm_score>: 1.00 "


def test_mere_strings_stay_strings_and_other_formats_are_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1=", "completion": " 2", "reward": 1}, {"prompt": "1+1=", "completion": "3", "reward": 0}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (pair,) = pairs(read_completions(str(file))).rows
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("1+1=", " 2", "3")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": messages, "reward": 2}) + "\n")
    (row,) = best_of_n(read_completions(str(file))).rows
    assert row == {"prompt": messages[:1], "completion": "b", "reward": 2, "origin": f"{file}:1"}


def test_rows_without_a_number_are_refused(tmp_path):
    for row, words in (({}, "no reward"), ({"reward": "high"}, "expected a number"), ({"reward": math.inf}, "number")):
        (answer,) = made([(0, "a", 0.0)])
        answer.row = row
        with pytest.raises(DataError, match=words):
            best_of_n([answer])
    for bad in (0, 1.5, math.nan):
        with pytest.raises(UsageError, match="fraction"):
            top_fraction([], bad)
    with pytest.raises(UsageError, match="min_reward"):
        threshold([], math.nan)
