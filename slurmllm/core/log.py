"""Log records of a run's processes: time, level, node, rank, component, message.

    2026-11-23T08:31:05.123+00:00 INFO n3 rank 5 slurmllm.train.loop: message

The supervisor, the launchers and the workers call `setup_logging` once each; a module then has
`log = logging.getLogger(__name__)`. $SLURMLLM_LOG chooses the level: debug, info or warning.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from datetime import datetime
from typing import NamedTuple

from slurmllm.core.format import printable

LEVEL = "SLURMLLM_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) "
    r"(?P<level>[A-Z]+) (?P<node>\S+) (?:rank (?P<rank>\d+) )?(?P<component>\S+): (?P<message>.*)"
)


class LogLine(NamedTuple):
    """A parsed log line; `time` is Unix time in s, `rank` is None for a process without one."""

    time: float
    level: str
    node: str
    rank: int | None
    component: str
    message: str


class _Formatter(logging.Formatter):
    def __init__(self, node: str, rank: int | None) -> None:
        origin = node if rank is None else f"{node} rank {rank}"
        super().__init__(f"%(asctime)s %(levelname)s {origin} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return (
            datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        )


class _StderrHandler(logging.Handler):
    """Writes to file descriptor 2 without a buffer, a record in one write.

    Ranks may share the file: with a write per record their lines do not interleave. A disk that
    refuses must not end a supervisor, and text left in the buffer of sys.stderr would fail the
    flush at exit and change the exit code.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(2, f"{printable(self.format(record))}\n".encode())
        except OSError:
            pass
        except Exception:
            self.handleError(record)


def setup_logging(rank: int | None = None) -> None:
    """Configure the logging of this process; later calls change nothing.

    Other packages' warnings take the same form; their lower levels stay off.

    Args:
        rank: Of a worker, None for other processes.
    """
    root = logging.getLogger()
    if any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        return
    # The launcher names the node: with --local several nodes are on one host.
    node = os.environ.get("SLURMLLM_NODE") or os.environ.get("SLURMD_NODENAME")
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(node or socket.gethostname(), rank))
    root.addHandler(handler)
    level = os.environ.get(LEVEL) or "info"
    logger = logging.getLogger("slurmllm")
    logger.setLevel(LEVELS.get(level.lower(), logging.INFO))
    if level.lower() not in LEVELS:
        logger.warning(
            "%s=%s is not a level; choose %s; using info", LEVEL, level, ", ".join(LEVELS)
        )


def parse_line(line: str) -> LogLine | None:
    """Parse a line of a log; None if it is not a log record, such as a library's output."""
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        rank = int(match["rank"]) if match["rank"] else None
        time = datetime.fromisoformat(match["time"]).timestamp()
    except (ValueError, OverflowError):  # month 13, a rank of 5,000 digits
        return None
    return LogLine(time, match["level"], match["node"], rank, match["component"], match["message"])


def message_of(line: str) -> str:
    """Return the message of a log line without its prefix; other lines unchanged."""
    return match["message"] if (match := _LINE.match(line)) else line
