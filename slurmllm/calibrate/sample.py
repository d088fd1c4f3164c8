"""The task and the results of a measurement, as lines of JSON between processes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from slurmllm.diagnose.probe import JsonLine

Kind = Literal[
    "progress", "product", "attention", "copy", "elementwise", "all_reduce", "all_gather",
    "reduce_scatter", "step", "reserved", "memory", "busy",
]  # fmt: skip


class Task(BaseModel):
    """The task of the measuring processes.

    Attributes:
        nodes: Number of nodes.
        workers: Processes of a node.
        sharing: Workers that share a machine's CPUs and memory.
        cpus: CPUs of a machine; None: all of them.
        device: `cpu` or `cuda`.
        address: Address of the first node.
        port: A free port there.
        precision: The recipe's precision.
        compiled: Whether the recipe compiles blocks.
        variables: Environment of the workers.
        quick: Whether to measure as little as possible, for tests.
    """

    model_config = ConfigDict(frozen=True)

    nodes: int
    workers: int
    sharing: int
    cpus: int | None
    device: Literal["cpu", "cuda"]
    address: str
    port: int
    precision: Literal["fp32", "bf16"]
    compiled: bool
    variables: dict[str, str]
    quick: bool = False


class Sample(JsonLine):
    """One measurement: the mean over all workers, or of one node.

    Attributes:
        kind: What was measured.
        of: Variant of the kind: a precision, `node` or `network`, a kind of elementwise work; text
            of `progress`; node name of `busy`.
        sizes: Size of the work: [m, n, k] of a product; FLOPs of attention; bytes moved; workers
            and bytes of a collective; layers and micro batches of a step.
        value: Seconds; bytes for `reserved` and `memory`; load average per CPU before the start
            for `busy`.
    """

    PREFIX: ClassVar[str] = "slurmllm-calibrate "

    kind: Kind
    of: str = ""
    sizes: tuple[int, ...] = ()
    value: float = 0.0
