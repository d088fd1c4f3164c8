"""What a node says on its standard output: a line of JSON as each check ends.

Not a file: the file system that all nodes share is among what is checked. A node that stops
answering has said by then how far it got. Slurm's step daemon keeps lines of less than 1024
bytes whole (`MAX_MSG_LEN` in its io.c) when it sends on what several tasks say at once.
"""

from __future__ import annotations

import time
from typing import ClassVar

from slurmllm.health.said import Said
from slurmllm.records import HealthFinding


class Line(Said):
    """One line.

    Attributes:
        node: Who says it; empty for a measurement over all nodes.
        time: Unix time there, s.
        finding: What a check found.
        version: Name and version of something that is installed there.
        took_s: Seconds of all checks; with the last line.
        gb_s: Bus bandwidth of an all-reduce, GB/s.
    """

    HEAD: ClassVar[str] = "slurmllm-health "

    node: str
    time: float
    finding: HealthFinding | None = None
    version: tuple[str, str] | None = None
    took_s: float | None = None
    gb_s: float | None = None


def say(node: str, **said: object) -> None:
    """Say one thing."""
    Line.model_validate({"node": node, "time": time.time(), **said}).say()
