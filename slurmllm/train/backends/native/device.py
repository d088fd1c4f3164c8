"""What differs between CPUs, GPUs and Trainium, and copies for which neither side waits.

A copy from or into pageable memory, `Tensor.item()` and a branch on a tensor make the host wait
until the device has done everything enqueued so far. Then nothing is enqueued, and the device is
idle until the host has caught up.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from slurmllm.core.errors import ConfigError
from slurmllm.core.format import format_plural
from slurmllm.core.run.host_memory import Memory, host_memory
from slurmllm.train.backends.native.environment import missing_torch_neuron

F = TypeVar("F", bound=Callable[..., Any])


class Device:
    """A worker's CPUs; an accelerator is a subclass.

    Attributes:
        torch: torch's device.
    """

    torch_type = "cpu"
    process_group = "gloo"
    activity = ProfilerActivity.CPU
    memory_history: Any = None  # torch's module that records allocations
    # Whether calls return before the work is done: metrics are read a step later, and one call for
    # many tensors, as torch._foreach_*, is faster than one for each.
    asynchronous = False
    # The vocabulary and the tokens of the head's matrix products are padded to a multiple of this.
    row_multiple = 1
    # Logits of bf16 that exist at a time. In `plan/memory.py` too.
    logits_at_a_time = 2**27
    # Elements that an optimizer updates at a time without compilation: temporaries (about 30 bytes
    # an element) stay in a CPU's cache, and below a gigabyte on an accelerator.
    update_elements = 2**16
    # How compiled blocks keep documents apart: "flex" (flex_attention, whose kernels compute only
    # blocks in which tokens attend to each other) or "dense" (a mask of all pairs of tokens). In
    # `plan.mesh.FLEX_DEVICES` too.
    document_attention: Literal["dense", "flex"] = "dense"
    # Bytes of gradients that are collected and then converted in one call; 0: each at once.
    waiting_gradients = 0

    def __init__(self, local_rank: int = 0) -> None:
        self.torch = torch.device(self.torch_type)

    @classmethod
    def compile(cls, function: F, *, dynamic: bool = False, **inductor: Any) -> F:
        """Return the function as one graph; `inductor` are options of torch's own compiler."""
        options: Any = inductor or None
        graph: Any = torch.compile(function, fullgraph=True, dynamic=dynamic, options=options)
        return cast("F", graph)

    def synchronize(self) -> None:
        """Wait until the device has done all that was enqueued."""

    def event(self) -> Any:
        """Return an event of what was enqueued so far; None if it is done already."""
        return None

    def mark(self) -> DeviceMark | None:
        """Return a point of the device's stream; None if the device has no clock."""
        return None

    @contextlib.contextmanager
    def copies(self, after: Any) -> Iterator[None]:
        """Copy in this context while the device computes: after an event, and complete on exit."""
        yield

    def pin(self, memory: Tensor) -> str | None:
        """Pin host memory of copies to the device, for good; return why it could not be."""
        return None

    def memory(self, sharing: int) -> Memory:
        """Return this worker's peak and limit, one of `sharing` on the machine; reset the peak."""
        return host_memory(sharing)

    def total_memory(self, sharing: int) -> int:
        """Return the bytes of the device, or this worker's share of the host's memory."""
        return host_memory(sharing).limit_bytes

    def release(self) -> None:
        """Give memory that no tensor uses back to the device."""


class Accelerator(Device):
    """A GPU or Trainium, through torch's module for it, such as torch.cuda.

    It uses the parts of the module that FSDP2 needs as well: streams, events, memory figures.
    """

    asynchronous = True
    logits_at_a_time = 2**29  # gradients of the chunks are summed in passes over the whole head's
    row_multiple = 64  # rows of bf16 are aligned to 128 bytes, of fp32 to 256
    update_elements = 2**25
    waiting_gradients = 2**28

    def __init__(self, local_rank: int = 0) -> None:
        if fault := self.missing(local_rank):
            raise ConfigError(fault)
        self.torch = torch.device(self.torch_type, local_rank)
        self._module: Any = torch.get_device_module(self.torch_type)
        self._module.set_device(self.torch)

    @classmethod
    def missing(cls, local_rank: int) -> str | None:
        """Return why this worker has no device, with the fix; None if it has one."""
        raise NotImplementedError

    def synchronize(self) -> None:
        self._module.synchronize()

    def event(self) -> Any:
        event = self._module.Event()
        event.record()
        return event

    def mark(self) -> DeviceMark | None:
        return DeviceMark(self._module.Event(enable_timing=True, blocking=True))

    @contextlib.contextmanager
    def copies(self, after: Any) -> Iterator[None]:
        stream = self._module.Stream(self.torch)  # the saving thread has no current device
        stream.wait_event(after)
        with self._module.stream(stream):
            yield
        stream.synchronize()

    def memory(self, sharing: int) -> Memory:
        self.synchronize()  # allocations may be asynchronous, as TorchNeuron's are
        peak = self._module.max_memory_allocated()
        # Memory used by others (NCCL, CUDA context) is excluded from both peak and limit.
        free, _ = self._module.mem_get_info()
        limit = free + self._module.memory_reserved()
        self.release()
        self._module.reset_peak_memory_stats()
        return Memory(peak, limit)

    def total_memory(self, sharing: int) -> int:
        return int(self._module.mem_get_info()[1])

    def unavailable_memory(self) -> int:
        """Return the bytes that are in use without any tensor."""
        self.release()
        free, total = self._module.mem_get_info()
        return int(total - free - self._module.memory_reserved())

    def release(self) -> None:
        self._module.empty_cache()


class Cuda(Accelerator):
    """An NVIDIA GPU, or one of AMD with torch for ROCm, which has the same names."""

    torch_type = "cuda"
    process_group = "nccl"
    activity = ProfilerActivity.CUDA
    memory_history = torch.cuda.memory
    # Not varlen_attn: it is new in torch 2.10, is not for fp32, has no fixed order of additions in
    # its backward pass, and takes the number of documents as a shape, that of the longest from the
    # host.
    document_attention = "flex"

    @classmethod
    def missing(cls, local_rank: int) -> str | None:
        count = torch.cuda.device_count()
        host = socket.gethostname()
        if count > local_rank:
            return None
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                f"cluster.device: cuda: PyTorch {torch.__version__} on {host} is built without "
                "CUDA; install a build for CUDA, or take a profile of CPUs, such as --cluster local"
            )
        if count == 0:
            return (
                f"cluster.device: cuda: PyTorch {torch.__version__} finds no GPU on {host}; run "
                "on a node that has some (without --local, in a job), and see `nvidia-smi` there"
            )
        return (
            f"cluster.devices_per_node: local rank {local_rank} has no GPU: {host} has "
            f"{format_plural(count, 'GPU')}; --set cluster.devices_per_node={count}"
        )

    def pin(self, memory: Tensor) -> str | None:
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        return f"cudaHostRegister returned {error}" if error else None


class Neuron(Accelerator):
    """A Trainium 2 or 3 through TorchNeuron (torch-neuronx 2.13 or later, Neuron SDK 2.33).

    From AWS's documentation of the beta, and not run yet on such a device.
    """

    torch_type = process_group = "neuron"
    activity = ProfilerActivity.PrivateUse1

    @classmethod
    def missing(cls, local_rank: int) -> str | None:
        if fault := missing_torch_neuron():
            return fault
        importlib.import_module("torch_neuronx")  # registers the device
        if not hasattr(torch, "neuron"):
            return (
                "cluster.device: neuron: torch_neuronx is here in its older form, for XLA; install "
                "that of Neuron SDK 2.33 (trn2, trn3), or --set backend=nxd"
            )
        return None

    @classmethod
    def compile(cls, function: F, *, dynamic: bool = False, **inductor: Any) -> F:
        # A compiler of its own, for static shapes.
        graph: Any = torch.compile(function, fullgraph=True, dynamic=False, backend="neuron")
        return cast("F", graph)


KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": Cuda, "neuron": Neuron}


def send(tensor: Tensor, device: torch.device) -> Tensor:
    # torch keeps the pinned copy until the device has read it.
    pinned = tensor if device.type == "cpu" else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class DeviceMark:
    """A point of the device's stream; the difference of two is in seconds of the device."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._event.record()

    def __sub__(self, earlier: DeviceMark) -> float:
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class DeviceNumber:
    """A number that the device may still be computing.

    float() waits until the device has done what was enqueued before this was made, and no longer:
    `Tensor.item()` would wait for the step that was enqueued since.
    """

    _ready: Any = None

    def __init__(self, value: Tensor) -> None:
        if not value.is_cpu:
            module: Any = torch.get_device_module(value.device)
            value = value.to("cpu", non_blocking=True)  # into pinned memory
            # `blocking`: the waiting thread sleeps; torch's default is a busy loop.
            self._ready = module.Event(blocking=True)
            self._ready.record()
        self._value = value

    def __float__(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._value)
