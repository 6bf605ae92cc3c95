"""Workers as actors of a Ray cluster.

An actor connects back to the controller and is then used like any other worker process: the same calls, timeouts and
errors. Ray provides only what it alone knows: nodes, devices, and why an actor died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.cluster import messages
from posttrain.cluster.processes import LOOPBACK, RendezvousStore, form_group
from posttrain.cluster.worker import redirect_output, serve
from posttrain.cluster.worker_host import GroupSpec, WorkerHost
from posttrain.cluster.worker_pool import SILENCE_SECONDS, Channel, WorkerPool
from posttrain.config.sections import ClusterConfig
from posttrain.core.errors import UsageError, WorkerError

NOTICE_SECONDS = 5.0  # after which a wait for devices is logged
EXIT_REASON_SECONDS = 30.0  # within which Ray notices that a node is gone
HANDSHAKE_SECONDS = 30.0  # for a new connection to authenticate
POLL_SECONDS = 0.5  # between checks whether actors that have not connected yet still exist
REPORT_CHARACTERS = 300  # of what Ray reports, in an error
MEMORY_MONITOR = r"Memory on the node .*?was ([\d.]+) ?GB / ([\d.]+) ?GB"
# Environment variables that workers take from the controller; all others are those of their own machine.
FORWARDED = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "VLLM_")

log = logging.getLogger("posttrain")


@dataclass(slots=True, frozen=True)
class Node:
    """A machine of the cluster, or a part of one that Ray treats as a machine."""

    id: str
    address: str
    hostname: str
    alive: bool

    def __str__(self) -> str:
        return f"{self.hostname}, Ray node {self.id[:8]} at {self.address}"


class RayCluster:
    """The connection to Ray, and the resources of the cluster."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.devices, self.timeout_seconds = cluster.devices, cluster.worker_timeout_seconds
        self.connected = connect(cluster.ray_address)
        import ray

        nodes = all_nodes()
        here = ray.util.get_node_ip_address()
        several = len({node.address for node in nodes.values() if node.alive} | {here}) > 1
        self.address = here if several else LOOPBACK  # where workers reach the controller
        resources = ray.cluster_resources()
        self.kind = "GPU" if resources.get("GPU") else "CPU"
        share = max(1, int(resources.get("CPU", 1)) // self.devices)
        self.threads = share if self.kind == "CPU" and "OMP_NUM_THREADS" not in os.environ else 0
        available = int(resources.get(self.kind, 0))
        if available < self.devices and all(node.alive for node in nodes.values()):  # a lost node may come back
            self.close()
            raise UsageError(
                f"cluster.devices is {self.devices}, but the Ray cluster has {available} {self.kind}s on {len(nodes)} "
                f"node{'s' if len(nodes) > 1 else ''}. Start Ray on more nodes, or lower cluster.devices."
            )

    def pool(
        self,
        size: int,
        logs: Path,
        rendezvous: RendezvousStore,
        *,
        first_number: int,
        per_node: int,
        current_step: Callable[[], int],
    ) -> RayPool:
        return RayPool(
            self, size, logs, rendezvous, first_number=first_number, per_node=per_node, current_step=current_step
        )

    @contextlib.contextmanager
    def reserve(self, size: int, per_node: int) -> Iterator[tuple[Any, list[tuple[int, Node]]]]:
        """Reserve devices for `size` workers, `per_node` neighbours on one node: (bundle, node) by rank.

        Workers of one node are neighbours. The reservation is removed if the body raises.
        """
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        if per_node > self.largest_node():
            log.warning(
                "no Ray node has %d %ss, so tensor- or context-parallel workers communicate across nodes",
                per_node,
                self.kind,
            )
            per_node = 1
        bundle = {"CPU": float(per_node)} | ({"GPU": float(per_node)} if self.kind == "GPU" else {})
        wanted = f"{size} worker{'s' if size > 1 else ''} with 1 {self.kind} each"
        wanted += f", {per_node} on one node" if per_node > 1 else ""
        group = placement_group([bundle] * (size // per_node), strategy="PACK")
        try:
            if not wait_for_placement(group, min(NOTICE_SECONDS, self.timeout_seconds)):
                log.warning("waiting for Ray to place %s. %s", wanted, self.describe_resources())
                if not wait_for_placement(group, self.timeout_seconds - NOTICE_SECONDS):
                    raise WorkerError(
                        f"Ray could not place {wanted} within {self.timeout_seconds:g} s "
                        f"(cluster.worker_timeout_seconds). {self.describe_resources()}",
                        lost=True,
                    )
            nodes = all_nodes()
            table = placement_group_table(group)["bundles_to_node_id"]
            found = sorted(((bundle, nodes[id]) for bundle, id in table.items()), key=lambda one: one[1].id)
            yield group, [place for place in found for _ in range(per_node)]
        except BaseException:
            remove_placement_group(group)
            raise

    def largest_node(self) -> int:
        """Return the number of devices of the largest node; nodes that are down count, since they may come back."""
        import ray

        return max(int(found["Resources"].get(self.kind, 0)) for found in ray.nodes())

    def describe_resources(self) -> str:
        """Return a sentence about free devices and lost nodes."""
        import ray

        free, total = (int(found.get(self.kind, 0)) for found in (ray.available_resources(), ray.cluster_resources()))
        down = [str(node) for node in all_nodes().values() if not node.alive]
        sentence = f"{free} of {total} {self.kind}s are free."
        return f"{sentence} Lost nodes: {'; '.join(down)}." if down else sentence

    def close(self) -> None:
        if self.connected:
            import ray

            ray.shutdown()


def wait_for_placement(group: Any, seconds: float) -> bool:
    """Whether Ray has placed a placement group within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (placed := group.wait(1)) and time.monotonic() < deadline:
        pass  # Python handles signals between the waits; Ray's own wait does not let them through
    return bool(placed)


class RayPool(WorkerPool):
    """`size` actors with one device each."""

    def __init__(
        self,
        cluster: RayCluster,
        size: int,
        logs: Path,
        rendezvous: RendezvousStore,
        *,
        first_number: int = 0,
        per_node: int = 1,
        current_step: Callable[[], int] = lambda: 0,
    ) -> None:
        """`first_number`: N in worker-N.log of the first one; `per_node`: neighbours that belong on one node."""
        logs.mkdir(parents=True, exist_ok=True)
        files = [(logs / f"worker-{first_number + rank}.log").resolve() for rank in range(size)]
        with cluster.reserve(size, per_node) as (self.group, places):
            actors = start_actors(self.group, places, files, cluster)
            channels = [
                RayChannel(first_number + actor.rank, actor.rank, connection, actor.log, actor=actor)
                for actor, connection in actors
            ]
            timeout, name = cluster.timeout_seconds, rendezvous.new_group_name()
            super().__init__(channels, timeout, current_step)
            addresses = [LOOPBACK if cluster.address == LOOPBACK else node.address for _, node in places]
            form_group(
                self,
                [
                    GroupSpec(rank, size, rendezvous.address, name, timeout, cluster.threads, address)
                    for rank, address in enumerate(addresses)
                ],
            )

    def shut_down(self, seconds: float) -> None:
        from ray.util.placement_group import remove_placement_group

        super().shut_down(seconds)
        remove_placement_group(self.group)


@dataclass(slots=True, eq=False)
class ActorHandle:
    """A Ray actor that is a worker."""

    rank: int
    node: Node
    log: Path
    actor: Any
    serving: Any  # the reference to its one call, `serve`, which returns when the worker ends

    def has_exited(self) -> bool:
        import ray

        return bool(ray.wait([self.serving], timeout=0)[0])

    def exit_reason(self, seconds: float = EXIT_REASON_SECONDS) -> str:
        """Return why the actor ended, as Ray reports it within `seconds`; empty if it has not ended."""
        import ray

        deadline, call = time.monotonic() + seconds, self.serving
        try:
            while True:
                try:
                    ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
                except ray.exceptions.ActorUnavailableError:  # Ray does not know yet whether it is gone for good
                    time.sleep(POLL_SECONDS)
                    call = self.actor.ping.remote()
                else:
                    return "ended by itself" if call is self.serving else ""
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayTaskError as error:
            return f"did not start: {error.cause}"
        except ray.exceptions.RayError as error:
            if not all_nodes()[self.node.id].alive:
                return f"was lost with its node, {self.node}"
            if "creation task" in str(error):
                return f"did not start: {str(error).splitlines()[-1]}. All nodes need the same environment"
            return describe_death(str(error))
        return "ended by itself"

    def terminate(self, deadline: float = 0.0) -> None:
        """Let the actor end by itself until the deadline; then kill it."""
        import ray

        ray.wait([self.serving], timeout=max(0.0, deadline - time.monotonic()))
        ray.kill(self.actor)


def describe_death(report: str) -> str:
    """Return why Ray says that an actor died, in one line.

    The report of Ray's memory monitor lists the processes of the node that take the most memory, with the command lines
    of all users: only its first sentence, with the node's memory, is kept.
    """
    if "memory" in report and (used := re.search(MEMORY_MONITOR, " ".join(report.split()))):
        return (
            f"was killed by Ray's memory monitor, because the memory of its node ran out ({used[1]} GB of {used[2]} GB "
            "were in use). Place fewer workers on a node, or use nodes with more memory"
        )
    cause = report.partition("The actor is dead because ")[2] or report
    for rest in ("Some common causes", "Top 10 memory users"):
        cause = cause.partition(rest)[0]
    cause = " ".join(cause.split()).rstrip(". ")
    return f"crashed, or was killed by hand or because memory ran out. Ray reports: {cause[:REPORT_CHARACTERS]}"


@dataclass(slots=True, eq=False)
class RayChannel(Channel):
    """The connection to a worker that Ray started."""

    actor: ActorHandle = field(kw_only=True)

    def __post_init__(self) -> None:
        self.host = str(self.actor.node)

    def runs_controller_script(self) -> bool:
        return False

    def has_exited(self) -> bool:
        return self.actor.has_exited()

    def exit_reason(self) -> str:
        return "" if self.silent_seconds >= SILENCE_SECONDS else self.actor.exit_reason()

    def terminate(self, deadline: float) -> None:
        self.actor.terminate(deadline)


def start_actors(
    group: Any, places: Sequence[tuple[int, Node]], logs: Sequence[Path], cluster: RayCluster
) -> list[tuple[ActorHandle, Connection]]:
    """Start an actor at each reserved place and wait until all have connected."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    key = secrets.token_bytes(32)
    resources = {"num_cpus": 1, "num_gpus": 1 if cluster.kind == "GPU" else 0}
    with socket.socket() as listener:
        listener.bind((cluster.address, 0))
        listener.listen(len(places))
        controller = listener.getsockname()
        actors = []
        for rank, ((bundle, node), file) in enumerate(zip(places, logs, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor = ray.remote(WorkerActor).options(scheduling_strategy=strategy, **resources).remote()
            environment = forwarded_environment()
            serving = actor.serve.remote(controller, key, rank, str(file), environment, node, __version__)
            actors.append(ActorHandle(rank, node, file, actor, serving))
        try:
            connections = accept_connections(listener, key, actors, cluster.timeout_seconds)
            return list(zip(actors, connections, strict=True))
        except BaseException:
            for actor in actors:
                actor.terminate()
            raise


def accept_connections(
    listener: socket.socket, key: bytes, actors: Sequence[ActorHandle], timeout_seconds: float
) -> list[Connection]:
    """Wait for the connections of all actors; returns them by rank. Unauthenticated connections are closed."""
    deadline = time.monotonic() + timeout_seconds
    listener.settimeout(POLL_SECONDS)
    found: dict[int, Connection] = {}
    while len(found) < len(actors):
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            late = time.monotonic() > deadline
            for actor in [actor for actor in actors if actor.rank not in found]:
                if late or actor.has_exited():
                    reason = (
                        actor.exit_reason(0)
                        or f"did not connect within {timeout_seconds:g} s (cluster.worker_timeout_seconds)"
                    )
                    message = f"new worker, rank {actor.rank} (on {actor.node}) {reason}. Its log: {actor.log}"
                    raise WorkerError(message, lost=True) from None
            continue
        connection = Connection(accepted.detach())
        messages.set_timeout(connection, HANDSHAKE_SECONDS)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            found[int(connection.recv_bytes())] = connection
        except (AuthenticationError, EOFError, OSError):  # not one of our workers
            connection.close()
    return [found[actor.rank] for actor in actors]


class WorkerActor:
    """The Ray actor that runs a worker."""

    def ping(self) -> None:
        """Return at once; called to find out whether the actor still exists."""

    def serve(
        self,
        controller: tuple[str, int],
        key: bytes,
        rank: int,
        file: str,
        environment: dict[str, str],
        node: Node,
        version: str,
    ) -> None:
        """Serve the controller until it ends the worker."""
        if version != __version__:
            raise RuntimeError(
                f"{socket.gethostname()} has posttrain {__version__}, but the controller has {version}: install one "
                "version on all nodes"
            )
        if not Path(file).parent.is_dir():
            raise FileNotFoundError(
                f"there is no folder {Path(file).parent} on {socket.gethostname()}: output_dir must be on a "
                "file system that all nodes share"
            )
        redirect_output(file)
        print(f"--- worker process {os.getpid()} on {node}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
        faulthandler.enable(2)
        os.environ |= environment
        try:
            connection = Connection(socket.create_connection(controller).detach())
        except OSError as error:
            address = f"{controller[0]}:{controller[1]}"
            raise ConnectionError(
                f"the controller listens at {address}, which {socket.gethostname()} cannot reach: {error}"
            ) from None
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(str(rank).encode())
        serve(connection, WorkerHost())


def forwarded_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}


def all_nodes() -> dict[str, Node]:
    """Return all nodes by id, including those that were lost."""
    import ray

    return {
        found["NodeID"]: Node(
            found["NodeID"], found["NodeManagerAddress"], found["NodeManagerHostname"], bool(found["Alive"])
        )
        for found in ray.nodes()
    }


# Connecting


def connect(address: str) -> bool:
    """Connect this process to Ray; returns False if it was connected before."""
    if address.startswith("ray://"):
        raise UsageError(
            f"cluster.ray_address is {address}: workers cannot connect to a remote client. Run the command on a "
            "node of the cluster, with --cluster.ray_address auto."
        )
    ours = LocalCluster.running() if address == "auto" and not os.environ.get("RAY_ADDRESS") else None
    if ours is not None:
        address = ours.address
        os.environ |= ours.environment()
    # Ray prints long reports about a lost node on the console; the error that is raised states it in one line.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise UsageError("cluster.ray_address needs Ray: pip install 'posttrain[ray]'") from None
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UsageError(f"cluster.ray_address is {address}, {connection_problem(error)}") from None
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: then Ray has set no handler
            signal.signal(signal.SIGTERM, handler)
    return True


def connection_problem(error: Exception) -> str:
    """Describe why Ray could not be reached, and what to do."""
    text = str(error).strip()
    if "Version mismatch" in text:
        versions = " ".join(text.partition("Version mismatch: ")[2].split())
        return f"but versions differ. {versions}. Use the same environment on all nodes, and start Ray again from it."
    reason = text.splitlines()[0].rstrip(".") if text else type(error).__name__
    return (
        f"but no Ray cluster answers there ({reason}). Start one: posttrain cluster up, or on each node: ray start. "
        "A cluster with a token answers only if RAY_AUTH_MODE and RAY_AUTH_TOKEN are set as on its nodes."
    )


@dataclass(slots=True, frozen=True)
class LocalCluster:
    """The cluster that `posttrain cluster up` started on this machine."""

    address: str
    token: str
    processes: tuple[int, ...]  # one per node, the head first; each ends all processes that it started
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
        """Return the variables that a process needs to connect."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}


def state_file() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return home / "posttrain" / "ray-cluster.json"


def is_ray(process: int) -> bool:
    """Whether this process id belongs to a Ray process of `posttrain cluster up`: Linux uses ids again."""
    with contextlib.suppress(OSError):
        return b"ray.scripts.scripts" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False
