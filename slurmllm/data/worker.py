"""The process that tokenizes ahead of training: `python -m slurmllm.data.worker`.

Started and read by `prefetch.WorkerProcess`, as a new interpreter instead of a fork: the parent
has torch, device handles and threads, none of which survive a fork. It imports none of them.

    stdin    a JSON line with the stream; a JSON line with the positions; then nothing until the end
    stdout   frames: header (kind, rows), then the kind's content (`FRAME`)
    stderr   the parent's

It ends with its parent: at the end of stdin, at a broken pipe, or when it is adopted by another
process (children that the parent forked may keep the pipes open after it).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import sys
import threading
import time
import traceback
from typing import BinaryIO, NoReturn

import numpy as np

from slurmllm.data.slots import SlotGroup
from slurmllm.data.sources.opening import open_all
from slurmllm.data.spec import StreamSpec
from slurmllm.errors import SlurmllmError

# A frame's header: kind and length (rows of a batch, bytes of a failure).
#   BATCH    int64 [rows, 3 * corpora] positions and int64 [corpora] counts after the batch,
#            int32 [rows, seq_len + 1] tokens, uint8 [rows, seq_len + 1] marks
#   FAILURE  a JSON object {"error", "message", "traceback"}
FRAME = struct.Struct("<BQ")
BATCH = 1
FAILURE = 2

# Sent by Slurm and by terminals to every process of a job. The parent decides when to stop, and
# needs more batches for the step that it finishes first.
PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ADOPTION_POLL_S = 1.0


def main() -> NoReturn:
    for number in PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The parent blocked them while it started this process; now they are ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a stray print cannot break the frames

    stream = json.loads(sys.stdin.readline() or "null")
    if stream is None:
        os._exit(0)
    threading.Thread(target=_end_when_adopted, args=(stream["parent_pid"],), daemon=True).start()
    # Bounded: tokenizing pauses when it is this many batches ahead.
    outgoing: queue.Queue[list[bytes]] = queue.Queue(maxsize=stream["prefetch"])
    threading.Thread(target=_send, args=(frames, outgoing), daemon=True).start()
    try:
        spec = StreamSpec.from_json(stream["spec"])
        sources, _ = open_all(spec.corpora, spec.tokenizer, spec.vocab_size, spec.mask)
        start = json.loads(sys.stdin.readline() or "null")
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        if start is None:
            os._exit(0)
        slots = range(*start["slots"])
        group = SlotGroup(spec, sources, slots, start["positions"], start["counts"])
        while True:
            tokens, marks = group.next_batch()
            counts = np.array(group.counts, dtype=np.int64)
            parts = (group.positions(), counts, tokens, marks)
            header = FRAME.pack(BATCH, len(tokens))
            outgoing.put([header, *(part.tobytes() for part in parts)])
    except BaseException as error:
        failure = {
            "error": type(error).__name__ if isinstance(error, SlurmllmError) else "",
            "message": str(error) or repr(error),
            "traceback": traceback.format_exc(),
        }
        content = json.dumps(failure).encode()
        outgoing.put([FRAME.pack(FAILURE, len(content)), content])
    # The parent ends this process once it has read the failure.
    while True:
        time.sleep(_ADOPTION_POLL_S)


def _send(frames: BinaryIO, outgoing: queue.Queue[list[bytes]]) -> None:
    try:
        while True:
            for part in outgoing.get():
                frames.write(part)
            frames.flush()
    except OSError:  # the parent closed its end
        os._exit(0)


def _end_with_stdin() -> None:
    # At the end of stdin. Not sys.exit: it would wait for a writer blocked on a full pipe.
    sys.stdin.read()
    os._exit(0)


def _end_when_adopted(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_ADOPTION_POLL_S)
    os._exit(0)


if __name__ == "__main__":
    main()
