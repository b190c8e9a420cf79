#!/bin/bash
# What a step of srun runs: step.sh COMMAND, in the environment of site.sh.
set -euo pipefail
here=$LWRAY_SLURM
# shellcheck source=cluster/slurm/site.sh
source "$here/site.sh"
# shellcheck source=cluster/slurm/job.sh
source "$here/job.sh"
setup
# in place of this shell: Slurm may signal the first process of a step alone
exec "${INSIDE[@]}" "$@"
