"""What a measurement is told, and what it says of itself: lines of JSON between processes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from slurmllm.diagnose.probe import JsonLine

Kind = Literal[
    "progress", "product", "attention", "copy", "elementwise", "all_reduce", "all_gather",
    "reduce_scatter", "step", "reserved", "memory", "busy",
]  # fmt: skip


class Task(BaseModel):
    """What a node is to measure.

    Attributes:
        nodes: In all.
        workers: Of a node, a process each.
        sharing: Workers that share a machine's CPUs and memory.
        cpus: Of a machine; None: all that there are.
        device: `cpu` or `cuda`.
        address: Of the first node.
        port: Free there.
        precision: That the recipe computes in.
        compiled: Whether it compiles blocks.
        variables: Environment of the workers.
        quick: Less of everything, for a look whether it works.
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
    """One figure, as the mean over all workers, or of one node.

    Attributes:
        kind: What was measured.
        of: Which one of the kind: a precision, `node` or `network`, a kind of elementwise work; of
            progress, its words; of `busy`, the node's name.
        sizes: Of the work: [m, n, k] of a product; FLOPs of attention; bytes moved; workers and
            bytes of a collective; layers and micro batches of a step.
        value: Seconds; bytes of `reserved` and `memory`; of `busy`, the tasks that waited for a
            CPU or had one before anything began, by CPU.
    """

    PREFIX: ClassVar[str] = "slurmllm-calibrate "

    kind: Kind
    of: str = ""
    sizes: tuple[int, ...] = ()
    value: float = 0.0
