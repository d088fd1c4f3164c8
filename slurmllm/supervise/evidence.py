"""What is known of an attempt once its launchers have ended: records, logs, and Slurm's word."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmllm.errors import EXIT_OK, EXIT_REQUEUE, SlurmError
from slurmllm.log import message_of
from slurmllm.records import AttemptRecord, FailureRecord, HangRecord, NodeRecord
from slurmllm.rundir import RunDir
from slurmllm.supervise import attempts, first_failure
from slurmllm.supervise.allocation import Allocation, SlurmAllocation
from slurmllm.supervise.attempt_monitor import Outcome
from slurmllm.supervise.classify import Evidence, reported_all
from slurmllm.supervise.exclusion import usable

ACCOUNTING_LAG_S = 3.0
POLL_S = 0.2
_TAIL_BYTES = 32 * 1024


def gather_evidence(
    run: RunDir,
    record: AttemptRecord,
    allocation: Allocation,
    outcome: Outcome,
    stop_signal: str | None,
    uncompiled: Sequence[str],
) -> Evidence:
    """Put together what an ending is named by.

    Args:
        run: The run.
        record: The attempt.
        allocation: Its nodes.
        outcome: What was seen while the launchers ran.
        stop_signal: The one that came before any failure.
        uncompiled: See Observed.

    Raises:
        StorageError: a record cannot be read.
    """
    nodes = attempts.node_records(run, record)
    failures = attempts.failure_records(run, record)
    hang, lines = outcome.hang, tuple[str, ...]()
    if hang is not None:
        hang, lines = _with_stacks(run, record, hang, nodes)
    return Evidence(
        expected_nodes=record.nodes,
        nodes=nodes,
        failures=failures,
        slurm_state=_slurm_state(allocation, stop_signal),
        step_out_of_memory=_out_of_memory(allocation, nodes),
        down_nodes=_down_nodes(record, allocation),
        stop_signal=stop_signal,
        overran_s=outcome.overran_s,
        uncompiled=uncompiled,
        hang=hang,
        stacks=lines,
        last_words=_last_words(run, record, nodes, failures),
        superseded_by=outcome.superseded_by,
        unwritable=outcome.unwritable or _unwritable(run, record),
    )


def _with_stacks(
    run: RunDir, record: AttemptRecord, hang: HangRecord, nodes: Mapping[str, NodeRecord]
) -> tuple[HangRecord, tuple[str, ...]]:
    """What the stacks say; where the pulses blame nobody, they do: those that stand apart.

    A launcher that could not even end its workers was frozen itself.
    """
    places = first_failure.read_places(run.attempt(record.stage, record.attempt))
    frozen = tuple(name for name in record.nodes if not reported_all(nodes.get(name)))
    if not hang.unresponsive_nodes and 0 < len(frozen) < len(record.nodes):
        hang = hang.model_copy(update={"unresponsive_nodes": frozen, "suspects": frozen})
    if not hang.suspects:
        node_of = {rank: name for name, node in nodes.items() for rank in node.pids}
        apart = [node_of[rank] for rank in first_failure.standing_apart(places) if rank in node_of]
        hang = hang.model_copy(update={"suspects": tuple(dict.fromkeys(apart))})
    return hang, first_failure.evidence(places)


def _slurm_state(allocation: Allocation, stop_signal: str | None) -> str:
    """Slurm's word for what happened; it comes into the accounting a moment after SIGTERM."""
    deadline = time.monotonic() + (ACCOUNTING_LAG_S if stop_signal == "SIGTERM" else 0.0)
    state = allocation.state()
    while state in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = allocation.state()
    return state


def _out_of_memory(allocation: Allocation, nodes: Mapping[str, NodeRecord]) -> bool:
    if not isinstance(allocation, SlurmAllocation):
        return False
    rows = allocation.client.accounting(allocation.job_id)
    return any(row.state == "OUT_OF_MEMORY" for row in rows[-3:])


def _down_nodes(record: AttemptRecord, allocation: Allocation) -> list[str]:
    if not isinstance(allocation, SlurmAllocation):
        return []
    try:
        states = allocation.client.node_states()
    except SlurmError:
        return []
    return [name for name in record.nodes if not usable(states.get(name, "unknown"))]


def _last_words(
    run: RunDir,
    record: AttemptRecord,
    nodes: Mapping[str, NodeRecord],
    failures: Sequence[FailureRecord],
) -> dict[int, list[str]]:
    """The ends of the logs of workers that failed without a record of it."""
    spoken = {failure.rank for failure in failures}
    found = {}
    for node in nodes.values():
        for rank, code in node.exit_codes.items():
            if (
                code not in (EXIT_OK, EXIT_REQUEUE)
                and rank not in spoken
                and rank not in node.stopped_ranks
            ):
                found[rank] = _tail(run, record, rank)
    return found


def _tail(run: RunDir, record: AttemptRecord, rank: int) -> list[str]:
    path = run.worker_log(record.stage, record.attempt, rank)
    if rank == 0:  # speaks into the stage's log, behind what earlier attempts said there
        path = run.stage_log(record.stage)
    lines = _end_of(path)
    begin = f"{record.stage} attempt {record.attempt}"
    starts = [at for at, line in enumerate(lines) if message_of(line).startswith(begin)]
    return lines[starts[0] :] if rank == 0 and starts else lines


def _end_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unwritable(run: RunDir, record: AttemptRecord) -> str | None:
    """Why nothing can be written into the attempt's folder; None where it can."""
    probe = run.attempt(record.stage, record.attempt).path / f".writable.{os.getpid()}"
    try:
        probe.write_bytes(b"written")
        probe.unlink()
    except OSError as error:
        return f"cannot write {probe.parent}: {error.strerror or error}"
    return None
