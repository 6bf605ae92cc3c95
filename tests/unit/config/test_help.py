"""`posttrain VERB --help` shows what most users set; --help-all shows every option."""

import subprocess
import sys

import pytest

from posttrain.algorithms import ALGORITHMS
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


def test_help_imports_no_torch():
    code = "import sys; from posttrain.cli.main import main\ntry: main(['grpo', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'transformers', 'tyro'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
