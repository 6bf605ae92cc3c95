"""`posttrain slurm`: a batch script that trains a configuration on several machines."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.options import Parser
from posttrain.config.parsing import verb_of_file
from posttrain.config.sections import Config
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

SAVE_SECONDS = 300  # before the job's time is over it is asked to save and end
STOPPED = 143  # our exit code then


def run(args: list[str]) -> int:
    """Check the configuration as training would, and print the script."""
    options, rest = parser().parse_known_args(args)
    if options.nodes < 1 or options.devices_per_node < 1:
        raise UsageError("--nodes and --devices_per_node must be at least 1")
    verb, file = options.verb_or_config, options.config
    if verb not in ALGORITHMS:
        file, verb = verb, verb_of_file(Path(verb))
        if verb not in ALGORITHMS:
            raise UsageError(f"{file} does not say what it is for: posttrain slurm VERB {file} --nodes {options.nodes}")
    from posttrain.cli.train import read

    devices = ["--cluster.devices", str(options.nodes * options.devices_per_node)]
    words = [*([file] if file else []), *rest]
    config = read(verb, [*words, *devices])
    print(script(verb, words, config, options), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    found = Parser(
        prog="posttrain slurm",
        usage="posttrain slurm [VERB] CONFIG.yaml --nodes N [options] [--section.option value ...]",
        description=f"Prints {TOOLS['slurm']}. Save it and hand it to sbatch; options of training go into it.",
    )
    found.add_argument("verb_or_config", metavar="CONFIG.yaml", help="with a line like `verb: sft`, or after the verb")
    found.add_argument("config", nargs="?", default="", help=argparse.SUPPRESS)
    found.add_argument("--nodes", type=int, required=True, help="machines")
    found.add_argument("--devices_per_node", type=int, default=8, help="accelerators of each, a process each (8)")
    found.add_argument("--cpu", action="store_true", help="machines without accelerators")
    found.add_argument("--cpus_per_task", type=int, default=0, help="cores for each process")
    found.add_argument("--time", default="", help="limit of the job, as 24:00:00; it saves before")
    found.add_argument("--partition", default="", help="where to run it")
    found.add_argument("--account", default="", help="who pays for it")
    found.add_argument("--requeue", action="store_true", help="when the time is over, go on in a new turn")
    found.add_argument("--ray", action="store_true", help="start a Ray cluster and place the roles on it")
    return found


def script(verb: str, words: list[str], config: Config, options: argparse.Namespace) -> str:
    out = shlex.quote(config.output_dir) if config.output_dir else f"runs/{verb}-$SLURM_JOB_ID"
    lines = ["#!/bin/bash", *headers(verb, options), "set -euo pipefail", f"OUT={out}", 'mkdir -p "$OUT"']
    lines += [
        "# A job that was stopped goes on where it was.",
        "resume=",
        'if [ -e "$OUT/config.yaml" ]; then resume=--resume; fi',
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ]
    train = f'posttrain {shlex.join([verb, *words])} --output_dir "$OUT" $resume'
    lines += ray_lines(train, options) if options.ray else srun_lines(train, options)
    if options.requeue:
        lines += [f'if [ "$code" = {STOPPED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi']
    lines += ['exit "$code"']
    return "\n".join(lines) + "\n"


def headers(verb: str, options: argparse.Namespace) -> list[str]:
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


def srun_lines(train: str, options: argparse.Namespace) -> list[str]:
    """A process a device; the first one controls, the others serve it."""
    return [
        "# Where the processes meet; the port is one that few others choose.",
        "export MASTER_ADDR=$head MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "code=0",
        f"srun --kill-on-bad-exit=1 {train} || code=$?",
    ]


def ray_lines(train: str, options: argparse.Namespace) -> list[str]:
    """One Ray process a machine, then the controller on the first of them."""
    start = "ray start --disable-usage-stats --block"
    if not options.cpu:
        start += f" --num-gpus={options.devices_per_node}"
    lines = [
        "address=$head:$((20000 + SLURM_JOB_ID % 20000))",
        'srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap '
        f'{start} --head --node-ip-address="$head" --port="${{address##*:}}" --include-dashboard=false &',
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
        "# The first wait ends when the signal comes; what it asked for takes a while.",
        'if [ "$code" -gt 128 ] && kill -0 "$training" 2> /dev/null; then code=0; wait "$training" || code=$?; fi',
    ]
