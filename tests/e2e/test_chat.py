"""`posttrain chat` as people use it: in a terminal, through a pipe, with one question."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from posttrain.train.launch import train
from tests.e2e.commands import PATIENCE, command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that has learnt by heart what to say, non-ASCII characters among it."""
    folder = tmp_path_factory.mktemp("chat")
    said = {"hello": "Grüße, 世界! 🙂", "long": "ab" * 100, "bell": "\x1b[31m\x07"}
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in said.items()
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    update = {"learning_rate": 3e-3, "rows_per_step": 3, "schedule": "constant"}
    options = {"model": {"path": "pico"}, "data": {"train": [str(folder / "rows.jsonl")]}, "update": update}
    return train("sft", out=str(folder / "run"), steps=120, quiet=True, **options).output_dir


def piped(*argv, text, env=None):
    process = subprocess.run(
        [sys.executable, "-m", "posttrain", "chat", *map(str, argv)],
        input=text.encode() if isinstance(text, str) else text,
        capture_output=True,
        timeout=PATIENCE,
        env={**os.environ, **(env or {})},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_through_a_pipe(run, tmp_path):
    lines = f"hello\n/set max_tokens 6\n/clear\nlong\n/save {tmp_path}/talk.jsonl\n/dance\nnew\n".encode()
    lines += b"\xff\xfe\n\n/clear\n/set max_tokens 8\nbell"  # no text; and no end of line before the end
    out = piped(run, "--greedy", text=lines, env={"PYTHONUTF8": "0", "LC_ALL": "C"}).decode("utf-8")
    assert "\x1b" not in out and "\x07" not in out
    said = out.splitlines()
    assert said[:7] == [
        "Grüße, 世界! 🙂",
        "max_tokens is 6",
        "the conversation is cleared",
        "ababab",
        f"saved to {tmp_path}/talk.jsonl",
        "unknown command /dance; /help lists the commands",
        "the conversation is cleared",
    ]
    assert said[-1] == "\\x1b[31m\\x07"
    saved = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert [message["content"] for message in saved] == ["long", "ababab"]


def test_one_question(run, capsys):
    assert command("chat", run, "--greedy", "--ask", "hello") == 0
    assert capsys.readouterr().out == "Grüße, 世界! 🙂\n"


def test_side_by_side(run, capsys):
    assert command("chat", "pico", run, "--greedy", "--ask", "hello", "--max_tokens", 40) == 0
    out = capsys.readouterr().out
    assert out.startswith("[pico]\n") and out.endswith(f"[{run}]\nGrüße, 世界! 🙂\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["pico", "pico"], "given twice"),
        (["a", "b", "c"], "one model, or two"),
        (["pico", "--top_p", 2], "top_p"),
        (["pico", "--template", "chatnl"], "chatml"),
        (["no/such/model/at/all"], "no/such/model"),
    ],
)
def test_mistakes_are_named(argv, words, capsys):
    assert command("chat", *argv, "--ask", "hello") == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_does_not_leave(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, EOFError])

    def interrupted(prompt):
        raise next(typed)

    monkeypatch.setattr("builtins.input", interrupted)
    assert command("chat", "pico") == 0
    assert capsys.readouterr().out == "\nexit ends the chat\n" and next(typed, None) is None


class Terminal:
    """A chat in a pseudo-terminal, read as it writes."""

    def __init__(self, *argv):
        self.seen = b""
        self.pid, self.screen = pty.fork()
        if not self.pid:
            os.execv(sys.executable, [sys.executable, "-m", "posttrain", "chat", *map(str, argv)])

    def type(self, text):
        os.write(self.screen, text.encode())

    def read(self):
        """More of what it writes; False when it has ended."""
        ready, _, _ = select.select([self.screen], [], [], 1)
        try:
            found = os.read(self.screen, 65536) if ready else None
        except OSError:  # so ends a pseudo-terminal
            return False
        self.seen += found or b""
        return found != b""

    def wait_for(self, pattern):
        """The match; what was seen up to it is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern.encode(), self.seen, re.DOTALL)):
            assert time.monotonic() < deadline and self.read(), self.seen
        self.seen = self.seen[found.end() :]
        return found

    def close(self):
        while self.read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.screen)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def terminal(request):
    opened = []

    def start(*argv):
        opened.append(Terminal(*argv))
        return opened[-1]

    yield start
    for found in opened:
        try:
            os.kill(found.pid, signal.SIGKILL)
            os.waitpid(found.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has ended, as it should


def test_in_a_terminal(terminal):
    """Ctrl-C stops the answer, not the chat; what cut an answer off is said."""
    chat = terminal("pico", "--greedy", "--max_tokens", 100_000)  # untrained it never comes to an end
    chat.wait_for("exit ends the chat.*You >> ")
    chat.type("talk\r")
    chat.wait_for("talk\r\n.{20}")
    chat.type("\x03")
    chat.wait_for(r"\[stopped\].*You >> ")
    chat.type("/set max_tokens 3\r")
    chat.wait_for("max_tokens is 3.*You >> ")
    chat.type("more\r")
    chat.wait_for(r"more\r\n.*\[stopped at max_tokens = 3.*You >> ")
    chat.type("exit\r")
    assert chat.close() == 0
