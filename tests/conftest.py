import importlib.util
import os
import random
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and commands under test are to hear Ctrl-C

if not all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn", "openai")):
    # `make test-gpu` runs where only training is installed: these tests could not be collected there.
    collect_ignore_glob = ["e2e/test_board.py", "unit/board/*", "unit/endpoint/*", "unit/rollout/test_agent*"]

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # Equal runs test equal examples, on machines of any speed. HYPOTHESIS_PROFILE=default looks for new ones.
    hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

torch.set_num_threads(1)  # two busy threads on two cores are slower than one, and sums keep their order


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture: what a test draws without a seed is the same every time, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    """Tests share one cache folder a session and leave the user's alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
