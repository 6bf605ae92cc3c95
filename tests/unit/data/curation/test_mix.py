"""Mixtures: counts, order and formats of what is written."""

import json
import re
import resource
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.disk import DiskFullError
from posttrain.core.errors import DataError, UsageError
from posttrain.data.curation.formats import PLACEHOLDER, kind_of, normalised_row
from posttrain.data.curation.mix import MixConfig, MixedSource, mix, order_of
from posttrain.data.reading.examples import SegmentsExample
from posttrain.data.reading.formats import FORMATS, SourceFormat
from posttrain.data.reading.records import Record
from tests.unit.data.curation.made import chat, read, write

DOCUMENTED = (Path(__file__).parents[4] / "docs/data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```json\n(.*?)^```$", DOCUMENTED, re.MULTILINE | re.DOTALL)
EXAMPLES = [json.loads(line) for block in BLOCKS for line in block.splitlines()]
ALPACA = {"instruction": "Add.", "input": "7 and 8", "output": "15", "source": "a book"}


def files(tmp_path, *sizes):
    return [
        write(tmp_path / f"{number}.jsonl", [chat(f"{number}/{row}", "yes", id=row) for row in range(size)])
        for number, size in enumerate(sizes)
    ]


def prompts(path):
    return [row["messages"][0]["content"] for row in read(path)]


def test_everything_once_in_an_order_of_the_seed(tmp_path):
    names, out = files(tmp_path, 5, 3), tmp_path / "out" / "mixed.jsonl"
    assert mix(names, out, MixConfig()) == [MixedSource(names[0], 5, 5), MixedSource(names[1], 3, 3)]
    first = prompts(out)
    assert sorted(first) == [f"0/{n}" for n in range(5)] + [f"1/{n}" for n in range(3)]
    assert first != sorted(first) and read(out)[0].keys() == {"messages", "id"}
    mix(names, out, MixConfig())
    assert prompts(out) == first
    mix(names, out, MixConfig(seed=1))
    assert prompts(out) != first and sorted(prompts(out)) == sorted(first)
    mix(names, out, MixConfig(shuffle=False))
    assert prompts(out) == sorted(first)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10), st.integers(0, 50)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 5),
)
def test_weights_limits_and_no_example_twice(sources, repeat, seed):
    sizes, weights, limits = (list(column) for column in zip(*sources, strict=True))
    config = MixConfig(weights=weights, max_examples=limits, repeat=repeat, seed=seed)
    order = order_of(sizes, config)
    assert order == order_of(sizes, config)
    used = [min(size, limit or size) for size, limit in zip(sizes, limits, strict=True)]
    edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    for number, count in enumerate(used):
        mine = [row for row in order if edges[number] <= row < edges[number + 1]]
        times = Counter(mine)
        assert len(times) <= count and max(times.values(), default=0) <= (1 if not repeat else 10**9)
        if repeat:
            assert len(times) == count and max(times.values()) - min(times.values()) <= 1
        share = len(mine) / len(order) - weights[number] / sum(weights)
        assert abs(share) <= len(sizes) / len(order) + 1e-9


def test_limits_are_drawn_at_random_and_totals_are_kept(tmp_path):
    names, out = files(tmp_path, 100, 100), tmp_path / "mixed.jsonl"
    found = mix(names, out, MixConfig(max_examples=[10, 0], total_examples=50))
    assert sum(source.written for source in found) == len(read(out)) == 50 and found[0].written <= 10
    mix(names, out, MixConfig(max_examples=[10]))
    assert Counter(prompt[0] for prompt in prompts(out)) == {"0": 10, "1": 10}
    assert set(prompts(out)) != {f"{number}/{row}" for number in (0, 1) for row in range(10)}
    with pytest.raises(UsageError, match=r"there are only 200$"):
        mix(names, out, MixConfig(total_examples=201))
    with pytest.raises(UsageError, match="add --repeat"):
        mix(names, out, MixConfig(weights=[1, 1], total_examples=201))


def test_different_formats_are_refused_or_normalised(tmp_path):
    names = [*files(tmp_path, 1), write(tmp_path / "alpaca.jsonl", [ALPACA])]
    out = tmp_path / "mixed.jsonl"
    with pytest.raises(UsageError, match=r"0.jsonl is chat: messages; .*alpaca.jsonl is Alpaca: .*--normalize"):
        mix(names, out, MixConfig())
    assert not out.exists() and not list(tmp_path.glob(".tmp*"))
    mix(names, out, MixConfig(normalize=True, shuffle=False))
    assert [list(row) for row in read(out)] == [["messages"], ["messages"]]
    assert read(out)[1] == chat("Add.\n7 and 8", "15")
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3"}])
    with pytest.raises(DataError, match="no kind of example in common"):
        mix([*names, pairs], out, MixConfig(normalize=True))
    with pytest.raises(DataError, match="gives no examples of the kind 'chat'"):
        mix([*names, pairs], out, MixConfig(normalize=True, kind="chat"))


def test_messages_that_end_with_the_user_are_prompts(tmp_path):
    name, out = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "1+1="}]}]), tmp_path / "b.jsonl"
    mix([name], out, MixConfig(normalize=True))
    assert read(out) == [{"prompt": [{"role": "user", "content": "1+1="}]}]


def test_renamed_columns_have_their_new_names_in_the_file(tmp_path):
    name, out = write(tmp_path / "a.jsonl", [{"q": "1+1=", "a": "2", "id": 7}]), tmp_path / "mixed.jsonl"
    mix([name], out, MixConfig(map_keys={"prompt": "q", "completion": "a"}))
    assert read(out)[0]["prompt"] == "1+1=" and read(out)[0]["completion"] == "2"


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda values: ",".join(values))
def test_a_normalised_example_is_read_as_the_same_example(values):
    """For every example of the documentation and every kind that it gives."""
    for kind in {form.kind for form in FORMATS if form.matches(values)}:
        form = SourceFormat(kind, PLACEHOLDER)
        try:
            examples = form.examples(Record(values, "a.jsonl:1"))
        except DataError:  # another kind is meant, or the documentation shows a record that is refused
            continue
        for example in examples:
            untemplated = isinstance(example, SegmentsExample) or getattr(example, "raw", False)
            if untemplated or (kind == "stepwise" and not example.prompt):
                with pytest.raises(DataError, match=r"a.jsonl:1: cannot be normalised"):
                    normalised_row(example)
            else:
                normalised_row(example)  # raises if anything changes
            assert kind_of(example) == kind


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path):
    names, out = files(tmp_path, 200), tmp_path / "mixed.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(DiskFullError, match=r"mixed.jsonl: cannot be written: .* Free some space"):
            mix(names, out, MixConfig())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]


def test_wrong_use(tmp_path):
    names, out = files(tmp_path, 2, 2), tmp_path / "mixed.jsonl"
    for config, words in (
        (MixConfig(weights=[1]), "weights has 1 values for 2 files"),
        (MixConfig(weights=[1, 0]), "must be above 0"),
        (MixConfig(max_examples=[1, 2, 3]), "max_examples has 3 values"),
        (MixConfig(repeat=True), "repeat needs weights"),
    ):
        with pytest.raises(UsageError, match=words):
            mix(names, out, config)
    with pytest.raises(UsageError, match="both read and written"):
        mix([str(tmp_path)], tmp_path / "1.jsonl", MixConfig())
    bad = write(tmp_path / "bad.jsonl", [chat("1", "2"), {"messages": []}])
    with pytest.raises(DataError, match=r"bad.jsonl:2: messages: empty list"):
        mix([bad], out, MixConfig())
    assert not out.exists()
