"""Calls of a Python function in processes of this machine: the local half of `arrays.map_calls`.

submitit's LocalExecutor discards the exit status, hides the CUDA devices and kills a job one second
after SIGINT.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from slurmllm.core.run.rundir import storage_errors

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Function = Callable[..., Any]
Call = tuple[Function, tuple[Any, ...]]
Arguments = Sequence[tuple[Any, ...]]  # of each call
Results = Generator[tuple[int, Any], None, None]  # index and result of each call


class FailedCall(NamedTuple):
    """A call that ended without a result."""

    message: str
    signal: int | None = None  # that killed its local process


class CallProcess:
    """A call in a process of its own, which ends with this process; its output is in a log file.

    Call and result are pickles, which run code when they are read; they pass through files without
    a name, which only the two processes can open. The call sees one CUDA device (`device`), or all
    that this process sees.
    """

    def __init__(self, call: Call, log: Path, device: str | None) -> None:
        self.log = log
        variables = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        with storage_errors(f"cannot write {log.parent}"):
            log.parent.mkdir(parents=True, exist_ok=True)
            self._result = tempfile.TemporaryFile()  # noqa: SIM115  closed by `result`
            with log.open("xb") as output, tempfile.TemporaryFile() as request:
                pickle.dump(call, request)
                request.seek(0)
                descriptor = self._result.fileno()
                # -P: not the modules of the working directory, which may be another user's.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(descriptor)],
                    env={**os.environ, **variables},
                    stdin=request,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(descriptor,),
                    # Ctrl-C reaches only the parent, which then terminates all of the session.
                    start_new_session=True,
                )

    def done(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> Any:
        """Return what the call returned, or how its process ended."""
        try:
            with self._result as stream:
                stream.seek(0)
                return pickle.load(stream)  # noqa: S301  its own child's
        except (EOFError, pickle.UnpicklingError):
            code = self._process.returncode
        if code < 0:
            return FailedCall(f"its process was killed by signal {-code}; see {self.log}", -code)
        return FailedCall(f"its process ended with exit code {code}; see {self.log}")

    @staticmethod
    def terminate(calls: Sequence[CallProcess]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for call in calls:  # the whole session: a call may have started processes
                with suppress(ProcessLookupError):
                    os.killpg(call._process.pid, number)
            deadline = time.monotonic() + 5.0  # a call may have files to remove
            for call in calls:
                with suppress(subprocess.TimeoutExpired):
                    call._process.wait(max(deadline - time.monotonic(), 0))
        for call in calls:
            call._result.close()


def end_child(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a child process and close its pipes, unless this is a fork of its owner."""
    if owner != os.getpid():
        return
    process.kill()
    with suppress(BrokenPipeError), process:  # closes the pipes
        process.wait()


def cuda_devices() -> list[str]:
    """Return the CUDA devices that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    # Without torch, which would take seconds to import.
    with suppress(OSError):
        return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").iterdir())]
    return []


def map_locally(
    function: Function,
    arguments: Arguments,
    names: Sequence[str],
    logs: Path,
    at_once: int,
    on_poll: Callable[[], None],
) -> Results:
    """See `arrays.map_calls`; processes that still run are terminated when this is closed."""
    devices = cuda_devices() if at_once > 1 else []  # a single call at a time may use all devices
    pending = list(enumerate(arguments))
    # By slot: of several devices, each slot uses one.
    running: dict[int, tuple[int, CallProcess]] = {}
    try:
        while pending or running:
            for slot in range(at_once):
                if not pending or slot in running:
                    continue
                index, values = pending.pop(0)
                running[slot] = (
                    index,
                    CallProcess(
                        (function, values),
                        logs / f"{names[index]}-{secrets.token_hex(4)}.log",
                        devices[slot % len(devices)] if devices else None,
                    ),
                )
            time.sleep(_POLL_S)
            on_poll()
            for slot, (index, process) in list(running.items()):
                if process.done():
                    del running[slot]
                    yield index, process.result()
    finally:
        CallProcess.terminate([process for _, process in running.values()])


def main(parent: int, descriptor: int) -> None:
    """Entry point of a call's process, which writes the result to a file descriptor."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return  # the parent died before prctl
    # Raises SystemExit, so that what the call has to remove is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301  its own parent's
    result = function(*arguments)
    with os.fdopen(descriptor, "wb") as stream:
        pickle.dump(result, stream)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
