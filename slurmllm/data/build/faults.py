"""What becomes of input that cannot be read."""

from __future__ import annotations

from slurmllm.errors import DataError

FAULT_EXAMPLES = 20


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

    def add(self, fault: str) -> None:
        """Raise a DataError or count, as told at the start."""
        if not self.skip_bad:
            raise DataError(f"{fault}. Mend the file, or leave such documents out with --skip-bad")
        self.count += 1
        if len(self.examples) < FAULT_EXAMPLES:
            self.examples.append(fault)
