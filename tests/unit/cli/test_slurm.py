"""The batch script: bash accepts it, and what it starts trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cli.main import main

ROOT = Path(__file__).parents[3]
OPTIONS = ["--model.path", "pico", "--data.train", str(ROOT / "examples/data/chat.jsonl")]


def script(capsys, *args):
    assert main(["slurm", *map(str, args)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--ray"], ["--time", "1:00:00", "--requeue"], ["--cpu", "--cpus_per_task", "4"]])
def test_bash_accepts_it(capsys, tmp_path, more):
    found = script(capsys, "sft", "--nodes", 3, "--devices_per_node", 4, *more, *OPTIONS, "--out", "a folder/it's")
    checked = subprocess.run(["bash", "-n"], input=found, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "#SBATCH --nodes=3" in found and ("--gpus-per-node=4" in found) != ("--cpu" in more)
    assert ("--ntasks-per-node=4" in found) != ("--ray" in more)
    assert ("--cluster.devices 12" in found) == ("--ray" in more), "srun's processes count themselves"


def test_what_cannot_work_is_found_before_the_queue(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: pico}\ndata: {train: a.jsonl}\n")
    assert main(["slurm", str(tmp_path / "c.yaml"), "--nodes", "2"]) == 2
    assert "names no verb to train with" in capsys.readouterr().err
    assert main(["slurm", "sft", *OPTIONS, "--nodes", "1", "--cluster.tensor_parallel_size", "3"]) == 2
    assert "8 devices, which cluster.tensor_parallel_size 3 does not divide" in capsys.readouterr().err


# Two tasks on this machine, as srun would start them.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
for rank in 0 1; do
  SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit $?; done
"""


def run_script(text, folder, posttrain, **environment):
    """Where the tools of Slurm are these."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, body in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n", "posttrain": posttrain}.items():
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid())}
    environment |= {"SLURM_JOB_NODELIST": "here", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash"], input=text, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.parametrize("more", [[], ["--ray"]])
def test_the_head_s_address_is_the_one_that_another_machine_resolves(capsys, tmp_path, more):
    text = script(capsys, "sft", "--nodes", 2, "--devices_per_node", 1, "--cpu", *more, *OPTIONS)
    lines = [line for line in text.splitlines() if line.startswith(("head", "last", "export MASTER", "address="))]
    tools = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'while [[ $1 == --* ]]; do options+=" $1"; shift; done\n[[ $options == *--nodelist=second* ]] && "$@"',
        "other/getent": "[ $2 = first ] && printf '10.9.8.7 STREAM first\\n10.9.8.7 DGRAM\\n'",
    }
    for name, body in tools.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    bash = "\n".join(["set -euo pipefail", *lines, 'echo "${MASTER_ADDR:-} ${address:-}"'])
    environment = {"SLURM_JOB_NODELIST": "both", "SLURM_JOB_ID": "7"}
    environment["PATH"] = f"{tmp_path}:{tmp_path / 'other'}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", bash], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == (["10.9.8.7:20007"] if more else ["10.9.8.7"]), done.stderr


SMALL = ["--nodes", 1, "--devices_per_node", 2, "--cpu", *OPTIONS, "--steps", 2, "--train.batch_size", 4]


def test_what_it_starts_trains(capsys, tmp_path):
    real = f'#!/bin/bash\nexec {sys.executable} -m posttrain "$@"\n'
    done = run_script(script(capsys, "sft", *SMALL), tmp_path, real)
    assert done.returncode == 0 and "done: 2 steps; loss" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / f"runs/sft-{os.getpid()}/logs/worker-1.log").exists()


def test_a_job_that_was_stopped_goes_on_and_its_code_is_the_run_s(capsys, tmp_path):
    text = script(capsys, "sft", *SMALL, "--out", "it's here")
    said = '#!/bin/bash\necho "$SLURM_PROCID of $SLURM_STEP_NUM_TASKS at $MASTER_ADDR:" "$@"\nexit $CODE\n'
    first = run_script(text, tmp_path, said, CODE="0")
    assert sorted(line.split(" at ")[0] for line in first.stdout.splitlines()) == ["0 of 2", "1 of 2"]
    assert "at 127.0.0.1: sft --model.path pico" in first.stdout and "--out it's here" in first.stdout
    assert "--resume" not in first.stdout
    (tmp_path / "it's here/config.yaml").touch()
    again = run_script(text, tmp_path, said, CODE="143")
    assert "--output_dir it's here --resume" in again.stdout and again.returncode == 143
