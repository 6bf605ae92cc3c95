"""One progress display: a line that changes on a terminal, plain lines elsewhere, nothing when quiet."""

import os
import pty
import sys
import threading

import pytest

from posttrain.core import progress
from posttrain.core.progress import ProgressDisplay, duration, short_number, time_left
from tests.unit.core.test_logging import read_until, screen_of


def test_lines_without_a_terminal(capsys, monkeypatch):
    with ProgressDisplay(stream=sys.stderr, seconds_between_lines=5) as display:
        for second in range(13):
            monkeypatch.setattr(progress.time, "monotonic", lambda now=second: float(now))
            display.update(f"{second} of 100", "fast" if second else "", done=second, total=100)
            if second == 7:
                display.message("a message")
        display.update("99 of 100", done=99, total=100, show=True)
        display.update("100 of 100", done=100, total=100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "0 of 100", "5 of 100  fast", "a message", "10 of 100  fast", "99 of 100", "100 of 100",
    ]  # fmt: skip


def test_quiet_shows_messages_alone(capsys):
    with ProgressDisplay(quiet=True) as display:
        display.update("1 of 2", done=1, total=2, show=True)
        display.message("a message")
    assert capsys.readouterr().out == "a message\n"


def test_lines_may_go_elsewhere(capsys):
    lines = []
    with ProgressDisplay(print_line=lines.append) as display:
        display.update("1 of 2", done=1, total=2)
        display.message("a message")
        display.update("2 of 2", done=2, total=2)
    assert lines == ["1 of 2", "a message", "2 of 2"] and capsys.readouterr().out == ""


def test_transient_progress_needs_a_terminal(capsys):
    with ProgressDisplay(transient=True) as display:
        display.update("1 of 2", done=1, total=2, show=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("transient", [False, True])
def test_a_terminal_shows_the_newest_line(monkeypatch, transient):
    controller, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("TERM", raising=False)
    with os.fdopen(terminal, "w") as out:
        with ProgressDisplay(stream=out, transient=transient) as display:
            assert display.on_terminal
            display.update("1 of 4", "[bold]fast", done=1, total=4)
            monkeypatch.setattr(sys, "stdout", out)  # as for a program whose output is the terminal
            display.message("a message")
            threads = [
                threading.Thread(
                    target=display.update, args=(f"{n} of 4",), kwargs={"done": n, "total": 4, "show": True}
                )
                for n in (2, 3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            display.update("4 of 4", "x" * 100, done=4, total=4)
        print("the end", file=out, flush=True)
        seen = read_until("the end\r\n", controller)
    os.close(controller)
    assert "1 of 4" in seen and "[bold]fast" in seen
    screen = screen_of(seen)
    assert screen[0] == "a message" and screen[-2:] == ["the end", ""]
    if not transient:
        assert screen[1].startswith(f"4 of 4 {'━' * 20} xxxx") and len(screen[1]) <= 70


def test_no_terminal_control_for_a_dumb_terminal(monkeypatch):
    controller, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "dumb")
    with os.fdopen(terminal, "w") as out:
        with ProgressDisplay(stream=out) as display:
            display.update("1 of 4", "fast", done=1, total=4)
        assert read_until("fast\r\n", controller) == "1 of 4  fast\r\n"
    os.close(controller)


def test_numbers_in_words(monkeypatch):
    assert [short_number(n) for n in (950, 1234, 3_400_000)] == ["950", "1.2k", "3.4M"]
    assert [duration(n) for n in (0.4, 185, 3785)] == ["0:00", "3:05", "1:03:05"]
    monkeypatch.setattr(progress.time, "monotonic", lambda: 110.0)
    assert time_left(100.0, 1, 4) == "eta 0:30"
    assert time_left(100.0, 0, 4) == time_left(100.0, 3, None) == ""


@pytest.mark.parametrize(
    ("position", "details"),
    [
        ("step 100000/200000", "reward 0.691  (correct 0.7 short -0.009)  length 1019  entropy 0.0906  979 tokens/s"),
        ("1,234,567 examples  1,234,567,890 tokens", "10,000 examples/s  1,000,000 tokens/s"),
        ("1,000,000 of 2,000,000 completions", "230,059 tokens/s"),
        ("a/long/path/of/a/data/file/that/fills/the/whole/width/of/a/terminal.jsonl", "1,000 examples"),
    ],
)
def test_the_remaining_time_is_visible_at_80_columns(monkeypatch, capsys, position, details):
    ProgressDisplay().update(position, details, done=1, total=4, eta="eta 123:03:05")
    assert capsys.readouterr().out == f"{position}  eta 123:03:05  {details}\n"
    controller, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TERM", raising=False)
    with os.fdopen(terminal, "w") as out:
        with ProgressDisplay(stream=out) as display:
            display.update(position, details, done=1, total=4, eta="eta 123:03:05")
        print("the end", file=out, flush=True)
        line, *_ = screen_of(read_until("the end\r\n", controller))
    os.close(controller)
    assert line.startswith(position[:30]) and "eta 123:03:05" in line and len(line) <= 80
