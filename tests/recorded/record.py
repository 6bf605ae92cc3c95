"""Records what the commands of cases.yaml compute: python -m tests.recorded.record OUT.json [CASE ...]

numbers.json was recorded with the code of commit b6c8b3a. To record that version on another machine, check it out, copy
this directory into its tests/ and run this module there.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from tests.recorded.cases import CASES, FOLDER, numbers_of, prepare, read_numbers, run, write_numbers
from tests.recorded.fingerprint import fingerprint


def commit():
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()


def main(out, *names):
    torch.set_num_threads(1)
    file = Path(out).resolve()
    numbers = read_numbers(file) if file.exists() else {"commit": commit(), "fingerprint": fingerprint(), "cases": {}}
    assert numbers["fingerprint"] == fingerprint(), f"{file} was recorded on another machine"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        for name in names or CASES:
            began = time.monotonic()
            place = Path(folder, name)
            prepare(place, CASES[name])
            with contextlib.chdir(place):
                run(CASES[name])
            numbers["cases"][name] = numbers_of(place)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
            write_numbers(numbers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
