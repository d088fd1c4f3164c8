"""Numbers as logs print them: `1,234.5`, `1.2K`, `tensor(1.2)`, `10/400`.

A comma separates thousands. Of `2,345` it may be a decimal comma: it is a number only of a count.
"""

from __future__ import annotations

import re

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
_DECIMAL_COMMA = re.compile(r"[-+]?[\d.]*,\d+(?:[eE][-+]?\d+)?")
_COUNT_NAME = re.compile(r"step|iter|update|batch|tok|sample|seq|tps|num|count|epoch", re.I)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def parse_number(token: str) -> float | None:
    """Parse a number; None if the text is not one, or has more than 40 characters."""
    token = token.strip().rstrip(",")
    if "(" in token:
        match = _FIRST_NUMBER.match(token[token.index("(") + 1 :].lstrip("["))
        token = "" if match is None else match[0]
    if not 0 < len(token) <= LONGEST_NUMBER:
        return None
    if token[-1] in _UNITS:
        number = parse_number(token[:-1])
        return None if number is None else number * _UNITS[token[-1]]
    if "," in token and _THOUSANDS.fullmatch(token):
        token = token.replace(",", "")
    try:
        return float(token)
    except ValueError:
        return None


def parse_value(name: str, token: str) -> float | None:
    """Parse the number of a column or key; of a step's also the first of `10/400`."""
    if has_decimal_comma(token) and not _COUNT_NAME.search(name):
        return None
    if "/" in token and _STEP_NAME.search(name):
        count, _, total = token.partition("/")
        if parse_number(total) is not None:
            return parse_number(count)
    return parse_number(token)


def has_decimal_comma(token: str) -> bool:
    """Return whether the comma of a number is, or may be, a decimal comma."""
    return "," in token and _DECIMAL_COMMA.fullmatch(token.strip()) is not None
