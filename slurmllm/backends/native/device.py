"""Copies between host and device for which neither waits.

A copy from or into pageable memory, `Tensor.item()` and a branch on a tensor make the host wait
until the device has done everything enqueued so far. Then nothing is enqueued, and the device is
idle until the host has caught up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device."""
    # torch keeps the pinned copy until the device has read it.
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


class DeviceMark:
    """A point of the device's stream; the difference of two is in seconds of the device."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def __sub__(self, earlier: DeviceMark) -> float:
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3  # type: ignore[no-any-return]


class DeviceNumber:
    """A number that the device may still be computing.

    float() waits until the device has done what was enqueued before this was made, and no longer:
    `Tensor.item()` would wait for the step that was enqueued since.
    """

    def __init__(self, value: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        if value.is_cuda:
            value = value.to("cpu", non_blocking=True)  # into pinned memory
            # `blocking`: the waiting thread sleeps; torch's default is a busy loop.
            self._ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._ready.record()
        self._value = value

    def __float__(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._value)
