"""What is found out about files before training."""

import json
from itertools import pairwise

import pytest

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.data import check as checks
from posttrain.data.check import RenderedSpan, check_source, length_bins, shortened_text
from posttrain.data.dataset import load_dataset
from posttrain.data.encoding.encoder import Encoder
from tests.unit.data.made import byte_level

CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "there"}]}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def maker(**options):
    tokenizer = byte_level()
    return lambda kind: Encoder(tokenizer, DataConfig(**options), kind, len(tokenizer))


def write(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_format_counts_and_trainers(tmp_path):
    report = check_source(write(tmp_path, [PAIR, PAIR, {**PAIR, "id": 7}, {**PAIR, "prompt": "r"}]), maker())
    (verdict, verbs) = report.descriptions[0]
    assert verdict == "preference: prompt, chosen, rejected" and {"dpo", "kto"} <= set(verbs)
    assert (report.kind, report.examples, report.bad, report.duplicates) == ("pair", 4, 0, 2)
    assert len(report.lengths) == 8 and report.encoded == 4
    assert check_source(write(tmp_path, [PAIR]), maker(), "labelled").kind == "labelled"


def test_rows_are_shown_as_the_model_sees_them(tmp_path):
    report = check_source(write(tmp_path, [CHAT] * 5), maker())
    assert [origin.rpartition(":")[2] for origin, _ in report.shown] == ["1", "2", "3"]
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert report.shown[0][1] == [[RenderedSpan(prompt, False), RenderedSpan("there<|im_end|>", True)]]


def test_half_a_character_is_shown_whole(tmp_path):
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]}
    ((_, [pieces]),) = check_source(write(tmp_path, [row]), maker()).shown
    assert "".join(piece.text for piece in pieces).endswith("aкиbки") and "\ufffd" not in str(pieces)
    assert sum(piece.trained for piece in pieces) == 2


def test_all_problems_are_counted_and_the_first_listed(tmp_path):
    rows = [CHAT, *[{"messages": []}] * 30, '{"messages": \n', {**CHAT, "messages": None}]
    file = write(tmp_path, rows)
    report = check_source(file, maker())
    assert (report.examples, report.bad, len(report.problems)) == (33, 32, 20)
    assert report.problems[0] == f"{file}:2: messages: empty list"


def test_a_first_row_that_cannot_be_read_decides_nothing(tmp_path):
    report = check_source(write(tmp_path, ["{broken\n", {**CHAT, "messages": []}, CHAT]), maker())
    assert report.kind == "chat" and report.bad == 2 and report.encoded == 1


def test_unknown_columns_are_reported_once_with_near_formats_and_a_map(tmp_path):
    file = write(tmp_path, [{"Passage": "p", "Reply": "r", "completion_id": 3}] * 50)
    report = check_source(file, maker())
    assert report.kind is None and report.descriptions == [] and report.bad == 1
    [problem] = report.problems
    assert problem.startswith(
        f"{file}:1: no known format has the columns Passage, Reply, completion_id. Map the columns to"
    )
    report = check_source(write(tmp_path, [{"Query": "q", "Reply": "r"}] * 50), maker(), "chat")
    assert report.problems == [
        f"{file}:1: no known format has the columns Query, Reply. If these columns are meant, map them: "
        '--data.map_keys \'{"prompt": "Query", "completion": "Reply"}\'. docs/data.md lists all formats.'
    ]
    with pytest.raises(DataError) as caught:
        load_dataset([file], maker()("chat"))
    assert str(caught.value) == report.problems[0]


def test_the_wrong_trainer_is_reported_once(tmp_path):
    report = check_source(write(tmp_path, [PAIR] * 50), maker(), "chat")
    [problem] = report.problems
    assert "the format is preference: prompt, chosen, rejected, which is data for reward, dpo" in problem


def test_a_damaged_file_is_one_problem_more(tmp_path):
    file = write(tmp_path, ['prompt,completion\n1,2\n3,4\n"open,3\n'], "rows.csv")
    report = check_source(file, maker())
    assert (report.examples, report.encoded, report.bad) == (2, 2, 1) and "never closed" in report.problems[0]


def test_lengths_against_the_limit(tmp_path):
    long = [{"role": "user", "content": "Hello " * 90}, {"role": "assistant", "content": "there " * 150}]
    lost = [{"role": "user", "content": "Hello " * 500}, {"role": "assistant", "content": "there"}]
    file = write(tmp_path, [CHAT, {"messages": long}, {"messages": lost}])
    report = check_source(file, maker(max_length=200), limit=200)
    assert report.too_long == 2 and max(report.lengths) > 400
    assert report.bad == 1 and report.problems[0].startswith(f"{file}:3: no token of the completion")
    assert check_source(file, maker(max_length=200)).bad == 0  # the tokens are not those of the model
    assert check_source(file, maker(max_length=200, on_overlong="drop"), limit=200).bad == 0
    assert check_source(file, maker(max_length=200, on_overlong="error"), limit=200).bad == 2


def test_of_large_files_a_part_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "ENCODED_FIRST", 20)
    file = write(tmp_path, [CHAT] * 119 + [{"messages": None}])
    heard = []
    report = check_source(file, maker(), progress=heard.append)
    assert (report.examples, report.encoded, report.bad, report.duplicates) == (120, 20 + 10, 1, 118) and heard == [120]
    assert check_source(file, maker(), full=True).encoded == 119


def test_prompts_without_answers(tmp_path):
    report = check_source(write(tmp_path, [{"prompt": "What is 2 + 2?", "target": 4}] * 2), maker())
    assert report.kind == "prompt" and report.encoded == 2 and report.bad == 0
    assert report.shown[0][1][0][-1].text.endswith("assistant\n") and not report.shown[0][1][0][-1].trained


@pytest.mark.parametrize("limit", [None, 50, 64, 5000])
def test_histogram(limit):
    lengths = [40, 60, 64, 65, 100, 1000]
    bins = length_bins(lengths, limit)
    assert sum(count for _, _, count in bins) == 6 and bins[-1][1] == 1000
    assert all(after[0] == before[1] + 1 for before, after in pairwise(bins))
    if limit == 50:
        assert [(low, high, count) for low, high, count in bins][:2] == [(33, 50, 1), (51, 64, 2)]
    assert length_bins([], limit) == [] and length_bins([1], limit)[0][2] == 1


def test_nothing_shown_can_steer_a_terminal():
    assert shortened_text("a\x1b[31mb\tc\n") == "a\\x1b[31mb\tc\n"
    assert len(shortened_text("x" * 10_000)) < 500 and "9,600 characters" in shortened_text("x" * 10_000)
