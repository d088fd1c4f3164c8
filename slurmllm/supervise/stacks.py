"""What the stacks of a hung attempt tell: where each worker stood, and which of them stands apart.

Workers that wait for others stand in a library's collective. The one that they wait for does not
answer at all, or stands somewhere else: in a read, in a lock, in the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from slurmllm.rundir import AttemptDir

# The frames of faulthandler and of py-spy.
_FAULTHANDLER = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_PY_SPY = re.compile(r"^\s+(?P<name>\S+) \((?P<path>[^:)]+):(?P<line>\d+)\)$")
# Where a worker stands that computes or waits for the others.
_TOGETHER = re.compile(r"/torch/|/torch_xla/|/neuronx_distributed/|slurmllm/backends/")
_MAX_LINES = 4


class Place(NamedTuple):
    """Where a worker's main thread stood.

    Attributes:
        words: For people.
        apart: Whether it neither computed nor waited for the others.
    """

    words: str
    apart: bool


def read_places(attempt: AttemptDir) -> dict[int, Place]:
    """Where the workers of a hung attempt stood, by rank."""
    folder = attempt.stacks(0).parent
    found = {}
    for path in sorted(folder.glob("rank_*.txt")) if folder.is_dir() else []:
        try:
            found[int(path.stem.removeprefix("rank_"))] = place(path.read_text(errors="replace"))
        except (OSError, ValueError):
            continue
    return found


def place(dump: str) -> Place:
    """Where the main thread of a worker stood, by its dump."""
    if dump.startswith("no answer"):
        return Place(dump.splitlines()[0], apart=True)
    # faulthandler puts the thread that took the signal, the main one, under "Current thread", and
    # the innermost frame first.
    main = dump.rpartition("Current thread")[2]
    frames = list(_FAULTHANDLER.finditer(main)) or list(_PY_SPY.finditer(main))
    if not frames:
        return Place("no Python frames", apart=False)
    inner = frames[0]
    words = f"{inner['name']} ({_short(inner['path'])}:{inner['line']})"
    own = next((frame for frame in frames if "slurmllm/" in frame["path"]), None)
    if own is not None and own is not inner:
        words += f" from {own['name']} ({_short(own['path'])}:{own['line']})"
    # With some frames of a library or a backend it is in the step that all make together.
    apart = not any(_TOGETHER.search(frame["path"]) for frame in frames)
    return Place(words, apart)


def standing_apart(places: Mapping[int, Place]) -> tuple[int, ...]:
    """The ranks that the others wait for; none where all or none stand apart."""
    apart = tuple(sorted(rank for rank, found in places.items() if found.apart))
    return apart if len(apart) < len(places) else ()


def evidence(places: Mapping[int, Place]) -> tuple[str, ...]:
    """A line for each worker that stands apart, else one of where most stand."""
    apart = standing_apart(places)
    lines = [f"rank {rank}: {places[rank].words}" for rank in apart[:_MAX_LINES]]
    if not apart and places:
        words = [found.words for found in places.values()]
        most = max(set(words), key=words.count)
        lines = [f"{words.count(most)} of {len(words)} workers: {most}"]
    return tuple(lines)


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
