# shellcheck shell=bash
# What the jobs of this directory have in common; site.sh is what you edit.

# The run's name: run.name of the command line or of the run file, or else the file's stem.
run_name() {
    local word name= file=
    for word in "$@"; do
        case $word in
            run.name=*) name=${word#run.name=} && break ;;
            *=* | -*) ;;
            *) [[ $file ]] || file=$word ;;
        esac
    done
    if [[ -z $name && -r $file ]]; then
        name=$(awk -F '[="\047]+' '/^\[/ { run = /^\[run\]/ } (run && /^name *=/) || /^run\.name *=/ { print $2; exit }' \
            <(sed 's/ *= */=/' "$file"))
    fi
    [[ $name || -z $file ]] || name=$(basename "$file" .toml)
    [[ $name ]] || { echo "Give a run file: $0 CONFIG [section.key=value …]" >&2 && exit 2; }
    echo "$name"
}

# submit SCRIPT OPTIONS -- CONFIG [section.key=value …]: sbatch, with what site.sh says; PRINT=1 only shows it.
submit() {
    local script=$1 options=()
    shift
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    shift
    [[ $ACCOUNT ]] && options+=("--account=$ACCOUNT")
    [[ $QOS ]] && options+=("--qos=$QOS")
    [[ $CONSTRAINT ]] && options+=("--constraint=$CONSTRAINT")
    options+=("--output=$OUTPUT" "--signal=B:USR1@$NOTICE" "--export=ALL,LWRAY_SLURM=$here")
    ${PRINT:+echo} sbatch --parsable "${options[@]}" "$script" "$@"
}

# What a node of PARTITION gives.
node_options() {
    printf '%s\n' "--partition=$PARTITION" "--time=$TIME" "--mem=$MEM" --ntasks-per-node=1 "--cpus-per-task=$CPUS"
    ((GPUS == 0)) || printf '%s\n' "--gpus-per-node=$GPUS"
}

# Whoever reaches Ray's ports without a token runs code as you.
make_token() {
    (umask 077 && mkdir -p "$1" && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$1/token.tmp")
    mv "$1/token.tmp" "$1/token"
}

use_token() {
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$1/token
}

# `ray_node ROLE OPTIONS &`: Ray on this node, until it is told to end.
ray_node() {
    exec "${INSIDE[@]}" python -m lwray.cluster.slurm_node "$@" --scratch="$SCRATCH"
}

# `a_step SRUN-OPTIONS -- COMMAND &`: only steps of srun hear of a preemption. In place of the shell, so that it gets the signals.
a_step() {
    local options=(--overlap --mpi=none --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1)
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    shift
    exec srun "${options[@]}" bash "$here/step.sh" "$@"
}

# The exit code of process $1, whatever signals come while this shell waits for it.
code_of() {
    local code=0
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
    wait "$1" || code=$?
    return "$code"
}

# `drive MEETING OTHERS CONFIG …`: lwray train as a step of the first node, on the Ray whose head has been started, once so many
# other nodes have joined; its exit code.
drive() {
    local code=0 meeting=$1 others=$2
    shift 2
    await 1 "$meeting/address"
    # without it lwray would start a Ray of its own, on this node alone
    [[ -s $meeting/address ]] || return 1
    RAY_ADDRESS=$(<"$meeting/address")
    await "$others" "$meeting/joined-*"
    export RAY_ADDRESS
    a_step --nodes=1 --ntasks=1 --relative=0 -- python -m lwray train "$@" --storage "$STORAGE" &
    driver=$!
    code_of "$driver" || code=$?
    return "$code"
}

# `await COUNT GLOB`: so many files are there, or two minutes are over; a cluster that is not whole is the run's to judge.
await() {
    local count=$1 _
    for _ in {1..600}; do
        (($(compgen -G "$2" | wc -l) < count)) || return 0
        sleep 0.2
    done
    echo "Ray has not started on all nodes within two minutes." >&2
}

# Ends what was started in the background, and waits for it.
end_all() {
    local pid
    for pid in "$@"; do kill -USR2 "$pid" 2>/dev/null || true; done
    for pid in "$@"; do code_of "$pid" || true; done
}
