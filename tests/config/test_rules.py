"""Slurm's time formats and the rules' helpers."""

from __future__ import annotations

import pytest

from slurmllm.config.rules import choose, divisors, minutes_of


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("2-0", 2880),
        ("1-12:30", 2190),
        ("1-00:00:30", 1440.5),
    ],
)
def test_minutes_of_slurm_times(text: str, minutes: float) -> None:
    assert minutes_of(text) == minutes


def test_remedies_read_as_words() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert choose([1, 2, 4]) == "choose 1, 2 or 4"
    assert choose([3]) == "choose 3"
