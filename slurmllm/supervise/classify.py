"""The table of endings: evidence of an attempt → class, reasons, blamed nodes.

A pure function of records, so that every row is tested without a cluster.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slurmllm.errors import EXIT_OK, EXIT_REQUEUE
from slurmllm.run.error_patterns import ENDINGS, Meaning, cause_line, matches, meaning_of
from slurmllm.run.records import EndingClass, FailureRecord, HangRecord, NodeRecord

# Signals that a process raises by a fault of its own code; others come from outside.
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
# Exit codes (errors.py) of workers that could not write a failure record, most specific first.
_EXITS: Mapping[int, EndingClass] = {4: "storage_failure", 2: "bad_configuration", 71: "divergence"}


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of an attempt that has ended."""

    expected_nodes: Sequence[str]
    nodes: Mapping[str, NodeRecord]
    failures: Sequence[FailureRecord] = ()
    slurm_state: str = "RUNNING"  # at the end; of a local job see `LocalAllocation.state`
    step_out_of_memory: bool = False  # whether Slurm's accounting reports OUT_OF_MEMORY
    down_nodes: Sequence[str] = ()  # nodes that Slurm reports as unusable
    stop_signal: str | None = None  # the stop signal, if it came before any failure
    overran_s: float | None = None  # from that signal to the forced end, if forced
    uncompiled: Sequence[str] = ()  # why the archive of a precompile attempt is incomplete
    hang: HangRecord | None = None  # found by the watchdog
    stacks: Sequence[str] = ()  # locations of the workers of a hang, one line each
    # Rank → last lines of the log, for workers that failed without a record.
    log_tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    superseded_by: int | None = None
    unwritable: str | None = None  # why the run directory cannot be written


@dataclass(frozen=True)
class Ending:
    """How an attempt ended; `evidence` has the reasons, one line each.

    `started` is False if it ended before its launchers were started.
    """

    ending: EndingClass
    evidence: tuple[str, ...]
    blamed_nodes: tuple[str, ...] = ()
    started: bool = True


class FailedWorker(NamedTuple):
    """A worker that failed by itself, not ended by its launcher."""

    rank: int
    code: int
    node: str


def classify(evidence: Evidence) -> Ending:
    """Classify the ending; the first matching row of the table wins."""
    if evidence.superseded_by is not None:
        text = f"superseded by attempt {evidence.superseded_by} of another supervisor"
        return Ending("superseded", (text,))
    silent = [n for n in evidence.expected_nodes if not reported_all(evidence.nodes.get(n))]
    codes = {rank: code for n in evidence.nodes.values() for rank, code in n.exit_codes.items()}
    finished = not silent and bool(codes) and all(code == 0 for code in codes.values())
    finished = finished and all(node.error is None for node in evidence.nodes.values())
    stop_signal = evidence.stop_signal
    if finished and not evidence.uncompiled:
        return Ending("done", (f"all {len(codes)} workers finished",))
    if evidence.slurm_state == "CANCELLED":
        return Ending("cancelled", ("the job was cancelled",))
    if evidence.step_out_of_memory:
        incomplete = evidence.uncompiled if finished else ()
        return Ending("out_of_memory", ("Slurm: the step ran out of host memory", *incomplete))
    if finished:
        cut = (f"{stop_signal} came before the compiler was done",) if stop_signal else ()
        return Ending("compile_failure", (*cut, *evidence.uncompiled))
    ended = set(codes.values())
    if not silent and EXIT_REQUEUE in ended and ended <= {EXIT_OK, EXIT_REQUEUE}:
        return Ending("advance_signal", (f"{stop_signal or 'a stop signal'}: saved and left",))
    if (hang := evidence.hang) is not None:
        # Unless a worker failed by itself before the others were found waiting for it.
        recorded = (f.time < hang.found_at and not is_echo(f) for f in evidence.failures)
        failed = failed_workers(evidence.nodes)
        if not any(recorded) and all(worker.code not in _EXITS for worker in failed):
            return Ending("hang", (*hang_text(hang), *evidence.stacks), hang.suspects)
    if down := tuple(name for name in silent if name in evidence.down_nodes):
        return Ending("node_failure", (f"Slurm: {', '.join(down)} down",), down)
    if (by_failure := _by_failure(evidence)) is not None:
        return by_failure
    # If the run directory cannot be written, most other records could not be written either.
    if evidence.unwritable is not None:
        return Ending("storage_failure", (evidence.unwritable,))
    return _by_exit_code(evidence) or _by_signal(evidence) or _by_silence(evidence, silent)


def reported_all(node: NodeRecord | None) -> bool:
    """Whether a node's launcher recorded how all of its workers ended."""
    if node is None:
        return False
    return node.error is not None or (bool(node.pids) and len(node.exit_codes) == len(node.pids))


def failed_workers(nodes: Mapping[str, NodeRecord]) -> list[FailedWorker]:
    """The workers that failed by themselves, by node and rank."""
    return [
        FailedWorker(rank, code, name)
        for name, node in nodes.items()
        for rank, code in sorted(node.exit_codes.items())
        if code not in (EXIT_OK, EXIT_REQUEUE) and rank not in node.stopped_ranks
    ]


def without_record(
    workers: Sequence[FailedWorker], failures: Sequence[FailureRecord]
) -> list[FailedWorker]:
    recorded = {failure.rank for failure in failures}
    return [worker for worker in workers if worker.rank not in recorded]


def hang_text(hang: HangRecord) -> list[str]:
    lines = [
        f"no progress for {hang.waited_s:.0f} s in phase {hang.phase} after step {hang.step} "
        f"(limit {hang.limit_s:.0f} s)"
    ]
    if hang.unresponsive_nodes:
        lines.append(f"{', '.join(hang.unresponsive_nodes)} stopped responding")
    if hang.behind:
        ranks = ", ".join(map(str, hang.behind[:8])) + (" …" if len(hang.behind) > 8 else "")
        lines.append(f"behind the others: rank {ranks}")
    return lines


def _by_failure(evidence: Evidence) -> Ending | None:
    """The earliest failure record that is not an echo of another worker's failure."""
    for taken in evidence.failures:
        if matches(taken.message, "port"):
            # No node is to blame: another process took the port first. Waiting peers may be silent.
            text = f"rank {taken.rank} on {taken.node}: {taken.message}"
            return Ending("node_failure", (f"the rendezvous port was taken: {text}",))
    primary = [f for f in evidence.failures if not is_echo(f)]
    if not primary:
        return None
    first = min(primary, key=lambda failure: failure.time)
    reason = (f"rank {first.rank} on {first.node}: {first.error}: {first.message}",)
    if first.blame == "user":
        return Ending("bad_configuration", reason)
    if first.error == "StaleGraphsError":
        return Ending("stale_graphs", reason)
    if first.error == "DivergenceError":
        return Ending("divergence", reason)
    out_of_memory = "OutOfMemory" in first.error or first.error == "MemoryError"
    if out_of_memory or matches(_text(first), "memory"):
        return Ending("out_of_memory", reason)
    if first.exit_code == 4:
        return Ending("storage_failure", reason)
    if device_fault(first):
        return Ending("node_failure", reason, (first.node,))
    if matches(_text(first), "compiler"):
        return Ending("compile_failure", reason)
    if first.blame == "infrastructure":
        return Ending("node_failure", reason, (first.node,))
    if matches(_text(first), "storage", "storage_lasting"):
        return Ending("storage_failure", reason)
    return Ending("code_error", reason)


def device_fault(failure: FailureRecord) -> bool:
    return matches(_text(failure), "device")


def _text(failure: FailureRecord) -> str:
    return f"{failure.error} {failure.message}"


def is_echo(failure: FailureRecord) -> bool:
    """Whether the worker only lost a peer."""
    return meaning_of(_text(failure)) == "lost_peer"


def _by_exit_code(evidence: Evidence) -> Ending | None:
    """A specific exit code of a worker that could not write its failure record."""
    failed = without_record(failed_workers(evidence.nodes), evidence.failures)
    for known, ending in _EXITS.items():
        for rank, code, name in failed:
            if code == known:
                text = f"rank {rank} on {name} ended with exit code {code} and could not write why"
                return Ending(ending, (text,))
    return None


def _by_signal(evidence: Evidence) -> Ending | None:
    """A worker ended by a signal that was not its launcher's; before that, a failed launcher."""
    for name, node in evidence.nodes.items():
        if node.error is not None:
            # If its port was taken, another process took it first, which may be gone next time.
            blamed = () if meaning_of(node.error) == "port" else (name,)
            return Ending("node_failure", (f"{name}: {node.error}",), blamed)
    echo: Ending | None = None
    unexplained: Ending | None = None
    # Workers with a failure record have been judged by it: echoes, or one was the cause.
    for rank, code, name in without_record(failed_workers(evidence.nodes), evidence.failures):
        if code >= 0:
            continue
        number = signal.Signals(-code)
        line = cause_line(evidence.log_tails.get(rank, ()))
        if line is not None:
            ending = _by_line(*line, f"rank {rank} on {name} ended by {number.name}", name)
            if line[1] != "lost_peer":
                return ending
            echo = echo or ending
        elif unexplained is None:
            who = f"rank {rank} on {name}"
            if number in CRASHES:
                unexplained = Ending("code_error", (f"{who} crashed with {number.name}",))
            elif evidence.overran_s is not None:
                continue  # the supervisor may have sent the signal
            elif number == signal.SIGBUS:
                text = f"{who}: SIGBUS: memory, or a file mapped into it, could not be read"
                unexplained = Ending("node_failure", (text,), (name,))
            else:
                text = f"{who} was ended by {number.name} from outside"
                unexplained = Ending("node_failure", (text,), (name,))
    if unexplained is not None or echo is not None:
        return unexplained or echo
    if evidence.overran_s is not None:
        text = f"{evidence.stop_signal}: not saved within {evidence.overran_s:.0f} s; ended"
        return Ending("advance_signal", (text,))
    return None


def _by_line(line: str, meaning: Meaning, who: str, node: str) -> Ending:
    ending, blamed = ENDINGS[meaning]
    return Ending(ending, (f"{who}: {line.strip()[:400]}",), (node,) if blamed else ())


def _by_silence(evidence: Evidence, silent: Sequence[str]) -> Ending:
    """A node that never reported, or workers that left no cause but in their logs."""
    if silent and evidence.stop_signal is not None:
        text = f"{evidence.stop_signal}: {', '.join(silent)} ended before the workers reported"
        return Ending("advance_signal", (text,))
    if silent:
        text = f"{', '.join(silent)} stopped responding"
        # If most nodes are silent at once, none is to blame: Slurm ended the step, or the network
        # failed.
        few = len(silent) <= max(len(evidence.expected_nodes) // 2, 1)
        return Ending("node_failure", (text,), tuple(silent) if few else ())
    if evidence.failures:
        first = min(evidence.failures, key=lambda failure: failure.time)
        text = f"communication: rank {first.rank} on {first.node}: {first.message}"
        return Ending("node_failure", (text,))
    failed = without_record(failed_workers(evidence.nodes), evidence.failures)
    echo: Ending | None = None
    for rank, code, name in failed:
        line = cause_line(evidence.log_tails.get(rank, ()))
        if line is not None:
            ending = _by_line(*line, f"rank {rank} on {name} ended with exit code {code}", name)
            if line[1] != "lost_peer":
                return ending
            echo = echo or ending
    if echo is not None:
        return echo
    rank, code, _ = failed[0] if failed else (-1, -1, "")
    text = f"rank {rank} ended with exit code {code} and wrote no reason; see its log"
    return Ending("code_error", (text,))
