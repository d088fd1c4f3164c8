"""How much of a test of many steps, cases or drawn examples runs: all of it in `make test-all`."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def amount(few: int, *, of: int) -> int:
    """`of` with SLURMLLM_TEST_ALL=1, else `few`."""
    return of if os.environ.get("SLURMLLM_TEST_ALL") == "1" else few


def sample(few: int, cases: Iterable[Any], *, arguments: int = 1) -> list[Any]:
    """Values for a test of one or more arguments, of which all but the first `few` are long."""
    params = [case if arguments > 1 else (case,) for case in cases]
    marks = [() if index < few else (pytest.mark.long,) for index in range(len(params))]
    return [pytest.param(*p, marks=m) for p, m in zip(params, marks, strict=True)]
