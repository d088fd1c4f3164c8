"""Where a step's time goes: the device's kernels under torch.profiler, in classes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

STEPS = 3
_RANGE = "slurmllm.gpu "
# Parts of `blocks`, head, optimizer and norm. In this order: flash attention is built with CUTLASS,
# as products are. The names of kernels are of cuBLAS, cuDNN, PyTorch, Inductor; `aten::` of CPUs.
_KINDS = {
    "attention": r"flash|fmha|sdpa|attention|flex|cudnn.*prop",
    "products": r"gemm|splitk|nvjet|cutlass|xmma|::(mm|addmm|bmm|baddbmm|linear|_scaled_mm)$",
    "copies": r"^triton_poi_fused__to_copy_\d+$|^(?!triton).*(copy|mem(cpy|set)|::cat|fill|clone)",
    "norms": r"^(?!triton).*(norm|reduce_kernel)",
    "embedding": r"embedding|index",
    "other passes": r"triton|elementwise|multi_tensor|aten::|compiled",
}


def class_of(kernel: str, ranges: Iterable[str]) -> str:
    """Return part and kind of a kernel, launched in these ranges, from the innermost outwards."""
    parts = (
        # Its backward pass is on autograd's thread.
        "head" if "LinearCrossEntropy" in name else name.removeprefix(_RANGE)
        for name in ranges
        if "LinearCrossEntropy" in name or name.startswith(_RANGE)
    )
    kinds = (kind for kind, names in _KINDS.items() if re.search(names, kernel, re.I))
    return f"{next(parts, 'blocks')}: {next(kinds, 'unknown')}"


def profiled(step: Callable[[], object], backend: Any) -> dict[str, Any]:
    """Profile some steps of the native backend; returns `summary`."""
    device = backend.worker_device
    output = backend.chunks[-1].output
    named = [(output, "forward", "head"), (backend, "optimizer_step", "optimizer")]
    for owner, name, part in [*named, (backend, "param_norm", "norm")]:
        setattr(owner, name, record_function(_RANGE + part)(getattr(owner, name)))
    device.synchronize()
    with profile(activities={ProfilerActivity.CPU, device.activity}) as profiler:
        for _ in range(STEPS):
            step()
        device.synchronize()
    return summary(list(profiler.events()), on_cpu=device.torch.type == "cpu")


def summary(events: list[Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return, in ms a step, `classes`; `kernels`, the slowest; `idle` of a device, None on CPUs."""
    annotations = {event.name for event in events if event.is_user_annotation}
    computed = ((event.name, event.self_cpu_time_total, _ranges(event)) for event in events)
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    classes: dict[str, float] = defaultdict(float)
    for name, us, ranges in computed if on_cpu else _on_device(events):
        if name not in annotations:
            group = class_of(name, ranges)
            kernels[group, name] += us / STEPS / 1e3
            classes[group] += us / STEPS / 1e3
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if not _is_on_cpu(event) and event.name not in annotations
    )
    slowest = sorted(kernels.items(), key=lambda item: -item[1])[:15]
    return {
        "classes": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "idle": None if on_cpu else _gaps(spans) / STEPS / 1e3,
        "kernels": [{"class": of, "name": name[:100], "ms": ms} for (of, name), ms in slowest],
    }


def _is_on_cpu(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _ranges(event: Any) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def _on_device(events: list[Any]) -> Iterator[tuple[str, float, Iterable[str]]]:
    """Yield kernels with the ranges in which they were launched; none if that is not known."""
    unknown: dict[str, float] = defaultdict(float)
    for event in events:
        if not _is_on_cpu(event):
            unknown[event.name] += event.time_range.elapsed_us()
        for kernel in event.kernels:
            unknown[kernel.name] -= kernel.duration
            yield kernel.name, kernel.duration, _ranges(event)
    yield from ((name, us, ()) for name, us in unknown.items() if us > 1)


def _gaps(spans: list[tuple[float, float]]) -> float:
    """Return the time between the first and the last in which nothing ran; spans are sorted."""
    idle, end = 0.0, spans[0][0] if spans else 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle
