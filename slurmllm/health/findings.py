"""The three kinds of finding."""

from __future__ import annotations

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
