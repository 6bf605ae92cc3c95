#!/usr/bin/env bash
# Train on several machines over SSH, without Slurm or Ray:
#
#   HOSTS="gpu1 gpu2" DEVICES=8 OUT=/shared/runs/one examples/launch/ssh.sh sft /shared/sft.yaml --train.max_steps 1000
#
# Every machine needs the same Python environment and the same paths on a shared file system; the others have to reach
# the first one by the name given here, and SSH must not ask for a password. If a machine or a process is lost, all are
# stopped and start again from the last checkpoint, RESTARTS times at most.
set -uo pipefail

: "${HOSTS:?names of the machines, the first one has the controller}" "${DEVICES:?accelerators per machine}"
: "${OUT:?run directory on the shared file system}"
PORT=${PORT:-29500} RESTARTS=${RESTARTS:-3} PYTHON=${PYTHON:-python}
read -r -a hosts <<< "$HOSTS"

# What runs on a machine: one process per device. When the connection ends, the terminal sends a signal, and the run saves.
remote='
cd "$1" && export MASTER_ADDR=$2 MASTER_PORT=$3 WORLD_SIZE=$4 LOCAL_WORLD_SIZE=$5 || exit 1
first=$6 code=0 pids=()
shift 6
for ((local = 0; local < LOCAL_WORLD_SIZE; local++)); do
  RANK=$((first + local)) LOCAL_RANK=$local "$@" &
  pids+=($!)
done
trap "kill -TERM ${pids[*]} 2> /dev/null" TERM HUP INT
for _ in "${pids[@]}"; do
  wait -n || { code=$?; kill -TERM "${pids[@]}" 2> /dev/null; wait; break; }
done
exit $code'

start() { # number of the machine, command
  local number=$1
  shift
  ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "${hosts[$number]}" "$(printf '%q ' bash -c "$remote" launch \
    "$PWD" "${hosts[0]}" "$PORT" $((${#hosts[@]} * DEVICES)) "$DEVICES" $((number * DEVICES)) "$@")" < /dev/null
}

for ((attempt = 0; attempt <= RESTARTS; attempt++)); do
  resume=()
  if [ -e "$OUT/config.yaml" ]; then resume=(--resume); fi
  code=0 pids=()
  for number in "${!hosts[@]}"; do
    start "$number" "$PYTHON" -m posttrain "$@" --output_dir "$OUT" "${resume[@]}" &
    pids+=($!)
  done
  trap 'kill -TERM "${pids[@]}" 2> /dev/null' TERM INT HUP
  for _ in "${pids[@]}"; do # the first that fails ends the others
    wait -n || { code=$?; kill -TERM "${pids[@]}" 2> /dev/null; wait; break; }
  done
  case $code in
    0 | 2 | 130 | 143) exit "$code" ;; # finished, wrong use, or stopped by a signal
  esac
  echo "attempt $((attempt + 1)) ended with exit code $code" >&2
done
exit "$code"
