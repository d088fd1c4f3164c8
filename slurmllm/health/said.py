"""A record that a process says on its standard output, as a line of JSON among other output."""

from __future__ import annotations

import os
import sys
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Said(BaseModel):
    """What is said.

    Attributes:
        HEAD: What such a line begins with.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    HEAD: ClassVar[str]

    def say(self) -> None:
        """Write the line at once and in one piece."""
        text = f"{self.HEAD}{self.model_dump_json(exclude_none=True)}\n"
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), text.encode())

    @classmethod
    def read(cls, text: str) -> Self | None:
        """What is said in a piece of output; None where it is something else."""
        _, head, body = text.partition(cls.HEAD)
        try:
            return cls.model_validate_json(body) if head else None
        except ValidationError:
            return None
