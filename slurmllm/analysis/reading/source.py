"""Whatever holds metrics, as a curve."""

from __future__ import annotations

from pathlib import Path

from slurmllm.analysis.curves import Curve
from slurmllm.analysis.reading.run import read_run


def read_curve(source: Path) -> Curve:
    """Read the metrics of a run, or of a file.

    Raises:
        RunError: there are no metrics, a line before the last is broken, or a file cannot be
            read.
    """
    return read_run(source)
