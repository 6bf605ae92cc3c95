"""Assigns the roles of a run to worker pools: one pool for roles that share devices, one per role with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from posttrain.cluster.base import Pool, Workers
from posttrain.cluster.launched import LaunchedProcesses
from posttrain.cluster.local import LocalPool
from posttrain.cluster.processes import (
    LOOPBACK,
    ProcessPool,
    RendezvousStore,
    devices_for_workers,
    worker_threads,
)
from posttrain.cluster.ray import RayCluster
from posttrain.cluster.worker_pool import WorkerPool
from posttrain.cluster.worker_slots import WorkerSlot
from posttrain.config.sections import ROLES, ClusterConfig
from posttrain.core import accelerators
from posttrain.parallel.weight_transfer import Rendezvous


class Placement:
    """Builds a pool when a role is first placed there, and closes all pools together."""

    def __init__(self, cluster: ClusterConfig, logs: Path, preload: Sequence[str] = ()) -> None:
        """`preload`: modules that workers need; see ProcessPool."""
        self.cluster, self.logs, self.preload = cluster, logs, preload
        self.step = 0  # the run's current step, for error messages
        self.pools: dict[str, Pool] = {}
        self.store: RendezvousStore | None = None
        self.slots: list[WorkerSlot] = []
        self.launched = LaunchedProcesses.detect()
        self.ray: RayCluster | None = None

    @property
    def in_process(self) -> bool:
        """Whether the only worker is this process."""
        return self.cluster.devices == 1 and not self.cluster.ray_address and self.launched is None

    def pool(self, role: str) -> Pool:
        """Return the pool that holds the models of a role."""
        if self.in_process:
            return self.pools.setdefault("actor", LocalPool())
        layout = self.cluster.of(role)
        if layout.place not in self.pools:
            number, largest = self.first_number(layout.place), self.largest_group(layout.place)
            self.pools[layout.place] = pool = self.make_pool(number, layout.devices, largest)
            pool.owner = layout.place
        return self.pools[layout.place]

    def first_number(self, place: str) -> int:
        """Return the number of a place's first worker: the actor's come first, then those of roles with own devices."""
        places = ["actor", *self.cluster.own_devices()]
        return sum(self.cluster.of(before).devices for before in places[: places.index(place)])

    def largest_group(self, place: str) -> int:
        """Return the size of the largest group of a place's workers that communicate in every layer (TP and CP)."""
        layouts = [self.cluster.of(role) for role in (*ROLES, place)]
        return max(layout.ranks_per_sample for layout in layouts if layout.place == place)

    def make_pool(self, first_number: int, size: int, per_node: int) -> WorkerPool:
        """Start `size` workers, numbered from `first_number`; `per_node` neighbours belong on one machine."""
        timeout = self.cluster.worker_timeout_seconds
        if self.cluster.ray_address:
            return self.ray_cluster().pool(
                size,
                self.logs,
                self.rendezvous_store(),
                first_number=first_number,
                per_node=per_node,
                current_step=lambda: self.step,
            )
        if self.launched is not None:
            ranks = range(first_number, first_number + size)
            return self.launched.pool(ranks, self.logs, timeout, lambda: self.step)
        devices = devices_for_workers(self.cluster.devices)
        return ProcessPool(
            size,
            self.logs,
            timeout_seconds=timeout,
            rendezvous=self.rendezvous_store(),
            first_number=first_number,
            current_step=lambda: self.step,
            devices=devices[first_number : first_number + size] if devices else None,
            threads=0 if devices else worker_threads(self.cluster.devices),
            preload=self.preload,
        )

    # Rollout workers on devices of their own

    @property
    def has_rollout_devices(self) -> bool:
        """Whether generation has devices of its own (cluster.rollout_devices)."""
        return "rollout" in self.cluster.own_devices()

    @property
    def on_accelerators(self) -> bool:
        """Whether the workers compute on accelerators, not on a CPU."""
        if self.cluster.ray_address:
            return self.ray_cluster().kind != "CPU"
        return bool(accelerators.accelerator_type())

    def rollout_slots(self, start_role: Callable[[Pool], Workers]) -> list[WorkerSlot]:
        """Return one slot per engine; each is a pool of its own, so that a lost one can be replaced."""
        layout = self.cluster.of("rollout")
        first, each = self.first_number("rollout"), layout.tensor_parallel
        numbers = range(first, first + layout.devices, each)
        self.slots = [WorkerSlot(partial(self.make_pool, number, each, each), start_role) for number in numbers]
        return self.slots

    def rendezvous(self, size: int) -> Rendezvous:
        """Return where a group across pools forms; its timeout is shorter than that of the calls that wait for it."""
        timeout = self.cluster.worker_timeout_seconds / 2
        if self.launched is not None:
            return Rendezvous(size, *self.launched.new_group(), timeout)
        store = self.rendezvous_store()
        return Rendezvous(size, store.address, store.new_group_name(), timeout)

    def rendezvous_store(self) -> RendezvousStore:
        if self.store is None:
            address = self.ray_cluster().address if self.cluster.ray_address else LOOPBACK
            self.store = RendezvousStore(self.cluster.worker_timeout_seconds, address)
        return self.store

    def ray_cluster(self) -> RayCluster:
        if self.ray is None:
            self.ray = RayCluster(self.cluster)
        return self.ray

    def close(self) -> None:
        """Close all pools and connections, even if closing one of them fails."""
        with ExitStack() as last_first:
            for connection in (self.ray, self.launched):
                if connection is not None:
                    last_first.callback(connection.close)
            for pool in self.pools.values():
                last_first.callback(pool.close)
            for slot in self.slots:
                last_first.callback(slot.close)
        self.pools.clear()
