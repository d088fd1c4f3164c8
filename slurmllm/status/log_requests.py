"""Requests for logs that are still on the disks of the nodes.

Of a running attempt the run directory has the logs of rank 0 and of workers that failed. A file in
the attempt's `log_requests` has the launcher of a worker copy that worker's log into the run
directory, until the attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from slurmllm.errors import StorageError
from slurmllm.records import AttemptRecord, NodeRecord
from slurmllm.rundir import RunDir, Stage, write_atomic
from slurmllm.status.logs import ranks_with_logs
from slurmllm.supervise.log_files import node_of


class LogRequests:
    """Asks the newest attempt of a run for logs, once for each attempt that is running.

    Args:
        ranks: The ranks, rank 0 aside; None for all.
        attempt: The only attempt to ask; None for the newest one.
    """

    def __init__(
        self,
        run: RunDir,
        stages: Sequence[Stage],
        ranks: frozenset[int] | None,
        attempt: int | None = None,
    ) -> None:
        self._run, self._stages, self._attempt = run, stages, attempt
        self._ranks = ranks
        self._asked: tuple[Stage, int] | None = None

    def ask(self, is_active: Callable[[], bool]) -> AttemptRecord | None:
        """Write the requests to a running attempt not asked before; returns its record.

        None if there is none, or nothing is missing.

        Args:
            is_active: Whether the run is active: an attempt whose supervisor was killed is open.

        Raises:
            StorageError: This user may not write to the run, or a record is damaged.
        """
        found = newest_attempt(self._run, self._stages, self._attempt)
        if found is None or (found.stage, found.attempt) == self._asked:
            return None
        self._asked = (found.stage, found.attempt)
        if found.ended_at is not None or not self.missing(found) or not is_active():
            return None
        attempt = self._run.attempt(found.stage, found.attempt)
        for rank in [None] if self._ranks is None else sorted(self._ranks):
            if rank is None or rank < found.world_size:
                write_atomic(attempt.log_request(rank), "")
        return found

    def missing(self, record: AttemptRecord) -> list[int]:
        """The ranks whose logs are not in the run directory."""
        wanted = set(range(1, record.world_size))
        if self._ranks is not None:
            wanted &= self._ranks
        return sorted(wanted - set(ranks_with_logs(self._run, record.stage, record.attempt)))


def newest_attempt(
    run: RunDir, stages: Sequence[Stage], number: int | None = None
) -> AttemptRecord | None:
    """The record of an attempt, by default of the newest one of the last stage that has any."""
    for stage in reversed(stages):
        numbers = [one.number for one in run.attempts(stage)] if number is None else [number]
        if numbers:
            return AttemptRecord.find(run.attempt(stage, max(numbers)).record)
    return None


def printed_nothing(run: RunDir, record: AttemptRecord, rank: int) -> bool:
    """Whether a worker without a log has ended, and its launcher has collected the logs."""
    node = node_of(run, record.stage, record.attempt, rank)
    with suppress(StorageError):
        found = NodeRecord.find(run.attempt(record.stage, record.attempt).node(node))
        return found is not None and rank in found.exit_codes
    return False
