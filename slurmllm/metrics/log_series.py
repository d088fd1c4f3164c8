"""Logs of other frameworks (also .gz): a series for each tag."""

from __future__ import annotations

import codecs
import gzip
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from slurmllm.errors import RunError
from slurmllm.metrics.curves import DamageWarning, Floats, Ints, SourceKind
from slurmllm.metrics.numbers import has_decimal_comma
from slurmllm.metrics.tags import METRICS, LogFormat, common_names, find_tags, list_tags, step_keys
from slurmllm.run.safe_files import LFS_POINTER, LFS_REASON, open_regular

_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_BLOCK_BYTES = 1 << 16
_SPOOLED_BYTES = 256 << 20  # in memory; what is longer is in a file
_FRACTIONAL = 0.1  # share of steps that are not whole numbers
_MOST_TEXTS = 200  # different ones in a column that separates rows
# Cells of a table that are no values, as pandas reads them
MISSING = {"", "na", "n/a", "none", "null", "-", "<na>"}


@dataclass(frozen=True)
class TagSeries:
    """The values of one tag, in the order in which they were written."""

    order: Ints  # position of each value in the log: ascending, counted over all tags [rows]
    steps: Ints  # [rows]
    values: Floats  # [rows]
    times: Floats | None = None  # when written, Unix time in s; None if not logged [rows]


@dataclass(frozen=True)
class TextSeries:
    """The texts of a column, such as the split or the rank of its row."""

    order: Ints  # as in `TagSeries` [rows]
    codes: Ints  # index into `texts` [rows]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Log:
    """A log as it was read."""

    path: Path  # file or folder
    kind: SourceKind
    series: Mapping[str, TagSeries]  # by tag
    starts: Sequence[int] = ()  # positions (`TagSeries.order`) at which a process began to write
    warnings: tuple[str, ...] = ()
    format: LogFormat | None = None  # if its lines have shown it
    lines: Sequence[int] = ()  # number of the line at each position, from 1; 0: unknown
    texts: Mapping[str, TextSeries] = field(default_factory=dict)  # by column
    invented_steps: str = ""  # why its steps are none that the training counted

    def place(self, order: int) -> str:
        line = self.lines[order] if len(self.lines) else 0
        return f"{self.path}:{line}" if line else str(self.path)


def log_suffix(path: Path) -> str:
    """Return the suffix in lower case, without .gz: `.csv` for both `x.CSV` and `x.csv.gz`."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def open_log(path: Path, warnings: list[str]) -> BinaryIO:
    """Open a log; a .gz is decompressed to a temporary file.

    If a .gz is damaged, it ends at the last complete line, and a warning is appended to `warnings`.
    Raises RunError if it is not gzip, UTF-16, or a Git LFS pointer.
    """
    stream = open_regular(path)
    start = stream.read(len(LFS_POINTER))
    stream.seek(0)
    if start == LFS_POINTER:
        stream.close()
        raise RunError(f"{path} is {LFS_REASON}")
    begin = start[:2]
    if path.suffix != ".gz":
        if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            stream.close()
            raise RunError(
                f"{path} is UTF-16 text, as PowerShell writes it; convert it: iconv -f UTF-16 -t "
                f"UTF-8 {path} > {path.stem}.utf8{path.suffix}"
            )
        return stream
    with stream:
        if begin and not _GZIP_MAGIC.startswith(begin):
            raise RunError(
                f"{path} is not a gzip file: it begins with {begin!r} instead of {_GZIP_MAGIC!r}; "
                f"rename it to {path.stem} if it is not compressed, or restore it"
            )
        content = cast(BinaryIO, tempfile.SpooledTemporaryFile(_SPOOLED_BYTES))  # noqa: SIM115
        # Bytes of complete lines: in a truncated line, the last number may lack digits
        complete = 0
        try:
            with gzip.open(stream) as compressed:
                while block := compressed.read1(_BLOCK_BYTES):
                    content.write(block)
                    if end := block.rfind(b"\n") + 1:
                        complete = content.tell() - len(block) + end
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # If the file is truncated, or other data are appended to it, all lines before that are
            # correct; if a checksum fails, any line may be wrong.
            correct = isinstance(error, EOFError) or "Not a gzipped file" in str(error)
            warning = f"{path} is damaged: {error}; read as far as possible"
            warning += "" if correct else ", and some of it may be wrong"
            warnings.append(warning if isinstance(error, EOFError) else DamageWarning(warning))
            content.truncate(complete)
    content.seek(0)
    return content


class RowCollector:
    """Columns of rows of numbers that each have their own keys."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._texts: dict[str, tuple[array[int], array[int], dict[str, int]]] = {}
        self._lines = array("q")

    def add(
        self,
        row: Iterable[tuple[str, float]],
        line: int = 0,
        texts: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Add a row, the number of its line if it has one, and its columns of text."""
        number = len(self._lines)
        for key, value in row:
            if key not in self._rows:
                self._rows[key], self._values[key] = array("q"), array("d")
            self._rows[key].append(number)
            self._values[key].append(value)
        for key, text in texts:
            rows, codes, codes_of = self._texts.setdefault(key, (array("q"), array("q"), {}))
            if key == "rank" or len(codes_of) < _MOST_TEXTS:
                rows.append(number)
                codes.append(codes_of.setdefault(text, len(codes_of)))
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __bool__(self) -> bool:
        return bool(self._rows)  # a line of a pattern may hold no number

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of values of the most frequent key that names a loss, and of rows."""
        losses = [len(rows) for key, rows in self._rows.items() if "loss" in key.lower()]
        return max(losses, default=0), len(self)

    def log(
        self,
        path: Path,
        kind: SourceKind,
        tags: Mapping[str, str],
        warnings: Sequence[str] = (),
        log_format: LogFormat | None = None,
        invented_steps: str = "",
    ) -> Log:
        """Return the rows that have a step as a log; raise RunError if there are none."""
        if not len(self):
            raise RunError(
                f"no metrics in {path}: it has no row of numbers; give the log of a training run"
                + "".join(f" ({warning})" for warning in warnings)
            )
        self._refuse_decimal_commas(path, tags)
        step_key, row_steps, skipped = self._select_steps(path, tags)
        warnings = (*warnings, *self._mixed_columns(path, step_key), *skipped)
        series = {}
        for key, positions in self._rows.items():
            key_rows = np.frombuffer(positions, dtype=np.int64)
            steps, values = row_steps[key_rows], np.frombuffer(self._values[key])
            has_step = steps >= 0
            if key != step_key and has_step.any():
                series[key] = TagSeries(key_rows[has_step], steps[has_step], values[has_step])
        texts = {
            key: TextSeries(np.array(at), np.array(codes), tuple(codes_of))
            for key, (at, codes, codes_of) in self._texts.items()
            if key == "rank" or len(codes_of) < _MOST_TEXTS
        }
        return Log(
            path,
            kind,
            series,
            warnings=tuple(warnings),
            format=log_format,
            lines=self._lines,
            texts=texts,
            invented_steps=invented_steps,
        )

    def _select_steps(self, path: Path, tags: Mapping[str, str]) -> tuple[str, Ints, Sequence[str]]:
        """Return the key of the step, the step of each row (-1: none), and warnings."""
        candidates = step_keys(self._rows, tags)
        if not candidates:
            names = [tags["step"]] if "step" in tags else common_names("step")
            raise RunError(
                f"no step in {path}: it has none of the keys {', '.join(names)}; its keys are "
                f"{list_tags(self._rows)}; name the step's key with --tag step=KEY"
            )
        # Some rows may lack the preferred key: take the first candidate that occurs at least half
        # as often as the most frequent one.
        most = max(len(self._rows[key]) for key in candidates)
        step_key = next(key for key in candidates if 2 * len(self._rows[key]) >= most)
        rows = np.frombuffer(self._rows[step_key], dtype=np.int64)
        steps = np.frombuffer(self._values[step_key])
        with np.errstate(invalid="ignore"):
            # Beyond 2**53 a float64 cannot represent every integer.
            valid = (steps >= 0) & (steps < 2**53) & (steps == np.floor(steps))
        fractional = np.flatnonzero(np.isfinite(steps) & (steps != np.floor(steps)))
        # A few may be damage; the whole ones among many would be another curve.
        if fractional.size > _FRACTIONAL * len(steps):
            place, line = fractional[0], self._lines[rows[fractional[0]]]
            raise RunError(
                f"{path}{f':{line}' if line else ''}: {step_key} is {steps[place]:g}, not a whole "
                "number; name the column of the step with --tag step=KEY"
            )
        lines = [line for row in rows[~valid].tolist() if (line := self._lines[row])]
        warnings = [
            DamageWarning(
                f"{path}: skipped {np.sum(~valid)} of {len(steps)} rows: {step_key} is {step:g}, "
                "not an integer of 0 or more",
                lines,
            )
            for step in steps[~valid][:1].tolist()
        ]
        row_steps = np.full(len(self), -1, dtype=np.int64)
        # Of a row with several steps the first: two columns may have the same name.
        row_steps[rows[valid][::-1]] = steps[valid][::-1].astype(np.int64)
        return step_key, row_steps, warnings

    def _mixed_columns(self, path: Path, step_key: str) -> Iterator[str]:
        """Yield warnings of texts in columns of numbers; without a step, the row is left out."""
        for key in self._rows if self._texts else ():
            at, codes, codes_of = self._texts.get(key, ((), (), {}))
            texts = list(codes_of)
            cells = [(row, texts[code]) for row, code in zip(at, codes, strict=True)]
            cells = [(row, text) for row, text in cells if text.lower() not in MISSING]
            if cells and key != "rank":
                lines = [self._lines[row] for row, _ in cells]
                place = f"{path}:{lines[0]}" if lines[0] else str(path)
                yield DamageWarning(
                    f"{place}: {cells[0][1]!r:.40} in column {key!r} is not a number; such cells "
                    f"are missing values: {len(cells)}",
                    lines,
                    "" if key == step_key else key,
                )

    def _refuse_decimal_commas(self, path: Path, tags: Mapping[str, str]) -> None:
        names = (*tags.values(), *(name for metric in METRICS for name in common_names(metric)))
        for key in find_tags(self._texts, names):
            codes_of = self._texts[key][2]
            number = next(filter(has_decimal_comma, codes_of), None)
            if number is not None:
                raise RunError(
                    f"{path}: {number!r} in column {key!r} has a decimal comma; write decimal "
                    "points: for a table, sed -E 's/([0-9]),([0-9])/\\1.\\2/g'"
                )
