"""Control groups: limits on the memory and the number of all processes of a program together, where we may make one.

Version 1 needs write access to our own group, version 2 a group above us that has the controllers enabled for its
children. Root has that on most machines, an ordinary user seldom; containers usually mount control groups read-only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "posttrain-"
REMOVE_SECONDS = 2.0  # longest wait for killed processes to leave a group
CONTROLLERS = ("memory", "pids")


@dataclass(slots=True, frozen=True)
class ParentGroup:
    """A group in which we can make others, and the files that hold the limits of those, by controller."""

    folder: Path
    files: dict[str, str]


class ControlGroup:
    """Groups with limits for one program, as far as this machine allows; processes enter by writing to `entries`."""

    def __init__(self, memory: int, processes: int) -> None:
        self.folders: list[Path] = []
        self.limits_memory = False
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        limits = {"memory": memory, "pids": processes}
        for parent in parent_groups():
            folder = parent.folder / name
            with contextlib.suppress(OSError):  # read-only, or another refusal that only shows here
                folder.mkdir()
                self.folders.append(folder)
                for controller, file in parent.files.items():
                    (folder / file).write_text(str(limits[controller]))
                    self.limits_memory |= controller == "memory"
                (folder / "memory.swap.max").write_text("0")  # there only in version 2 with swap accounting

    @property
    def entries(self) -> list[str]:
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def remove(self) -> None:
        """Remove the groups as soon as their processes have ended."""
        until = time.monotonic() + REMOVE_SECONDS
        for folder in self.folders:
            while not _remove_group(folder) and time.monotonic() < until:
                time.sleep(0.005)


@cache
def parent_groups() -> tuple[ParentGroup, ...]:
    """Find the groups in which we can make others, and remove what killed processes left there."""
    found = tuple(parent for parent in _candidates(Path("/proc/self")) if os.access(parent.folder, os.W_OK))
    for parent in found:
        for group in parent.folder.glob(f"{PREFIX}*"):
            owner = group.name.removeprefix(PREFIX).partition("-")[0]
            if not Path(f"/proc/{owner}").exists():
                _remove_group(group)
    return found


def _candidates(proc: Path) -> Iterator[ParentGroup]:
    """Find groups by what the kernel says of this process: its groups, and where these are mounted."""
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split(" ") for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        root, top = fields[3], Path(fields[4])
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        for _, names, path in groups:
            own = top / os.path.relpath(path, root) if Path(path).is_relative_to(root) else top
            if kind == "cgroup" and names and set(names.split(",")) <= set(options.split(",")):
                files = {"memory": "memory.limit_in_bytes", "pids": "pids.max"}
                if usable := {name: files[name] for name in CONTROLLERS if name in names.split(",")}:
                    yield ParentGroup(own, usable)
            elif kind == "cgroup2" and not names:
                for folder in (own, *own.parents):
                    if folder.is_relative_to(top) and (usable := _enabled_for_children(folder)):
                        yield ParentGroup(folder, usable)
                        break


def _enabled_for_children(folder: Path) -> dict[str, str]:
    try:
        enabled = (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return {}
    return {name: f"{name}.max" for name in CONTROLLERS if name in enabled}


def _remove_group(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
