"""Checks of the nodes (`slurmllm health`) and of installation and cluster (`slurmllm doctor`).

`probe.py` starts `node.py` on all nodes and compares them; `bandwidth.py` measures the all-reduce.
`login_node.py` and `storage.py` are the checks of `doctor`. Every check yields `records.Finding`s.
Only `allreduce.py`, a program of its own, imports torch. Here are the constructors of findings and
the exit code of a set of them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from slurmllm.core.errors import EXIT_OK, InfrastructureError, UserError
from slurmllm.core.run.records import Finding

Value = int | float | str
Findings = Iterator[Finding]


def _finding(
    check: str,
    value: Value,
    expected: Value = "",
    message: str = "",
    **fields: Any,
) -> Finding:
    return Finding(check=check, value=value, expected=expected, message=message, **fields)


ok = partial(_finding, status="ok")  # meets the profile, or the profile has no requirement
warn = partial(_finding, status="warn")  # a run can start, but may fail or be slow later
# No run can start. `blame` is `user` for packages, profile and options, else `infrastructure`: for
# Slurm, a node or a file system.
fail = partial(_finding, status="fail", blame="infrastructure")
unfit = partial(fail, blame="user")  # of `fail`, what the user can correct
skipped = partial(_finding, status="skipped")


def judge(
    check: str, value: Value, fix: str, status: Callable[..., Finding] = warn, **fields: Any
) -> Finding:
    """Return ok if there is nothing to fix, else a finding with that status and fix."""
    return status(check, value, fix=fix, **fields) if fix else ok(check, value)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if nothing failed; 2 if the user can fix a failed check; else 3."""
    blames = {finding.blame for finding in findings if finding.status == "fail"}
    if "user" in blames:
        return UserError.exit_code
    return InfrastructureError.exit_code if blames else EXIT_OK
