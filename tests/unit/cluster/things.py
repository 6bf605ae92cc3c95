"""Objects for the workers of these tests; imports nothing heavy, so that workers start quickly."""

import ctypes
import os
import signal
import threading
import time

from posttrain.core.errors import UsageError


class Thing:
    """Returns values, and fails in several ways on request."""

    def __init__(self, name, other=None):
        self.name, self.other = name, other
        self.released = threading.Event()
        self.seen = []

    def identify(self, *args, **kwargs):
        return self.name, os.getpid(), args, kwargs

    def echo(self, value):
        self.seen.append(value)
        return value

    def all_seen(self):
        return self.seen

    def name_of_other(self):
        return self.other.name

    def generate(self):
        """Returns only if another call runs in parallel."""
        return self.released.wait(60)

    def release(self):
        self.released.set()

    def fail(self, rank, mine=None):
        if mine == rank:
            raise ValueError("this is wrong\nand more of it")
        time.sleep(3600)

    def refuse(self):
        raise UsageError("model.path: no such thing")

    def kill(self, this):
        if this:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def stop(self, this):
        if this:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)

    def hold_lock(self, seconds):
        """A call of a library that does not release Python's lock: no other thread runs."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return seconds

    def quit(self):
        os._exit(7)

    def unsendable(self):
        return threading.Lock()

    def child(self):
        """Starts a child process that would outlive the worker."""
        pid = os.fork()
        if not pid:
            time.sleep(3600)
        return pid

    def environment(self, name):
        return os.environ.get(name)


class Late:
    """Is built only when another one is being built too: one after the other they would wait for ever."""

    def __init__(self, folder, mine, other):
        (folder / mine).touch()
        while not (folder / other).exists():
            time.sleep(0.01)

    def here(self):
        return True


class Together:
    """Uses the group."""

    def total(self, value):
        import torch
        import torch.distributed as dist

        found = torch.tensor(value)
        dist.all_reduce(found)
        return found.item(), dist.get_rank(), torch.get_num_threads()

    def lose(self, rank):
        import torch.distributed as dist

        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


class NumberedRequest(int):
    """A request of a prompt of its own."""

    prompt = b""

    @property
    def group(self):
        return int(self)


class FakeRolloutWorker:
    """Returns the request and the version of its weights, as the sample of a rollout worker depends on both."""

    def __init__(self, folder):
        self.folder, self.version = folder, None
        self.batch, self.held = 0, {}

    def is_ready(self):
        self.misbehave("start")
        return True

    def misbehave(self, moment):
        """Fails at a moment that a file names: is lost once, or raises an error every time."""
        for fault in sorted(self.folder.glob(f"{moment}-*")):
            if "-of-" in fault.name and f"-of-{os.getpid()}-" not in fault.name:  # another one's
                continue
            if fault.name.endswith("hang"):  # for good, although the process answers pings
                fault.unlink()
                time.sleep(3600)
            if fault.name.endswith("raise"):
                raise ValueError("lm_head.weight has 7 rows, but 8 are expected")
            try:
                fault.unlink()
            except FileNotFoundError:
                continue  # another one took it
            os.kill(os.getpid(), signal.SIGSTOP if fault.name.endswith("stop") else signal.SIGKILL)

    def needed_parts(self):
        self.misbehave("needed_parts")
        return {"weight": ((0, 4),)}

    def connect(self, groups, rank):
        self.misbehave("connect")
        with (self.folder / "met").open("a") as met:
            met.write(f"{rank}\n")
        return ""

    def receive(self, version):
        self.misbehave("receive")
        try:
            (self.folder / f"dropped-{version}").unlink()  # by one of the workers
        except FileNotFoundError:
            self.version = version
        return ""

    def check(self, expected):
        self.misbehave("check")
        return self.version, "by 0.5 on average" if (self.folder / f"differs-{self.version}").exists() else ""

    def generate(self, requests, sampling):
        self.misbehave("generate")
        if (self.folder / "slow").exists():
            (self.folder / f"under-way-{os.getpid()}").touch()
            while (self.folder / "slow").exists():
                time.sleep(0.01)
        with (self.folder / "asked").open("a") as asked:
            asked.write("".join(f"{request}\n" for request in requests))
        return [(request, self.version) for request in requests]

    def advance(self, batch, requests, sampling, longest_prompt, slots, wanted):
        """Finish half of the requests that it has at a time."""
        if batch != self.batch:
            self.batch, self.held = batch, {}
        self.held |= requests
        if wanted and slots - len(self.held) >= wanted:
            return [], [], slots - len(self.held)
        self.misbehave("advance")
        assert len(self.held) <= slots, "no more than it has room for"
        finished = list(self.held)[: -(-len(self.held) // 2)]
        samples = self.generate([self.held.pop(index) for index in finished], sampling)
        return finished, samples, slots - len(self.held)


class FakeWeightSender:
    """Sends nothing and returns a fixed result."""

    def connect(self, groups, parts):
        return ""

    def send(self):
        from posttrain.parallel.weight_transfer import TransferResult

        return TransferResult(10, 0.5)
