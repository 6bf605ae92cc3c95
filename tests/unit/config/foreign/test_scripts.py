"""Shell scripts are read without running them: conditions, arguments, sourced files, joined commands."""

from pathlib import Path

import pytest

from posttrain.config.foreign.scripts import condition_holds, script_commands


def commands(text, *arguments, script=None):
    return [list(words) for words in script_commands(text, "x.sh", script or Path("x.sh"), arguments)]


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ('if [ -z "$1" ]; then\n  c=a\nelse\n  c=$1\nfi\nrun $c', (), ["run", "a"]),
        ('if [ -z "$1" ]; then\n  c=a\nelse\n  c=$1\nfi\nrun $c', ("b",), ["run", "b"]),
        ("d=a\nrun ${1:-$d}", (), ["run", "a"]),
        ("iter=0\nm=a\nif ((iter > 0)); then m=b; fi\nrun $m", (), ["run", "a"]),
        ("iter=1\nm=a\nif ((iter > 0)); then m=b; fi\nrun $m", (), ["run", "b"]),
        ('if [[ ${1} != "slurm" ]]; then run a; else run b; fi', ("slurm",), ["run", "b"]),
    ],
)
def test_a_condition_that_is_known_is_decided(text, arguments, expected):
    assert commands(text, *arguments) == [expected]


def test_both_branches_are_read_where_a_condition_is_not_known():
    assert commands('if [ "$STATUS" == up ]; then run a; else run b; fi') == [["run", "a"], ["run", "b"]]
    assert condition_holds("[ -s file ]", {}) is None


def test_commands_that_are_joined_are_separate():
    assert commands("cd x && run a 2>&1 | tee log || run b > out") == [["cd", "x"], ["run", "a"], ["run", "b"]]


def test_the_rounds_of_a_loop_are_known():
    [first, second] = script_commands("n=3\nwhile (($i < $n)); do\n run a\ndone\nrun b", "x.sh")
    assert (first.rounds, second.rounds) == (3, 0)


def test_a_script_knows_its_folder_and_sources_others(tmp_path):
    (tmp_path / "inner.sh").write_text('words="a b"\nif [ "$1" == quiet ]; then :; else run inner; fi\n')
    outer = 'HERE=$(cd "$(dirname "$0")" && pwd)\nsource inner.sh quiet\nrun $words "$HERE"\n'
    found = commands(outer, script=tmp_path / "outer.sh")
    assert found[-1] == ["run", "a", "b", str(tmp_path)] and ["run", "inner"] not in found
