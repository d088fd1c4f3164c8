"""Types of what a test knows to be there."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return `value`; fail if it is None."""
    assert value is not None
    return value
