"""The error messages of runtimes and libraries, and their meaning for a run.

error_patterns.yaml has a pattern, its meaning, the source of the message, and an example.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from slurmllm.core.format import Json
from slurmllm.core.run.records import EndingClass

# In the order of the search in a message that matches several rows. The device's before the
# program's, because a broken device may cause both; echoes last.
Meaning = Literal[
    "memory",  # of the device or the host
    "device",  # an accelerator is broken: its node is excluded
    "code",  # an invalid request of the program, on any node
    "limit",  # of the user: processes
    "compiler",  # a graph that does not compile
    "storage_lasting",  # the shared file system, until the user acts
    "storage",  # likewise; may be transient
    "node",  # this node: its driver, its network adapter, an installation
    "port",  # taken by another process; no node is to blame
    "lost_peer",  # another worker is gone: an echo, never the cause
    "connection",  # to something: an echo if that is a peer
]
# The class of an ending with such a message, and whether the node of the worker is blamed.
ENDINGS: Mapping[Meaning, tuple[EndingClass, bool]] = {
    "memory": ("out_of_memory", False),
    "device": ("node_failure", True),
    "code": ("code_error", False),
    "limit": ("bad_configuration", False),
    "compiler": ("compile_failure", False),
    "storage": ("storage_failure", False),
    "storage_lasting": ("storage_failure", False),
    "node": ("node_failure", True),
    "port": ("node_failure", False),
    "lost_peer": ("node_failure", False),
    "connection": ("code_error", False),
}
# Connections to a service or a file, never to a peer.
_ELSEWHERE = re.compile(
    r"\b(?!tcp|env)[a-z][a-z0-9+]{1,12}://(?!\[)|HTTPS?Connection|(?i:\burl\b)|urlopen"
    r"|\[Errno -?\d+\] [^:']{1,80}: ['\"]"
)

# torch-neuronx prints NRT_STATUS as `nrt_execute status=5 message="…"` (vllm issue 12443), the
# SDK's documentation as `Failed to execute the model status=1003 message=…`.
_STATUS = r"(?:\bnrt_\w+|[Ff]ailed to|Could not)\b.{0,300}?\bstatus[= ](?:%s)\b"
_SEARCHED = 10_000  # characters at each end of a message: nodes are held while it is searched


class Row(NamedTuple):
    """One row of the table; the pattern matches the `example`."""

    pattern: str
    meaning: Meaning
    source: str
    example: str


def read_table(path: Path) -> Any:
    """Return a table that is part of the package, by libyaml if it is there."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text("utf-8"), Loader=loader)  # noqa: S506 - both are safe


def read_rows(path: Path) -> list[Json]:
    return list(read_table(path))


@cache
def table() -> tuple[Row, ...]:
    return tuple(
        Row(row.get("pattern") or _STATUS % row["status"], *(row[name] for name in Row._fields[1:]))
        for row in read_rows(Path(__file__).with_suffix(".yaml"))
    )


@cache
def pattern(*meanings: Meaning) -> re.Pattern[str]:
    """Return one pattern that matches all messages of some meanings."""
    return re.compile("|".join(f"(?:{row.pattern})" for row in table() if row.meaning in meanings))


def matches(message: str, *meanings: Meaning) -> bool:
    """Return whether a message matches a row with one of these meanings."""
    if len(message) > 2 * _SEARCHED:
        message = f"{message[:_SEARCHED]}\n{message[-_SEARCHED:]}"
    return pattern(*meanings).search(message) is not None


def meaning_of(message: str) -> Meaning | None:
    """Return the meaning of a message; None if no row of the table matches."""
    meaning = next((meaning for meaning in get_args(Meaning) if matches(message, meaning)), None)
    about_peers = meaning in ("lost_peer", "connection")
    return None if about_peers and _ELSEWHERE.search(message[: 2 * _SEARCHED]) else meaning


def names_any(message: str, names: Iterable[str]) -> bool:
    """Return whether a message has one of some names or addresses, as a whole word."""
    return any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", message) for name in names)


def cause_line(lines: Iterable[str]) -> tuple[str, Meaning] | None:
    """Return the first line that names a cause, else of a lost peer, else of any connection."""
    echoes: dict[Meaning, tuple[str, Meaning]] = {}
    for line in lines:
        meaning = meaning_of(line)
        if meaning in ("lost_peer", "connection"):
            echoes.setdefault(meaning, (line, meaning))
        elif meaning is not None:
            return line, meaning
    return echoes.get("lost_peer") or echoes.get("connection")
