"""The exit code that findings add up to."""

from __future__ import annotations

from slurmllm.diagnose.finding import cluster_fail, exit_code, fail, ok, skipped, warn


def test_warnings_and_skipped_checks_are_no_failure() -> None:
    assert exit_code([ok("a", ""), warn("b", "", ""), skipped("c", "")]) == 0


def test_a_fault_of_slurm_is_3() -> None:
    assert exit_code([ok("a", ""), cluster_fail("b", "", "")]) == 3


def test_a_fault_of_the_installation_is_2_beside_one_of_slurm_too() -> None:
    assert exit_code([fail("a", "", "")]) == 2
    assert exit_code([cluster_fail("a", "", ""), fail("b", "", "")]) == 2
