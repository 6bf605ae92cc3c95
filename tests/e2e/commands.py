"""The command `posttrain`, run in this process or in one of its own."""

import json
import subprocess
import sys
import time

from posttrain.cli.main import main

PATIENCE = 300  # seconds; only a hang is ever that slow, also on a busy machine


def command(*argv):
    """The exit code of `posttrain argv...`."""
    try:
        return main([str(argument) for argument in argv])
    except SystemExit as stopped:  # the parsers leave so, with 2 for wrong use and 0 after --help
        return stopped.code


def start(*argv, cwd=None):
    """`python -m posttrain argv...` as a process of its own."""
    arguments = [sys.executable, "-m", "posttrain", *map(str, argv)]
    return subprocess.Popen(arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(happened, process):
    """Look again and again, as long as the process lives and we have patience."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, f"ended too early with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def rows_of(file):
    """The objects of a .jsonl file; a last line that is still being written is left out."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
