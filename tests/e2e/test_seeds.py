"""docs/seeds.md is what its script writes, has every feature, and names tests that exist."""

import shlex
from pathlib import Path

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.config.verbs import PIPELINES, TOOLS
from tests.e2e.seeds import FEATURES, SETUP, page

COUNTS = {"A": 35, "B": 34, "C": 37, "D": 32}  # and C21b


def test_the_page_is_what_the_script_writes():
    assert Path("docs/seeds.md").read_text(encoding="utf-8") == page(), "run make docs"


def test_no_row_is_missing():
    expected = [f"{letter}{n:02d}" for letter, count in COUNTS.items() for n in range(1, count + 1)]
    assert sorted(FEATURES) == sorted([*expected, "C21b"]) and len(FEATURES) == 139


@pytest.mark.parametrize("key", FEATURES)
def test_each_row_has_a_command_and_a_test(key):
    entry = FEATURES[key]
    assert entry.keys() <= {"feature", "run", "do", "test", "partly"} and ("run" in entry) != ("do" in entry)
    assert Path(entry["test"]).is_file()
    if "run" in entry:
        program, verb, *_ = shlex.split(entry["run"])
        assert program == "posttrain" and verb in {*ALGORITHMS, *PIPELINES, *TOOLS}


def test_what_the_commands_name_is_made_first():
    assert {text.split("--output_dir ")[1] for text in SETUP if "--output_dir" in text} == {
        "runs/sft",
        "runs/rm",
        "runs/grpo",
    }
