"""The three kinds of finding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from slurmllm.errors import EXIT_OK, Blame, InfrastructureError, UserError
from slurmllm.records import HealthFinding

Value = int | float | str
GB = 10**9


def ok(check: str, value: Value, expected: Value = "") -> HealthFinding:
    """What the profile asks for, or nothing was asked for."""
    return HealthFinding(check=check, status="ok", value=value, expected=expected)


def warn(check: str, value: Value, expected: Value, message: str) -> HealthFinding:
    """A run can start; something may bite later."""
    return _of_people(check, "warn", value, expected, message)


def fail(check: str, value: Value, expected: Value, message: str) -> HealthFinding:
    """The node lacks what the profile asks for."""
    return _of_people(check, "fail", value, expected, message)


def _of_people(check: str, status: str, value: Value, expected: Value, said: str) -> HealthFinding:
    return HealthFinding.model_validate(
        {
            "check": check,
            "status": status,
            "value": _cut(value, 100),
            "expected": _cut(expected, 100),
            "message": _cut(said, 500),
        }
    )


def _cut(value: Value, most: int) -> Value:
    """At most so many bytes of a text: a finding must fit into a line of output (report.py)."""
    if not isinstance(value, str) or len(value.encode()) <= most:
        return value
    return value.encode()[:most].decode(errors="ignore") + "…"


State = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check's answer.

    Attributes:
        name: What was looked at.
        state: `warn`: a run can start and something may bite later; `fail`: no run can start.
        found: What is there.
        remedy: What to do about it; empty where there is nothing to do.
        blame: Whose a fail is: the installation's owner's (user), or the cluster's
            (infrastructure); None where nothing fails.
    """

    name: str
    state: State
    found: str
    remedy: str = ""
    blame: Blame | None = None

    def to_json(self) -> dict[str, str | None]:
        """The finding as one JSON object."""
        return asdict(self)


def finding_ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def skipped(name: str, why: str) -> Finding:
    """Not looked at."""
    return Finding(name, "skipped", why)


def finding_warn(name: str, found: str, remedy: str) -> Finding:
    """A run can start."""
    return Finding(name, "warn", found, remedy)


def finding_fail(name: str, found: str, remedy: str) -> Finding:
    """The installation cannot start a run, and its owner can put that right."""
    return Finding(name, "fail", found, remedy, blame="user")


def cluster_fail(name: str, found: str, remedy: str) -> Finding:
    """Slurm, a node or a file system does not do what it must."""
    return Finding(name, "fail", found, remedy, blame="infrastructure")


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a fail; the user's exit code where one is theirs to mend, else infrastructure's."""
    blames = {finding.blame for finding in findings if finding.state == "fail"}
    if "user" in blames:
        return UserError.exit_code
    return InfrastructureError.exit_code if blames else EXIT_OK
