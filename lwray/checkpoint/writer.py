"""The writer process of a rank, `python -m lwray.checkpoint.writer`: writes and commits at low priority.

It reads one request a line (JSON) from standard input and answers each with one line. When its input ends, the rank
is gone, and nothing of it could be committed any more: the process leaves at once. It never imports torch.
"""

import json
import mmap
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lwray.checkpoint.commit import Keep, commit
from lwray.checkpoint.manifest import decode
from lwray.checkpoint.write import in_blocks, struck, write_part
from lwray.store import Store, open_store


def main(store: str, attempts: str, descriptor: str) -> None:
    """Answer requests until there are none. `descriptor` is that of the memory which holds the rank's file."""
    os.nice(19)
    # whoever stops a job signals all its processes; the rank decides what still has to be written
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    checkpoints, started = open_store(store), open_store(attempts)
    while True:
        request = json.loads(requests.get())
        if "remove" in request:
            # of a save that has failed: what stays, a later start or commit removes
            with suppress(OSError):
                checkpoints.remove(request["remove"])
            continue
        try:
            reply = answer(request, checkpoints, started, int(descriptor))
        except Exception as error:
            # whatever it is, it is the rank's to judge: training goes on, and the checkpoint before stands
            reply = {"error": str(error) or type(error).__name__}
        print(json.dumps(reply), flush=True)  # noqa: T201


def answer(request: dict[str, Any], checkpoints: Store, attempts: Store, descriptor: int) -> dict[str, Any]:
    """Write the rank's file (`path`, `size`), or commit (`manifest`)."""
    if "manifest" in request:
        manifest = decode(request["manifest"].encode())
        return {"superseded_by": commit(checkpoints, attempts, manifest, Keep(**request["keep"]))}
    # closed with its last view: an error that is being told still holds some
    memory = mmap.mmap(descriptor, request["size"], prot=mmap.PROT_READ)
    chunks = struck(in_blocks([memory]), request["step"], request["rank"])
    return asdict(write_part(checkpoints, request["path"], chunks, read_back=True))


def _listen(requests: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
