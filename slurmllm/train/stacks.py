"""A worker that hangs says where: its Python stacks on a signal, whatever it is doing."""

from __future__ import annotations

import faulthandler
import os
from contextlib import suppress

from slurmllm.pulse import STACKS, STACKS_SIGNAL


def dump_on_signal() -> None:
    """From now on, dump the stacks of all threads into the launcher's file on its signal.

    In C, without the interpreter's lock: it works while a thread waits in a library. The file is
    opened now, for a handler cannot.
    """
    path = os.environ.get(STACKS)
    if not path:
        return
    with suppress(OSError):  # a full disk of the node must not end the training
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
