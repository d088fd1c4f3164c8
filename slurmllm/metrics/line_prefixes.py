"""What launchers and log collectors write before each line: the rank, the host, the time."""

from __future__ import annotations

import re

_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[-+]\d\d:?\d\d)?"
_PREFIXES = (
    r" {0,6}(\d{1,6}):(?: |(?=\D|$))",  # srun --label, which pads the task's number
    r"\[[A-Za-z_]{1,20}(\d{1,6})\]: ?",  # torchrun --tee
    r"\[(?:rank|gpu|device|worker)[ _=:]?(\d{1,6})\]:? ?",
    r"rank[ =:]?(\d{1,6})\]?: ?",
    r"\[\d{1,6},(\d{1,6})\]<std(?:out|err)>: ?",  # mpirun --tag-output
    r"\(\w{1,80} pid=(\d{1,10})(?:, ip=[\d.]{7,15})?\) ?",  # Ray
    r"(?!step|iter|epoch|batch|update|loss|train|val)([a-z][\w.-]{0,62}\d[\w.-]{0,62}): ",  # pdsh
    # syslog, journald: Nov 27 12:00:00 host python[123]:
    rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d|{_TIME}) [\w.-]{{1,64}} [\w./-]{{1,64}}"
    r"(?:\[\d{1,10}\])?: ?",
    # kubectl logs --timestamps, CI, containerd; not a time that the framework's own fields follow
    rf"\[?{_TIME}\]? (?:std(?:out|err) F )?(?!-|\| |,)",
)
_PREFIX = re.compile("|".join(_PREFIXES), re.IGNORECASE)


def split_prefix(line: str) -> tuple[str, str]:
    """Return the rank or host that the prefixes of a line name, and the line without them."""
    ranks, start = dict[str, None](), 0
    while match := _PREFIX.match(line, start):
        ranks |= dict.fromkeys(text for text in match.groups() if text is not None)
        start = match.end()
    return ".".join(ranks), line[start:]
