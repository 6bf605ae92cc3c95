"""Near-duplicates: planted ones are found, others are not, and groups do not depend on the order of comparisons."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.data.curation import near_duplicates
from posttrain.data.curation.near_duplicates import Groups, NearDuplicates, equal_band, rows_per_band
from posttrain.data.curation.words import NgramHasher, words_of
from tests.unit.data.curation.made import changed, seeded, sentence


def groups_of(texts, threshold=0.8):
    found = NearDuplicates(threshold)
    for text in texts:
        found.add(text)
    return found.groups().roots().tolist()


def grams(text):
    words = words_of(text)
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def jaccard(one, other):
    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


def test_planted_duplicates_are_found_and_nothing_else():
    """Recall is 1 on 200 copies with a similarity above 0.9; none of 600 other texts is reported."""
    rng = seeded(0)
    texts, near, far = [], [], []
    while len(near) < 200 or len(far) < 200:
        texts.append(sentence(rng, 150))
        texts.append(changed(rng, texts[-1], rng.choice([1, 2, 8, 9])))
        similarity = jaccard(texts[-2], texts[-1])
        if similarity > 0.9:
            near.append(len(texts) - 1)
        elif similarity < 0.7:
            far.append(len(texts) - 1)
    groups = groups_of(texts)
    assert all(groups[place] == place - 1 for place in near)
    assert all(groups[place] == place for place in far)
    assert all(groups[place] == place for place in range(0, len(texts), 2))  # these are unrelated


def test_case_punctuation_and_spaces_do_not_count_but_numbers_and_signs_do():
    text = "Ann has 7 apples, and Ben has 8. How many do they have together?"
    assert groups_of([text, text.upper().replace(",", "\n")]) == [0, 0]
    assert groups_of([text, text.replace("7", "9")]) == [0, 1]
    assert groups_of(["12+34=", "12-34=", "12+34 ="]) == [0, 1, 0]
    assert groups_of(["\u2603", "\u2604", "\u2603"]) == [0, 1, 0]  # no words at all


def test_texts_without_spaces_are_compared_by_characters():
    text = "小明有七个苹果,小红有八个苹果,他们一共有多少个苹果?请写出计算过程和答案,并解释每一步的理由。" * 2
    assert len(words_of(text)) > 50
    assert groups_of([text, text.replace(",", " ", 1), text[::-1]]) == [0, 0, 2]


def test_chains_are_one_group_named_by_the_first():
    rng = seeded(1)
    chain = [sentence(rng, 300)]
    for _ in range(30):
        chain.append(changed(rng, chain[-1], 3))
    assert groups_of([sentence(rng, 300), *chain, sentence(rng, 300)]) == [0, *[1] * 31, 32]


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_the_size_of_parts_changes_nothing(monkeypatch, at_once):
    rng = seeded(2)
    base = [sentence(rng, 60) for _ in range(10)]
    texts = [changed(rng, rng.choice(base), rng.randrange(3)) for _ in range(80)]
    expected = groups_of(texts)
    assert 10 <= len(set(expected)) < 60
    monkeypatch.setattr(near_duplicates, "TEXTS_AT_ONCE", at_once)
    monkeypatch.setattr(near_duplicates, "PAIRS_AT_ONCE", at_once)
    assert groups_of(texts) == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
def test_groups_are_the_connected_components(pairs):
    groups, expected = Groups(20), [{number} for number in range(20)]
    for a, b in pairs:
        groups.join(a, b)
        union = expected[a] | expected[b]
        for member in union:
            expected[member] = union
    assert groups.roots().tolist() == [min(group) for group in expected]


def test_all_pairs_with_an_equal_band_are_compared():
    """Against every pair compared: the same groups, also where many texts have equal bands."""
    rng = seeded(3)
    base = sentence(rng, 40)
    texts = [changed(rng, base, rng.randrange(6)) for _ in range(120)]
    found = NearDuplicates(0.6)
    for text in texts:
        found.add(text)
    found._sign()
    signatures, bands = np.concatenate(found.signatures), np.concatenate(found.bands)
    slow = Groups(len(texts))
    for a in range(len(texts)):
        for b in range(a):
            if (bands[a] == bands[b]).any() and (signatures[a] == signatures[b]).mean() >= 0.6:
                slow.join(a, b)
    assert found.groups().roots().tolist() == slow.roots().tolist()
    assert len(set(slow.roots().tolist())) > 1


def test_bands_find_pairs_at_the_threshold():
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        assert equal_band(threshold, rows_per_band(threshold)) >= 0.99
    for wrong in (0.0, 0.2, 1.1):
        with pytest.raises(UsageError, match="similarity is"):
            NearDuplicates(wrong)
    assert NearDuplicates(0.8).groups().roots().tolist() == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=8), min_size=1, max_size=6), st.integers(1, 5))
def test_hashes_of_many_texts_are_those_of_each_alone(texts, size):
    hasher = NgramHasher(size)
    hashes, starts = hasher.hash(texts)
    parts = [part.tolist() for part in np.split(hashes, starts[1:])]
    assert parts == [NgramHasher(size).hash([words])[0].tolist() for words in texts]
    assert [len(part) for part in parts] == [max(1, len(words) - size + 1) for words in texts]
    for words, part in zip(texts, parts, strict=True):
        if len(words) >= size:
            same = {tuple(words[at : at + size]): value for at, value in enumerate(part)}
            assert len(set(part)) == len(same) == len({tuple(words[at : at + size]) for at in range(len(part))})
