"""The table of endings: what an attempt left behind → class, evidence, blamed nodes.

A pure function of records, so that every row is tested without a cluster.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmllm.errors import DEVICE_FAULT, DEVICE_MEMORY, EXIT_OK, EXIT_REQUEUE, LOST_PEER
from slurmllm.records import Action, EndingClass, FailureRecord, NodeRecord

ACTIONS: Mapping[EndingClass, Action] = {
    "done": "finish",
    "advance_signal": "requeue",
    "node_failure": "requeue",
    "hang": "requeue",
    "out_of_memory": "stop",
    "compile_failure": "stop",
    "bad_configuration": "stop",
    "storage_failure": "stop",
    "code_error": "stop",
    "divergence": "stop",
    "no_progress": "stop",
    "cancelled": "stop",
    "superseded": "stop",
}

# Signals by which a process ends through a fault of its own code; others come from outside.
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS}

# A graph that its compiler refuses while training: by the exception's name, or by the words of
# Neuron's compile cache.
_COMPILER = re.compile(
    r"^(InductorError|BackendCompilerFailed|CppCompileError|CompilationError)\b"
    r"|neuronx-cc.*(failed|error)|[Ff]ailed compilation|cached failed neff"
)

# torch's TCPStore, where the port that was free a moment ago is no longer.
_TAKEN_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Observed:
    """What the supervisor knows of an attempt that has ended.

    Attributes:
        expected_nodes: The nodes it ran on.
        nodes: What their launchers reported.
        failures: What workers wrote down before they failed.
        slurm_state: Slurm's word for the job at the end.
        step_out_of_memory: Whether Slurm's accounting says so.
        down_nodes: Nodes that Slurm no longer counts on.
        stop_signal: The signal that asked for a stop, where it came before any failure.
        overran_s: Seconds from that signal to the end, where the supervisor had to end it.
        uncompiled: Why the archive that a precompile attempt left is not complete.
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


def classify(seen: Observed) -> Ending:
    """Name the ending; the first row of the table that fits wins."""
    silent = [n for n in seen.expected_nodes if not reported_all(seen.nodes.get(n))]
    codes = {rank: code for n in seen.nodes.values() for rank, code in n.exit_codes.items()}
    finished = not silent and bool(codes) and all(code == 0 for code in codes.values())
    finished = finished and all(node.error is None for node in seen.nodes.values())
    if finished and not seen.uncompiled:
        return Ending("done", (f"all {len(codes)} workers finished",))
    if seen.slurm_state == "CANCELLED":
        return Ending("cancelled", ("Slurm: the job was cancelled",))
    if seen.step_out_of_memory:
        left = seen.uncompiled if finished else ()
        return Ending("out_of_memory", ("Slurm: the step ran out of host memory", *left))
    if finished:
        cut = (f"{seen.stop_signal} came before the compiler was done",) if seen.stop_signal else ()
        return Ending("compile_failure", (*cut, *seen.uncompiled))
    ended = set(codes.values())
    if not silent and EXIT_REQUEUE in ended and ended <= {EXIT_OK, EXIT_REQUEUE}:
        return Ending("advance_signal", (f"{seen.stop_signal or 'a stop signal'}: saved and left",))
    return (
        _by_slurm(seen, silent)
        or _by_failure(seen)
        or _by_signal(seen)
        or _by_silence(seen, silent)
        or _unexplained(codes)
    )


def reported_all(node: NodeRecord | None) -> bool:
    """Whether a node's launcher lived to write down how all of its workers ended."""
    if node is None:
        return False
    return node.error is not None or (bool(node.pids) and len(node.exit_codes) == len(node.pids))


def _by_slurm(seen: Observed, silent: Sequence[str]) -> Ending | None:
    """Nodes that fell silent and that Slurm no longer counts on either."""
    down = tuple(name for name in silent if name in seen.down_nodes)
    return Ending("node_failure", (f"Slurm: {', '.join(down)} down",), down) if down else None


def _by_failure(seen: Observed) -> Ending | None:
    """The earliest failure that is not another worker's echo."""
    for taken in seen.failures:
        if _TAKEN_PORT.search(taken.message):
            # Nobody's fault: another process was quicker. Its peers, who waited, may be silent.
            words = f"rank {taken.rank} on {taken.node}: {taken.message}"
            return Ending("node_failure", (f"the rendezvous port was taken: {words}",))
    primary = [f for f in seen.failures if device_fault(f) or not LOST_PEER.search(_words(f))]
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
    if _COMPILER.search(f"{first.error}: {first.message}"):
        return Ending("compile_failure", evidence)
    if first.blame == "infrastructure":
        return Ending("node_failure", evidence, (first.node,))
    return Ending("code_error", evidence)


def device_fault(failure: FailureRecord) -> bool:
    """Whether the runtime of a worker's device said that the device is broken."""
    return DEVICE_FAULT.search(_words(failure)) is not None


def _out_of_memory(failure: FailureRecord) -> bool:
    if "OutOfMemory" in failure.error or failure.error == "MemoryError":
        return True
    return DEVICE_MEMORY.search(_words(failure)) is not None


def _words(failure: FailureRecord) -> str:
    return f"{failure.error} {failure.message}"


def _by_signal(seen: Observed) -> Ending | None:
    """A worker that a signal ended, other than its launcher's own."""
    for name, node in seen.nodes.items():
        if node.error is not None:
            return Ending("node_failure", (f"{name}: {node.error}",), (name,))
        for rank, code in sorted(node.exit_codes.items()):
            if code >= 0 or rank in node.stopped_ranks:
                continue
            word = signal.Signals(-code).name
            if signal.Signals(-code) in CRASHES:
                return Ending("code_error", (f"rank {rank} on {name} crashed with {word}",))
            if seen.overran_s is not None:
                continue
            evidence = f"rank {rank} on {name} was ended by {word} from outside"
            return Ending("node_failure", (evidence,), (name,))
    if seen.overran_s is not None:
        evidence = f"{seen.stop_signal}: not saved and gone after {seen.overran_s:.0f} s; ended"
        return Ending("advance_signal", (evidence,))
    return None


def _by_silence(seen: Observed, silent: Sequence[str]) -> Ending | None:
    """A node that never reported, or workers that only lost their peers."""
    if silent and seen.stop_signal is not None:
        evidence = f"{seen.stop_signal}: {', '.join(silent)} ended before the workers reported"
        return Ending("advance_signal", (evidence,))
    if silent:
        evidence = f"no word from {', '.join(silent)}"
        return Ending("node_failure", (evidence,), tuple(silent))
    if seen.failures:
        first = min(seen.failures, key=lambda failure: failure.time)
        return Ending(
            "node_failure",
            (f"communication: rank {first.rank} on {first.node}: {first.message}",),
        )
    return None


def _unexplained(codes: Mapping[int, int]) -> Ending:
    bad = {rank: code for rank, code in codes.items() if code not in (0, EXIT_REQUEUE)}
    rank, code = next(iter(sorted(bad.items())), (-1, -1))
    return Ending(
        "code_error", (f"rank {rank} ended with exit code {code} and wrote no reason; see its log",)
    )
