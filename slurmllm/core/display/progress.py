"""A progress bar on the terminal; for inputs, without one, a line per minute."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# Called with the bytes completed so far.
OnProgress = Callable[[int], None]
# Called with the current stage, the bytes completed so far, and the total.
OnStage = Callable[[str, int, int], None]

# Called with a line of text.
OnNote = Callable[[str], None]

_QUIET_S = 60.0  # between two lines in a log


@contextlib.contextmanager
def input_progress(title: str, total_bytes: int) -> Iterator[OnProgress]:
    with stage_progress() as show:
        yield lambda done_bytes: show(title, done_bytes, total_bytes)


@contextlib.contextmanager
def count_progress(title: str, total: int) -> Iterator[Callable[[], object]]:
    """Show how many of `total` parts are done, on stderr, on a terminal only.

    Yields what to call after each part.
    """
    with _bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on the raw stderr, whose cursor it moves; disabled if no terminal."""
    console = Console(file=sys.__stderr__)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def stage_progress() -> Iterator[OnStage]:
    bar = _bar(DownloadColumn(), TransferSpeedColumn())
    if bar.disable:
        yield _Lines()
        return
    tasks = {}

    def show(title: str, done_bytes: int, total_bytes: int) -> None:
        if title not in tasks:
            for task in bar.task_ids:
                bar.remove_task(task)
            tasks[title] = bar.add_task(title, total=total_bytes)
        bar.update(tasks[title], completed=done_bytes)

    with bar:
        yield show


class _Lines:
    """Prints lines such as `reading: 3.1 of 5.0 GB, 190.2 MB/s, 0:00:10 left`."""

    def __init__(self) -> None:
        self._title = ""
        self._shown = self._begun = 0.0
        self._first = 0

    def __call__(self, title: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if title != self._title:
            self._title = title
            self._begun = now
            self._first = done_bytes
            self._shown = max(self._shown, now)
        if now - self._shown < _QUIET_S:
            return
        self._shown = now
        rate = (done_bytes - self._first) / (now - self._begun)
        left = timedelta(seconds=round((total_bytes - done_bytes) / rate)) if rate else "unknown"
        print(
            f"{title}: {decimal(done_bytes)} of {decimal(total_bytes)}, "
            f"{decimal(int(rate))}/s, {left} left",
            file=sys.stderr,
            flush=True,
        )
