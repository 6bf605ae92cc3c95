"""The files under examples/launch: their syntax, their commands, and what the SSH script starts."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from posttrain.cli.train import read

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "examples/launch"

# Runs the command on this machine, as sshd does: a shell reads the last argument.
SSH = '#!/bin/bash\nwhile [ "${1:0:1}" = - ]; do if [ "$1" = -o ]; then shift; fi; shift; done\nexec bash -c "$2"\n'


def commands(script):
    """Return the words after `posttrain` of a shell script, its variables left out."""
    joined = script.replace("\\\n", " ").replace("$resume", "").replace('"$OUT"', "out")
    found = re.findall(r"(?:-m )?posttrain ((?:sft|grpo) [^\n;']*)", " ".join(joined.split("\n")))
    return [shlex.split(words) for words in found]


def check_command(words, tmp_path):
    """The options are ones that training accepts; the file is one of the presets."""
    verb, config, *options = words
    assert config == f"/shared/{verb}.yaml"
    read(verb, [str(ROOT / f"configs/{verb}.yaml"), *options])


def test_kuberay(tmp_path):
    manifest = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    entrypoint = manifest["spec"]["entrypoint"]
    (words,) = commands(entrypoint)
    check_command(words, tmp_path)
    checked = subprocess.run(["bash", "-n", "-c", shlex.split(entrypoint)[2]], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    cluster = manifest["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert group["rayStartParams"]["num-gpus"] == str(gpus)
    assert words[words.index("--cluster.devices") + 1] == str(group["replicas"] * gpus), "all devices are used"
    for part in (group, cluster["headGroupSpec"]):
        spec = part["template"]["spec"]
        mounted = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_skypilot(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    (words,) = commands(task["run"])
    check_command(words, tmp_path)
    for script in (task["run"], task["setup"]):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"].endswith(":8")


# Notes its rank and arguments; the first attempt of rank 3 fails.
FAKE = """
import os, sys
from pathlib import Path
rank, out = os.environ["RANK"], Path(os.environ["NOTES"])
resumed = "--resume" in sys.argv
names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
(out / f"{int(resumed)}-{rank}").write_text(" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]))
if rank == "0":
    (out / "run").mkdir(exist_ok=True)
    (out / "run/config.yaml").touch()
if rank == "3" and not resumed:
    while not (out / "run/config.yaml").exists():
        pass
    sys.exit(1)
sys.exit(int(os.environ.get("EXIT", "0")))
"""


def launch(tmp_path, **environment):
    for name, body in {"bin/ssh": SSH, "posttrain/__main__.py": FAKE}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body)
    (tmp_path / "bin/ssh").chmod(0o755)
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOSTS": "one two", "DEVICES": "2"}
    environment |= {"OUT": str(tmp_path / "run"), "NOTES": str(tmp_path), "PYTHON": sys.executable, "PYTHONPATH": ""}
    command = [str(LAUNCH / "ssh.sh"), "sft", "it's a file.yaml"]
    return subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )


def test_ssh_starts_every_rank_and_resumes_after_a_loss(tmp_path):
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "attempt 1 ended with exit code 1" in done.stderr
    for rank in range(4):
        noted = (tmp_path / f"1-{rank}").read_text()
        out = tmp_path / "run"
        assert noted == f"one 29500 4 {rank % 2} 2 sft it's a file.yaml --output_dir {out} --resume"


@pytest.mark.parametrize("code", [2, 143])
def test_ssh_does_not_repeat_wrong_use_or_a_stop(tmp_path, code):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    done = launch(tmp_path, EXIT=str(code))
    assert done.returncode == code and "attempt" not in done.stderr


def test_ssh_gives_up(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    done = launch(tmp_path, EXIT="7", RESTARTS="1")
    assert done.returncode == 7 and done.stderr.count("ended with exit code 7") == 2
