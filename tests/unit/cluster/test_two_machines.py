"""Two machines that find each other: two network namespaces with a link between them, each with its own /etc/hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cluster.test_launched import SCRIPT

ROOT = Path(__file__).parents[3]
# The head's own name is a loopback address on the head alone, as Debian and Ubuntu write /etc/hosts.
HOSTS = {
    "head": "127.0.0.1 localhost\n127.0.1.1 head $(hostname)\n10.77.0.2 other\n",
    "other": "127.0.0.1 localhost\n127.0.1.1 other $(hostname)\n10.77.0.1 head\n",
}
MACHINES = f"""
set -euo pipefail
mount -t tmpfs tmpfs /run && mkdir /run/netns
for name in head other; do
  ip netns add $name
  ip -n $name link set lo up
done
ip link add to-other type veth peer name to-head
ip link set to-other netns head && ip -n head addr add 10.77.0.1/24 dev to-other && ip -n head link set to-other up
ip link set to-head netns other && ip -n other addr add 10.77.0.2/24 dev to-head && ip -n other link set to-head up
printf '%b' "{HOSTS["head"]}" > /run/hosts-head
printf '%b' "{HOSTS["other"]}" > /run/hosts-other
on() {{ ip netns exec $1 unshare --mount bash -c 'mount --bind /run/hosts-'$1' /etc/hosts && exec "$@"' - "${{@:2}}"; }}
"""
SRUN = """
export MASTER_ADDR=head MASTER_PORT=29400 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1
SLURM_PROCID=0 SLURM_LOCALID=0 on head "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 on head "$@" & second=$!
SLURM_PROCID=2 SLURM_LOCALID=0 on other "$@" & third=$!
wait $first && wait $second && wait $third
"""


def on_two_machines(commands, *words, cwd, **options):
    """Run bash commands, in which `on head` and `on other` start a program on a machine."""
    isolated = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--mount-proc", "--kill-child"]
    return subprocess.run(
        [*isolated, "bash", "-c", MACHINES + commands, "-", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    try:
        tried = on_two_machines("on other getent hosts head", cwd=tmp_path_factory.mktemp("tried"), timeout=60)
    except FileNotFoundError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    if tried.returncode:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
    return on_two_machines


def test_they_meet_where_the_head_s_name_is_a_loopback_address_on_the_head(machines, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n"
    done = machines(environment + SRUN, sys.executable, "script.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[(111, 0), (111, 1), (111, 2)]") == 2, done.stdout + done.stderr
