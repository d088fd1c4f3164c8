"""What goes into the picture of `slurmllm plan`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from slurmllm.cli.planning import Answer, shown
from slurmllm.plan.candidate import Candidate, MemoryUse
from slurmllm.plan.explain import degrees
from slurmllm.plan.plot import Curve, picture

_BARS = 6


def draw(answers: Sequence[Answer]) -> Figure:
    """Throughput and dollars over the node counts, and the memory of the best layouts."""
    return picture([_curve(found) for found in answers], _bars(answers))


def _curve(found: Answer) -> Curve:
    points = found.points()
    fit = [(p.nodes, p.candidate, p.prospects.usd) for p in points if p.candidate and p.prospects]
    dollars = [usd for _, _, usd in fit if usd is not None]
    return Curve(
        label=found.config.recipe.name,
        nodes=[nodes for nodes, _, _ in fit],
        tokens_per_s=[candidate.tokens_per_s for _, candidate, _ in fit],
        usd=dollars if len(dollars) == len(fit) else None,
    )


def _bars(answers: Sequence[Answer]) -> dict[str, MemoryUse]:
    """Label → memory: of one node count its best layouts, of several the best on each."""
    every = [planned for found in answers for planned in found.planned]
    if len(every) == 1:
        return {f"{rank}: {_label(one)}": one.memory for rank, one in shown(every[0], _BARS)}
    labelled = {}
    for one in (planned.best for planned in every):
        if one is not None:
            recipe = f"{one.config.recipe.name}, " if len(answers) > 1 else ""
            nodes = f"{one.mesh.nodes} node{'s' * (one.mesh.nodes != 1)}"
            labelled[f"{recipe}{nodes}: {_label(one)}"] = one.memory
    return labelled


def _label(one: Candidate) -> str:
    how = one.config.recipe.train.activation_checkpointing
    return f"{degrees(one)}, micro batch {one.mesh.micro_batch}, {how}"
