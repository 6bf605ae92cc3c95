"""The garbage collector does not look through libraries, neither when they are imported nor when the command ends."""

import subprocess
import sys

IMPORTED = """
import gc, sys
from posttrain.core.imports import importing_libraries
passes = []
gc.callbacks.append(lambda phase, found: passes.append(found["generation"]))
with importing_libraries():
    library = [[] for _ in range(100_000)]
print(len(passes), gc.get_freeze_count() > 100_000, gc.isenabled())
held = [[] for _ in range(100_000)]
print(len(passes) > 0)
sys.modules["transformers"] = sys  # as after the first import
gc.unfreeze()
with importing_libraries():
    print(gc.isenabled(), gc.get_freeze_count())
"""
ENDED = """
import atexit, gc, sys
from posttrain.cli.main import run_process
atexit.register(lambda: print(len(gc.get_objects()) < 1000 < gc.get_freeze_count()))
sys.argv = ["posttrain", *sys.argv[1:]]
run_process()
"""


def lines_of(*arguments, code=0):
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def test_the_collector_pauses_while_libraries_are_imported_for_the_first_time():
    assert lines_of(IMPORTED) == ["0 True True", "True", "True 0"]


def test_the_end_of_a_command_is_without_passes_whatever_its_exit_code():
    assert lines_of(ENDED, "--version")[-1] == "True"
    assert lines_of(ENDED, "sftt", code=2)[-1] == "True"
