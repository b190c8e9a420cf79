#!/bin/sh
# The image's roles. Each replaces this shell, so that a stop signal reaches Ray or lwray itself.
set -eu

refuse() {
    echo "$1" >&2
    exit 2
}

role=${1:-}
[ $# -eq 0 ] || shift
case $role in
    # Ray's dashboard listens on 127.0.0.1 only, because whoever reaches it can run code;
    # where the network is closed to others: head --dashboard-host=0.0.0.0
    head) exec ray start --head --port="${RAY_PORT:-6379}" --block "$@" ;;
    worker)
        [ "${RAY_HEAD_ADDRESS:-}" ] || refuse "A worker needs RAY_HEAD_ADDRESS; set it to the head's HOST:6379."
        exec ray start --address="$RAY_HEAD_ADDRESS" --block "$@"
        ;;
    job) exec lwray "$@" ;;
    *) refuse "The image's roles are head, worker and job, not '$role'; a job is: job train CONFIG." ;;
esac
