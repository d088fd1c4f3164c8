"""How long to train between two checkpoints: what saves cost against what failures lose.

Young 1974 ("A first order approximation to the optimum checkpoint interval", Comm. ACM 17(9)):
sqrt(2·δ·M), where a save costs δ and failures are M apart on average. Daly 2006 ("A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), eq. 37) holds for costly saves and frequent failures too.
"""

from __future__ import annotations

import math

from slurmllm.records import EndingClass

HOUR_S = 3600.0
# The endings that lose the steps since the last checkpoint, and count as failures.
FAILURES: frozenset[EndingClass] = frozenset({"node_failure", "hang", "storage_failure"})


def best_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between the end of a save and the begin of the next.

    Daly's: sqrt(2·δ·M)·[1 + 1/3·sqrt(δ/2M) + 1/9·(δ/2M)] - δ where δ < 2·M, else M. How long a
    restart takes has no part in it: in Daly's model it multiplies the time of every interval alike.

    Args:
        save_cost_s: What a save costs the training, δ.
        mtbf_s: Mean time between failures of the whole run, M; may be infinite.
    """
    if save_cost_s < 0 or not mtbf_s > 0:
        raise ValueError(f"save cost {save_cost_s} s must be at least 0, MTBF {mtbf_s} s above 0")
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    if math.isinf(mtbf_s):
        return mtbf_s if save_cost_s > 0 else 0.0
    ratio = save_cost_s / (2 * mtbf_s)
    young = math.sqrt(2 * save_cost_s * mtbf_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def mtbf_s(nodes: int, failures: int, node_s: float, node_mtbf_hours: float) -> float:
    """Mean time between failures of a run on `nodes` nodes, s.

    The profile's figure counts as one failure seen in `node_mtbf_hours`, so that it is all there is
    at first and what the run sees outweighs it in time.

    Args:
        nodes: Of the run.
        failures: That the run has seen.
        node_s: Seconds that it has run, times nodes.
        node_mtbf_hours: Mean time between failures of one node by the profile, h.
    """
    per_node_s = (node_mtbf_hours * HOUR_S + node_s) / (1 + failures)
    return per_node_s / nodes
