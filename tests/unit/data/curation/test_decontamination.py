"""Overlap with evaluation sets: planted rows are found, clean ones are not."""

import pytest

from posttrain.core.errors import UsageError
from posttrain.data.curation.decontamination import EvaluationSets
from posttrain.data.curation.words import Text
from tests.unit.data.curation.made import chat, seeded, sentence, write


def evaluation(tmp_path, rows, size=13, name="eval.jsonl"):
    return EvaluationSets([write(tmp_path / name, rows)], size)


def overlaps(sets, *texts):
    return sets.overlaps([(f"row {number}", [Text(*text)]) for number, text in enumerate(texts)])


def test_planted_questions_are_found_and_clean_rows_are_not(tmp_path):
    rng = seeded(0)
    questions = [sentence(rng, rng.randrange(13, 60)) for _ in range(200)]
    sets = evaluation(tmp_path, [{"question": text, "answer": "7"} for text in questions])
    around = [f"{sentence(rng, 20)} {text.upper()}! {sentence(rng, 20)}" for text in questions]
    clean = [sentence(rng, 100) for _ in range(2000)]
    found = overlaps(sets, *((text, False) for text in around), *((text, False) for text in clean))
    assert [overlap is not None for overlap in found] == [True] * 200 + [False] * 2000
    for number, overlap in enumerate(found[:200]):
        assert overlap.evaluation.endswith(f"eval.jsonl:{number + 1}") and overlap.words in questions[number]


def test_twelve_words_are_not_thirteen(tmp_path):
    words = sentence(seeded(1), 30).split()
    sets = evaluation(tmp_path, [{"question": " ".join(words)}])
    shared = [" ".join(["before", *words[5 : 5 + count], "after"]) for count in (12, 13)]
    assert [found is not None for found in overlaps(sets, *((text, False) for text in shared))] == [False, True]
    assert overlaps(evaluation(tmp_path, [{"question": " ".join(words)}], size=12), (shared[0], False))[0]


def test_short_prompts_must_be_equal_and_short_answers_do_not_count(tmp_path):
    sets = evaluation(tmp_path, [{"question": "How much is 7+8?", "answer": "15"}, chat("Bye  now", "Bye.")])
    cases = [("how much is 7+8?", True), ("How much is 7-8?", True), ("How much is 7+8? Think.", True)]
    cases += [("15", True), ("15", False), ("bye now", True), ("How much is 7+8?", False)]
    assert [found is not None for found in overlaps(sets, *cases)] == [True, *[False] * 4, True, False]


def test_all_columns_of_an_evaluation_set_count_except_system_prompts(tmp_path):
    rng = seeded(2)
    system, solution, option = (sentence(rng, 20) for _ in range(3))
    row = {"messages": [{"role": "system", "content": system}], "extra": {"solution": solution}, "choices": [option]}
    found = overlaps(evaluation(tmp_path, [row]), (system, False), (solution, False), (option, False))
    assert [overlap is not None for overlap in found] == [False, True, True]


def test_instructions_that_many_evaluation_examples_share_are_ignored(tmp_path):
    rng = seeded(3)
    instruction = sentence(rng, 20)
    questions = [sentence(rng, 15) for _ in range(12)]
    sets = evaluation(tmp_path, [{"question": f"{question} {instruction}"} for question in questions])
    assert overlaps(sets, (f"{sentence(rng, 5)} {instruction}", True)) == [None] and sets.ignored == 8
    assert overlaps(sets, (questions[3], True))[0] is not None


def test_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="at least 4"):
        evaluation(tmp_path, [{"question": "Hello"}], size=3)
    with pytest.raises(UsageError, match="no text of 13 words and no prompt"):
        evaluation(tmp_path, [{"id": "a"}])
    with pytest.raises(UsageError, match="no such file"):
        EvaluationSets([str(tmp_path / "missing.jsonl")], 13)
