"""Time and dollars to the end of a run, from the estimate of one layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from slurmllm.errors import UserError
from slurmllm.plan.estimate import LayoutEstimate

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Cost:
    """Time and cost of a run to its end; dollars are None without a price."""

    steps: int  # optimizer steps, whole ones
    tokens: int  # tokens of those steps, at least the requested number
    hours: float  # wall time, lost time and waits in the queue included
    node_hours: float  # lost time and spare nodes included
    usd: float | None  # waits in the queue included if they are paid
    waiting_usd: float | None  # of that, for waits in the queue; 0 if they are not paid
    usd_per_hour: float | None  # price of all nodes for an hour, spare ones included
    # Tokens per dollar without lost time, as AWS defines it in "Frugality meets accuracy:
    # Cost-efficient training of GPT NeoX and Pythia models with AWS Trainium" (2023-12-12).
    tokens_per_usd: float | None

    @property
    def days(self) -> float:
        return self.hours / 24.0


def cost(
    candidate: LayoutEstimate,
    tokens: int | None,
    usd_per_node_hour: float | None,
    effective: float = 1.0,
    goodput: float | None = None,
    waits_are_paid: bool = False,
) -> Cost:
    """Time and dollars of training one layout.

    Args:
        tokens: Tokens to train on; None: the recipe's `train.steps`.
        effective: Share of the node hours that trains, by `plan.lost_time`.
        goodput: Share of the wall time that trains; None: no wait in the queue, as `effective`.
        waits_are_paid: Whether nodes cost the same while the run waits in the queue.

    Raises:
        ValueError: a share is not above 0, or is above 1.
    """
    goodput = effective if goodput is None else goodput
    if not (0 < effective <= 1 and 0 < goodput <= 1):
        raise ValueError(f"effective {effective} and goodput {goodput} must be within (0, 1]")
    recipe = candidate.config.recipe
    nodes = candidate.mesh.nodes + recipe.slurm.spare_nodes
    a_step = candidate.mesh.global_batch * recipe.model.seq_len
    steps = recipe.train.steps if tokens is None else -(-tokens // a_step)
    training_h = steps * candidate.step.total / _HOUR_S
    node_hours = nodes * training_h / effective
    hours = training_h / goodput
    usd = waiting_usd = usd_per_hour = tokens_per_usd = None
    if usd_per_node_hour is not None:
        usd_per_hour = nodes * usd_per_node_hour
        waiting_usd = (hours - training_h / effective) * usd_per_hour if waits_are_paid else 0.0
        usd = node_hours * usd_per_node_hour + waiting_usd
        tokens_per_usd = candidate.tokens_per_s * _HOUR_S / usd_per_hour
    return Cost(
        steps=steps,
        tokens=steps * a_step,
        hours=hours,
        node_hours=node_hours,
        usd=usd,
        waiting_usd=waiting_usd,
        usd_per_hour=usd_per_hour,
        tokens_per_usd=tokens_per_usd,
    )


def scaling(rows: Sequence[tuple[int, float]]) -> list[float]:
    """Throughput per node relative to the fewest nodes', of rows (nodes, throughput of all)."""
    if not rows:
        return []
    fewest, base = min(rows)
    return [throughput / nodes * fewest / base for nodes, throughput in rows]


_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Digits in groups of any length, a fraction, an exponent that stays a number, a suffix.
_COUNT = re.compile(
    r"(?P<number>[0-9]+(?:[_,][0-9]+)*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)(?P<suffix>[KMBTkmbt]?)"
)
MOST_TOKENS = 10**18


def parse_tokens(text: str) -> int:
    """Read the count of --tokens: 375M, 20B, 1.5T (powers of 10), 2e9 or 20_000_000_000.

    Raises:
        UserError: not a whole number of tokens from 1 to 10^18.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"--tokens {text!r} is no count of tokens; write for instance 375M, 20B, 1.5T or 2e9"
        )
    # Exact: a float product may miss a whole number by its rounding error.
    number = Decimal(re.sub("[_,]", "", found["number"])) * _FACTORS[found["suffix"].upper()]
    if not 1 <= number <= MOST_TOKENS or number != int(number):
        raise UserError(
            f"--tokens {text!r} must be a whole number of tokens from 1 to {MOST_TOKENS:.0e}; "
            "write for instance 375M, 20B or 1.5T"
        )
    return int(number)
