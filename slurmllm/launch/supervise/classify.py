"""The table of endings: evidence of an attempt → class, reasons, blamed nodes.

A pure function of records, so that every row is tested without a cluster.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slurmllm.core.errors import (
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    EXIT_REQUEUE,
    ConfigError,
    StorageError,
)
from slurmllm.core.format import format_ranks
from slurmllm.core.log import message_of
from slurmllm.core.run.error_patterns import (
    ENDINGS,
    Meaning,
    cause_line,
    matches,
    meaning_of,
    names_any,
)
from slurmllm.core.run.records import (
    EndingClass,
    FailureRecord,
    HangRecord,
    LaunchFailure,
    Lines,
    NodeNames,
    NodeRecord,
    NodeRecords,
)
from slurmllm.core.slurm.client import Names

# Signals that a process raises by a fault of its own code; others come from outside.
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_ENDINGS_OF_ERRORS: Mapping[str, EndingClass] = {
    "StaleGraphsError": "stale_graphs",
    "DivergenceError": "divergence",
}
KILLED = "killed"  # error of a process that its launcher saw end by a signal
# Of a process whose child, such as one that reads data, was killed
_LOST_CHILD = re.compile(
    r"(killed by signal(?: 9|: Killed))|exited unexpectedly|BrokenProcessPool|abruptly"
)
# A child process that got Slurm's SIGTERM before its worker did
_STOPPED_CHILD = re.compile(r"killed by signal(?: 15\b|: Terminated)")
_SET_UP = re.compile(r": cluster\.setup: line |^slurmllm: line |execve\(|python[\d.]*: No module")
_NO_GPU = re.compile(
    r"No (?:CUDA|HIP) GPUs are available|no CUDA-capable device|Found no NVIDIA driver"
    r"|No supported gpu backend|torch\.cuda\.is_available\(\) is False"
)
# Exit codes (errors.py) of workers that could not write a failure record, most specific first.
_EXITS: Mapping[int, EndingClass] = {
    4: "storage_failure",
    2: "bad_configuration",
    71: "divergence",
    EXIT_OUT_OF_MEMORY: "out_of_memory",
}
# The class of a launch that failed, by whose fault it is; a node_failure for all others.
LAUNCH_ENDINGS: Mapping[str, EndingClass] = {
    "request": "bad_configuration",
    "user": "bad_configuration",
    "storage": "storage_failure",
    "memory": "out_of_memory",
    "limit": "advance_signal",
}


@dataclass(frozen=True)
class TrainerExit:
    """How the trainer left, and how far it has come if it is another project's."""

    leaving: str = "saved and left"  # what workers did that were asked to stop
    unfinished: str = ""  # why it may have ended before its last step
    done_early: tuple[int, int] | None = None  # as in `AttemptRecord`
    step: str = ""  # `at step 8 `: how far it has come


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of an attempt that has ended."""

    expected_nodes: Names
    nodes: NodeRecords
    failures: Sequence[FailureRecord] = ()
    slurm_state: str = "RUNNING"  # at the end; of a local job see `LocalAllocation.state`
    step_out_of_memory: bool = False  # whether Slurm's accounting reports OUT_OF_MEMORY
    # Nodes that Slurm reports as unusable → its reason, which may be empty.
    down_nodes: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str | None = None  # the stop signal, if it came before any failure
    overran_s: float | None = None  # from that signal to the forced end, if forced
    uncompiled: Lines = ()  # why the archive of a precompile attempt is incomplete
    hang: HangRecord | None = None  # found by the watchdog
    stacks: Lines = ()  # locations of the workers of a hang, one line each
    collectives: Lines = ()  # the operations in which ranks wait, if recorded
    # Rank → last lines of the log, for workers that failed without a record.
    log_tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    superseded_by: int | None = None
    unwritable: str | None = None  # why the run directory cannot be written
    launch: LaunchFailure | None = None  # how srun failed
    trainer: TrainerExit = TrainerExit()
    peers: Collection[str] = ()  # names and addresses by which workers reach each other
    no_gpu: str = ""  # why the job has no GPUs: it did not request any

    @property
    def unreported(self) -> list[str]:
        return unreported_nodes(self.expected_nodes, self.nodes)

    @property
    def begun(self) -> bool:
        """Whether a launcher has started its workers or reported an error."""
        return bool(self.failures) or any(
            n.pids or n.exit_codes or n.error for n in self.nodes.values()
        )

    @property
    def ended_by_slurm(self) -> bool:
        return self.slurm_state in ("PREEMPTED", "TIMEOUT", "DEADLINE")

    @property
    def exit_codes(self) -> list[int]:
        return exit_codes(self.nodes)

    @property
    def finished(self) -> bool:
        codes = self.exit_codes
        return (
            bool(codes)
            and not any(codes)
            and all(n.error is None for n in self.nodes.values())
            and not self.unreported
        )


@dataclass(frozen=True)
class Ending:
    """How an attempt ended; `evidence` has the reasons, one line each.

    `started` is False if it ended before its launchers were started.
    """

    ending: EndingClass
    evidence: Lines
    blamed_nodes: NodeNames = ()
    started: bool = True
    launch: LaunchFailure | None = None  # how srun failed, if no launcher had begun
    done_early: tuple[int, int] | None = None  # as in `AttemptRecord`


_Rows = Iterator[Ending | None]  # None: a row that does not match


class FailedWorker(NamedTuple):
    """A worker that failed by itself, not ended by its launcher."""

    rank: int
    code: int
    node: str


def classify(evidence: Evidence) -> Ending:
    """Classify the ending; the first matching row of the table wins."""
    ending = next(ending for ending in _rows(evidence) if ending is not None)
    if ending.ending == "node_failure":  # such as a time-out of a collective
        return replace(ending, evidence=(*ending.evidence, *evidence.collectives))
    return ending


def _rows(evidence: Evidence) -> _Rows:
    """Yield the rows of the table, in its order; None if a row does not match."""
    yield from _reported_endings(evidence)
    yield _hang(evidence)
    yield from _launch_endings(evidence)
    for failure in evidence.failures:
        if matches(failure.message, "port"):  # another process took it first: no node is to blame
            yield Ending(
                "node_failure",
                (f"the rendezvous port was taken: {failure.origin}: {failure.message}",),
            )
    yield _by_failure(evidence)
    if evidence.unwritable is not None:  # most records could not be written either
        yield Ending("storage_failure", (evidence.unwritable,))
    yield from _worker_endings(evidence)


def _reported_endings(evidence: Evidence) -> _Rows:
    """Yield the endings that supervisors, Slurm or the workers themselves report."""
    stop_signal = evidence.stop_signal
    if evidence.superseded_by is not None:
        yield Ending(
            "superseded", (f"superseded by attempt {evidence.superseded_by} of another supervisor",)
        )
    incomplete = evidence.uncompiled if evidence.finished else ()
    if evidence.finished and not incomplete:
        unfinished = evidence.trainer.unfinished
        workers = len(evidence.exit_codes)
        done = "the worker finished" if workers == 1 else f"all {workers} workers finished"
        yield Ending(
            "done", tuple(filter(None, (done, unfinished))), done_early=evidence.trainer.done_early
        )
    if evidence.slurm_state == "CANCELLED":
        yield Ending("cancelled", ("the job was cancelled",))
    if evidence.step_out_of_memory:
        yield Ending("out_of_memory", ("Slurm: the step ran out of host memory", *incomplete))
    if incomplete:
        cut = (f"{stop_signal} came before the compiler was done",) if stop_signal else ()
        yield Ending("compile_failure", (*cut, *incomplete))
    codes = {*evidence.exit_codes}
    if stop_signal is not None or EXIT_REQUEUE in codes:
        yield _node_lost(evidence)
    left = EXIT_REQUEUE in codes and not codes - {EXIT_OK, EXIT_REQUEUE}
    # srun stops the others if a launcher fails.
    failed = stop_signal is None and any(node.error for node in evidence.nodes.values())
    if left and not failed and not evidence.unreported:
        yield _stopped(evidence, f"{stop_signal or 'a stop signal'}: {evidence.trainer.leaving}")


def _node_lost(evidence: Evidence) -> Ending | None:
    """The end of a job that Slurm ended because a node failed, whatever signals that sent."""
    launch = evidence.launch
    down = evidence.down_nodes
    said = launch is not None and "node failure" in launch.message.lower()
    names = tuple(down) or (launch.accused if said and launch else ())
    if not (names or said or evidence.slurm_state == "NODE_FAIL"):
        return None
    reasons = [f"{name} ({down[name]})" if down.get(name) else name for name in names]
    return Ending(
        "node_failure",
        (f"Slurm: node failure on {', '.join(reasons)}".removesuffix(" on "),),
        _nodes_at_fault(names, evidence.expected_nodes),
    )


def _nodes_at_fault(failed: Names, nodes: Names) -> NodeNames:
    """Return the failed nodes to blame: none if most of the `nodes` failed at once."""
    return tuple(failed) if len(failed) <= max(len(nodes) // 2, 1) else ()


def _stopped(evidence: Evidence, *reasons: str) -> Ending:
    """Return the end of a job that was asked to stop; why Slurm ends it comes first."""
    by_slurm = (f"Slurm: the job is {evidence.slurm_state}",) if evidence.ended_by_slurm else ()
    return Ending("advance_signal", (*by_slurm, *reasons))


def _launch_endings(evidence: Evidence) -> _Rows:
    """Yield the endings by a refused launch, and by nodes that Slurm reports down."""
    launch = evidence.launch
    if launch is not None and not evidence.begun and evidence.stop_signal is None:
        # Slurm refused the launchers, or could not start them, by no fault of a node.
        ending = launch_ending(launch, evidence.expected_nodes)
        yield None if ending.ending == "node_failure" else ending
    down = tuple(name for name in evidence.unreported if name in evidence.down_nodes)
    if down:
        lines = (f"Slurm: {', '.join(down)} down", *(() if launch is None else (launch.text,)))
        yield Ending("node_failure", lines, down, launch=None if evidence.begun else launch)


def _worker_endings(evidence: Evidence) -> _Rows:
    """Yield the endings by the exit codes of workers and launchers, the last one always."""
    # Workers with a failure record have been judged by it: echoes, or one was the cause.
    failed = workers_without_failure_record(evidence.nodes, evidence.failures)
    for exit_code, ending_class in _EXITS.items():
        for rank, code, name in failed:
            if code == exit_code:
                reason = (
                    f"rank {rank} on {name} ended with exit code {code} and could not write why"
                )
                cause = cause_line(evidence.log_tails.get(rank, ()))
                if cause is not None and ENDINGS[cause[1]][0] == ending_class:
                    reason += f"; its log: {message_of(cause[0]).strip()[:400]}"
                yield Ending(ending_class, (reason,))
    yield _launcher_error(evidence)
    yield _by_workers(evidence, [worker for worker in failed if worker.code < 0])
    if evidence.overran_s is not None:
        yield _stopped(
            evidence, f"{evidence.stop_signal}: not saved within {evidence.overran_s:.0f} s; ended"
        )
    yield _unreported(evidence)
    yield _lost_peers(evidence)
    yield _by_workers(evidence, failed)
    rank, code, _ = failed[0] if failed else (-1, -1, "")
    yield Ending(
        "code_error", (f"rank {rank} ended with exit code {code} and wrote no reason; see its log",)
    )


def _lost_peers(evidence: Evidence) -> Ending | None:
    """The end of workers that only lost a connection: to a peer, which may have left with 0."""

    def names_a_peer(failure: FailureRecord) -> bool:
        message = _full_message(failure)
        return meaning_of(message) == "lost_peer" or names_any(message, evidence.peers)

    if not evidence.failures:
        return None
    first = min(evidence.failures, key=lambda failure: (names_a_peer(failure), failure.time))
    if not names_a_peer(first):
        return Ending("code_error", (_reason(first),))
    return Ending(
        "node_failure", (*_left_early(evidence), f"communication: {first.origin}: {first.message}")
    )


def _left_early(evidence: Evidence) -> list[str]:
    """Return a line about the first process that ended while others trained, if one did.

    The exit code of one that a launcher started is not known; after a hang, all are ended.
    """
    failed = {failure.process for failure in evidence.failures}  # as their launchers report
    until = math.inf if evidence.hang is None else evidence.hang.found_at
    ended = sorted(
        (ended_at, node.exit_codes.get(rank) == EXIT_OK, f"rank {rank} on {name}")
        for name, node in evidence.nodes.items()
        for rank, ended_at in node.ended_first.items()
        if f"rank {rank}" not in failed and ended_at < until
    )
    how = f"{evidence.trainer.step}while the others trained (usual cause: uneven data)"
    return [f"{origin} {'exited with 0' if ok else 'ended'} {how}" for _, ok, origin in ended[:1]]


def _hang(evidence: Evidence) -> Ending | None:
    """A hang, unless a worker failed by itself before the others were found waiting for it."""
    hang = evidence.hang
    if hang is None or any(f.time < hang.found_at and not is_echo(f) for f in evidence.failures):
        return None
    if any(worker.code in _EXITS for worker in failed_workers(evidence.nodes)):
        return None
    return Ending(
        "hang",
        (*hang_text(hang), *evidence.collectives, *_left_early(evidence), *evidence.stacks),
        hang.suspects,
    )


def launch_ending(failure: LaunchFailure, nodes: Names, started: bool = False) -> Ending:
    """Return the ending of an attempt on `nodes` by Slurm's message; `started`: workers had begun.

    Only a node that a message about nodes names is blamed, unless it names most of them.
    """
    fix = (
        f"refused: {', '.join(failure.options)}; correct slurm.directives of the recipe or "
        "cluster.directives of the profile, then `slurmllm resume`"
    )
    return Ending(
        LAUNCH_ENDINGS.get(failure.fault, "node_failure"),
        (failure.text, *([fix] if failure.fault == "request" and failure.options else [])),
        _nodes_at_fault(failure.accused, nodes),
        started,
        None if started else failure,
    )


def reported_all(node: NodeRecord | None) -> bool:
    """Whether a node's launcher recorded how all of its workers ended."""
    return node is not None and (
        node.error is not None or (bool(node.pids) and len(node.exit_codes) == len(node.pids))
    )


def unreported_nodes(names: Names, nodes: NodeRecords) -> list[str]:
    """Return the nodes whose launchers did not record how all their workers ended."""
    return [name for name in names if not reported_all(nodes.get(name))]


def exit_codes(nodes: NodeRecords) -> list[int]:
    return [code for node in nodes.values() for code in node.exit_codes.values()]


def failed_workers(nodes: NodeRecords) -> list[FailedWorker]:
    return [
        FailedWorker(rank, code, name)
        for name, node in nodes.items()
        for rank, code in sorted(node.exit_codes.items())
        if code not in (EXIT_OK, EXIT_REQUEUE) and rank not in node.stopped_ranks
    ]


def workers_without_failure_record(
    nodes: NodeRecords, failures: Sequence[FailureRecord]
) -> list[FailedWorker]:
    recorded = {failure.rank for failure in failures}
    return [worker for worker in failed_workers(nodes) if worker.rank not in recorded]


def hang_text(hang: HangRecord) -> list[str]:
    lines = [
        f"no progress for {hang.waited_s:.0f} s in phase {hang.phase} after step {hang.step} "
        f"(limit {hang.limit_s:.0f} s)"
    ]
    if hang.unresponsive_nodes:
        lines.append(f"{', '.join(hang.unresponsive_nodes)} stopped responding")
    if hang.behind:
        lines.append(f"behind the others: {format_ranks(hang.behind)}")
    return lines


def _by_failure(evidence: Evidence) -> Ending | None:
    """The earliest failure record that is not an echo of another worker's failure."""
    primary = [f for f in evidence.failures if not is_echo(f)]
    if not primary:
        return None
    # A launcher ends the others by SIGTERM.
    first = min(primary, key=lambda f: (f.exit_code == -signal.SIGTERM, f.time))
    node = evidence.nodes.get(first.node)
    if first.error == KILLED:
        return _by_signal(first.origin, first.exit_code, first.node, evidence)
    reason: Lines = (_reason(first),)
    asked = evidence.stop_signal or evidence.ended_by_slurm
    if _STOPPED_CHILD.search(first.message) and asked:
        return _stopped(
            evidence, f"{evidence.stop_signal or 'SIGTERM'}: ended a data worker first", *reason
        )
    if first.blame == "user" or _matches(first, "limit"):
        return Ending("bad_configuration", reason)
    if evidence.no_gpu and _NO_GPU.search(first.message):
        return Ending("bad_configuration", (evidence.no_gpu, *reason))
    if first.error in _ENDINGS_OF_ERRORS:
        return Ending(_ENDINGS_OF_ERRORS[first.error], reason)
    oom_kills = 0
    lost = _LOST_CHILD.search(first.message)
    if lost and node is not None:
        oom_kills = node.oom_kills
        cause = "usual cause: too little host memory; " if oom_kills else ""
        reason += (f"{cause}the kernel's oom_kill on {first.node}: {oom_kills}",)
    exhausted = oom_kills or first.error == "MemoryError" or "OutOfMemory" in first.error
    rows: Sequence[tuple[EndingClass, object]] = (
        ("out_of_memory", exhausted),
        ("node_failure", lost and lost[1]),  # the kernel counts no out-of-memory kill
        ("out_of_memory", _matches(first, "memory")),
        # Its message is the plugin's, whatever it reads like.
        ("code_error", first.error == "PluginError"),
        ("storage_failure", first.exit_code == 4),
        ("node_failure", device_fault(first)),
        ("compile_failure", _matches(first, "compiler")),
        ("node_failure", first.blame == "infrastructure"),
        ("storage_failure", _matches(first, "storage", "storage_lasting")),
        ("code_error", True),
    )
    ending = next(ending for ending, is_so in rows if is_so)
    return Ending(ending, reason, (first.node,) if ending == "node_failure" else ())


def device_fault(failure: FailureRecord) -> bool:
    return _matches(failure, "device")


def _matches(failure: FailureRecord, *meanings: Meaning) -> bool:
    return matches(_full_message(failure), *meanings)


def _reason(failure: FailureRecord) -> str:
    return f"{failure.origin}: {failure.error}: {failure.message}"


def _full_message(failure: FailureRecord) -> str:
    return f"{failure.error} {failure.message}"


def is_echo(failure: FailureRecord) -> bool:
    """Whether another worker may have failed before; `_lost_peers` judges if none did."""
    return meaning_of(_full_message(failure)) in ("lost_peer", "connection")


def _launcher_error(evidence: Evidence) -> Ending | None:
    errors = [node.error_code for node in evidence.nodes.values()]
    by_user = len(errors) == len(evidence.expected_nodes) and {*errors} == {ConfigError.exit_code}
    for name, node in evidence.nodes.items():
        if node.error is not None:
            lines = (f"{name}: {node.error}",)
            if by_user:  # what no node accepts is no node's fault
                return Ending("bad_configuration", lines)
            # Not a node's own disk: that is a NodeError.
            shared = node.error_code == StorageError.exit_code
            if shared and matches(node.error, "storage", "storage_lasting"):
                return Ending("storage_failure", lines)
            # If its port was taken, another process took it first, which may be gone next time.
            return Ending(
                "node_failure", lines, () if meaning_of(node.error) == "port" else (name,)
            )
    return None


def _by_workers(evidence: Evidence, workers: Sequence[FailedWorker]) -> Ending | None:
    """What a log explains; else the first worker's signal; else a log with a lost peer."""
    echo = unexplained = None
    for worker in workers:
        origin = f"rank {worker.rank} on {worker.node}"
        cause = cause_line(evidence.log_tails.get(worker.rank, ()))
        if cause is None or (cause[1] == "connection" and worker.code < 0):
            by_signal = _by_signal(origin, worker.code, worker.node, evidence)
            # Which of several was killed first, nobody knows.
            if by_signal is not None and by_signal.ending == "out_of_memory":
                return by_signal
            unexplained = unexplained or by_signal
            continue
        line, meaning = cause
        ending, blamed = ENDINGS[meaning]
        by_log = Ending(
            ending,
            (f"{origin} {how_ended(worker.code)}: {line.strip()[:400]}",),
            (worker.node,) if blamed else (),
        )
        if meaning not in ("lost_peer", "connection"):
            return by_log
        echo = echo or by_log
    return unexplained or echo


def how_ended(code: int) -> str:
    """Return `ended with exit code 1`, `ended by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"  # a real-time signal


def _by_signal(origin: str, code: int, name: str, evidence: Evidence) -> Ending | None:
    """The end of a process by a signal; None if it was none, or may be the supervisor's own."""
    how = how_ended(code)
    if code >= 0:
        return None
    if -code in CRASHES:
        reason = how.replace("ended by", "crashed with")
        return Ending("code_error", (f"{origin} {reason}",))
    if evidence.overran_s is not None:
        return None
    node = evidence.nodes.get(name)
    if -code == signal.SIGKILL and node is not None and node.oom_kills:
        return Ending(
            "out_of_memory",
            (
                f"{origin} was {how}: out of host memory (the kernel's oom_kill there: "
                f"{node.oom_kills})",
            ),
        )
    reason = f"{origin} was {how} from outside"
    if -code == signal.SIGBUS:
        reason = f"{origin}: SIGBUS: memory, or a file mapped into it, could not be read"
    return Ending("node_failure", (reason,), (name,))


def _unreported(evidence: Evidence) -> Ending | None:
    """Nodes whose launchers did not record how their workers ended."""
    names = evidence.unreported
    if not names:
        return None
    if evidence.stop_signal is not None:
        return _stopped(
            evidence,
            f"{evidence.stop_signal}: {', '.join(names)} ended before the workers reported",
        )
    lines = []
    launch = evidence.launch
    if launch is not None:
        # The request, the program or a log cannot end a step that has begun.
        other = launch.fault in ("unknown", "result", "request", "user", "storage")
        # A node's set-up or interpreter may, while others have begun.
        explains = not other or _SET_UP.search(launch.message)
        if (explains and {*launch.nodes} <= {*names}) or not evidence.begun:
            return launch_ending(launch, evidence.expected_nodes, evidence.begun)
        lines = [launch.text] if launch.message else []
        if launch.fault == "result":  # a node on which a task ended has responded
            names = [name for name in names if name not in launch.nodes]
    if names:
        lines.insert(0, f"{', '.join(names)} stopped responding")
    # If most nodes are silent at once, none is to blame: Slurm ended the step, or the network
    # failed.
    return Ending("node_failure", tuple(lines), _nodes_at_fault(names, evidence.expected_nodes))
