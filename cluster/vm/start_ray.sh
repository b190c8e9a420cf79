#!/bin/bash
# Starts Ray on this machine as a systemd unit: start_ray.sh OPTIONS OF `ray start`. aws.yaml and onprem.yaml call it.
#
# A plain `ray start` goes into the background, and a machine that shuts down kills its processes all at once. As a unit, the shutdown
# sends SIGTERM to `ray start --block` alone (KillMode=mixed), which marks the node as draining and waits for the work on it to end.
set -euo pipefail

bin="$HOME/lwray/.venv/bin"
# Seconds. More than the drain by what Ray then needs to end its processes; a spot machine has two minutes from its notice on AWS.
stop_timeout=100
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=85
# The token lies in ~/.ray/auth_token, which `ray up` has brought here. Named, because Ray 2.60 asks for it only when told to.
export RAY_AUTH_MODE=token

environment=("--setenv=HOME=$HOME" "--setenv=PATH=$bin:$PATH")
# what `ray up` exported for this node: the head's address, resources, labels
for name in "${!RAY_@}"; do
    environment+=("--setenv=$name=${!name}")
done

# there is none at the first start
sudo systemctl stop lwray-ray 2>/dev/null || true
exec sudo systemd-run --unit=lwray-ray --collect --uid="$(id -u)" --gid="$(id -g)" \
    --property=KillMode=mixed --property=TimeoutStopSec="$stop_timeout" --property=LimitNOFILE=65536 \
    "${environment[@]}" "$bin/ray" start --block "$@"
