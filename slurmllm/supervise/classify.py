"""The table of endings: what an attempt left behind → class, evidence, blamed nodes.

A pure function of records, so that every row is tested without a cluster.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmllm.error_patterns import (
    COMPILER,
    DEVICE_FAULT,
    ENDINGS,
    MEMORY,
    STORAGE,
    TAKEN_PORT,
    Meaning,
    meaning_of,
    telling_line,
)
from slurmllm.errors import EXIT_OK, EXIT_REQUEUE
from slurmllm.records import EndingClass, FailureRecord, HangRecord, NodeRecord

# Signals by which a process ends through a fault of its own code; others come from outside.
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
# What a worker's exit code says where it could not write why (errors.py), the telling one first.
_EXITS: Mapping[int, EndingClass] = {
    4: "storage_failure",
    2: "bad_configuration",
    71: "divergence",
}


@dataclass(frozen=True)
class Evidence:
    """What the supervisor knows of an attempt that has ended.

    Attributes:
        expected_nodes: The nodes it ran on.
        nodes: What their launchers reported.
        failures: What workers wrote down before they failed.
        slurm_state: Slurm's word for the job at the end; of a local one, `LocalAllocation.state`'s.
        step_out_of_memory: Whether Slurm's accounting says so.
        down_nodes: Nodes that Slurm no longer counts on.
        stop_signal: The signal that asked for a stop, where it came before any failure.
        overran_s: Seconds from that signal to the end, where the supervisor had to end it.
        uncompiled: Why the archive that a precompile attempt left is not complete.
        hang: What the watchdog found, before it ended the attempt.
        stacks: Where workers stood then, a line each.
        last_words: The last lines of the logs of workers that ended without a failure record.
        superseded_by: The newer attempt of another supervisor.
        unwritable: Why the run directory cannot be written.
    """

    expected_nodes: Sequence[str]
    nodes: Mapping[str, NodeRecord]
    failures: Sequence[FailureRecord] = ()
    slurm_state: str = "RUNNING"
    step_out_of_memory: bool = False
    down_nodes: Sequence[str] = ()
    stop_signal: str | None = None
    overran_s: float | None = None
    uncompiled: Sequence[str] = ()
    hang: HangRecord | None = None
    stacks: Sequence[str] = ()
    last_words: Mapping[int, Sequence[str]] = field(default_factory=dict)
    superseded_by: int | None = None
    unwritable: str | None = None


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        ending: The class.
        evidence: Why, a line each.
        blamed_nodes: What it is put down to.
        started: Whether launchers were started at all.
    """

    ending: EndingClass
    evidence: tuple[str, ...]
    blamed_nodes: tuple[str, ...] = ()
    started: bool = True


def classify(seen: Evidence) -> Ending:
    """Name the ending; the first row of the table that fits wins."""
    if seen.superseded_by is not None:
        words = f"attempt {seen.superseded_by} of another supervisor has taken the run over"
        return Ending("superseded", (words,))
    silent = [n for n in seen.expected_nodes if not reported_all(seen.nodes.get(n))]
    codes = {rank: code for n in seen.nodes.values() for rank, code in n.exit_codes.items()}
    finished = not silent and bool(codes) and all(code == 0 for code in codes.values())
    finished = finished and all(node.error is None for node in seen.nodes.values())
    if finished and not seen.uncompiled:
        return Ending("done", (f"all {len(codes)} workers finished",))
    if seen.slurm_state == "CANCELLED":
        return Ending("cancelled", ("the job was cancelled",))
    if seen.step_out_of_memory:
        left = seen.uncompiled if finished else ()
        return Ending("out_of_memory", ("Slurm: the step ran out of host memory", *left))
    if finished:
        cut = (f"{seen.stop_signal} came before the compiler was done",) if seen.stop_signal else ()
        return Ending("compile_failure", (*cut, *seen.uncompiled))
    ended = set(codes.values())
    if not silent and EXIT_REQUEUE in ended and ended <= {EXIT_OK, EXIT_REQUEUE}:
        return Ending("advance_signal", (f"{seen.stop_signal or 'a stop signal'}: saved and left",))
    if seen.hang is not None and not _ended_before(seen, seen.hang):
        return _hung(seen.hang, seen.stacks)
    return (
        _by_slurm(seen, silent)
        or _by_failure(seen)
        or _by_storage(seen)
        or _by_exit_code(seen)
        or _by_signal(seen)
        or _by_silence(seen, silent)
        or _unexplained(seen)
    )


def reported_all(node: NodeRecord | None) -> bool:
    """Whether a node's launcher lived to write down how all of its workers ended."""
    if node is None:
        return False
    return node.error is not None or (bool(node.pids) and len(node.exit_codes) == len(node.pids))


def _by_slurm(seen: Evidence, silent: Sequence[str]) -> Ending | None:
    """Nodes that fell silent and that Slurm no longer counts on either."""
    down = tuple(name for name in silent if name in seen.down_nodes)
    return Ending("node_failure", (f"Slurm: {', '.join(down)} down",), down) if down else None


def _ended_before(seen: Evidence, hang: HangRecord) -> bool:
    """Whether a worker had failed by itself before the others were found to wait for it."""
    told = any(
        f.time < hang.found_at and meaning_of(_words(f)) != "lost_peer" for f in seen.failures
    )
    return told or any(
        code in _EXITS and rank not in node.stopped_ranks
        for node in seen.nodes.values()
        for rank, code in node.exit_codes.items()
    )


def _hung(hang: HangRecord, stacks: Sequence[str]) -> Ending:
    words = (
        f"no progress for {hang.waited_s:.0f} s in phase {hang.phase} after step {hang.step} "
        f"(limit {hang.limit_s:.0f} s)"
    )
    evidence = [words]
    if hang.unresponsive_nodes:
        evidence.append(f"no sign of life from {', '.join(hang.unresponsive_nodes)}")
    if hang.behind:
        ranks = ", ".join(map(str, hang.behind[:8])) + (" …" if len(hang.behind) > 8 else "")
        evidence.append(f"behind the others: rank {ranks}")
    return Ending("hang", (*evidence, *stacks), hang.suspects)


def _by_failure(seen: Evidence) -> Ending | None:
    """The earliest failure that is not another worker's echo."""
    for taken in seen.failures:
        if TAKEN_PORT.search(taken.message):
            # Nobody's fault: another process was quicker. Its peers, who waited, may be silent.
            words = f"rank {taken.rank} on {taken.node}: {taken.message}"
            return Ending("node_failure", (f"the rendezvous port was taken: {words}",))
    primary = [f for f in seen.failures if meaning_of(_words(f)) != "lost_peer"]
    if not primary:
        return None
    first = min(primary, key=lambda failure: failure.time)
    evidence = (f"rank {first.rank} on {first.node}: {first.error}: {first.message}",)
    if first.blame == "user":
        return Ending("bad_configuration", evidence)
    if first.error == "DivergenceError":
        return Ending("divergence", evidence)
    if _out_of_memory(first):
        return Ending("out_of_memory", evidence)
    if first.exit_code == 4:
        return Ending("storage_failure", evidence)
    if device_fault(first):
        return Ending("node_failure", evidence, (first.node,))
    if COMPILER.search(_words(first)):
        return Ending("compile_failure", evidence)
    if first.blame == "infrastructure":
        return Ending("node_failure", evidence, (first.node,))
    if STORAGE.search(_words(first)):
        return Ending("storage_failure", evidence)
    return Ending("code_error", evidence)


def device_fault(failure: FailureRecord) -> bool:
    """Whether the runtime of a worker's device said that the device is broken."""
    return DEVICE_FAULT.search(_words(failure)) is not None


def _out_of_memory(failure: FailureRecord) -> bool:
    if "OutOfMemory" in failure.error or failure.error == "MemoryError":
        return True
    return MEMORY.search(_words(failure)) is not None


def _words(failure: FailureRecord) -> str:
    return f"{failure.error} {failure.message}"


def _by_storage(seen: Evidence) -> Ending | None:
    """A run directory that cannot be written: then most other signs could not be left either."""
    return Ending("storage_failure", (seen.unwritable,)) if seen.unwritable is not None else None


def _by_signal(seen: Evidence) -> Ending | None:
    """A worker that a signal ended, other than its launcher's own."""
    for name, node in seen.nodes.items():
        if node.error is not None:
            return Ending("node_failure", (f"{name}: {node.error}",), (name,))
    echo: Ending | None = None
    plain: Ending | None = None
    spoken = {failure.rank for failure in seen.failures}  # echoes, or one had been the cause
    for name, node in seen.nodes.items():
        for rank, code in sorted(node.exit_codes.items()):
            if code >= 0 or rank in node.stopped_ranks or rank in spoken:
                continue
            word = signal.Signals(-code).name
            told = telling_line(seen.last_words.get(rank, ()))
            if told is not None:
                ending = _told(*told, f"rank {rank} on {name} ended by {word}", name)
                if told[1] != "lost_peer":
                    return ending
                echo = echo or ending
            elif plain is None:
                plain = _plain_signal(seen, rank, name, signal.Signals(-code))
    if plain is not None or echo is not None:
        return plain or echo
    if seen.overran_s is not None:
        evidence = f"{seen.stop_signal}: not saved and gone after {seen.overran_s:.0f} s; ended"
        return Ending("advance_signal", (evidence,))
    return None


def _plain_signal(seen: Evidence, rank: int, name: str, number: signal.Signals) -> Ending | None:
    """What a signal means by itself; None for one by which the supervisor ends an attempt."""
    if number in CRASHES:
        return Ending("code_error", (f"rank {rank} on {name} crashed with {number.name}",))
    if seen.overran_s is not None:
        return None
    if number == signal.SIGBUS:
        words = "memory, or a file mapped into it, could not be read"
        return Ending("node_failure", (f"rank {rank} on {name}: SIGBUS: {words}",), (name,))
    evidence = f"rank {rank} on {name} was ended by {number.name} from outside"
    return Ending("node_failure", (evidence,), (name,))


def _told(line: str, meaning: Meaning, who: str, node: str) -> Ending:
    """The ending that a line of a worker's log tells of."""
    ending, blamed = ENDINGS[meaning]
    return Ending(ending, (f"{who}: {line.strip()[:400]}",), (node,) if blamed else ())


def _by_silence(seen: Evidence, silent: Sequence[str]) -> Ending | None:
    """A node that never reported, or workers that only lost their peers."""
    if silent and seen.stop_signal is not None:
        evidence = f"{seen.stop_signal}: {', '.join(silent)} ended before the workers reported"
        return Ending("advance_signal", (evidence,))
    if silent:
        evidence = f"no word from {', '.join(silent)}"
        # Most of them at once is no node's fault: Slurm ended the step, or a switch is gone.
        few = len(silent) <= max(len(seen.expected_nodes) // 2, 1)
        return Ending("node_failure", (evidence,), tuple(silent) if few else ())
    if seen.failures:
        first = min(seen.failures, key=lambda failure: failure.time)
        return Ending(
            "node_failure",
            (f"communication: rank {first.rank} on {first.node}: {first.message}",),
        )
    return None


def _by_exit_code(seen: Evidence) -> Ending | None:
    """An exit code that tells by itself, of a worker that could not write down why it failed."""
    bad = _without_reason(seen)
    for known, ending in _EXITS.items():
        for rank, code, name in bad:
            if code == known:
                words = f"rank {rank} on {name} ended with exit code {code} and could not write why"
                return Ending(ending, (words,))
    return None


def _without_reason(seen: Evidence) -> list[tuple[int, int, str]]:
    """Rank, exit code and node of workers that failed and left no record of it."""
    spoken = {failure.rank for failure in seen.failures}
    return [
        (rank, code, name)
        for name, node in seen.nodes.items()
        for rank, code in sorted(node.exit_codes.items())
        if code not in (EXIT_OK, EXIT_REQUEUE)
        and rank not in node.stopped_ranks
        and rank not in spoken
    ]


def _unexplained(seen: Evidence) -> Ending:
    """An exit code without a reason: by the worker's log, where that tells one."""
    bad = _without_reason(seen)
    echo: Ending | None = None
    for rank, code, name in bad:
        told = telling_line(seen.last_words.get(rank, ()))
        if told is not None:
            ending = _told(*told, f"rank {rank} on {name} ended with exit code {code}", name)
            if told[1] != "lost_peer":
                return ending
            echo = echo or ending
    if echo is not None:
        return echo
    rank, code, _ = bad[0] if bad else (-1, -1, "")
    return Ending(
        "code_error", (f"rank {rank} ended with exit code {code} and wrote no reason; see its log",)
    )
