"""What a node says on its standard output: a line of JSON as each check ends.

Not a file: the file system that all nodes share is among what is checked. A node that stops
answering has said by then how far it got. Slurm's step daemon keeps lines of less than 1024
bytes whole (`MAX_MSG_LEN` in its io.c) when it sends on what several tasks say at once.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from slurmllm.records import HealthFinding

_HEAD = "slurmllm-health "


class Line(BaseModel):
    """One line.

    Attributes:
        node: Who says it; empty for a measurement over all nodes.
        time: Unix time there, s.
        finding: What a check found.
        version: Name and version of something that is installed there.
        took_s: Seconds of all checks; with the last line.
        gb_s: Bus bandwidth of an all-reduce, GB/s.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    time: float
    finding: HealthFinding | None = None
    version: tuple[str, str] | None = None
    took_s: float | None = None
    gb_s: float | None = None

    def say(self) -> None:
        """Write the line at once and in one piece."""
        text = f"{_HEAD}{self.model_dump_json(exclude_none=True)}\n"
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), text.encode())

    @classmethod
    def read(cls, text: str) -> Self | None:
        """The line in a piece of output; None where it is something else."""
        _, head, body = text.partition(_HEAD)
        try:
            return cls.model_validate_json(body) if head else None
        except ValidationError:
            return None


def say(node: str, **said: object) -> None:
    """Say one thing."""
    Line.model_validate({"node": node, "time": time.time(), **said}).say()
