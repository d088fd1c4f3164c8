"""How much of a test of many steps or of drawn examples runs: all of it in `make test-all`."""

from __future__ import annotations

import os


def amount(few: int, *, of: int) -> int:
    """`of` with SLURMLLM_TEST_ALL=1, else `few`."""
    return of if os.environ.get("SLURMLLM_TEST_ALL") == "1" else few
