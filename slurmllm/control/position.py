"""A node's place in the tree of relays, and its peers there.

Node i is below node (i - 1) // FAN_OUT; node 0 is the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slurmllm.control.wire import Role

FAN_OUT = 16  # nodes below a node: two levels for 272 nodes


@dataclass(frozen=True)
class Position:
    """A relay's place in the tree.

    Attributes:
        index: Of this node in the attempt.
        names: Of all nodes of the attempt.
        per_node: Workers on a node.
    """

    index: int
    names: Sequence[str]
    per_node: int

    @property
    def world_size(self) -> int:
        return len(self.names) * self.per_node

    @property
    def parent(self) -> int | None:
        return (self.index - 1) // FAN_OUT if self.index else None

    def workers(self) -> range:
        """Ranks of this node's workers."""
        return range(self.index * self.per_node, (self.index + 1) * self.per_node)

    def below(self) -> range:
        """Indices of the nodes directly below this one."""
        first = self.index * FAN_OUT + 1
        return range(first, max(first, min(first + FAN_OUT, len(self.names))))

    def levels_below(self) -> int:
        levels, first = 0, self.index * FAN_OUT + 1
        while first < len(self.names):
            levels, first = levels + 1, first * FAN_OUT + 1
        return levels

    def ranks_below(self, node: int) -> list[int]:
        """Ranks of all workers on a node and on those below it."""
        at = Position(node, self.names, self.per_node)
        return [*at.workers(), *(rank for child in at.below() for rank in at.ranks_below(child))]


class Peer(NamedTuple):
    """A worker of this node, or the relay of another one."""

    role: Role
    number: int  # rank of a worker, or place of a node in the attempt

    def describe(self, names: Sequence[str], own: str) -> str:
        if self.role is Role.WORKER:
            return f"rank {self.number} on {own}"
        name = names[self.number] if self.number < len(names) else f"node {self.number}"
        return f"the launcher of {name}"
