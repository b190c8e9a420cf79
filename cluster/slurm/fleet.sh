#!/bin/bash
# An elastic fleet: a head, and NODES jobs of one node each, which come and go by themselves. Edit site.sh, then, in the
# root of this repository,
#   bash cluster/slurm/fleet.sh CONFIG [section.key=value …]
# Again, it submits what is missing: the head, where the run is to go on, and nodes up to NODES.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
# shellcheck source=cluster/slurm/site.sh
source "$here/site.sh"
# shellcheck source=cluster/slurm/job.sh
source "$here/job.sh"
name=$(run_name "$@")
meeting=$MEETING/fleet-$name

if [[ -z $(squeue --me --noheader --name="$name") ]]; then
    make_token "$meeting"
    submit "$here/fleet-head.sbatch" --job-name="$name" --dependency=singleton --partition="$HEAD_PARTITION" \
        --time="$HEAD_TIME" --mem="$HEAD_MEM" --nodes=1 --ntasks-per-node=1 --cpus-per-task="$HEAD_CPUS" -- "$@"
fi
there=$(squeue --me --noheader --name="$name-node" | wc -l)
readarray -t options < <(node_options)
for ((number = there; number < NODES; number++)); do
    submit "$here/fleet-node.sbatch" --job-name="$name-node" --nodes=1 "${options[@]}" -- "$@"
done
