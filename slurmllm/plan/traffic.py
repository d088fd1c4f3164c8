"""What each kind of link carries in a step, read off the step's own model; torch-free.

The same step is predicted on links without latency and with nothing hidden: what a collective takes
there, times the rate of its links, is what it moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurmllm.plan.candidate import Candidate
from slurmllm.plan.collectives import data_group, rate, tensor_group
from slurmllm.plan.predict import known_hardware
from slurmllm.plan.step import formats, step_time


@dataclass(frozen=True)
class Traffic:
    """What one worker passes on in a step.

    Attributes:
        tensor: Bytes within its tensor-parallel group.
        stages: Bytes to the stages before and after it.
        data: Bytes between data-parallel workers.
        data_s: Seconds that those take, hidden or not.
    """

    tensor: float
    stages: float
    data: float
    data_s: float


def traffic(candidate: Candidate) -> Traffic:
    """The bytes of a layout, of a worker in a middle stage of its pipeline."""
    config, mesh = candidate.config, candidate.mesh
    hardware = known_hardware(config)
    shown = hardware.model_copy(update={"overlap": 0.0})
    swift = shown.model_copy(update={"node_link_latency_us": 0.0, "network_latency_us": 0.0})

    def on(figures: object) -> Candidate:
        cluster = config.cluster.model_copy(update={"hardware": figures})
        changed = replace(config, cluster=cluster)
        return replace(candidate, config=changed, step=step_time(changed, mesh))

    moved = on(swift).step
    shared = mesh.tensor if config.recipe.parallel.sequence else 1
    width = config.recipe.model.hidden_size * formats(config).computed / shared
    crossings = 2 * mesh.accumulation * mesh.virtual_pipeline if mesh.pipeline > 1 else 0
    return Traffic(
        tensor=moved.tensor * rate(tensor_group(mesh), swift),
        stages=crossings * mesh.micro_batch * config.recipe.model.seq_len * width,
        data=moved.data * rate(data_group(mesh), swift),
        data_s=on(shown).step.data,
    )
