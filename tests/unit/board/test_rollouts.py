"""The index of recorded completions, filters, search, groups and comparisons."""

import json

import numpy as np
import pytest
from hypothesis import given, settings

from posttrain.board import files, rollout_index, rollouts
from posttrain.board.rollout_index import (
    FAILED,
    RECORD,
    TRUNCATED,
    UNREADABLE,
    RolloutIndex,
    escaped,
    parsed_record,
    quick_record,
    record_of,
)
from posttrain.board.rollouts import Filter, shared_prompts
from posttrain.board.token_texts import TokenPieces, token_texts
from posttrain.core.jsonl import as_line
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.records import RolloutWriter, line_of, streams, without_streams
from tests.unit.board.made import lines, make_run, reader_of, row, run_of
from tests.unit.rollout.test_records import made
from tests.unit.rollout.test_records import rollouts as any_rollouts

ODD = [
    {"columns": {"a": [1], "mask": "11111"}},
    {"columns": {"tokens": [1], "mask": "1"}},
    {"prompt": [{"role": "user", "content": ["x"], "text": "y"}]},
    {"rewards": {"{": 1.0}},
    {"text": '], "mask": "1111", "tokens": [1], "text": "'},
    {"failure": 'a "quoted" \\ failure'},
    {"reward": float("nan")},
    {"group": None},
    {"turns": 100_000},
]


def indexed(reader):
    """All records, once the file is read to its end."""
    return reader.index.refresh(None)


@given(rollout=any_rollouts())
@settings(max_examples=40, deadline=None)
def test_reading_without_parsing_gives_the_same_record(rollout):
    line = line_of(without_streams(rollout, 3), streams(rollout.sample)).encode("utf-8", "backslashreplace")[:-1]
    quick, parsed = quick_record(7, 8, line, 9), parsed_record(7, 8, line, 9)
    if quick is not None:
        assert np.array([quick], RECORD).tobytes() == np.array([parsed], RECORD).tobytes()
    assert parsed[6] == rollout.completion_tokens and parsed[2] == 3


@pytest.mark.parametrize("change", ODD, ids=lambda change: json.dumps(change)[:40])
def test_lines_of_any_form_get_the_right_record(change):
    line = lines([row(step=5, group=2, tokens=3) | change])[:-1]
    quick, parsed = quick_record(0, 0, line, 0), parsed_record(0, 0, line, 0)
    assert quick is None or np.array([quick], RECORD).tobytes() == np.array([parsed], RECORD).tobytes()
    record = np.array([record_of(0, len(line) + 1, line)], RECORD)[0]
    assert (record["step"], record["length"]) == (5, 3)


def test_usual_lines_are_not_parsed():
    """Else the index of a million completions takes minutes instead of seconds."""
    assert quick_record(0, 0, lines([row()])[:-1], 0) is not None
    rollout = made(3)
    assert quick_record(0, 0, line_of(without_streams(rollout, 3), streams(rollout.sample)).encode(), 0) is not None


@pytest.fixture
def recorded(tmp_path):
    rows = [
        row(
            step=step,
            group=10 * step + group,
            reward=(step + sample) / 10,
            text=f"text {step}-{sample}",
            asked=f"{group}+1=",
            tokens=4 + sample,
        )
        for step in (1, 2)
        for group in (0, 1)
        for sample in range(3)
    ]
    rows += [row(step=3, group=30, failure="it <b>broke</b>\nValueError: no", reward=0.0)]
    rows += [row(step=3, group=30, finish="length", turns=2, text="Ünïcode\n\u2028\x07\ud800", reward=-1.0)]
    return make_run(tmp_path / "run", rows=rows), rows


def numbers(reader, **wanted):
    return [found["number"] for found in reader.page(Filter(**wanted), 0, 50)["rows"]]


def test_filters(recorded):
    reader = reader_of(recorded[0])
    assert numbers(reader) == list(range(13, -1, -1))
    assert numbers(reader, order="oldest", step=2) == list(range(6, 12))
    assert numbers(reader, step=2, group=21, order="oldest") == [9, 10, 11]
    assert numbers(reader, failed=True) == [12]
    assert numbers(reader, failed=False, step=3) == [13]
    assert numbers(reader, truncated=True) == numbers(reader, many_turns=True) == [13]
    assert numbers(reader, min_reward=0.4) == [11, 8]
    assert numbers(reader, max_reward=0.0) == [13]  # the failed one has no reward
    assert numbers(reader, min_length=6, step=1) == [5, 2]
    assert numbers(reader, order="reward_high")[:2] == [8, 11] and numbers(reader, order="reward_high")[-1] == 12
    assert numbers(reader, order="reward_low")[0] == 13
    assert numbers(reader, order="longest", step=1)[0] == 2 and numbers(reader, order="shortest", step=1)[0] == 0


def test_a_million_completions_are_filtered_as_by_looking_at_each():
    random = np.random.default_rng(0)
    records = np.zeros(1_000_000, RECORD)
    records["step"], records["group"] = np.arange(1_000_000) // 512, np.arange(1_000_000) // 8
    records["reward"], records["length"] = random.normal(size=1_000_000), random.integers(0, 2000, 1_000_000)
    records["flags"] = random.choice([0, 0, 0, FAILED, TRUNCATED, UNREADABLE], 1_000_000)
    found = Filter(min_reward=0.5, max_length=100, truncated=True, order="reward_high").select(records)
    columns = [records[name].tolist() for name in ("reward", "length", "flags")]
    wanted = [
        number
        for number, (reward, length, flags) in enumerate(zip(*columns, strict=True))
        if reward >= 0.5 and length <= 100 and flags == TRUNCATED
    ]
    assert len(found) > 1000 and sorted(found.tolist()) == wanted
    assert (np.diff(records["reward"][found]) <= 0).all()
    statistics = rollouts.statistics(records, found)
    assert statistics["all"] == 1_000_000 and statistics["truncated"] == len(found)
    assert sum(statistics["histogram"]["counts"]) == len(found)
    assert Filter(step=1000).select(records).tolist() == list(range(512_511, 511_999, -1))


def test_pages_and_statistics(recorded):
    reader = reader_of(recorded[0])
    found = reader.page(Filter(), 0, 5)
    assert found["matching"] == 14 and found["next"] == 5 and len(found["rows"]) == 5
    assert reader.page(Filter(), 10, 5)["next"] is None
    statistics = found["statistics"]
    assert (statistics["failed"], statistics["truncated"], statistics["last_step"]) == (1, 1, 3)
    assert sum(statistics["histogram"]["counts"]) == 13
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text 2-1", [10, 7]),
        ("TEXT 2-1", [10, 7]),
        ("1+1=", [11, 10, 9, 5, 4, 3]),
        ("<b>broke", [12]),
        ("\nValueError", [12]),
        ("Ünïcode", [13]),
        ("\u2028", [13]),
        ("logprobs", []),  # the name of a field
        ("questions.jsonl:1", list(range(13, -1, -1))),
    ],
)
def test_search(recorded, text, expected):
    assert numbers(reader_of(recorded[0]), text=text) == expected


def test_search_goes_on_where_a_request_ends(recorded, monkeypatch):
    monkeypatch.setattr(rollouts, "SEARCH_SECONDS", -1.0)  # a request looks at one line
    reader, found, place = reader_of(recorded[0]), [], 0
    while place is not None:
        page = reader.page(Filter(text="text 2-1"), place, 50)
        found += [one["number"] for one in page["rows"]]
        assert page["next"] is None or page["next"] == place + 1
        place = page["next"]
    assert found == [10, 7]


def test_what_is_escaped_is_found():
    for text in ('a"b', "tab\t", "back\\slash", "\u2028", "\x9f", "\ud800", "é"):
        assert escaped(text) in as_line({"text": f"x{text}y"}).encode("utf-8", "backslashreplace")


def test_the_index_follows_a_run_that_is_written_and_resumed(tmp_path):
    folder, cache = make_run(tmp_path / "run"), tmp_path / "cache"
    writer = RolloutWriter(folder, 0)
    for step in (1, 2, 3):
        writer.add([made(step, group=step), made(step, group=step)], step)
    writer.close()
    reader = reader_of(folder, cache)
    assert indexed(reader)["step"].tolist() == [1, 1, 2, 2, 3, 3]
    earlier = reader.index.records
    again = RolloutWriter(folder, 1)  # the lines after step 1 are cut off
    again.add([made(9, group=7)] * 4, 2)
    again.close()
    assert indexed(reader)["step"].tolist() == [1, 1, 2, 2, 2, 2]
    assert earlier["step"].tolist() == [1, 1, 2, 2, 3, 3]  # what another request still uses does not change
    file = folder / "rollouts.jsonl"
    with file.open("ab") as stream:
        stream.write(b'{"step": 4, "incomplete')
    assert len(indexed(reader)) == 6
    file.unlink()
    indexed(reader)
    assert reader.index.progress()["error"]


def test_a_stored_index_is_used_and_checked(tmp_path, monkeypatch):
    folder, cache = make_run(tmp_path / "run", rows=[row(step=n) for n in range(1, 9)]), tmp_path / "cache"
    first = reader_of(folder, cache)
    indexed(first)
    first.index.store.file.close()
    with monkeypatch.context() as patch:
        patch.setattr(rollout_index, "record_of", lambda *_: pytest.fail("every line is known"))
        second = reader_of(folder, cache)
        assert indexed(second)["step"].tolist() == list(range(1, 9))
    third = reader_of(folder, cache)  # while the second holds the file: it reads and does not write
    assert len(indexed(third)) == 8 and third.index.store.file is None
    second.index.store.file.close()
    changed = [row(step=n) for n in (1, 2, 3)] + [row(step=n, text="another") for n in (4, 5, 6, 7, 8, 9)]
    (folder / "rollouts.jsonl").write_bytes(lines(changed))
    fourth = reader_of(folder, cache)
    assert indexed(fourth)["step"].tolist() == list(range(1, 10))
    assert fourth.page(Filter(step=5), 0, 1)["rows"][0]["text"] == "another"
    fourth.index.store.file.close()
    (file,) = cache.iterdir()
    file.write_bytes(b"damaged")
    assert indexed(reader_of(folder, cache))["step"].tolist() == list(range(1, 10))


def test_unreadable_lines_are_shown_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 5000)
    monkeypatch.setattr(rollout_index, "MAX_LINE_BYTES", 5000)
    content = [lines([row()]), b"not JSON\n", b"[" * 2000 + b"\n", b"[1]\n", b'{"step": ' + b"9" * 500 + b"}\n"]
    content += [lines([row(text="x" * 6000)]), lines([row(step=2)])]
    folder = make_run(tmp_path / "run", rows=[row()])
    (folder / "rollouts.jsonl").write_bytes(b"".join(content))
    found = reader_of(folder).page(Filter(order="oldest"), 0, 50)
    assert [one.get("unreadable", False) for one in found["rows"]] == [False, *[True] * 5, False]
    assert found["statistics"]["unreadable"] == 5
    assert reader_of(folder).completion(5) == {"number": 5, "unreadable": True}


def test_rows_of_wrong_types_do_no_harm(tmp_path):
    wrong = ["x", None, 5, [], {}, float("inf"), True, 10**300]
    changes = [{name: value} for name in row() if name != "step" for value in wrong]
    rows = [row(group=number) | change for number, change in enumerate(changes)]
    reader = reader_of(make_run(tmp_path / "run", rows=rows))
    assert reader.page(Filter(text="four"), 0, 200)["rows"]
    for number in range(len(rows)):
        json.dumps([reader.completion(number), reader.group(number)], allow_nan=False)


def test_a_group_is_shown_with_neighbours_and_tokens(recorded):
    reader = reader_of(recorded[0])
    group = reader.group(4)
    assert [one["number"] for one in group["completions"]] == [3, 4, 5]
    assert group["neighbours"] == {"before": 2, "after": 6} and (group["step"], group["group"]) == (1, 11)
    tokens = group["completions"][0]["tokens"]
    assert tokens["mask"] == "001111" and tokens["streams"]["logprobs"] == [-0.5] * 4 and tokens["texts"] is None
    assert group["completions"][0]["advantage"] == 0.25
    assert reader.group(99) is None and reader.completion(99) is None


def test_ratio_and_divergence_are_computed_where_recorded(tmp_path):
    one = row(tokens=2, logprobs=[-1.0, -2.0], old_logprobs=[-1.0, -1.0], ref_logprobs=[-1.5, -2.0], entropy=[1.0, 2.0])
    streams_found = reader_of(make_run(tmp_path / "run", rows=[one])).completion(0)["tokens"]["streams"]
    assert streams_found["ratio"] == [1.0, pytest.approx(2.71828)]
    assert streams_found["logprobs - ref_logprobs"] == [0.5, 0.0] and streams_found["entropy"] == [1.0, 2.0]


def test_conversations_with_tool_calls(tmp_path):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "find", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "name": "find", "content": "sunny"},
        {"role": "assistant", "reasoning_content": "hm", "content": "It is sunny."},
        "odd",
    ]
    reader = reader_of(make_run(tmp_path / "run", rows=[row(turns=2, messages=messages)]))
    found = reader.completion(0)
    assert found["whole"] and [message["role"] for message in found["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "?",
    ]
    assert found["messages"][0]["content"] == "weather?"
    assert found["messages"][1]["tool_calls"] == [{"name": "find", "arguments": '{"city": "Rome"}'}]
    assert numbers(reader, text="Rome") == [0]


def test_texts_of_tokens_make_up_the_completion(tmp_path):
    """Against the tokenizer itself: the pieces, put together, are what it decodes."""
    folder = make_run(tmp_path / "run", rows=[row()])
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "checkpoints/step-00000001/model")
    ids = tokenizer("Grüße, 27+48=75 \N{GRINNING FACE}", add_special_tokens=False)["input_ids"]
    texts = token_texts(run_of(folder)).texts([1, *ids, 6])
    assert "".join(texts) == tokenizer.decode([1, *ids, 6]) and len(texts) == len(ids) + 2
    assert token_texts(run_of(folder)).texts([10**9]) == ["<1000000000>"]


def test_texts_of_sentencepiece_and_of_damaged_tokenizers(tmp_path):
    words = {"\u2581Hello": 0, "<0xC3>": 1, "<0xA9>": 2, "</s>": 3}
    assert TokenPieces({"model": {"vocab": words}}).texts([0, 1, 2, 3, 4]) == [" Hello", "", "é", "</s>", "<4>"]
    unigram = {"model": {"vocab": [["<unk>", 0], ["\u2581a", -1.5], "odd"]}}
    assert TokenPieces(unigram).texts([1, 2]) == [" a", "<2>"]
    for odd in ({}, {"model": 5}, {"model": {"vocab": {"a": "b"}}, "added_tokens": [5, {"id": "x"}]}):
        assert TokenPieces(odd).texts([0]) == ["<0>"]
    folder = make_run(tmp_path / "run", rows=[row()])
    (folder / "checkpoints/step-00000001/model").mkdir(parents=True)
    (folder / "checkpoints/step-00000001/model/tokenizer.json").write_text("[" * 100_000)
    assert token_texts(run_of(folder)) is None


def test_two_runs_are_compared_on_the_same_prompts(tmp_path):
    a = [row(step=s, asked=f"{n}+1=", reward=float(n)) for s in (1, 2) for n in range(4)]
    b = [row(step=1, asked=f"{n}+1=", reward=1.0) for n in range(2, 6)] + [row(asked="2+1=", failure="x")]
    one, two = (reader_of(make_run(tmp_path / name, rows=rows)) for name, rows in (("a", a), ("b", b)))
    found = shared_prompts([one, two])
    assert found["shared"] == 2 and [prompt["text"] for prompt in found["prompts"]] == ["3+1=", "2+1="]
    assert found["prompts"][1]["runs"] == [{"count": 2, "reward": 2.0}, {"count": 1, "reward": 1.0}]
    prompt = int(found["prompts"][0]["prompt"])
    assert [c["step"] for c in one.of_prompt(prompt, 8)] == [2, 1] and len(two.of_prompt(prompt, 8)) == 1


def test_a_long_text_is_cut_with_its_length(tmp_path):
    reader = reader_of(make_run(tmp_path / "run", rows=[row(text="<script>" * 400_000)]))
    assert (
        (shown := reader.completion(0)) and len(shown["text"]) == rollouts.LONG_TEXT and shown["letters"] == 3_200_000
    )
    assert len(reader.page(Filter(), 0, 1)["rows"][0]["text"]) == rollouts.SHORT_TEXT


def test_index_file_of_another_layout_is_replaced(tmp_path):
    folder = make_run(tmp_path / "run", rows=[row()])
    index = RolloutIndex(run_of(folder), tmp_path / "cache")
    index.store.path.parent.mkdir()
    index.store.path.write_bytes(b"posttrain board index 0\n" + b"x" * 999)
    assert len(index.refresh(None)) == 1
    index.store.file.close()
    assert len(RolloutIndex(run_of(folder), tmp_path / "cache").refresh(None)) == 1
