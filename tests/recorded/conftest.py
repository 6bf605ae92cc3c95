import warnings

import pytest

from tests.recorded.cases import read_numbers
from tests.recorded.compare import TOLERANCE
from tests.recorded.fingerprint import fingerprint


def mode():
    """Returns how numbers are compared on this machine, as text, and whether the comparison is exact."""
    if read_numbers()["fingerprint"] == fingerprint():
        return "recorded numbers of the previous version: compared exactly, this machine computes the same bits", True
    return (
        f"recorded numbers of the previous version: compared within {TOLERANCE}, and neither weights nor tokens: this "
        "machine, torch or transformers computes other bits. For an exact comparison see tests/recorded/record.py.",
        False,
    )


USED = pytest.StashKey[str]()


def pytest_report_header():
    return mode()[0]


def pytest_terminal_summary(terminalreporter, config):
    if USED in config.stash:
        terminalreporter.write_line(config.stash[USED])


@pytest.fixture(scope="session")
def exact(pytestconfig):
    words, exactly = mode()
    pytestconfig.stash[USED] = words
    if not exactly:
        warnings.warn(words, stacklevel=1)  # shown at the end with several worker processes, too
    return exactly


@pytest.fixture(autouse=True)
def one_thread_in_workers_too(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
