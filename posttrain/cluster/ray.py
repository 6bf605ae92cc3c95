"""Workers on a Ray cluster: Ray finds places for them, starts them there and knows when one is gone.

A worker is an actor that connects back to the controller and from then on is spoken to like any other worker process:
the same calls, deadlines and errors. Ray is asked for what only it knows: nodes, devices, and why an actor died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.cluster import messages
from posttrain.cluster.processes import LOOPBACK, RendezvousStore, greet
from posttrain.cluster.worker import log_into, serve
from posttrain.cluster.worker_host import GroupSpec, WorkerHost
from posttrain.cluster.worker_pool import Channel, WorkerPool
from posttrain.config.sections import ClusterConfig
from posttrain.core.errors import UsageError, WorkerError

NOTICE_SECONDS = 5.0  # after which a wait for devices is spoken of
OBITUARY_SECONDS = 30.0  # in which Ray notices that a node is gone
HANDSHAKE_SECONDS = 30.0  # in which whoever connects says who it is
LOOK_SECONDS = 0.5  # between looks at whether workers that are to connect are still there
SIOCGIFADDR = 0x8915  # Linux: the address of a network interface
# What the controller's environment tells its workers; the rest of theirs is of the machine they are on.
PASSED_ON = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "VLLM_")

log = logging.getLogger("posttrain")


@dataclass(slots=True, frozen=True)
class Node:
    """A machine of the cluster, or a part of one that Ray takes for a machine."""

    id: str
    address: str
    hostname: str
    alive: bool

    def __str__(self) -> str:
        return f"{self.hostname}, Ray node {self.id[:8]} at {self.address}"


class RayCluster:
    """The connection to Ray, and what it has."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.devices, self.seconds = cluster.devices, cluster.limits[1]
        self.connected = connect(cluster.ray)
        import ray

        nodes = all_nodes()
        here = ray.util.get_node_ip_address()
        several = len({node.address for node in nodes.values() if node.alive} | {here}) > 1
        self.address = here if several else LOOPBACK  # where workers find the controller
        resources = ray.cluster_resources()
        self.kind = "GPU" if resources.get("GPU") else "CPU"
        share = max(1, int(resources.get("CPU", 1)) // self.devices)
        self.threads = share if self.kind == "CPU" and "OMP_NUM_THREADS" not in os.environ else 0
        have = int(resources.get(self.kind, 0))
        if have < self.devices and all(node.alive for node in nodes.values()):  # a lost one may come back
            self.close()
            raise UsageError(
                f"cluster.devices is {self.devices}, but the Ray cluster has {have} {self.kind}s on {len(nodes)} "
                f"node{'s' if len(nodes) > 1 else ''}. Start Ray on more nodes, or lower cluster.devices."
            )

    def pool(
        self, size: int, logs: Path, meeting: RendezvousStore, *, first: int, together: int, step: Callable[[], int]
    ) -> RayPool:
        return RayPool(self, size, logs, meeting, first=first, together=together, step=step)

    @contextlib.contextmanager
    def reserve(self, size: int, together: int) -> Iterator[tuple[Any, list[tuple[int, Node]]]]:
        """Places for `size` workers, as near to each other as they go: (bundle, node) by rank, a node's together.

        `together`: so many neighbours are on one node. They are given back if what happens inside fails.
        """
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        if together > self.largest_node():
            log.warning("tp and cp: no Ray node has %d %ss, so these workers talk across nodes", together, self.kind)
            together = 1
        bundle = {"CPU": float(together)} | ({"GPU": float(together)} if self.kind == "GPU" else {})
        wanted = f"{size} worker{'s' if size > 1 else ''} with 1 {self.kind} each"
        wanted += f", {together} on one node" if together > 1 else ""
        group = placement_group([bundle] * (size // together), strategy="PACK")
        try:
            if not ready(group, min(NOTICE_SECONDS, self.seconds)):
                log.warning("waiting for Ray to find places for %s. %s", wanted, self.state())
                if not ready(group, self.seconds - NOTICE_SECONDS):
                    raise WorkerError(
                        f"Ray found no places for {wanted} within {self.seconds:g} s (cluster.limits). {self.state()}",
                        lost=True,
                    )
            nodes = all_nodes()
            table = placement_group_table(group)["bundles_to_node_id"]
            found = sorted(((bundle, nodes[id]) for bundle, id in table.items()), key=lambda one: one[1].id)
            yield group, [place for place in found for _ in range(together)]
        except BaseException:
            remove_placement_group(group)
            raise

    def largest_node(self) -> int:
        """Devices of the node that has most; those that are down may come back, and count."""
        import ray

        return max(int(found["Resources"].get(self.kind, 0)) for found in ray.nodes())

    def state(self) -> str:
        """What there is, and who is missing."""
        import ray

        free, whole = (int(found.get(self.kind, 0)) for found in (ray.available_resources(), ray.cluster_resources()))
        down = [str(node) for node in all_nodes().values() if not node.alive]
        said = f"Free are {free} of {whole} {self.kind}s."
        return f"{said} Lost: {'; '.join(down)}." if down else said

    def close(self) -> None:
        if self.connected:
            import ray

            ray.shutdown()


def ready(group: Any, seconds: float) -> bool:
    """Whether a placement group has its places within so long."""
    until = time.monotonic() + seconds
    while not (found := group.wait(1)) and time.monotonic() < until:
        pass  # in between signals are seen, which Ray's own wait does not let through
    return bool(found)


class RayPool(WorkerPool):
    """`size` actors, each with a device of its own."""

    def __init__(
        self,
        cluster: RayCluster,
        size: int,
        logs: Path,
        meeting: RendezvousStore,
        *,
        first: int = 0,
        together: int = 1,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        """`first`: number of the first in the names of logs; `together`: so many neighbours are on one node."""
        logs.mkdir(parents=True, exist_ok=True)
        files = [(logs / f"worker-{first + rank}.log").resolve() for rank in range(size)]
        with cluster.reserve(size, together) as (self.group, places):
            recruits = hire(self.group, places, files, cluster)
            channels = [
                RayChannel(first + recruit.rank, recruit.rank, connection, recruit.log, recruit=recruit)
                for recruit, connection in recruits
            ]
            super().__init__(channels, cluster.seconds, step)
            name = meeting.name()
            greet(
                self,
                [GroupSpec(rank, size, meeting.address, name, self.seconds, cluster.threads) for rank in range(size)],
            )

    def end(self, seconds: float) -> None:
        from ray.util.placement_group import remove_placement_group

        super().end(seconds)
        remove_placement_group(self.group)


@dataclass(slots=True, eq=False)
class ActorHandle:
    """A worker as Ray knows it."""

    rank: int
    node: Node
    log: Path
    actor: Any
    serving: Any  # the answer of its one call, which takes as long as the worker lives

    def ended(self) -> bool:
        import ray

        return bool(ray.wait([self.serving], timeout=0)[0])

    def exit_reason(self, seconds: float = OBITUARY_SECONDS) -> str:
        """Why it ended, as Ray finds out; empty where it did not end."""
        import ray

        until, asked = time.monotonic() + seconds, self.serving
        try:
            while True:
                try:
                    ray.get(asked, timeout=max(0.0, until - time.monotonic()))
                except ray.exceptions.ActorUnavailableError:  # Ray does not know yet whether it is gone for good
                    time.sleep(LOOK_SECONDS)
                    asked = self.actor.ping.remote()
                else:
                    return "ended by itself" if asked is self.serving else ""
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayTaskError as error:
            return f"did not start: {error.cause}"
        except ray.exceptions.RayError as error:
            if not all_nodes()[self.node.id].alive:
                return f"was lost with its node, {self.node}"
            if "creation task" in str(error):
                return f"did not start: {str(error).splitlines()[-1]}. All nodes need the same environment"
            told = str(error).partition("The actor is dead because ")[2] or str(error)
            told = " ".join(told.partition("Some common causes")[0].split())
            return f"was killed, by hand or by the system for want of memory, or crashed. Ray says: {told.rstrip('. ')}"
        return "ended by itself"

    def dismiss(self, until: float = 0.0) -> None:
        """Let it end by itself until then; kill it."""
        import ray

        ray.wait([self.serving], timeout=max(0.0, until - time.monotonic()))
        ray.kill(self.actor)


@dataclass(slots=True, eq=False)
class RayChannel(Channel):
    """The connection to a worker that Ray started."""

    recruit: ActorHandle = field(kw_only=True)

    def __post_init__(self) -> None:
        self.host = str(self.recruit.node)

    def runs_script(self) -> bool:
        return False

    def ended(self) -> bool:
        return self.recruit.ended()

    def exit_reason(self) -> str:
        return self.recruit.exit_reason()

    def finish(self, until: float) -> None:
        self.recruit.dismiss(until)


def hire(
    group: Any, places: Sequence[tuple[int, Node]], logs: Sequence[Path], cluster: RayCluster
) -> list[tuple[ActorHandle, Connection]]:
    """Start a worker at each place and let it connect."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    key = secrets.token_bytes(32)
    resources = {"num_cpus": 1, "num_gpus": 1 if cluster.kind == "GPU" else 0}
    with socket.socket() as listener:
        listener.bind((cluster.address, 0))
        listener.listen(len(places))
        meet = listener.getsockname()
        recruits = []
        for rank, ((bundle, node), file) in enumerate(zip(places, logs, strict=True)):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor = ray.remote(WorkerActor).options(scheduling_strategy=where, **resources).remote()
            alone = cluster.address == LOOPBACK
            serving = actor.serve.remote(meet, key, rank, str(file), passed_on(), node, alone, __version__)
            recruits.append(ActorHandle(rank, node, file, actor, serving))
        try:
            return list(zip(recruits, gather(listener, key, recruits, cluster.seconds), strict=True))
        except BaseException:
            for recruit in recruits:
                recruit.dismiss()
            raise


def gather(listener: socket.socket, key: bytes, recruits: Sequence[ActorHandle], seconds: float) -> list[Connection]:
    """The connections of all, by rank."""
    until = time.monotonic() + seconds
    listener.settimeout(LOOK_SECONDS)
    found: dict[int, Connection] = {}
    while len(found) < len(recruits):
        try:
            connected, _ = listener.accept()
        except TimeoutError:
            missing = [recruit for recruit in recruits if recruit.rank not in found]
            late = time.monotonic() > until
            for recruit in missing:
                if late or recruit.ended():
                    why = recruit.exit_reason(0) or f"did not connect within {seconds:g} s (cluster.limits)"
                    message = f"new worker, rank {recruit.rank} (on {recruit.node}) {why}. Its log: {recruit.log}"
                    raise WorkerError(message, lost=True) from None
            continue
        connection = Connection(connected.detach())
        messages.bound(connection, HANDSHAKE_SECONDS)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            found[int(connection.recv_bytes())] = connection
        except (AuthenticationError, EOFError, OSError):  # none of ours
            connection.close()
    return [found[recruit.rank] for recruit in recruits]


class WorkerActor:
    """The actor that is a worker."""

    def ping(self) -> None:
        """Asked of one that may be gone."""

    def serve(
        self,
        meet: tuple[str, int],
        key: bytes,
        rank: int,
        file: str,
        environment: dict[str, str],
        node: Node,
        alone: bool,
        version: str,
    ) -> None:
        """Work for the controller until it says that it is over. `alone`: all workers are on this machine."""
        if version != __version__:
            raise RuntimeError(f"posttrain is {__version__} on {socket.gethostname()}, but {version} at the command")
        if not Path(file).parent.is_dir():
            raise FileNotFoundError(
                f"there is no folder {Path(file).parent} on {socket.gethostname()}: the run folder (--out) must be on "
                "a file system that all nodes share"
            )
        log_into(file)
        print(f"--- worker process {os.getpid()} on {node}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
        faulthandler.enable(2)
        interface = "lo" if alone else interface_of(node.address)
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        os.environ |= environment
        try:
            connection = Connection(socket.create_connection(meet).detach())
        except OSError as error:
            where = f"{meet[0]}:{meet[1]} cannot be reached from {socket.gethostname()}"
            raise ConnectionError(f"{where}, where the command waits for its workers: {error}") from None
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(str(rank).encode())
        serve(connection, WorkerHost())


def interface_of(address: str) -> str:
    """Name of the network interface that has this address; empty if it is not found."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return ""


def passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def all_nodes() -> dict[str, Node]:
    """Id -> node; also of those that were lost."""
    import ray

    return {
        found["NodeID"]: Node(
            found["NodeID"], found["NodeManagerAddress"], found["NodeManagerHostname"], bool(found["Alive"])
        )
        for found in ray.nodes()
    }


# Connecting


def connect(address: str) -> bool:
    """Connect this process to Ray, unless it is already; whether it was done."""
    if address.startswith("ray://"):
        raise UsageError(
            f"cluster.ray is {address}: a remote client cannot be spoken to by workers. Run the command on a node of "
            "the cluster, with --cluster.ray auto."
        )
    ours = LocalCluster.running() if address == "auto" and not os.environ.get("RAY_ADDRESS") else None
    if ours is not None:
        address = ours.address
        os.environ |= ours.environment()
    # Ray prints pages on the console about a node that is gone; the error that is raised says it in a line.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise UsageError("cluster.ray needs Ray: pip install 'posttrain[ray]'") from None
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UsageError(f"cluster.ray is {address}, {refusal(error)}") from None
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: then Ray has set none
            signal.signal(signal.SIGTERM, handler)
    return True


def refusal(error: Exception) -> str:
    """Why Ray did not let us in, and what to do."""
    told = str(error).strip()
    if "Version mismatch" in told:
        told = " ".join(told.partition("Version mismatch: ")[2].split())
        return f"but versions differ. {told}. Use the same environment on all nodes, and start Ray again from it."
    reason = told.splitlines()[0].rstrip(".") if told else type(error).__name__
    return (
        f"but no Ray cluster answers there ({reason}). Start one: posttrain cluster up, or on each node: ray start. "
        "One with a token answers only where RAY_AUTH_MODE and RAY_AUTH_TOKEN are as on its nodes."
    )


@dataclass(slots=True, frozen=True)
class LocalCluster:
    """What `posttrain cluster up` started on this machine."""

    address: str
    token: str
    processes: tuple[int, ...]  # one a node, the head first; each ends all that it started
    folder: str  # of their logs and sockets

    @classmethod
    def running(cls) -> LocalCluster | None:
        try:
            found = json.loads(state_file().read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        ours = cls(found["address"], found["token"], tuple(found["processes"]), found["folder"])
        return ours if is_ray(ours.processes[0]) else None

    def write(self) -> None:
        file = state_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """For a process that is to connect."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}


def state_file() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return home / "posttrain" / "ray-cluster.json"


def is_ray(process: int) -> bool:
    """Whether such a process is there and was started by `posttrain cluster up`; numbers are used again."""
    with contextlib.suppress(OSError):
        return b"ray.scripts.scripts" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False
