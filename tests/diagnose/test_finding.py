"""The exit code of a set of findings."""

from __future__ import annotations

from slurmllm.diagnose.finding import exit_code, fail, ok, skipped, warn


def test_warnings_and_skipped_checks_are_no_failure() -> None:
    assert exit_code([ok("a", ""), warn("b", ""), skipped("c", "")]) == 0


def test_a_fault_of_slurm_is_3() -> None:
    assert exit_code([ok("a", ""), fail("b", "")]) == 3


def test_a_fault_of_the_installation_is_2_also_with_one_of_slurm() -> None:
    assert exit_code([fail("a", "", blame="user")]) == 2
    assert exit_code([fail("a", ""), fail("b", "", blame="user")]) == 2
