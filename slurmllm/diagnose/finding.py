"""Constructors of findings, for `health` and `doctor` alike, and the exit code of a set of them."""

from __future__ import annotations

from collections.abc import Iterable

from slurmllm.errors import EXIT_OK, Blame, InfrastructureError, UserError
from slurmllm.run.records import Finding

Value = int | float | str


def ok(check: str, value: Value, expected: Value = "") -> Finding:
    """Meets the profile, or the profile has no requirement."""
    return Finding(check=check, status="ok", value=value, expected=expected)


def warn(
    check: str, value: Value, expected: Value = "", message: str = "", *, fix: str = ""
) -> Finding:
    """A run can start, but may fail or be slow later."""
    texts = {"message": message, "fix": fix}
    return Finding(check=check, status="warn", value=value, expected=expected, **texts)


def fail(
    check: str,
    value: Value,
    expected: Value = "",
    message: str = "",
    *,
    fix: str = "",
    blame: Blame = "infrastructure",
) -> Finding:
    """No run can start here.

    `blame` is `user` for packages, profile and options; `infrastructure` for Slurm, a node or a
    file system.
    """
    texts = {"message": message, "fix": fix}
    return Finding(check=check, status="fail", value=value, expected=expected, blame=blame, **texts)


def skipped(check: str, reason: str) -> Finding:
    return Finding(check=check, status="skipped", value=reason)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if nothing failed; 2 if the user can fix a failed check; else 3."""
    blames = {finding.blame for finding in findings if finding.status == "fail"}
    if "user" in blames:
        return UserError.exit_code
    return InfrastructureError.exit_code if blames else EXIT_OK
