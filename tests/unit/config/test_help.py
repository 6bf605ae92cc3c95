"""`posttrain VERB --help` shows what most users set; --help-all shows every option."""

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.doctor import DoctorArgs
from posttrain.cli.slurm import SlurmArgs
from posttrain.config.help import COMMON, help_text, options_of
from posttrain.config.parsing import about, option_keys
from posttrain.config.sections import with_algorithm


def texts(verb):
    start = with_algorithm(ALGORITHMS[verb])
    return [
        help_text(verb, about(verb, ALGORITHMS[verb]), start, everything=everything) for everything in (False, True)
    ]


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_short_help_is_short_and_full_help_is_full(verb):
    short, full = texts(verb)
    keys = option_keys(with_algorithm(ALGORITHMS[verb]))
    listed = [line.split()[0].removeprefix("--") for line in full.splitlines() if line.startswith("  --")]
    assert sorted(listed) == sorted(keys)
    assert 15 <= sum(line.startswith("  --") for line in short.splitlines()) <= 32
    assert f"--help-all lists all {len(keys)}" in short


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_every_option_has_a_sentence(verb):
    missing = [option.key for option in options_of(with_algorithm(ALGORITHMS[verb])) if not option.sentence]
    assert not missing


def test_the_options_of_short_help_exist():
    known = {option.key for verb in ALGORITHMS for option in options_of(with_algorithm(ALGORITHMS[verb]))}
    for section in ("model", "data", "train", "eval", "save", "log", "cluster"):
        assert {f"{section}.{name}" for name in COMMON[section]} <= known


def test_help_of_tools_imports_no_torch():
    code = "import sys\nfrom posttrain.cli import tools\nfrom posttrain.config.verbs import TOOLS\n"
    code += "for verb in [args.verb.split() for name in TOOLS for args in tools.args_of(name)]:\n"
    code += "    try: tools.run(verb[0], [*verb[1:], '--help'])\n    except SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'transformers', 'tyro'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_help_imports_no_torch():
    code = "import sys; from posttrain.cli.main import main\ntry: main(['grpo', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'transformers', 'tyro'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@dataclass(kw_only=True)
class RareOptions:
    group: ClassVar[str] = "for old scripts"

    loader: str = ""
    """Has no effect."""


@dataclass(kw_only=True)
class WithRareOptions(RareOptions):
    workers: int = 4
    """Number of processes."""


def test_a_required_option_shows_no_default_and_a_tool_without_options_no_file():
    assert "Required. Number of machines.\n" in help_text("slurm", "About.", SlurmArgs(), everything=True)
    assert help_text("doctor", "About.", DoctorArgs(), everything=True).splitlines()[0] == "usage: posttrain doctor"


def test_options_of_a_group_are_listed_by_full_help_alone():
    short, full = (help_text("tool", "About.", WithRareOptions(), everything=full) for full in (False, True))
    assert "--workers INTEGER" in short and "loader" not in short and "--help-all lists all 2." in short
    assert full.index("--workers") < full.index("\nfor old scripts\n  --loader TEXT\n      Has no effect.")
