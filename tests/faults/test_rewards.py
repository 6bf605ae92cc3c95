"""Whatever a reward function does, it costs the completion it does it for, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from posttrain.core.errors import RewardError, UsageError
from posttrain.rewards.base import Completion, Rewards, combine
from posttrain.rewards.pool import RewardWorker
from posttrain.sandbox.process import REAPER
from posttrain.sandbox.reaper import descendants
from posttrain.sandbox.supervisor import RunStoppedError
from tests.e2e.commands import PATIENCE

FAULTS = textwrap.dedent(
    """
    import ctypes, os, shutil, signal, subprocess, sys, threading, time

    class Odd(BaseException):
        def __str__(self):
            raise RuntimeError("no text")

    def background():
        def later():
            time.sleep(0.2)
            os._exit(3)
        threading.Thread(target=later, daemon=True).start()
        return 1.0

    def twice():
        copy = os.fork()
        if copy:
            os.waitpid(copy, 0)
        return 1.0

    def killed_once():
        if not os.path.exists(os.environ["KILLED"]):
            open(os.environ["KILLED"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    def closed():
        os.closerange(3, 1000)
        return 1.0

    def shout():
        block = "x" * 2**20
        for _ in range(1024):
            print(block)
        return 1.0

    def scribble():
        for number in range(1024):
            try:
                os.write(number, b"hello\\n")
            except OSError:
                pass
        return 1.0

    def hang_in_c():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
        libc.sleep(1000)

    def remove_folder():
        shutil.rmtree(os.getcwd())
        return 1.0

    def full_disk():
        with open("large", "wb") as file:
            for _ in range(100):
                file.write(b"x" * 2**20)
        return 1.0

    def orphan():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        return 1.0

    def loop():
        while True:
            pass

    def memory():
        return float(len(bytearray(2 * 2**30)) > 0)

    def raising(error):
        raise error

    FAULTS = {
        "exception": lambda: 1 / 0,
        "odd exception": lambda: raising(Odd()),
        "exit": lambda: sys.exit(0),
        "interrupt": lambda: raising(KeyboardInterrupt()),
        "_exit": lambda: os._exit(0),
        "segfault": lambda: ctypes.string_at(0),
        "abort": os.abort,
        "loop": loop,
        "hang in c": hang_in_c,
        "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "memory": memory,
        "closed": closed,
        "scribble": scribble,
        "full disk": full_disk,
        "nan": lambda: float("nan"),
        "inf": lambda: float("-inf"),
        "text": lambda: "1.0",
        "list": lambda: [1.0, 2.0],
        "huge": lambda: [0.5] * 10**7,
        "huge number": lambda: 10**400,
        "large number": lambda: 1e300,
        "deep": lambda: deep(0),
    }
    kept = []

    def leak():
        kept.append(bytearray(3 * 2**29))
        return float(len(bytearray(2**30)) > 0)

    def keep():
        kept.append(bytearray(3 * 2**29))
        return 1.0

    def large():
        return float(len(bytearray(2**30)) > 0)

    def wait_for_ever():
        with open(os.environ["ARRIVED"], "w") as pipe:
            pipe.write("here")
        loop()

    FAULTS |= {"leak": leak, "wait": wait_for_ever}
    HARMLESS = {"large": large, "keep": keep, "shout": shout, "folder": remove_folder, "orphan": orphan, "twice": twice}
    HARMLESS |= {"background": background, "killed once": killed_once}

    def deep(n):
        return deep(n + 1)

    def score(text):
        return {**FAULTS, **HARMLESS}.get(text, lambda: float(text))()

    def one_number(completions, **columns):
        return 1.0

    def in_batch(completions, **columns):
        return [score(text) for text in completions]
    """
)
# What the reason must say, and the kind.
EXPECTED = {
    "exception": ("ZeroDivisionError", "error"),
    "odd exception": ("Odd", "error"),
    "exit": ("SystemExit", "error"),
    "interrupt": ("KeyboardInterrupt", "error"),
    "_exit": ("exit code 0", "error"),
    "segfault": ("SIGSEGV", "error"),
    "abort": ("SIGABRT", "error"),
    "loop": ("no result within", "timeout"),
    "hang in c": ("no result within", "timeout"),
    "stopped": ("no result within", "timeout"),
    "memory": ("MemoryError", "error"),
    "closed": ("", "error"),
    "scribble": ("the reply pipe", "error"),
    "full disk": ("File too large", "error"),
    "nan": ("returned nan", "error"),
    "inf": ("returned -inf", "error"),
    "text": ("returned a str", "error"),
    "list": ("returned a list", "error"),
    "huge": ("returned a list", "error"),
    "huge number": ("OverflowError", "error"),
    "large number": ("returned 1e+300; rewards must be at most 1e+15", "error"),
    "deep": ("RecursionError", "error"),
}
SECONDS = 3.0  # of what hangs; a busy machine must score the others within it
AMPLE = 120.0  # where nothing hangs


def asked(*texts):
    return [Completion(prompt="?", messages=[], text=text, finish="stop", tokens=1, columns={"n": 1}) for text in texts]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "faults.py"
    path.write_text(FAULTS, encoding="utf-8")
    return path


@pytest.fixture(params=["of a file", "in memory"])
def score(request, file):
    """The function `score`, named by its file, or as a notebook cell defines it."""
    if request.param == "of a file":
        return f"{file}:score"
    cell: dict = {"__name__": "__main__"}
    exec(compile(FAULTS, "<cell>", "exec"), cell)
    return cell["score"]


def values(verdicts):
    return [row[0].value for row in verdicts]


def left_over(path):
    """Processes that have to do with this test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(path).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    ours = [line for line in found if b"reaper.py" not in line]
    return [line for line in ours if b"rewards.child" in line or b"sleep(1000)" in line]


@pytest.mark.parametrize("fault", EXPECTED)
def test_each_fault_costs_its_own_completion(fault, score):
    text, kind = EXPECTED[fault]
    seconds = SECONDS if kind == "timeout" else AMPLE
    with Rewards([score], timeout_seconds=seconds, workers=1, max_failure_rate=1) as rewards:
        verdicts = rewards.score(asked("1", "2", fault, "3", "4"))
        assert values(verdicts) == [1, 2, None, 3, 4]
        verdict = verdicts[2][0]
        assert verdict.kind == kind and text in verdict.reason, verdict
        assert len(verdict.reason) < 10_000
        assert values(rewards.score(asked("5"))) == [5]


@pytest.mark.parametrize("text", ["shout", "folder", "orphan", "twice"])
def test_what_does_no_harm_is_scored(text, score, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")  # marks the processes of this test
    with Rewards([score], timeout_seconds=AMPLE, workers=1) as rewards:
        assert values(rewards.score(asked("1"))) == [1]
        child = rewards._pool.workers[0].supervisor.process
        assert values(rewards.score(asked("1", text, "2"))) == [1, 1, 2]
        assert rewards._pool.workers[0].supervisor.process is child  # not even the process had to be replaced
        assert len(left_over(tmp_path)) == (2 if text == "orphan" else 1)
    assert left_over(tmp_path) == []


def test_memory_that_a_failed_call_holds_is_not_missing_for_the_next(score):
    with Rewards([score], timeout_seconds=AMPLE, workers=1, max_failure_rate=1) as rewards:
        assert values(rewards.score(asked("leak", "large", "leak"))) == [None, 1, None]
        assert values(rewards.score(asked("large"))) == [1]


@pytest.mark.parametrize("function", ["score", "in_batch"])
def test_memory_that_a_completion_keeps_is_not_blamed_on_later_ones(function, file):
    with Rewards([f"{file}:{function}"], timeout_seconds=AMPLE, workers=1) as rewards:
        assert values(rewards.score(asked("keep", "large", "keep", "large"))) == [1, 1, 1, 1]


def test_one_number_for_a_batch_is_refused(file):
    with Rewards([f"{file}:one_number"], timeout_seconds=AMPLE, workers=1, max_failure_rate=1) as rewards:
        verdicts = [row[0] for row in rewards.score(asked("1", "2"))]
        assert {verdict.value for verdict in verdicts} == {None}
        assert "one number for 2 completions. Return a list with one number for each" in verdicts[0].reason


def test_what_a_thread_left_behind_does_is_not_blamed_on_others(score):
    with Rewards([score], timeout_seconds=AMPLE, workers=1) as rewards:
        assert values(rewards.score(asked("background"))) == [1]
        child = rewards._pool.workers[0].supervisor.process
        child.process.wait(timeout=PATIENCE)  # the thread ends the process
        assert values(rewards.score(asked("1", "2"))) == [1, 2]


@pytest.mark.parametrize("function", ["score", "in_batch"])
@pytest.mark.parametrize("when", ["idle", "first call", "reaper"])
def test_a_child_that_is_killed_costs_no_completion(file, function, when, monkeypatch, tmp_path):
    """As by the kernel when the machine is out of memory; also before it has scored anything."""
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    with Rewards([f"{file}:{function}"], timeout_seconds=AMPLE, workers=1, env=["KILLED"]) as rewards:
        rewards.check()
        if when != "first call":
            reaper = rewards._pool.workers[0].supervisor.process.process
            (child,) = descendants(reaper.pid)
            os.kill(reaper.pid if when == "reaper" else child, signal.SIGKILL)
            reaper.wait(timeout=PATIENCE)
        assert values(rewards.score(asked("killed once" if when == "first call" else "1", "2"))) == [1, 2]


def test_functions_of_batches_are_repeated_one_by_one(file):
    texts = ["1", "exception", "2", "segfault", "3", "nan", "4", "loop", "5", "_exit"]
    expected = [1, None, 2, None, 3, None, 4, None, 5, None]
    with Rewards([f"{file}:in_batch"], timeout_seconds=SECONDS, workers=1, max_failure_rate=1) as rewards:
        assert values(rewards.score(asked(*texts))) == expected


def test_results_do_not_depend_on_the_number_of_workers(file):
    texts = [str(n) for n in range(150)]
    for at, fault in ((3, "segfault"), (40, "exception"), (41, "_exit"), (90, "nan"), (149, "exit")):
        texts[at] = fault
    found = []
    for workers in (1, 3):
        with Rewards([f"{file}:score", f"{file}:in_batch"], timeout_seconds=AMPLE, workers=workers) as rewards:
            verdicts = rewards.score(asked(*texts))
        found.append([[(verdict.value, verdict.kind) for verdict in row] for row in verdicts])
    assert found[0] == found[1]
    assert [row[0][0] for row in found[0]] == [float(text) if text.isdigit() else None for text in texts]


def test_a_batch_that_is_slow_but_does_not_hang_is_asked_singly_from_then_on(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\ncalls = 0\n"
        "def slow(completions):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if len(completions) > 1: time.sleep(1000)\n"
        "    return [float(text) for text in completions]\n",
        encoding="utf-8",
    )
    with Rewards([f"{file}:slow"], timeout_seconds=SECONDS, workers=1, max_failure_rate=1) as rewards:
        assert values(rewards.score(asked("1", "2"))) == [1, 2]
        child = rewards._pool.workers[0].supervisor.process
        assert values(rewards.score(asked("3", "4"))) == [3, 4]
        assert rewards._pool.workers[0].supervisor.process is child  # nothing had to be killed


def test_a_function_that_always_hangs_is_given_up(score):
    with Rewards([score], timeout_seconds=0.5, workers=2, max_failure_rate=0.02) as rewards:
        verdicts = rewards.score(asked(*["loop"] * 100))
        late = [row[0] for row in verdicts if row[0].kind == "timeout"]
        assert 3 <= len(late) <= 4 and values(verdicts) == [None] * 100
        with pytest.raises(RewardError, match="100 of 100"):
            rewards.check_failures(verdicts)


def test_all_parts_of_a_batch_share_its_timeouts_and_all_workers_share_what_hangs(score, monkeypatch):
    """A batch is scored in parts while completions are generated: together they may time out as often as one call."""
    busy, run = set(), RewardWorker.run
    monkeypatch.setattr(RewardWorker, "run", lambda self, *given: (busy.add(id(self)), run(self, *given))[1])
    with Rewards([score], timeout_seconds=0.5, workers=3, max_failure_rate=0.05) as rewards:
        budget = rewards.timeout_budget(96)
        parts = [rewards.score(asked(*["loop"] * 24), budget) for _ in range(4)]
    late = [row[0] for part in parts for row in part if row[0].kind == "timeout"]
    assert 5 <= len(late) <= 4 + 3  # more than 4, and each worker may have been waiting for one
    assert all(row[0].value is None for part in parts for row in part)
    assert len(busy) == 3


def test_a_requested_stop_ends_scoring(score):
    with Rewards([score], timeout_seconds=1000, workers=1, max_failure_rate=1) as rewards:
        rewards.check()
        rewards.stop_when(lambda: True)
        with pytest.raises(RunStoppedError):
            rewards.score(asked("1", "loop", "2"))
        with pytest.raises(RunStoppedError):
            rewards.score(asked("1", "2"), rewards.timeout_budget(2, stop_seconds=0.0))


def test_functions_see_no_secrets_and_no_descriptors_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "wanted")
    file = tmp_path / "look.py"
    file.write_text(
        "import os, json\n"
        "def look(text):\n"
        "    there = sorted(int(n) for n in os.listdir('/proc/self/fd'))\n"
        "    return 1.0, json.dumps([dict(os.environ), there, os.getcwd(), 'torch' in __import__('sys').modules])\n",
        encoding="utf-8",
    )
    with (tmp_path / "open").open("w") as ours, Rewards([f"{file}:look"], env=["JUDGE_KEY"]) as rewards:
        os.set_inheritable(ours.fileno(), True)
        (verdict,) = rewards.score(asked("x"))[0]
    environment, descriptors, folder, heavy = json.loads(verdict.reason)
    assert "MY_TOKEN" not in environment and environment["JUDGE_KEY"] == "wanted"
    assert environment["HOME"] == folder != str(Path.cwd()) and not Path(folder).exists()
    assert len([number for number in descriptors if number > 2]) <= 3  # our two, and that of the listing
    assert not heavy


def test_too_many_failures_stop_the_run_with_their_text(score):
    with Rewards([score], max_failure_rate=0.25) as rewards:
        few = rewards.score(asked("1", "2", "3", "exception"))
        rewards.check_failures(few)
        assert [combine(row, rewards.weights) for row in few] == [1, 2, 3, None]
        many = rewards.score(asked("1", "exception", "exception", "nan"))
        with pytest.raises(RewardError) as stopped:
            rewards.check_failures(many)
    text = str(stopped.value)
    assert stopped.value.exit_code == 1
    assert "3 of 4 completions" in text and "score, 2 times" in text
    assert "ZeroDivisionError" in text and "returned nan" in text
    assert "1 / 0" in text or not isinstance(score, str)  # a cell's text is known only where there is a notebook


def test_timeouts_name_the_options_that_help(score, monkeypatch):
    with Rewards([score], timeout_seconds=SECONDS, workers=1) as rewards:
        verdicts = rewards.score(asked("1", "loop"))
        for load in (0.0, 1e6):
            monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
            with pytest.raises(RewardError, match=rf"raise reward\.timeout_seconds \(now {SECONDS:g}\)") as stopped:
                rewards.check_failures(verdicts)
            assert ("lower reward.workers (now 1)" in str(stopped.value)) is (load > 0)


def test_a_variable_that_is_hidden_from_a_function_is_named(tmp_path, monkeypatch):
    (tmp_path / "keyed.py").write_text("import os\ndef keyed(text): return float(os.environ['JUDGE_KEY'])\n")
    reward = f"{tmp_path / 'keyed.py'}:keyed"
    with Rewards([reward], workers=1) as rewards:
        for value in (None, "0.5"):
            monkeypatch.setenv("JUDGE_KEY", value) if value else monkeypatch.delenv("JUDGE_KEY", raising=False)
            with pytest.raises(RewardError, match="KeyError: 'JUDGE_KEY'") as stopped:
                rewards.check_failures(rewards.score(asked("1")))
            assert ("reward.env JUDGE_KEY" in str(stopped.value)) is (value is not None)
    with Rewards([reward], workers=1, env=["JUDGE_KEY"]) as rewards:
        assert rewards.score(asked("1"))[0][0].value == 0.5
    with pytest.raises(UsageError, match=r"reward\.env: NO_SUCH_KEY is not set"):
        Rewards([reward], env=["JUDGE_KEY", "NO_SUCH_KEY"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(text:\n", "SyntaxError"),
        ("import nothing_such\n", "nothing_such"),
        ("def other(text): return 1\n", "has no function 'score'; it has other"),
        ("score = 3\n", "is a int, not a function"),
        ("def score(a, b): return 1\n", "has none of the known forms"),
        ("import os\nos._exit(0)\n", "ended its process"),
        ("import sys\nsys.exit(1)\n", "SystemExit"),
        ("def score(text, difficulty): return 1\n", "not columns of the data: difficulty"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_anything_starts(code, message, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(code, encoding="utf-8")
    with Rewards([f"{file}:score"]) as rewards, pytest.raises(UsageError) as refused:
        rewards.check(columns=["question", "answer"])
    assert message in str(refused.value) and str(file) in str(refused.value)


def test_columns_are_checked_also_of_a_function_that_is_loaded_already(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def score(text, difficulty): return 1\n", encoding="utf-8")
    with Rewards([f"{file}:score"]) as rewards:
        rewards.check()
        rewards.check(columns=["question", "difficulty"])
        with pytest.raises(UsageError, match="not columns of the data: difficulty"):
            rewards.check(columns=["question", "answer"])


def test_an_interrupt_waits_for_no_function(file):
    """Ctrl-C while a function hangs: the child processes are gone, and the call returns before the deadline."""
    arrived = file.parent / "arrived"
    os.mkfifo(arrived)
    code = (
        "import sys\nfrom posttrain.rewards.base import Completion, Rewards\n"
        "ask = [Completion(prompt='', messages=[], text='wait', finish='', tokens=1, columns={})]\n"
        "with Rewards([sys.argv[1]], timeout_seconds=600, env=['ARRIVED']) as rewards:\n"
        "    rewards.score(ask)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"{file}:score"],
        stderr=subprocess.PIPE,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:{file.parent}", "ARRIVED": str(arrived)},
    )
    try:
        assert arrived.read_text() == "here"  # the function runs
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
        process.communicate()
    assert left_over(file.parent) == []


@pytest.mark.parametrize("text", ["loop", "hang in c", "stopped"])
def test_children_end_when_the_trainer_is_killed(file, text):
    """Also one that holds the interpreter's lock, or is stopped, and cannot end itself."""
    code = (
        "import sys\nfrom posttrain.rewards.base import Completion, Rewards\n"
        f"ask = [Completion(prompt='', messages=[], text={text!r}, finish='', tokens=1, columns={{}})]\n"
        "rewards = Rewards([sys.argv[1]], timeout_seconds=600)\n"
        "rewards.check()\nprint(rewards._pool.workers[0].supervisor.process.folder, flush=True)\nrewards.score(ask)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, f"{file}:score"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:{file.parent}"},
    )
    with process:
        folder = Path(process.stdout.readline().decode().strip())
        assert folder.is_dir()
        process.kill()
    wait_until(lambda: not left_over(file.parent) and not folder.exists())


def test_the_folder_goes_also_where_the_child_ends_before_the_reaper_sees_that_the_trainer_is_gone(tmp_path):
    """A child reads the end of its requests and ends: the trainer that would remove the folder may be gone."""
    folder = tmp_path / "folder"
    folder.mkdir()
    theirs, ours = os.pipe()
    command = [sys.executable, "-I", "-S", str(REAPER), str(theirs), "", sys.executable, "-c", "raise SystemExit(3)"]
    done = subprocess.run(command, pass_fds=(theirs,), cwd=folder, timeout=PATIENCE, check=False)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 3 and not folder.exists()


def wait_until(happened):
    until = time.monotonic() + PATIENCE  # a busy machine needs longer than the 5 s that a quiet one stays below
    while not happened():
        assert time.monotonic() < until, "something is left"
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["closed", "crashed", "trainer killed"])
def test_a_descendant_without_environment_in_its_own_session_ends_too(tmp_path, how):
    """Nothing but its ancestry connects it with the run: its parent has ended, and it is another user's session."""
    pid, file = tmp_path / "pid", tmp_path / "detached.py"
    sleeper = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    file.write_text(
        "import os, sys, time\n"
        "def score(text):\n"
        "    if (starter := os.fork()) == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        f"            os.execve(sys.executable, [sys.executable, '-c', {sleeper!r}], {{}})\n"
        "        os._exit(0)\n"
        "    os.waitpid(starter, 0)\n"
        f"    while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read():\n"
        "        time.sleep(0.01)\n"
        "    if text == 'crash':\n"
        "        os._exit(3)\n"
        "    return 1.0\n",
        encoding="utf-8",
    )
    text = "crash" if how == "crashed" else "x"
    code = (
        "import sys, time\nfrom posttrain.rewards.base import Completion, Rewards\n"
        f"ask = [Completion(prompt='', messages=[], text={text!r}, finish='', tokens=1, columns={{}})]\n"
        f"with Rewards([{f'{file}:score'!r}], timeout_seconds=60, max_failure_rate=1) as rewards:\n"
        f"    rewards.score(ask)\n    print('scored', flush=True)\n    time.sleep({1000 * (how != 'closed')})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "scored\n"
        if how == "closed":
            assert process.wait(timeout=PATIENCE) == 0
        elif how == "trainer killed":
            process.kill()
            process.wait()
        try:
            wait_until(lambda: not Path(f"/proc/{pid.read_text()}").exists())
        finally:
            process.kill()
