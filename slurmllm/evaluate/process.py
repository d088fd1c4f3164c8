"""A job as a process of this machine: `python -m slurmllm.evaluate.process STEM`.

The work lies in STEM.work and the outcome goes to STEM.outcome; what the process prints, to
STEM.log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmllm.errors import StorageError
from slurmllm.evaluate.request import Outcome, Work

# A process that was asked to end gets so long to remove what it has exported.
_GRACE_S = 5.0


class JobProcess:
    """A process that does some work, in a session of its own.

    Args:
        work: What to do.
        logs: Folder for its files.
        device: The CUDA device that it sees; None: all that this process sees.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, work: Work, logs: Path, device: str | None) -> None:
        stem = logs / f"step_{work.candidate.step:08d}-{secrets.token_hex(4)}"
        self._outcome = stem.with_suffix(".outcome")
        self.log = stem.with_suffix(".log")
        self._input = stem.with_suffix(".work")
        variables = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        try:
            logs.mkdir(parents=True, exist_ok=True)
            self._input.write_bytes(pickle.dumps(work))
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "slurmllm.evaluate.process", str(stem)],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise StorageError(f"cannot write {logs}: {error.strerror or error}") from error

    def done(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def outcome(self) -> Outcome:
        """What it said; where it ended without a word, how."""
        try:
            found = pickle.loads(self._outcome.read_bytes())
            assert isinstance(found, Outcome)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return Outcome(lost=f"its process {how}; its log is {self.log}")
        finally:
            self._remove()
        return found

    def end(self) -> None:
        """End it early."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._remove()

    def _remove(self) -> None:
        for path in (self._input, self._outcome):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def cuda_devices() -> list[str]:
    """The CUDA devices that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    with contextlib.suppress(OSError):
        return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").iterdir())]
    return []


def main(arguments: Sequence[str]) -> None:
    """Do the work of a stem."""
    from slurmllm.evaluate.job import evaluate

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is exported goes
    (name,) = arguments
    stem = Path(name)
    work = pickle.loads(stem.with_suffix(".work").read_bytes())
    outcome = pickle.dumps(evaluate(work))
    temporary = stem.with_suffix(".partial")
    temporary.write_bytes(outcome)
    temporary.replace(stem.with_suffix(".outcome"))


if __name__ == "__main__":
    main(sys.argv[1:])
