"""The schemas of what a drill found: what `slurmllm drill --json` prints."""

from __future__ import annotations

from pydantic import Field

from slurmllm.drill.kinds import KindName
from slurmllm.records import EndingClass, Record


class Recovery(Record):
    """Seconds from the blow to the next completed step, by what they went into."""

    total_s: float
    requeue_s: float = Field(description="between attempts: Slurm's requeue, or the local restart")
    detection_s: float = Field(description="until the broken attempt was closed; its save, too")
    preflight_s: float = Field(description="checks of the nodes")
    cache_s: float = Field(description="compiled graphs onto the nodes")
    launch_s: float = Field(description="what is left: supervisor, srun, launchers, interpreters")
    start_up_s: float = Field(description="workers: imports, rendezvous, model, resume")
    first_step_s: float

    @property
    def own_s(self) -> float:
        """What is slurmllm's to answer for: all but the requeue."""
        return self.total_s - self.requeue_s


class Drilled(Record):
    """What became of one broken run."""

    kind: KindName
    run: str
    passed: bool
    faults: tuple[str, ...] = Field(description="why it did not pass, a line each")
    at_step: int | None = Field(default=None, description="last step that was seen before the blow")
    node: str = ""
    ending: EndingClass | None = Field(default=None, description="class of the broken attempt")
    attempts: int = Field(default=0, description="that the run took")
    steps_lost: int | None = Field(default=None, description="made, and to be made again")
    steps_made_again: int = 0
    recovery: Recovery | None = None


class DrillReport(Record):
    """A whole drill."""

    run: str
    nodes: int
    local: bool
    steps: int
    every_steps: int = Field(description="between checkpoints")
    seed: int
    reference: str = Field(description="name of the unbroken run")
    own_reference: bool = Field(description="whether the run itself was the reference")
    drills: tuple[Drilled, ...]
    kept: tuple[str, ...] = Field(description="runs of the drill that were not removed")

    @property
    def passed(self) -> bool:
        """Whether every broken run went on exactly."""
        return all(one.passed for one in self.drills)
