"""Logs of other frameworks in text files: tables, JSON, and the lines of a training's output.

A log may have gigabytes and is streamed. Bytes that are not UTF-8 are replaced; in a text log
terminal colours are removed, and a carriage return, with which a progress bar overwrites itself,
ends a line too.
"""

from __future__ import annotations

import calendar
import csv
import io
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from slurmllm.errors import RunError
from slurmllm.format import format_plural
from slurmllm.metrics.log_series import Log, RowCollector, log_suffix, open_log
from slurmllm.metrics.row_reader import parse_row
from slurmllm.metrics.tags import step_keys

Numbers = dict[str, float]
LineParser = Callable[[str], Numbers | None]  # None: a line of another format

_CHUNK_BYTES = 1 << 20
# A line without an end (a core dump in a log) is cut here.
_MAX_LINE_BYTES = 1 << 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_VALUE = rf"(?:tensor\(\[?)?(?P<%s>{_NUMBER})"


def read_text(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a text log.

    Raises:
        RunError: no line has a known format.
        OSError: the file cannot be read.
    """
    formats = [(name, parser()) for name, parser in _FORMATS]
    found = [RowCollector() for _ in formats]
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        for line in _lines_with_loss(stream):
            for (_, parse), rows in zip(formats, found, strict=True):
                row = parse(line)
                if row is not None:
                    rows.add(row.items())
                    break
    for rows in found:
        if len(rows):
            return rows.log(path, "text", tags, warnings)
    raise RunError(
        f"no metrics in {path}: no line is one of {', '.join(name for name, _ in formats)}; "
        "give such a log, or a table (.csv, .jsonl) of the metrics"
    )


def _lines_with_loss(stream: BinaryIO) -> Iterator[str]:
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        *whole, rest = re.split(rb"[\r\n]+", rest + chunk)
        rest = rest[-_MAX_LINE_BYTES:]
        for line in whole:
            if b"loss" in line:
                yield _COLOURS.sub("", line.decode("utf-8", errors="replace"))
    if b"loss" in rest:
        yield _COLOURS.sub("", rest.decode("utf-8", errors="replace"))


def _to_float(text: str) -> float:
    return float(text.replace(",", ""))


def _pattern(pattern: str) -> Callable[[], LineParser]:
    """Returns a parser of lines by a pattern in which `%name` matches a number."""
    names = r"step_time_s|seq_per_s|tokens_per_s|ms_per_step|grad_norm|step|loss|lr"
    expression = re.compile(
        re.sub(rf"%({names})", lambda found: _VALUE % found[1], pattern), re.IGNORECASE
    )

    def parse(line: str) -> Numbers | None:
        found = expression.search(line)
        if found is None:
            return None
        groups = {name: text for name, text in found.groupdict().items() if text is not None}
        asctime = groups.pop("asctime", None)
        values = {name: _to_float(text) for name, text in groups.items()}
        if "ms_per_step" in values:
            values["step_time_s"] = values.pop("ms_per_step") / 1e3
        if asctime is not None:
            with suppress(ValueError):
                values["time"] = float(calendar.timegm(time.strptime(asctime)))
        return values

    return lambda: parse


_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+ \|")
_VALIDATION = re.compile(
    r"validation loss at iteration (\d+)[^|]*\|\s*lm[ _]loss(?: value)?: (\S+)"
)
_FIELD = re.compile(rf"\|?\s*([A-Za-z][^|:]*?)\s*:\s*({_NUMBER})\s*\|", re.IGNORECASE)
_TIMESTAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?\]")


def _parse_megatron(line: str) -> Numbers | None:
    """`iteration 10/ 100 | consumed samples: 80 | … | lm loss: 6.9E+00 | grad norm: 1.2 | …`."""
    if validation := _VALIDATION.search(line):
        with suppress(ValueError):
            return {"step": float(validation[1]), "lm loss validation": float(validation[2])}
    iteration = _ITERATION.search(line)
    if iteration is None:
        return None
    row = {"step": float(iteration[1])}
    for name, value in _FIELD.findall(line):
        row[name.strip().lower()] = _to_float(value)
    if "elapsed time per iteration (ms)" in row:
        row["iteration-time"] = row.pop("elapsed time per iteration (ms)") / 1e3
    if stamp := _TIMESTAMP.search(line):
        moment = calendar.timegm(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S"))
        row["time"] = moment + float(stamp[2] or 0)
    return row


_BAR = re.compile(r"\|\s*(\d+)/(?:\d+|\?) \[(.*)\]?")
_PAIR = re.compile(rf"([A-Za-z][\w./ -]*)=({_NUMBER})(?=[,\]\s]|$)", re.IGNORECASE)


def _progress_bar() -> LineParser:
    """`Epoch 0:  22%|██▏ | 4499/20101 [22:26:14<77:48:37, …, loss=2.43, global_step=4512.0]`.

    The bar prints three digits of a large number: from 100,000 the step is its own count, plus the
    steps before the bar's first, which a restart begins with.
    """
    before = 0.0

    def parse(line: str) -> Numbers | None:
        nonlocal before
        bar = _BAR.search(line)
        if bar is None or "loss" not in bar[2]:
            return None
        row = {name.strip(): _to_float(value) for name, value in _PAIR.findall(bar[2])}
        step = row.pop("global_step", row.pop("step", None))
        if step is not None and step < 1e5:
            before = step - float(bar[1])
        row["step"] = float(bar[1]) + before
        return row

    return parse


# Name of a format → maker of its parser, which may have state (one for each log)
_FORMATS: tuple[tuple[str, Callable[[], LineParser]], ...] = (
    # slurmllm/train/hooks/monitoring.py
    (
        "ours",
        _pattern(
            r"step %step/\d+  loss %loss  grad norm %grad_norm  lr %lr  %seq_per_s seq/s  "
            r"%tokens_per_s tokens/s"
        ),
    ),
    # aws-neuron/neuronx-distributed v2.28.0 examples/training/llama/
    # tp_zero1_llama_hf_pretrain/logger.py and tp_dp_gpt_neox_hf_pretrain/*/*.py
    (
        "NxD's examples",
        _pattern(
            r"LOG (?P<asctime>.+?) - \(\d+, %step\) step_loss : %loss learning_rate : %lr "
            r"throughput : %seq_per_s seq/s(?:\s+grad-norm : %grad_norm)?"
        ),
    ),
    # v2.28.0 examples/training/llama/tp_pp_llama_hf_pretrain/logger.py
    (
        "NxD's pipeline example",
        _pattern(
            r"step %step step_time %step_time_ss throughput %seq_per_s seq/s step loss %loss"
            r"(?: grad norm (?:%grad_norm|None))?"
        ),
    ),
    # v2.28.0 examples/training/llama/lightning/module_llama.py, dbrx and mixtral likewise
    (
        "NxD's Lightning examples",
        _pattern(
            r"step %step loss is %loss, lr is \[?%lr\]?,(?: throughput %seq_per_s seq/s,)?"
            r"\s+input_ids -?\d+, norm (?:%grad_norm|None)"
        ),
    ),
    # NVIDIA/Megatron-LM megatron/training/training.py, EleutherAI/gpt-neox megatron/logging.py
    ("Megatron-LM or gpt-neox", lambda: _parse_megatron),
    # pytorch/torchtitan torchtitan/components/metrics.py
    ("torchtitan", _pattern(r"step:\s+%step\s+loss:\s+%loss(?:\s+grad_norm:\s+%grad_norm)?")),
    # karpathy/nanoGPT train.py
    ("nanoGPT", _pattern(r"iter %step: loss %loss(?:, time %ms_per_stepms)?")),
    # tqdm behind NVIDIA/NeMo, aws-neuron/neuronx-distributed-training and Lightning
    ("progress bars of Lightning, NeMo and NxD Training", _progress_bar),
)


# wandb's table of a chart: `<run> - <metric>`, and the range over the runs that were averaged
_WANDB_COLUMN = re.compile(r"(?P<run>.+?) - (?P<metric>.+)")
_WANDB_RANGE = ("__MIN", "__MAX")
# Keys of a JSON document that may hold the rows, preferred first
_ROW_KEYS = ("log_history", "history", "metrics", "logs", "rows", "data")
_NAMED_NUMBERS = {"NaN": math.nan, "nan": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_table(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a table; a cell that is blank or not a number is a missing value.

    Raises:
        RunError: it has no header or no rows, or no column is the step.
        OSError: the file cannot be read.
    """
    rows, warnings = RowCollector(), list[str]()
    with open_log(path, warnings) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
        # A node that crashed may leave NUL bytes, which csv refuses.
        lines = (line.replace("\0", "") for line in text)
        header_line = next(lines, "")
        tab = log_suffix(path) == ".tsv"
        delimiter = "\t" if tab else max(",;\t", key=header_line.count)
        header: list[str] = []
        with suppress(csv.Error):  # a line of 128 KiB without a separator
            cells = next(csv.reader([header_line], delimiter=delimiter), [])
            header = [name.strip() for name in cells]
        if not any(header):
            raise RunError(f"no metrics in {path}: it has no header; a table of metrics has one")
        # The columns' names, without the run's name if all are of one run
        names = header
        matches = [_WANDB_COLUMN.fullmatch(name) for name in header]
        known = all(
            match or not name or step_keys([name], {})
            for name, match in zip(header, matches, strict=True)
        )
        if known and len({match["run"] for match in matches if match}) == 1:
            names = [m["metric"] if m else name for name, m in zip(header, matches, strict=True)]
        if any(tag in header and tag not in names for tag in tags.values()):
            names = header
        reader = csv.reader(lines, delimiter=delimiter)
        short: list[int] = []  # line numbers; the header is line 1
        last = 0
        try:
            for cells in reader:
                if not cells:
                    continue
                last = reader.line_num + 1
                if len(cells) < len(names):
                    short.append(last)
                else:
                    numbers: list[tuple[str, float]] = []
                    for name, cell in zip(names, cells, strict=False):
                        if cell and name and not name.endswith(_WANDB_RANGE):
                            with suppress(ValueError):
                                numbers.append((name, float(cell)))
                    rows.add(numbers)
        except csv.Error as error:
            warnings.append(f"{path}:{reader.line_num + 1}: {error}; read as far as that")
    if short == [last]:
        warnings.append(f"{path}:{last}: skipped the truncated last line")
    elif short:
        warnings.append(
            f"{path}:{short[0]}: {len(short)} rows have fewer than the header's {len(names)} "
            "columns; skipped them"
        )
    return rows.log(path, "csv", tags, warnings)


def read_json_lines(path: Path, tags: Mapping[str, str]) -> Log:
    """Read JSON lines; other lines are skipped with a warning.

    Raises:
        RunError: it holds no rows, or no key is the step.
        OSError: the file cannot be read.
    """
    rows, broken, last = RowCollector(), list[int](), 0
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            last = number
            row = parse_row(line)
            if isinstance(row, dict):
                rows.add(_json_numbers(row))
            else:
                broken.append(number)
    if broken == [last]:
        warnings.append(f"{path}:{last}: skipped the truncated last line")
    elif broken:
        lines = format_plural(len(broken), "line")
        warnings.append(f"{path}:{broken[0]}: not a JSON object; skipped {lines}")
    return rows.log(path, "jsonl", tags, warnings)


def read_json(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a JSON document that holds a list of rows, or a list of values for each key.

    Raises:
        RunError: it holds neither, or no key is the step.
        OSError: the file cannot be read.
    """
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        # JSON lines in a file that is called .json
        if text.lstrip().startswith(b"{") and text.strip().count(b"\n"):
            return read_json_lines(path, tags)
        raise RunError(
            f"{path} is not complete JSON: {error!s:.100}; restore it, or give another log"
        ) from error
    rows = RowCollector()
    for row in _document_rows(document):
        rows.add(_json_numbers(row))
    return rows.log(path, "jsonl", tags, warnings)


def _document_rows(document: Any) -> list[dict[str, Any]]:
    """Returns the rows of a JSON document; none if it has another form."""
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list)}
        for key in _ROW_KEYS:
            if any(isinstance(row, dict) for row in lists.get(key, ())):
                return [row for row in lists[key] if isinstance(row, dict)]
        columns = {key: values for key, values in lists.items() if values}
        return [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)
        ]
    return [row for row in document if isinstance(row, dict)] if isinstance(document, list) else []


def _json_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by dotted path; null counts as absent."""
    for key, value in row.items():
        kind = type(value)
        if kind is float:
            yield prefix + key, value
        elif kind is int:
            yield prefix + key, float(value) if abs(value) < 2**1023 else math.inf
        elif kind is dict:
            yield from _json_numbers(value, f"{prefix}{key}.")
        elif kind is str and value in _NAMED_NUMBERS:
            yield prefix + key, _NAMED_NUMBERS[value]
