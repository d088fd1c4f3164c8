"""A line on a terminal for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

_PATIENCE_S = 1.0


class Progress:
    """Prints one line, how much is done and how long the rest takes, if the work is not short.

    Args:
        total: Number of parts; each calls the object when it is done.
        what: What the parts are, such as `node counts`.
        clock: Seconds since any time.
    """

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._what, self._clock = total, what, clock
        self._done, self._begun = 0, clock()
        self._silent = not sys.stderr.isatty()

    def __call__(self) -> None:
        self._done += 1
        seconds, left = self._clock() - self._begun, self._total - self._done
        if not self._silent and left and seconds > _PATIENCE_S:
            self._silent = True
            rest_s = seconds / self._done * left
            click.echo(
                f"{self._done} of {self._total} {self._what} in {seconds:.1f} s; about "
                f"{rest_s:.0f} s left",
                err=True,
            )
