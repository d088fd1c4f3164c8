"""Counts of tokens as people write them: 375M, 20B, 1.5T."""

from __future__ import annotations

import re
from decimal import Decimal

from slurmllm.errors import UserError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Digits in groups of any length, a fraction, an exponent that stays a number, a suffix.
_COUNT = re.compile(
    r"(?P<number>[0-9]+(?:[_,][0-9]+)*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)(?P<suffix>[KMBTkmbt]?)"
)
MOST_TOKENS = 10**18


def parse_tokens(text: str) -> int:
    """Read a count of tokens: 375M, 20B, 1.5T, 2e9 or 20_000_000_000.

    Args:
        text: As given to --tokens. K, M, B and T are 10^3, 10^6, 10^9 and 10^12.

    Raises:
        UserError: it is no whole number of tokens from 1 to 10^18.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"--tokens {text!r} is no count of tokens; write for instance 375M, 20B, 1.5T or 2e9"
        )
    number = Decimal(re.sub("[_,]", "", found["number"])) * _FACTORS[found["suffix"].upper()]
    if not 1 <= number <= MOST_TOKENS or number != int(number):
        raise UserError(
            f"--tokens {text!r} must be a whole number of tokens from 1 to {MOST_TOKENS:.0e}; "
            "write for instance 375M, 20B or 1.5T"
        )
    return int(number)
