import os

import pytest

from tests.unit.convert.models import make


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small conversions; that files survive a loss of power is not tested here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of tiny models by name, made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return folder
