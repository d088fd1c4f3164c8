"""The kinds of faults, and the class that the supervisor must give to each."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from slurmllm.errors import RunError
from slurmllm.records import EndingClass

FaultKind = Literal["worker", "node", "first_node", "time_limit", "save", "hang"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
# Short, for a quick drill; the watchdog also waits for ten times the run's slow steps, as always.
HANG_LIMIT_S = 20.0


class Fault(NamedTuple):
    """One kind of fault.

    Attributes:
        expected: The class that the attempt must get.
        min_nodes: Nodes that the run must have.
        overrides: Values that the run needs for it, as given to --set.
    """

    expected: EndingClass
    min_nodes: int = 1
    overrides: tuple[str, ...] = ()


FAULTS: dict[FaultKind, Fault] = {
    "worker": Fault("node_failure"),  # SIGKILL to one worker
    "node": Fault("node_failure", min_nodes=2),  # SIGKILL to launcher and workers of one node
    "first_node": Fault("node_failure"),  # SIGKILL to all of the first node, with the supervisor
    "time_limit": Fault("advance_signal"),  # the signal that Slurm sends ahead of the time limit
    "save": Fault("node_failure"),  # SIGKILL to one worker while a checkpoint is written
    "hang": Fault(  # SIGSTOP to one worker
        "hang",
        overrides=("watchdog.enabled=true", f"watchdog.min_step_s={HANG_LIMIT_S:g}"),
    ),
}


def parse_kinds(text: str, nodes: int) -> tuple[FaultKind, ...]:
    """The kinds of `--kinds`: names separated by commas, or all.

    Raises:
        RunError: a name is unknown, or needs more nodes than there are.
    """
    if text == "all":
        return tuple(kind for kind in FAULT_KINDS if FAULTS[kind].min_nodes <= nodes)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(FAULT_KINDS):
        raise RunError(
            f"--kinds {text!r}: must be all, or some of {', '.join(FAULT_KINDS)}, with commas "
            "between"
        )
    kinds = tuple(kind for kind in FAULT_KINDS if kind in names)
    for kind in kinds:
        if FAULTS[kind].min_nodes > nodes:
            raise RunError(
                f"--kinds {kind}: takes {FAULTS[kind].min_nodes} nodes and the run has {nodes}; "
                "add --nodes 2 (for the first node there is the kind first_node)"
            )
    return kinds
