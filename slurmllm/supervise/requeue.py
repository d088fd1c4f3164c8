"""Before a requeue: keep a job off the node that it has just lost.

Slurm notices a dead node only after SlurmdTimeout (300 s by default). A job requeued before
that may get the same node again and use up an attempt on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from slurmllm.errors import SlurmError
from slurmllm.records import AttemptRecord
from slurmllm.slurm.client import SlurmClient

POLL_S = 2.0
NOTICE_S = 330.0  # Slurm's default SlurmdTimeout and a little
_UNUSABLE = ("down", "drain", "fail", "maint", "power", "reboot", "unknown", "*")


def usable(state: str) -> bool:
    """Whether Slurm would start a job on a node in this state (sinfo's long form)."""
    return not any(word in state for word in _UNUSABLE)


def avoid_lost_nodes(
    client: SlurmClient,
    closed: AttemptRecord,
    lost: Sequence[str],
    lost_before: Sequence[str],
    excluded: str | None,
) -> None:
    """Exclude lost nodes where others can take their place, else wait until Slurm knows.

    Args:
        client: Slurm.
        closed: The attempt that lost them.
        lost: Nodes whose launchers fell silent.
        lost_before: Such nodes of earlier attempts; taken again where there are no others.
        excluded: What the recipe excludes anyway.
    """
    if closed.job_id is None or not lost:
        return
    try:
        states = client.node_states()
        for avoid in (sorted({*lost, *lost_before}), list(lost)):
            spare = [name for name, state in states.items() if usable(state) and name not in avoid]
            if len(spare) >= len(closed.nodes):
                client.exclude(closed.job_id, [*([excluded] if excluded else []), *avoid])
                print(f"keeping off {' '.join(avoid)} from now on", flush=True)
                return
        print(f"no node to take the place of {' '.join(lost)}: waiting for Slurm", flush=True)
        deadline = time.monotonic() + NOTICE_S
        while time.monotonic() < deadline:
            if any(not usable(client.node_states().get(name, "unknown")) for name in lost):
                return
            time.sleep(POLL_S)
    except SlurmError as error:
        print(f"{error}; requeueing without a look at the nodes", flush=True)
