"""Numbers as logs print them: `1,234.5`, `2,5` (a decimal comma), `1.2K`, `tensor(1.2)`, `10/400`.

A comma before three digits may separate thousands or decimals, which only the other numbers of the
column show: such a number is read as thousands first.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import numpy as np

from slurmllm.metrics.curves import Floats

DecimalMark = Literal["comma", "point"]

LONGEST_NUMBER = 40  # characters; what is longer is no metric
# Every repetition is bounded and atomic, so that a search in a long line takes linear time.
NUMBER = (
    r"[-+]?(?:(?>(?:\d{1,40}(?:,\d{1,40}){0,9}(?:\.\d{0,40})?|\.\d{1,40})(?:e[-+]?\d{1,4})?)"
    r"(?!\d)|nan|inf(?:inity)?)"
)
# np.float64(1.2), tensor([1.2], device='cuda:0'), maybe cut by the end of the line
WRAPPER = r"(?:(?:np\.\w{1,20}|\w{0,20}tensor|\w{0,20}array)\(\[?)?"
WRAPPER_END = r"(?:\]?(?:, ?\w{1,20}=[^,()\s]{1,40}){0,3}\))?"
_FIRST_NUMBER = re.compile(NUMBER, re.IGNORECASE)
_STEP_NAME = re.compile(r"step|iter|update|batch", re.IGNORECASE)
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?(?:\d*|\d{1,3}(?:\.\d{3})+),\d+(?:[eE][-+]?\d+)?")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


class CommaNumber(float):
    """A number that was written with a comma, and the decimal mark which that shows, if any."""

    mark: DecimalMark | None

    def __new__(cls, value: str, mark: DecimalMark | None) -> CommaNumber:
        number = super().__new__(cls, value)
        number.mark = mark
        return number


def parse_number(text: str) -> float | None:
    """Parse a number; None if the text is none, or has more than 40 characters."""
    text = text.strip().rstrip(",")
    if "(" in text:
        match = _FIRST_NUMBER.match(text[text.index("(") + 1 :].lstrip("["))
        text = "" if match is None else match[0]
    if not 0 < len(text) <= LONGEST_NUMBER:
        return None
    if text[-1] in _UNITS:
        number = parse_number(text[:-1])
        return None if number is None else number * _UNITS[text[-1]]
    try:
        if "," not in text:
            return float(text)
    except ValueError:
        return None
    if _THOUSANDS.fullmatch(text):
        shown = "." in text or text.count(",") > 1
        return CommaNumber(text.replace(",", ""), "point" if shown else None)
    if _DECIMAL_COMMA.fullmatch(text):
        return CommaNumber(text.replace(".", "").replace(",", "."), "comma")
    return None


def parse_value(name: str, text: str) -> float | None:
    """Parse the number of a column or key; of a step's also the first of `10/400`."""
    count, slash, total = text.partition("/")
    if slash and _STEP_NAME.search(name) and parse_number(total) is not None:
        return parse_number(count)
    return parse_number(text)


def decimal_mark(
    values: Floats, marks: Collection[DecimalMark | None], others: Collection[DecimalMark | None]
) -> DecimalMark | None:
    """Return the decimal mark of a column; None if its numbers do not show it.

    Args:
        values: With a comma before three digits read as thousands.
        marks: What the column's numbers with a comma show.
        others: What those of the other columns show.
    """
    shown = set(marks) - {None}
    if not shown:
        finite = values[np.isfinite(values)]
        fractions = finite[finite != np.floor(finite)]
        # 1e-4 has no decimal mark.
        if any(float(f"{value:.0e}") != value for value in fractions[:1000].tolist()):
            return "point"
        shown = {"comma"} if "comma" in others else set()
    return next(iter(shown)) if len(shown) == 1 else None
