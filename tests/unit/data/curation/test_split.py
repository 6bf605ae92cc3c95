"""Splits: nothing leaks, the same seed gives the same files, and fractions are kept."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError, UsageError
from posttrain.data.curation.split import SplitConfig, assign, files_of, split
from tests.unit.data.curation.made import changed, chat, read, seeded, sentence, write


def run(name, folder, overwrite=True, **options):
    config = SplitConfig(**options)
    return split([name], files_of(folder, config, overwrite), config)


def rows(rng, count):
    """Conversations of which some have one prompt, and some are near-duplicates; `family` names the original."""
    found = []
    for family in range(count):
        prompt, completion = sentence(rng, 120), sentence(rng, 120)
        found.append(chat(prompt, completion, family=family))
        if family % 3 == 0:
            found += [chat(prompt.upper(), sentence(rng, 60), family=family) for _ in range(2)]
        if family % 3 == 1:
            found.append(chat(changed(rng, prompt, 1), changed(rng, completion, 1), family=family))
    rng.shuffle(found)
    return found


def test_nothing_leaks_and_everything_is_kept(tmp_path):
    data = rows(seeded(0), 300)
    name = write(tmp_path / "rows.jsonl", data)
    report = run(name, tmp_path / "split", eval_fraction=0.1, test_examples=50)
    parts = {part: read(path) for part, path in report.files.items()}
    assert list(parts) == ["train", "eval", "test"]
    assert {part: len(found) for part, found in parts.items()} == report.examples
    assert report.examples["eval"] == round(0.1 * len(data)) and report.examples["test"] == 50
    assert report.groups == 300 and report.largest_group == 3
    families = [{row["family"] for row in found} for found in parts.values()]
    assert not families[0] & families[1] and not families[0] & families[2] and not families[1] & families[2]
    # Every row is there once, unchanged, in its order.
    places = {json.dumps(row): number for number, row in enumerate(data)}
    found = [[places[json.dumps(row)] for row in part] for part in parts.values()]
    assert sorted(chain(*found)) == list(range(len(data))) and all(part == sorted(part) for part in found)


def test_without_near_duplicates_only_prompts_stay_together(tmp_path):
    data = rows(seeded(1), 300)
    name = write(tmp_path / "rows.jsonl", data)
    report = run(name, tmp_path, eval_fraction=0.5, near_duplicates=False)
    assert report.groups == 400 and report.largest_group == 3
    families = [{row["family"] for row in read(path)} for path in report.files.values()]
    assert {family % 3 for family in families[0] & families[1]} == {1}


def test_the_seed_decides_and_nothing_else(tmp_path):
    name = write(tmp_path / "rows.jsonl", rows(seeded(2), 60))
    texts = []
    for seed in (0, 0, 1):
        report = run(name, tmp_path / "split", eval_fraction=0.2, seed=seed)
        texts.append([path.read_text() for path in report.files.values()])
    assert texts[0] == texts[1] != texts[2]


def test_other_kinds_of_examples(tmp_path):
    pairs = [{"prompt": f"{number % 10}+1=", "chosen": f"{number}", "rejected": "x"} for number in range(100)]
    report = run(write(tmp_path / "pairs.jsonl", pairs), tmp_path / "a", eval_fraction=0.2)
    prompts = [{row["prompt"] for row in read(path)} for path in report.files.values()]
    assert report.examples == {"train": 80, "eval": 20} and not prompts[0] & prompts[1]
    texts = [{"text": f"{number // 2}"} for number in range(20)]
    report = run(write(tmp_path / "texts.jsonl", texts), tmp_path / "b", test_examples=4)
    assert report.examples == {"train": 16, "test": 4} and report.groups == 10


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=30, max_size=80),
    st.floats(0.05, 0.4),
    st.integers(0, 10),
    st.integers(0, 3),
)
def test_groups_are_whole_and_sizes_are_met(sizes, fraction, examples, seed):
    roots = np.repeat(np.arange(len(sizes)), sizes)
    config = SplitConfig(eval_fraction=fraction, test_examples=examples, seed=seed)
    try:
        parts = assign(roots, config)
    except DataError:  # a wanted size below that of most groups
        wanted = config.sizes(len(roots))
        assert min(wanted.values()) < 10 * max(sizes)
        return
    for group in range(len(sizes)):
        assert len(set(parts[roots == group])) == 1
    for part, wanted in config.sizes(len(roots)).items():
        assert 0.9 * wanted <= (parts == part).sum() <= wanted
    assert (parts == assign(roots, config)).all()


def test_one_large_group_stays_in_the_training_file_or_is_refused(tmp_path):
    data = [*[chat("Tell me a joke.", f"{number}") for number in range(90)], *[chat(f"{n}?", "a") for n in range(10)]]
    name = write(tmp_path / "rows.jsonl", data)
    report = run(name, tmp_path / "split", eval_fraction=0.05)
    assert report.examples == {"train": 95, "eval": 5} and report.largest_group == 90
    with pytest.raises(DataError, match=r"only 10 of the 20 examples for eval .* 11 groups .* the largest of 90"):
        run(name, tmp_path / "more", eval_fraction=0.2)
    assert not list((tmp_path / "more").iterdir())


def test_wrong_use(tmp_path):
    name = write(tmp_path / "rows.jsonl", [chat(f"{n}", "a") for n in range(10)])
    for options, words in (
        ({}, "nothing is held out"),
        ({"eval_fraction": 1.0}, "eval_fraction is 1.0"),
        ({"test_examples": -1}, "test_examples is -1"),
        ({"eval_fraction": 0.1, "eval_examples": 1}, "are both set"),
        ({"eval_examples": 5, "test_examples": 5}, "none is left to train on"),
    ):
        with pytest.raises(UsageError, match=words):
            run(name, tmp_path / "split", **options)
    run(name, tmp_path / "split", eval_examples=2, test_examples=2)
    with pytest.raises(UsageError, match="already exists"):
        run(name, tmp_path / "split", overwrite=False, eval_examples=2)
    with pytest.raises(UsageError, match=r"test.jsonl is from another split"):
        run(name, tmp_path / "split", eval_examples=2)
    with pytest.raises(UsageError, match="both read and written"):
        run(str(tmp_path / "split" / "train.jsonl"), tmp_path / "split", eval_examples=1, test_examples=1)
