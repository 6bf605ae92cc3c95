"""Where the roles of a run live: a pool for all that share devices, one each for those with devices of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from posttrain.cluster.base import Pool, Workers
from posttrain.cluster.launched import LaunchedProcesses
from posttrain.cluster.local import LocalPool
from posttrain.cluster.processes import LOOPBACK, ProcessPool, RendezvousStore, devices_here, share_of_cores
from posttrain.cluster.ray import RayCluster
from posttrain.cluster.worker_slots import WorkerSlot
from posttrain.config.sections import ROLES, ClusterConfig
from posttrain.parallel.weight_transfer import Rendezvous


class Placement:
    """Makes a pool when a role is first placed there; ends them all together."""

    def __init__(self, cluster: ClusterConfig, logs: Path) -> None:
        self.cluster, self.logs = cluster, logs
        self.step = 0  # of the run now, for messages
        self.pools: dict[str, Pool] = {}
        self.meeting: RendezvousStore | None = None
        self.slots: list[WorkerSlot] = []
        self.launch = LaunchedProcesses.detect()
        self.ray: RayCluster | None = None

    @property
    def alone(self) -> bool:
        """Whether there is one worker only, this process."""
        return self.cluster.devices == 1 and not self.cluster.ray and self.launch is None

    def pool(self, role: str) -> Pool:
        """The pool that holds the models of this role."""
        if self.alone:
            return self.pools.setdefault("actor", LocalPool())
        layout = self.cluster.of(role)
        if layout.place not in self.pools:
            self.pools[layout.place] = self.make(
                self.first(layout.place), layout.devices, self.largest_group(layout.place)
            )
        return self.pools[layout.place]

    def first(self, place: str) -> int:
        """Number of the first worker of a place: the actor's come first, then those of roles with their own."""
        places = ["actor", *self.cluster.own_devices()]
        return sum(self.cluster.of(before).devices for before in places[: places.index(place)])

    def largest_group(self, place: str) -> int:
        """Of workers that talk in every layer, among the roles that live there."""
        layouts = [self.cluster.of(role) for role in (*ROLES, place)]
        return max(layout.alike for layout in layouts if layout.place == place)

    def make(self, first: int, size: int, together: int) -> Pool:
        """Workers number `first` and on; `together`: so many neighbours belong on one machine."""
        seconds = self.cluster.limits[1]
        if self.cluster.ray:
            pool = self.ray_cluster().pool
            return pool(
                size, self.logs, self.rendezvous_store(), first=first, together=together, step=lambda: self.step
            )
        if self.launch is not None:
            return self.launch.pool(range(first, first + size), self.logs, seconds, lambda: self.step)
        devices = devices_here(self.cluster.devices)
        return ProcessPool(
            size,
            self.logs,
            seconds=seconds,
            meeting=self.rendezvous_store(),
            first=first,
            step=lambda: self.step,
            devices=devices[first : first + size] if devices else None,
            threads=0 if devices or "OMP_NUM_THREADS" in os.environ else share_of_cores(self.cluster.devices),
        )

    # Rollout workers apart from the learners

    @property
    def rollouts_apart(self) -> bool:
        return "rollout" in self.cluster.own_devices()

    def rollout_slots(self, start: Callable[[Pool], Workers]) -> list[WorkerSlot]:
        """A place for each engine; each is a pool of its own, so that one can be replaced without the others."""
        layout = self.cluster.of("rollout")
        first, each = self.first("rollout"), layout.tensor_parallel
        numbers = range(first, first + layout.devices, each)
        self.slots = [WorkerSlot(partial(self.make, number, each, each), start) for number in numbers]
        return self.slots

    def rendezvous(self, size: int) -> Rendezvous:
        """For a group across pools. It gives up before those who wait for its members do."""
        seconds = self.cluster.limits[1] / 2
        if self.launch is not None:
            return Rendezvous(size, *self.launch.meeting(), seconds)
        point = self.rendezvous_store()
        return Rendezvous(size, point.address, point.name(), seconds)

    def rendezvous_store(self) -> RendezvousStore:
        if self.meeting is None:
            address = self.ray_cluster().address if self.cluster.ray else LOOPBACK
            self.meeting = RendezvousStore(self.cluster.limits[1], address)
        return self.meeting

    def ray_cluster(self) -> RayCluster:
        if self.ray is None:
            self.ray = RayCluster(self.cluster)
        return self.ray

    def close(self) -> None:
        """All of them, also if one cannot be ended in peace."""
        with ExitStack() as last_first:
            for connection in (self.ray, self.launch):
                if connection is not None:
                    last_first.callback(connection.close)
            for pool in self.pools.values():
                last_first.callback(pool.close)
            for slot in self.slots:
                last_first.callback(slot.empty)
        self.pools.clear()
