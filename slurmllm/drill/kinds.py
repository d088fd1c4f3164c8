"""What can be broken, and what the supervisor must say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from pydantic import Field

from slurmllm.errors import RunError
from slurmllm.records import EndingClass, Record

KindName = Literal["worker", "node", "first_node", "time_limit", "save", "hang"]
NAMES: tuple[KindName, ...] = get_args(KindName)
# Soon enough for a drill; ten times the run's slow steps hold as well, as always.
HANG_LIMIT_S = 20.0


class Kind(NamedTuple):
    """One way to break a run.

    Attributes:
        expected: The class that the attempt must get.
        words: What is done, for people.
        nodes: Nodes that it takes at least.
        overrides: Values that the run to be broken needs, as given to --set.
    """

    expected: EndingClass
    words: str
    nodes: int = 1
    overrides: tuple[str, ...] = ()


KINDS: dict[KindName, Kind] = {
    "worker": Kind("node_failure", "one worker is killed"),
    "node": Kind("node_failure", "launcher and workers of one node are killed", nodes=2),
    "first_node": Kind("node_failure", "all of the first node is killed, the supervisor too"),
    "time_limit": Kind("advance_signal", "the signal ahead of the time limit comes"),
    "save": Kind("node_failure", "one worker is killed in the middle of a save"),
    "hang": Kind(
        "hang", "one worker is stopped where it stands", overrides=(
            "watchdog.enabled=true", f"watchdog.min_step_s={HANG_LIMIT_S:g}",
        ),
    ),
}  # fmt: skip


def chosen(text: str, nodes: int) -> tuple[KindName, ...]:
    """The kinds that `--kinds` means: names with commas between, or all.

    Raises:
        RunError: one is unknown or takes more nodes than there are.
    """
    if text == "all":
        return tuple(name for name in NAMES if KINDS[name].nodes <= nodes)
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in NAMES]
    if unknown or not wanted:
        raise RunError(
            f"--kinds {text!r}: must be all, or some of {', '.join(NAMES)} with commas between"
        )
    names = tuple(name for name in NAMES if name in wanted)
    _check_nodes(names, nodes)
    return names


def _check_nodes(names: Sequence[KindName], nodes: int) -> None:
    for name in names:
        if KINDS[name].nodes > nodes:
            raise RunError(
                f"--kinds {name}: takes {KINDS[name].nodes} nodes and the run has {nodes}; add "
                "--nodes 2 (the first node has a kind of its own, first_node)"
            )


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
