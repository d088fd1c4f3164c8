"""What one check found, and what all of them together mean for the exit code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from slurmllm.errors import EXIT_OK, Blame, InfrastructureError, UserError

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


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found)


def skipped(name: str, why: str) -> Finding:
    """Not looked at."""
    return Finding(name, "skipped", why)


def warn(name: str, found: str, remedy: str) -> Finding:
    """A run can start."""
    return Finding(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
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
