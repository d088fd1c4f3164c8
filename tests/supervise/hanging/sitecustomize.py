"""On the path of a run, rank 1 sleeps for ever in its 23rd read of data, once."""

import os
import sys
import time
from pathlib import Path

if os.environ.get("RANK") == "1" and "worker" in sys.argv + sys.orig_argv:
    from slurmllm.data.stream import PackedStream

    read, once = PackedStream.next_batch, Path(os.environ["SLURMLLM_RUN"]) / "hung_once"

    def next_batch(self):
        next_batch.calls += 1
        if next_batch.calls == 23 and not once.exists():
            once.touch()
            time.sleep(1e6)
        return read(self)

    next_batch.calls = 0
    PackedStream.next_batch = next_batch
