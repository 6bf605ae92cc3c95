"""The commands of docs/vllm.md run."""

import importlib.util
import shlex

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from tests.e2e.commands import command
from tests.e2e.test_docs import ROOT, blocks


def test_everything_shown_runs(tmp_path, monkeypatch):
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    shown = [shlex.split(body.replace("\\\n", " ")) for _, body in blocks("docs/vllm.md", "sh")]
    assert len(shown) == 3
    for program, *arguments in shown:
        assert program == "posttrain" and command(*arguments, "--quiet") == 0, shlex.join(arguments)
