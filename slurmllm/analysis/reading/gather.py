"""Values row by row, gathered into one series a key."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from slurmllm.analysis.curves import SourceKind
from slurmllm.analysis.reading.series import Log, Series
from slurmllm.analysis.reading.tags import STEPS, listed, step_keys
from slurmllm.errors import RunError


class Gather:
    """Rows of numbers; every row may have other keys."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._count = 0

    def add(self, row: Iterable[tuple[str, float]]) -> None:
        """Append a row."""
        for key, value in row:
            if key not in self._rows:
                self._rows[key], self._values[key] = array("q"), array("d")
            self._rows[key].append(self._count)
            self._values[key].append(value)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def log(
        self,
        path: Path,
        kind: SourceKind,
        tags: Mapping[str, str],
        warnings: tuple[str, ...] = (),
    ) -> Log:
        """The rows as a log; those without a step are left out.

        Raises:
            RunError: there are no rows, or no key is the step.
        """
        if not self._count:
            raise RunError(
                f"no metrics in {path}: it holds no row of numbers; give a log of a training"
                + "".join(f" ({warning})" for warning in warnings)
            )
        key = self._step_key(path, tags)
        rows = np.frombuffer(self._rows[key], dtype=np.int64)
        steps = np.frombuffer(self._values[key])
        with np.errstate(invalid="ignore"):
            whole = (steps >= 0) & (steps < 2**53) & (steps == np.floor(steps))
        if not whole.all():
            first = steps[~whole][0]
            warnings = (
                *warnings,
                f"{path}: {key} is {first:g} and no whole number in {np.sum(~whole)} of "
                f"{len(steps)} rows; these are left out",
            )
        rows, at = rows[whole], steps[whole].astype(np.int64)
        series = {}
        for name, of_name in self._rows.items():
            mine = np.frombuffer(of_name, dtype=np.int64)
            where = np.minimum(np.searchsorted(rows, mine), max(len(rows) - 1, 0))
            known = rows[where] == mine if len(rows) else np.zeros(len(mine), dtype=bool)
            if name != key and known.any():
                values = np.frombuffer(self._values[name])
                series[name] = Series(mine[known], at[where[known]], values[known])
        return Log(path, kind, series, warnings=warnings)

    def _step_key(self, path: Path, tags: Mapping[str, str]) -> str:
        """The step's key: the first of the table that is there about as often as any."""
        found = step_keys(self._rows, tags)
        if not found:
            looked_for = [tags["step"]] if "step" in tags else STEPS
            raise RunError(
                f"no step in {path}: none of {', '.join(looked_for)}; there are "
                f"{listed(self._rows)}; name it with --tag step=KEY"
            )
        most = max(len(self._rows[key]) for key in found)
        return next(key for key in found if 2 * len(self._rows[key]) >= most)


def plain_suffix(path: Path) -> str:
    """What a file is by its name, in lower case; a .gz by what is packed in it."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
