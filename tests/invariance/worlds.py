"""Processes that find each other over gloo, for tests of what they do together."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

SECONDS = 600  # for one world; the machine may be busy
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]  # sizes


def run_world(size: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `work(rank, *args)` in `size` processes of one gloo group; returns their results, which must be JSON."""
    context = multiprocessing.get_context("forkserver")  # imports once, and no thread of this process is inherited
    context.set_forkserver_preload(
        [__name__, "posttrain.train.learner", "posttrain.algorithms", "peft", work.__module__]
    )
    folder.mkdir(parents=True)
    members = [context.Process(target=enter, args=(rank, size, folder, work, args)) for rank in range(size)]
    for member in members:
        member.start()
    try:
        for member in members:
            member.join(SECONDS)
        complaints = [path.read_text() for path in sorted(folder.glob("error-*"))]
        assert not complaints, "\n".join(complaints)
        assert [member.exitcode for member in members] == [0] * size, [member.exitcode for member in members]
    finally:
        for member in members:
            if member.is_alive():
                member.kill()
            member.join()
    return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(size)]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` returns for an empty folder, as JSON; of several pytest processes the first makes it for all."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = base / name / "answer.json"
        if not answer.is_file():
            answer.parent.mkdir()
            answer.write_text(json.dumps(make(answer.parent)))
        return json.loads(answer.read_text())


def enter(rank: int, size: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = torch.distributed.FileStore(str(folder / "store"), size)
        options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=SECONDS / 4)}
        torch.distributed.init_process_group("gloo", store=store, **options)
        answer = work(rank, *args)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        (folder / f"answer-{rank}").write_text(json.dumps(answer))
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
