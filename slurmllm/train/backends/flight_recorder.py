"""Dumps of torch's Flight Recorder on request, for process groups without NCCL.

With NCCL, torch's monitor thread answers the requests itself, on a pipe that replaces this one.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from slurmllm.core.run.flight_recorder import dump_prefixes
from slurmllm.core.run.safe_files import write_whole
from slurmllm.train.model.private_names import FLIGHT_RECORDER


def answer_requests(rank: int) -> None:
    """Start a thread that writes a dump whenever it reads something from this rank's pipe."""
    pipe, dump = dump_prefixes(os.environ)
    if not pipe or not dump or FLIGHT_RECORDER.missing():
        return
    (dump_trace,) = FLIGHT_RECORDER.get()
    path = Path(f"{pipe}{rank}.pipe")

    def answer() -> None:
        while os.read(descriptor, 64):
            # Torch names the lines of code by its compiler, whose import may take longer than
            # launchers wait.
            trace = dump_trace(includeStackTraces="torch._inductor.codecache" in sys.modules)
            with suppress(OSError):
                write_whole(Path(f"{dump}{rank}"), trace, 0o600, durable=False)

    with suppress(OSError):  # a file system without pipes: no reason to end the training
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDWR)  # also for writing: it is open at any time
        threading.Thread(target=answer, name="flight recorder", daemon=True).start()
