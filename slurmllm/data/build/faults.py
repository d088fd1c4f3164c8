"""What becomes of input that cannot be read."""

from __future__ import annotations

from typing import Literal

from slurmllm.errors import DataError

FAULT_EXAMPLES = 20

# What a fault makes unreadable: a document, a whole file, or what follows in the file.
Extent = Literal["document", "file", "rest"]
_REMEDIES: dict[Extent, str] = {
    "document": "leave such documents out",
    "file": "leave such files out",
    "rest": "read such files up to the fault",
}


class Faults:
    """An error at the first fault, or a count of them.

    Attributes:
        count: Documents and files left out so far.
        examples: The first of them: file, place, reason.
    """

    def __init__(self, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.count = 0
        self.examples: list[str] = []

    def add(self, fault: str, extent: Extent = "document") -> None:
        """Raise a DataError or count, as told at the start."""
        if not self.skip_bad:
            remedy = f"Mend the file, or {_REMEDIES[extent]} with --skip-bad"
            raise DataError(f"{fault.rstrip('.')}. {remedy}")
        self.count += 1
        if len(self.examples) < FAULT_EXAMPLES:
            self.examples.append(fault)
