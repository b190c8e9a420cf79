# shellcheck shell=bash disable=SC2034
# Everything that a site and a run differ in. Copy this directory, edit this file, and leave the others as they are.

# Where runs are kept: a file system that every node mounts, or s3://bucket/prefix.
STORAGE=/shared/runs

# Who pays, and where the jobs go; what is empty is left to the site's defaults.
ACCOUNT=
QOS=
CONSTRAINT=
# Jobs here may be preempted, and must be requeued then: PreemptMode=REQUEUE and a GraceTime longer than a save.
PARTITION=preempt
# For the head of a fleet: a partition that nothing preempts. It needs no GPU.
HEAD_PARTITION=safe
HEAD_CPUS=4
HEAD_MEM=16G
HEAD_TIME=7-00:00:00

# Nodes of a job, or of a fleet, and what each of them has. Where a node has no GPUs: GPUS=0, and CPUS by hand.
NODES=2
GPUS=4
CPUS=$((16 * GPUS))
MEM=0
TIME=1-00:00:00

# Seconds before the time limit at which Slurm gives notice of it: a save and a step fit into it, 300 at most.
NOTICE=120

# Where output goes (Slurm's patterns), and fast local room for Ray's files: a short path.
OUTPUT=%x-%j.txt
SCRATCH=/tmp

# A directory that every node sees and only you may read: a fleet's token and the address of its head.
MEETING=$HOME/.lwray-slurm

# What every node does before lwray: modules, a virtual environment. The current directory is the one of the submission.
setup() {
    # module load cuda
    # shellcheck disable=SC1091
    source .venv/bin/activate
}

# What Python is started in: nothing, or a container, such as (apptainer exec --nv --bind /shared image.sif).
INSIDE=()
