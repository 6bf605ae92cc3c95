"""`posttrain slurm`: prints a batch script that trains a configuration on several machines."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import verb_of_file
from posttrain.config.sections import Config
from posttrain.config.tools import ToolArgs, check_at_least, check_required, read_own_options, required
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

SAVE_SECONDS = 300  # Slurm signals the job to save and stop this long before its time limit
STOPPED = 143  # exit code of a run that saved and stopped


@dataclass(kw_only=True)
class SlurmArgs(ToolArgs):
    """Options of `posttrain slurm` besides those of training."""

    verb: ClassVar[str] = "slurm"
    about: ClassVar[str] = TOOLS["slurm"]
    example: ClassVar[str] = "posttrain slurm configs/sft.yaml --nodes 2 --time 24:00:00 > job.sh && sbatch job.sh"
    usage: ClassVar[str] = "posttrain slurm [VERB] [CONFIG.yaml] --nodes N [--option value ...] [--section.option ...]"

    nodes: int = required(0)
    """Required. Number of machines."""
    devices_per_node: int = 8
    """Accelerators per machine; one process runs on each."""
    cpu: bool = False
    """The machines have no accelerators."""
    cpus_per_task: int = 0
    """CPU cores per process; 0: the default of the cluster."""
    time: str = ""
    """Time limit of the job, such as 24:00:00; the run saves a checkpoint before it."""
    partition: str = ""
    """Slurm partition."""
    account: str = ""
    """Slurm account."""
    requeue: bool = False
    """Queue the job again when its time limit is reached, to resume."""
    ray: bool = False
    """Start a Ray cluster in the job, and place the workers on it."""


ARGS = (SlurmArgs,)
MORE = "VERB may be left out if the file has a line like `verb: sft`. Options of training become part of the script."


def run(args: list[str]) -> int:
    """Check the configuration as training would, and print the script."""
    options, words, rest = read_own_options(SlurmArgs(), args, MORE)
    check_required(options)
    check_at_least(options, nodes=1, devices_per_node=1, cpus_per_task=0)
    verb = words[0] if words else ""
    if verb in ALGORITHMS:
        words = words[1:]
    elif not words:
        raise UsageError(f"VERB or CONFIG.yaml is not set. Name what to train. Example: {SlurmArgs.example}")
    else:
        verb = verb_of_file(Path(words[0]))
        if verb not in ALGORITHMS:
            raise UsageError(
                f"{words[0]}: names no verb to train with. Add a line like `verb: sft`, or run "
                f"posttrain slurm VERB {words[0]} --nodes {options.nodes}"
            )
    from posttrain.cli.train import read

    devices = ["--cluster.devices", str(options.nodes * options.devices_per_node)]
    words = [*words, *rest]
    config = read(verb, [*words, *devices])
    print(script(verb, words, config, options), end="")
    return 0


def script(verb: str, words: list[str], config: Config, options: SlurmArgs) -> str:
    out = shlex.quote(config.output_dir) if config.output_dir else f"runs/{verb}-$SLURM_JOB_ID"
    lines = ["#!/bin/bash", *headers(verb, options), "set -euo pipefail", f"OUT={out}", 'mkdir -p "$OUT"']
    lines += [
        "# A job that was stopped resumes from its last checkpoint.",
        "resume=",
        'if [ -e "$OUT/config.yaml" ]; then resume=--resume; fi',
        *head_lines(options),
    ]
    train = f'posttrain {shlex.join([verb, *words])} --output_dir "$OUT" $resume'
    lines += ray_lines(train, options) if options.ray else srun_lines(train, options)
    if options.requeue:
        lines += [f'if [ "$code" = {STOPPED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi']
    lines += ['exit "$code"']
    return "\n".join(lines) + "\n"


def headers(verb: str, options: SlurmArgs) -> list[str]:
    tasks = 1 if options.ray else options.devices_per_node
    found = {"job-name": f"posttrain-{verb}", "nodes": options.nodes, "ntasks-per-node": tasks}
    if not options.cpu:
        found["gpus-per-node"] = options.devices_per_node
    if options.cpus_per_task:
        found["cpus-per-task"] = options.cpus_per_task * (options.devices_per_node if options.ray else 1)
    found |= {name: getattr(options, name) for name in ("time", "partition", "account") if getattr(options, name)}
    found |= {"output": "slurm-%j.out", "open-mode": "append"}
    if options.time:
        found["signal"] = f"{'B:' if options.ray else ''}TERM@{SAVE_SECONDS}"
    return [f"#SBATCH --{name}={value}" for name, value in found.items()] + ["#SBATCH --requeue"] * options.requeue


def head_lines(options: SlurmArgs) -> list[str]:
    """Find the first machine and the address at which the others reach it."""
    name = "head=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | awk 'NR == 1')"
    if options.nodes == 1:
        return [name, "head_address=$head"]
    resolve = 'srun --nodes=1 --ntasks=1 --nodelist="$last" getent ahostsv4 "$head"'
    return [
        name,
        "# The head's address as another machine resolves it: on the head itself its name may be a loopback address.",
        "last=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | awk 'END {print}')",
        f"head_address=$({resolve} | awk 'NR == 1 {{print $1}}')",
    ]


def srun_lines(train: str, options: SlurmArgs) -> list[str]:
    """Return the srun command with one process per device: rank 0 is the controller, the others are workers."""
    return [
        "# The address where the processes find each other; the port depends on the job.",
        "export MASTER_ADDR=$head_address MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "code=0",
        f"srun --kill-on-bad-exit=1 {train} || code=$?",
    ]


def ray_lines(train: str, options: SlurmArgs) -> list[str]:
    """Start Ray on each machine, then the controller on the first one."""
    start = "ray start --disable-usage-stats --block"
    if not options.cpu:
        start += f" --num-gpus={options.devices_per_node}"
    lines = [
        "address=$head_address:$((20000 + SLURM_JOB_ID % 20000))",
        'srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap '
        f'{start} --head --node-ip-address="$head_address" --port="${{address##*:}}" --include-dashboard=false &',
        "for _ in $(seq 120); do",
        '  if ray status --address="$address" > /dev/null 2>&1; then break; fi',
        "  sleep 1",
        "done",
    ]
    if options.nodes > 1:
        others = options.nodes - 1
        lines.append(
            f'srun --nodes={others} --ntasks={others} --exclude="$head" --overlap {start} --address="$address" &'
        )
    devices = options.nodes * options.devices_per_node
    return [
        *lines,
        f'{train} --cluster.ray_address "$address" --cluster.devices {devices} &',
        "training=$!",
        "trap 'kill -TERM \"$training\"' TERM",
        "code=0",
        'wait "$training" || code=$?',
        "# The first wait returns when the signal arrives; saving takes longer.",
        'if [ "$code" -gt 128 ] && kill -0 "$training" 2> /dev/null; then code=0; wait "$training" || code=$?; fi',
    ]
