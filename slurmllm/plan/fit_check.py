"""What the planner says of a run about to be submitted, its layout known; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slurmllm.config.resolve import RunConfig
from slurmllm.plan.auto_parallel import fixed_training
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.explain import gib, why_too_large
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.predict import predict
from slurmllm.plan.search import VARIED, Unsupported, search
from slurmllm.plan.suggestions import (
    best_layout,
    layout_text,
    rate,
    set_options,
    suggest_fixes,
    value,
)

# A layout is warned of below this share of the best one's throughput: about as far apart as two
# predictions that are 12 % off into opposite directions.
FAR = 0.8


@dataclass(frozen=True)
class FitCheck:
    """The prediction for a run, and what follows from it.

    Attributes:
        candidate: The run's own layout. Where its micro batch is to be measured, with the fastest
            that fits.
        chosen: Whether the planner chose it.
        best: The fastest layout on the same nodes with the same training settings, where it was
            looked for and something fits.
        refusals: That it does not fit into memory, and what would. None where the figures are too
            rough to tell.
        warnings: That it is far from the best, or does not fit and is to be run all the same.
    """

    candidate: LayoutEstimate
    chosen: bool
    best: LayoutEstimate | None = None
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The `planner` part of what `submit --json` prints."""
        return {
            "chosen": self.chosen,
            "rough": self.rough,
            **_figures(self.candidate),
            "best": None if self.best is None else _figures(self.best),
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
        }

    def line(self) -> str:
        """The layout and why, in a line."""
        found, memory = self.candidate, self.candidate.memory
        return (
            f"{layout_text(found)}: {rate(found)}, MFU {100 * found.mfu:.0f} %, "
            f"{gib(memory.peak)} of {gib(memory.limit)} GiB a worker"
            f"{', by rough figures' * self.rough}"
        )

    @property
    def rough(self) -> bool:
        """Whether the hardware's figures are a guess."""
        hardware = self.candidate.config.cluster.hardware
        return hardware is not None and hardware.rough


def check_fit(
    config: RunConfig,
    nodes: int,
    unsupported: Unsupported,
    measured: int | None = None,
    *,
    chosen: bool = False,
    force: bool = False,
) -> FitCheck | None:
    """Predict a run whose layout is known, and hold it against the others.

    Args:
        config: The run's, `parallel.auto` settled.
        nodes: Of the train stage; the mesh fits them.
        unsupported: As for `search`.
        measured: The micro batch that was measured, as for `make_mesh`.
        chosen: Whether the planner has just chosen the layout.
        force: Whether to warn, and not to refuse, where it does not fit.

    Returns:
        None where there is nothing to predict: the profile says nothing of its hardware, or the
        backend cannot train the run.
    """
    if config.cluster.hardware is None or unsupported(config):
        return None
    candidate = _own(config, nodes, unsupported, measured)
    found = FitCheck(candidate, chosen)
    # A rehearsal holds no model.
    if chosen or found.rough or config.backend == "rehearsal":
        return found
    fixed = fixed_training(config)
    best = best_layout(config, nodes, unsupported, fixed)
    if not candidate.fits:
        too_large = _too_large(candidate)
        if force:
            return replace(found, best=best, warnings=(too_large,))
        instead = _instead(config, nodes, unsupported, best, fixed)
        return replace(found, best=best, refusals=(too_large, *instead))
    if best is not None and candidate.seq_per_s < FAR * best.seq_per_s:
        return replace(found, best=best, warnings=(_far(config, candidate, best),))
    return replace(found, best=best)


def _own(
    config: RunConfig, nodes: int, unsupported: Unsupported, measured: int | None
) -> LayoutEstimate:
    """The run's own layout; with the fastest micro batch where it is to be measured."""
    mesh = make_mesh(config, nodes, measured)
    if mesh.unmeasured:
        others = [path for path in VARIED if path != "train.micro_batch"]
        fitting = search(config, nodes, unsupported, others).fitting
        if fitting:
            return fitting[0]
    return predict(config, mesh)


def _too_large(candidate: LayoutEstimate) -> str:
    return (
        f"{layout_text(candidate)} is predicted to need "
        f"{why_too_large(candidate.memory, most=None)}"
    )


def _instead(
    config: RunConfig,
    nodes: int,
    unsupported: Unsupported,
    best: LayoutEstimate | None,
    fixed: list[str],
) -> list[str]:
    """What would fit."""
    if best is None:
        return suggest_fixes(config, nodes, unsupported, fixed)
    return [f"this would fit: {set_options(config, best)} ({rate(best)})"]


def _far(config: RunConfig, candidate: LayoutEstimate, best: LayoutEstimate) -> str:
    share = 100 * candidate.seq_per_s / best.seq_per_s
    return (
        f"{layout_text(candidate)}: {rate(candidate)}, {share:.0f} % of the best on these nodes: "
        f"{set_options(config, best)} ({rate(best)})"
    )


def _figures(candidate: LayoutEstimate) -> dict[str, Any]:
    mesh, memory = candidate.mesh, candidate.memory
    layout = {path.partition(".")[2]: value(candidate.config, path) for path in VARIED}
    return {
        **layout,
        "data": mesh.data,
        "micro_batch": mesh.micro_batch,
        "accumulation": mesh.accumulation,
        "seq_per_s": candidate.seq_per_s,
        "step_s": candidate.step.total,
        "parts_s": candidate.step.parts(),
        "mfu": candidate.mfu,
        "memory_bytes": memory.peak,
        "memory": dict(memory.parts),
        "memory_limit_bytes": memory.limit,
        "fits": candidate.fits,
    }
