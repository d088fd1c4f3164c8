"""The fit check before a submit: does the run's layout fit, and is it close to the best?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slurmllm.config.resolve import RunConfig
from slurmllm.format import format_gib
from slurmllm.plan.auto_parallel import fixed_training
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.explain import why_too_large
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.predict import predict
from slurmllm.plan.search import VARIED, Unsupported, search
from slurmllm.plan.suggestions import (
    best_layout,
    layout_text,
    rate_text,
    set_options,
    setting,
    suggest_fixes,
    suggest_layout,
)

# A layout below this share of the best one's throughput gets a warning. Two predictions that are
# 12 % off in opposite directions differ by as much.
SLOW = 0.8


@dataclass(frozen=True)
class FitCheck:
    """The prediction for a run, with refusals and warnings.

    Attributes:
        candidate: The run's own layout. If its micro batch is measured later, the fastest that
            fits is assumed.
        chosen: Whether the planner chose the layout.
        best: The fastest layout on the same nodes with the same training settings; None if it was
            not searched for or nothing fits.
        refusals: That the layout does not fit into memory, and what would fit. Empty if the
            hardware figures are too rough to decide.
        warnings: That the layout is much slower than the best, or is forced although too large.
    """

    candidate: LayoutEstimate
    chosen: bool
    best: LayoutEstimate | None = None
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The `planner` part of the JSON of `submit`."""
        return {
            "chosen": self.chosen,
            "rough": self.rough,
            **_figures(self.candidate),
            "best": None if self.best is None else _figures(self.best),
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
        }

    def line(self) -> str:
        """The layout, its throughput and its memory, in one line."""
        found, memory = self.candidate, self.candidate.memory
        return (
            f"{layout_text(found)}: {rate_text(found)}, MFU {100 * found.mfu:.0f} %, "
            f"{format_gib(memory.peak)} of {format_gib(memory.limit)} GiB a worker"
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
    """Predict a run whose layout is known, and compare it with other layouts.

    Args:
        config: The run's configuration, `parallel.auto` resolved.
        nodes: Nodes of the train stage, which the mesh fits.
        unsupported: As for `search`.
        measured: The micro batch that was measured, as for `make_mesh`.
        chosen: Whether the planner has just chosen the layout.
        force: Whether a layout that does not fit is a warning, not a refusal.

    Returns:
        None if nothing can be predicted: the profile has no hardware figures, or the backend cannot
        train the run.
    """
    if config.cluster.hardware is None or unsupported(config):
        return None
    candidate = _predict_own(config, nodes, unsupported, measured)
    found = FitCheck(candidate, chosen)
    # A rehearsal computes nothing and so holds no model.
    if chosen or found.rough or config.backend == "rehearsal":
        return found
    fixed = fixed_training(config)
    best = best_layout(config, nodes, unsupported, fixed)
    found = replace(found, best=best)
    if not candidate.fits:
        needs = why_too_large(candidate.memory, most=None)
        too_large = f"{layout_text(candidate)} is predicted to need {needs}"
        if force:
            return replace(found, warnings=(too_large,))
        if best is not None:
            return replace(found, refusals=(too_large, suggest_layout(config, best)))
        fixes = suggest_fixes(config, nodes, unsupported, fixed)
        return replace(found, refusals=(too_large, *fixes))
    if best is not None and candidate.seq_per_s < SLOW * best.seq_per_s:
        share = 100 * candidate.seq_per_s / best.seq_per_s
        slow = (
            f"{layout_text(candidate)}: {rate_text(candidate)}, {share:.0f} % of the best on these "
            f"nodes: {set_options(config, best)} ({rate_text(best)})"
        )
        return replace(found, warnings=(slow,))
    return found


def _predict_own(
    config: RunConfig, nodes: int, unsupported: Unsupported, measured: int | None
) -> LayoutEstimate:
    """The run's own layout, with the fastest micro batch that fits if it is measured later."""
    mesh = make_mesh(config, nodes, measured)
    if mesh.unmeasured:
        others = [path for path in VARIED if path != "train.micro_batch"]
        fitting = search(config, nodes, unsupported, others).fitting
        if fitting:
            return fitting[0]
    return predict(config, mesh)


def _figures(candidate: LayoutEstimate) -> dict[str, Any]:
    mesh, memory = candidate.mesh, candidate.memory
    layout = {path.partition(".")[2]: setting(candidate.config, path) for path in VARIED}
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
