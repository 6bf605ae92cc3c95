import gc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and commands under test are to hear Ctrl-C

# `make test-gpu` runs where only training is installed: files that need more could not be collected there.
NEEDED = {
    "gguf": ["unit/publish/test_gguf.py", "unit/publish/test_k_quants.py"],
    "openai": ["e2e/test_board.py", "unit/board/*", "unit/endpoint/*", "unit/rollout/test_agent*"],
    "starlette": ["e2e/test_board.py", "unit/board/*", "unit/endpoint/*", "unit/rollout/test_agent*", "unit/server/*"],
    "uvicorn": ["e2e/test_board.py", "unit/board/*", "unit/endpoint/*", "unit/rollout/test_agent*", "unit/server/*"],
}
collect_ignore_glob = [
    pattern for library, patterns in NEEDED.items() if not importlib.util.find_spec(library) for pattern in patterns
]

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # Equal runs test equal examples, on machines of any speed. HYPOTHESIS_PROFILE=default looks for new ones.
    hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
else:

    class Anything:
        """Takes the place of hypothesis where it is missing: its tests are skipped, the others of their files run."""

        def __getattr__(self, name):
            return self

        def __call__(self, *_, **__):
            return self

        __or__ = __ror__ = __call__

    nothing = types.ModuleType("hypothesis")
    nothing.__spec__ = importlib.machinery.ModuleSpec("hypothesis", None)  # libraries that look for it ask for this
    nothing.strategies = nothing.assume = nothing.HealthCheck = Anything()
    nothing.given = lambda *_, **__: pytest.mark.skip(reason="needs hypothesis")
    nothing.settings = nothing.example = lambda *_, **__: lambda test: test
    sys.modules["hypothesis"] = nothing

torch.set_num_threads(1)  # two busy threads on two cores are slower than one, and sums keep their order


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from passing over libraries and tests, millions of objects: now and while tests run.

    Its passes would take a third of the CPU time of collecting all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


RUNS_PER_PASS = 25  # garbage of as many runs is kept at most, a few megabytes of each
runs_ended = 0
unfrozen = False  # since the last test; asking for the number of frozen objects would count millions of them
unfreeze_all = gc.unfreeze


def unfreeze():
    """Take the place of gc.unfreeze, with which a training run in this process ends, and remember that it ran."""
    global unfrozen
    unfreeze_all()
    unfrozen = True


gc.unfreeze = unfreeze


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """After the fixtures: nothing of a test is left in the process that would change what later ones do."""
    freeze_again()
    # A run on one device that shards leaves a process group until the process ends. That of vLLM's engines is theirs.
    if torch.distributed.is_initialized() and "vllm" not in sys.modules:
        torch.distributed.destroy_process_group()
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is not None:
        found = transformers.PreTrainedModel.tie_weights  # which it replaces while it reads a model
        transformers.PreTrainedModel.tie_weights = originals.setdefault("tie_weights", found)
        assert found is originals["tie_weights"], f"{item.nodeid}: tied weights of later models would not be tied"


originals = {}


def freeze_again():
    """Leave garbage collection as it was, after a training run in this process."""
    global runs_ended, unfrozen
    if unfrozen and not torch.accelerator.is_available():  # whose memory garbage would hold
        runs_ended += 1
        if runs_ended % RUNS_PER_PASS == 0:
            gc.collect()
        gc.freeze()
    unfrozen = False


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
