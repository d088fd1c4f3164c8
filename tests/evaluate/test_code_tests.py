"""Programs run against their tests."""

from __future__ import annotations

from itertools import combinations

import pytest

from slurmllm.evaluate.code_tests import pass_at_k, passes, programs

GOOD, BAD = "def f(x):\n    return x + 1", "def f(x):\n    return x"
TESTS = "assert f(1) == 2"


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("x = 1", True),
        ("assert False", False),
        ("import os; os._exit(0)", False),
        ("this is no program", False),
        ("x = bytearray(1 << 40)", False),
        ("while True: pass", False),
    ],
)
def test_a_program_passes_by_reaching_its_end(program: str, passed: bool) -> None:
    assert passes(program, limit_s=1 if "while" in program else 10) is passed


def test_pass_at_k_is_the_share_of_subsets_with_a_good_one() -> None:
    samples = [BAD, GOOD, BAD, GOOD]
    scores = pass_at_k([TESTS], [samples], k=[1, 2, 3, 5])
    for k in (1, 2, 3):
        subsets = list(combinations(samples, k))
        assert scores[f"pass@{k}"] == pytest.approx(sum(GOOD in s for s in subsets) / len(subsets))
    assert "pass@5" not in scores


def test_programs_are_prompts_with_what_follows() -> None:
    assert programs([["b", "c"]], [{"prompt": "a"}]) == [["ab", "ac"]]
