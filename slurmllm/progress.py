"""A progress bar on the terminal, and nothing where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# Called with the bytes done so far.
OnProgress = Callable[[int], None]


@contextlib.contextmanager
def input_progress(title: str, total_bytes: int) -> Iterator[OnProgress]:
    """Show how much of the input is read, on stderr.

    Yields:
        What to call with the bytes read so far.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)
