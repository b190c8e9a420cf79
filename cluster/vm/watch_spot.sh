#!/bin/bash
# Drains this machine's Ray node when its cloud gives notice: a systemd unit beside the one of start_ray.sh. Only spot machines need it.
set -euo pipefail

bin="$HOME/lwray/.venv/bin"
# there is none at the first start
sudo systemctl kill --signal=KILL lwray-spot 2>/dev/null || true
sudo systemctl stop lwray-spot 2>/dev/null || true
exec sudo systemd-run --unit=lwray-spot --collect --uid="$(id -u)" --gid="$(id -g)" \
    --property=Restart=on-failure --property=RestartSec=10 \
    "--setenv=HOME=$HOME" "--setenv=PATH=$bin:$PATH" --setenv=RAY_AUTH_MODE=token --setenv=RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=85 \
    "$bin/python" -m lwray.cluster.spot
