"""docs/commands.md says what the code says."""

from pathlib import Path

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.algorithms.cpo import CPO
from posttrain.algorithms.simpo import SimPO
from posttrain.cli.reference import commands_page, escaped
from posttrain.config.help import default_of, field_docs, type_name
from posttrain.config.parsing import option_keys
from posttrain.config.sections import with_algorithm
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.pipelines.settings import pipeline_defaults

PAGE = Path(__file__).parents[3] / "docs/commands.md"


def test_the_page_is_up_to_date():
    assert commands_page() == PAGE.read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_every_option_is_there_with_a_meaning(verb):
    lines = commands_page().splitlines()
    section = lines[lines.index(f"## {verb}") :]
    algorithm = ALGORITHMS[verb]
    for key in option_keys(with_algorithm(algorithm)):
        place = section if key.startswith("algo.") else lines
        (row, *_) = [line for line in place if line.startswith(f"| `--{key}` |")]
        assert len(row.split("|")[4].strip()) > 10, row


@pytest.mark.parametrize("verb", PIPELINES)
def test_every_option_of_pipelines_is_there(verb):
    lines = commands_page().splitlines()
    for key in option_keys(pipeline_defaults(verb)):
        assert any(line.startswith(f"| `--{key}` |") for line in lines), key


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_its_usage(tool):
    assert f"usage: posttrain {tool}" in commands_page()


def test_the_terminal_does_not_change_the_page(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert commands_page() == PAGE.read_text(encoding="utf-8")


def test_a_subclass_may_say_it_otherwise():
    assert "cpo_alpha" in field_docs(CPO.Config)["sft_coef"]
    assert "cpo_alpha" not in field_docs(SimPO.Config)["sft_coef"]
    assert field_docs(SimPO.Config)["label_smoothing"] == field_docs(CPO.Config)["label_smoothing"]


def test_types_and_defaults_read_well():
    assert type_name(tuple[float, ...]) == "numbers" and type_name(tuple[str, ...]) == "texts"
    assert type_name(int | None) == "integer or `None`"
    assert default_of(1e-05) == "`1e-5`" and default_of(()) == ""
    assert default_of(True) == "on" and default_of(("+", "-")) == "`+ -`"
    assert escaped("runs/<verb>, a|b, `a<b`") == "runs/&lt;verb>, a\\|b, `a<b`"
