"""Checks that every trainer computes what the previous version computed and accepts that version's commands.

The numbers were recorded with commit b6c8b3a (record.py). If a test fails, the code is wrong, not the number: a change
that is meant to alter results belongs in a commit of its own, which records the numbers again and says why.
"""

import re

import pytest

from tests.recorded.cases import CASES, FOLDER, PLANS, numbers_of, prepare, read_numbers, run
from tests.recorded.compare import HALF_PRECISION, TOLERANCE, differences

RECORDED = read_numbers()["cases"]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_previous_version(name, exact, tmp_path, monkeypatch):
    prepare(tmp_path, CASES[name])
    monkeypatch.chdir(tmp_path)
    run(CASES[name])
    tolerance = 0 if exact else HALF_PRECISION.get(name, TOLERANCE)
    found = differences(RECORDED[name], numbers_of(tmp_path), tolerance)
    assert not found, "\n".join(["differs from the previous version:", *found[:20]])


@pytest.mark.parametrize("line", PLANS)
def test_command_is_still_accepted(line, tmp_path, monkeypatch):
    prepare(tmp_path, [line])
    monkeypatch.chdir(tmp_path)
    run([line])


@pytest.mark.parametrize("file", sorted((FOLDER / "old_configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_old_configuration_files_can_be_read(file, tmp_path, monkeypatch):
    prepare(tmp_path, [])
    monkeypatch.chdir(tmp_path)
    run([f"posttrain plan configs/{file.name}"])


def test_every_option_of_the_previous_version_is_used():
    """Otherwise a rename that is missing from the table of renames would go unnoticed."""
    files = [*(FOLDER / "old_configs").glob("*.yaml"), *(FOLDER / "inputs/data").glob("*.yaml")]
    words = " ".join([*(line for lines in CASES.values() for line in lines), *PLANS]).replace("rows-per-step", "")
    typed = set(re.findall(r"--([\w.]+)", words.replace(".no_", ".")))
    typed |= {re.sub(r"\s", "", name) for file in files for name in keys_of(file)}
    lines = (FOLDER / "old_options.txt").read_text(encoding="utf-8").splitlines()
    options = {option for line in lines for option in line.partition(": ")[2].split()}
    assert options - typed == {"resume"}  # in test_old_runs.py


def keys_of(file):
    section = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"(\s*)(\w+):", line):
            section = section if found[1] else found[2]
            yield f"{section}.{found[2]}" if found[1] else found[2]
