"""What one node has said of itself so far."""

from __future__ import annotations

from dataclasses import dataclass

from slurmllm.health.report import Line
from slurmllm.records import NodeHealth


@dataclass
class Answer:
    """What one node has said so far.

    Attributes:
        ahead_s: The node's clock less this one's. What a line says is older than its arrival, so
            that each is a lower bound, and the highest of them the best.
        aside: The last line that names the node and is not its own: srun's words.
    """

    health: NodeHealth
    ahead_s: float | None = None
    aside: str = ""

    def take(self, line: Line, arrived: float) -> None:
        """Add a line."""
        ahead = line.time - arrived
        self.ahead_s = ahead if self.ahead_s is None else max(self.ahead_s, ahead)
        health, update = self.health, dict[str, object]()
        if line.finding is not None:
            update["findings"] = (*health.findings, line.finding)
        if line.version is not None:
            update["versions"] = {**health.versions, line.version[0]: line.version[1]}
        if line.took_s is not None:
            update["checks_s"] = round(line.took_s, 3)
        self.health = health.model_copy(update=update)
