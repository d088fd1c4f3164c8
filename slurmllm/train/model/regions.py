"""Regions of tensors, such as a worker's part of a parameter."""

from __future__ import annotations

from collections.abc import Sequence

Region = tuple[slice, ...]  # one slice per dimension, with start and stop


def whole_region(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def intersection(a: Region, b: Region) -> Region:
    """Return what two regions have in common; without that, stops before starts."""
    return tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )


def sizes_of(region: Region) -> list[int]:
    return [bounds.stop - bounds.start for bounds in region]


def relative_to(region: Region, origin: Region) -> Region:
    """Return a region counted from the start of `origin`, which is counted as the region is."""
    return tuple(
        slice(x.start - o.start, x.stop - o.start) for x, o in zip(region, origin, strict=True)
    )


def absolute(region: Region, origin: Region) -> Region:
    """Return a region that is counted from the start of `origin` as `origin` is: the inverse."""
    return tuple(
        slice(x.start + o.start, x.stop + o.start) for x, o in zip(region, origin, strict=True)
    )
