"""The planner's part of a submit: choose open degrees, check the fit, suggest other layouts.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.rules import yaml_text
from slurmllm.core.config.validate import PLANNER
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Json, Texts, format_gib, format_mfu, format_plural
from slurmllm.plan.explain import (
    figures,
    fitting_changes,
    memory_shortfall,
    misfit_reasons,
    why_too_large,
)
from slurmllm.plan.memory import dense_mask_warning
from slurmllm.plan.mesh import assumed_micro_batch, make_mesh, measures_micro_batch
from slurmllm.plan.search import (
    DEGREES,
    VARIED,
    LayoutEstimate,
    Unsupported,
    known_hardware,
    order,
    predict,
    search,
)

# A layout below this share of the best one's throughput gets a warning. Two predictions that are
# 12 % off in opposite directions differ by as much.
SLOW = 0.8
# Predictions closer than this are a tie, which the layout with the fewest changes wins.
_TIE = 0.99
_BATCH = ["train.global_batch"]  # what a resumed run cannot change
_MICRO_BATCH, _CHECKPOINTING = "train.micro_batch", "train.activation_checkpointing"


def choose_parallel(
    config: RunConfig,
    nodes: int,
    unsupported: Unsupported,
    *,
    resumes: bool = False,
    force: bool = False,
) -> RunConfig:
    """Choose the settings that are left to the planner: those of the fastest layout that fits.

    Args:
        config: A configuration with open settings; those that are set are kept.
        resumes: Whether the run has begun: no other global batch is suggested.
        force: Whether to choose the layout that needs the least memory if none fits.

    Returns:
        The configuration with all of them set and without `parallel.auto`; the origins name the
        planner. A micro batch of `auto` is chosen too if the device cannot measure it.

    Raises:
        ConfigError: nothing fits, or the profile has no hardware figures.
    """
    choices = config.open_settings()
    # A run whose number of nodes varies cannot keep copies on groups of nodes.
    varies = {"parallel.shard_nodes"} if config.recipe.slurm.min_nodes else set()
    fixed = [
        path
        for path in (*DEGREES, *_fixed_training(config))
        if path not in choices or path in varies
    ]
    result = search(config, nodes, unsupported, fixed)
    nodes_text = format_plural(nodes, "node")
    layouts = result.fitting
    if not layouts and (force or known_hardware(config).rough or config.backend == "rehearsal"):
        layouts = result.too_large[:1]
    if not layouts:
        reasons = misfit_reasons(result)
        title = f"no layout of {config.recipe.name} fits {nodes_text} of {config.cluster.name}"
        fixes = _suggest_fixes(config, nodes, unsupported, fixed + _BATCH * resumes)
        raise ConfigError(title, [*reasons, *dense_mask_warning(config), *fixes])
    best = layouts[0].config.recipe
    source = f"{PLANNER}best of {len(result.fitting)} layouts that fit {nodes_text}"
    if not result.fitting:
        source = f"{PLANNER}the smallest layout; none is predicted to fit {nodes_text}"
    origins = dict.fromkeys((path for path in VARIED if path not in fixed), source)
    if measures_micro_batch(config):
        del origins[_MICRO_BATCH]
    if config.recipe.parallel.auto:
        requested = config.origins.get("parallel.auto", "default")
        origins["parallel.auto"] = f"{PLANNER}resolved; auto by {requested}"
    degrees = {**best.parallel.model_dump(), "auto": False}
    names = (path.partition(".")[2] for path in origins if path.startswith("train."))
    training = {name: getattr(best.train, name) for name in names}
    return config.with_settings("parallel", origins, **degrees).with_settings("train", **training)


def _fixed_training(config: RunConfig) -> list[str]:
    # A micro batch that the planner chose for another mesh is varied, as `auto` is.
    chosen = config.origins.get(_MICRO_BATCH, "").startswith(PLANNER)
    free = config.recipe.train.micro_batch == "auto" or chosen
    return [_CHECKPOINTING] if free else [_CHECKPOINTING, _MICRO_BATCH]


def _kept_training(config: RunConfig) -> list[str]:
    """Return the training settings that a suggested layout keeps: a micro batch only of --set."""
    fixed = _fixed_training(config)
    is_option = config.origins.get(_MICRO_BATCH, "").startswith("--set")
    return fixed if is_option else [_CHECKPOINTING]


@dataclass(frozen=True)
class FitCheck:
    """The prediction for a run, with refusals and warnings."""

    # The run's own layout. If its micro batch is measured later, the fastest that fits is assumed.
    candidate: LayoutEstimate
    chosen: bool  # whether the planner chose the layout
    # The fastest layout on the same nodes with the same training settings; None if it was not
    # searched for or nothing fits.
    best: LayoutEstimate | None = None
    # That the layout does not fit into memory, and what would fit. Empty if the hardware figures
    # are too rough to decide.
    refusals: Texts = ()
    # That the layout is much slower than the best, or is forced although too large.
    warnings: Sequence[str] = ()

    def to_json(self) -> Json:
        return {
            "chosen": self.chosen,
            "rough": self.rough,
            **figures(self.candidate),
            "best": None if self.best is None else figures(self.best),
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
        }

    def line(self) -> str:
        layout, memory = self.candidate, self.candidate.memory
        train = layout.config.recipe.train
        is_recomputed = self.chosen and train.recomputed
        recomputed = f", {train.checkpointing_text} checkpointing" if is_recomputed else ""
        tight = " (tight)" if memory.tight else ""
        rough = ", by rough figures" if self.rough else ""
        return (
            f"{layout_text(layout)}{recomputed}: {_rate_text(layout)}, "
            f"MFU {format_mfu(layout.mfu, train.precision, 0)}, {format_gib(memory.peak)} of "
            f"{format_gib(memory.limit)} GiB a worker{tight}{rough}"
        )

    @property
    def rough(self) -> bool:
        return known_hardware(self.candidate.config).rough


def check_fit(
    config: RunConfig,
    nodes: int,
    unsupported: Unsupported,
    measured: int | None = None,
    *,
    chosen: bool = False,
    force: bool = False,
    resumes: bool = False,
) -> FitCheck | None:
    """Predict a run whose layout is known, and compare it with other layouts.

    Args:
        config: The run's configuration, `parallel.auto` resolved.
        measured: The micro batch that was measured, as for `make_mesh`.
        force: Whether a layout that does not fit is a warning, not a refusal.
        resumes: As for `choose_parallel`.

    Returns:
        None if nothing can be predicted: the profile has no hardware figures, or the backend cannot
        train the run.
    """
    if config.cluster.hardware is None or unsupported(config):
        return None
    mesh = make_mesh(config, nodes, measured)
    fitting: Sequence[LayoutEstimate] = ()
    if mesh.unmeasured:  # then the precompile stage will choose the fastest micro batch that fits
        varied = [path for path in VARIED if path != _MICRO_BATCH]
        fitting = search(config, nodes, unsupported, varied).fitting
    candidate = fitting[0] if fitting else predict(config, mesh)
    warnings = dense_mask_warning(config)
    needs = why_too_large(candidate.memory)
    too_large = f"{layout_text(candidate)} is predicted to need {needs}"
    # A rehearsal computes nothing and so holds no model.
    if config.backend == "rehearsal" or (chosen and candidate.fits):
        return FitCheck(candidate, chosen, warnings=warnings)
    if known_hardware(config).rough:
        if chosen:
            warnings.append(f"{too_large}, by rough figures")
        return FitCheck(candidate, chosen, warnings=warnings)
    best = _best_layout(config, nodes, unsupported, _kept_training(config))
    if candidate.fits:
        if best is not None and candidate.seq_per_s < SLOW * best.seq_per_s:
            share = 100 * candidate.seq_per_s / best.seq_per_s
            warnings.append(
                f"{layout_text(candidate)}: {_rate_text(candidate)}, {share:.0f} % of the best on "
                f"these nodes: {_set_options(config, best)} ({_rate_text(best)})"
            )
    elif force:
        warnings.append(too_large)
    else:
        fixed = _fixed_training(config) + _BATCH * resumes
        fixes = (
            _suggest_fixes(config, nodes, unsupported, fixed)
            if best is None
            else [_suggest_layout(config, best)]
        )
        return FitCheck(candidate, chosen, best, (too_large, *warnings, *fixes))
    return FitCheck(candidate, chosen, best, (), warnings)


def _suggest_fixes(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> list[str]:
    """Suggest other training settings and node counts for a run of which no layout fits."""
    free = [path for path in fixed if path not in (_CHECKPOINTING, _MICRO_BATCH)]
    other = _best_layout(config, nodes, unsupported, free)
    fixes = [_suggest_layout(config, other)] if other is not None else []
    degrees = [] if config.recipe.parallel.auto else ["parallel=auto"]
    near = fitting_changes(config, nodes, unsupported, fixed)
    if not near and other is None and len(free) < len(fixed):
        near = fitting_changes(config, nodes, unsupported, free)
        relaxed = {_CHECKPOINTING: "full", _MICRO_BATCH: "auto"}
        degrees += [f"{path}={value}" for path, value in relaxed.items() if path in fixed]
    also = f" with --set {' --set '.join(degrees)}" if degrees else ""
    fixes += [f"{change}{also}" for change in near]
    if fixes:
        return fixes
    fixed_degrees = [path for path in free if path.startswith("parallel.")]
    leave = f"leave out {', '.join(fixed_degrees)}, or " if fixed_degrees else ""
    return [*memory_shortfall(config, nodes, unsupported, free), f"{leave}choose another --cluster"]


def mesh_fixes(
    config: RunConfig, nodes: int, unsupported: Unsupported, *, resumes: bool = False
) -> list[str]:
    """Suggest other degrees, node counts and global batches for a mesh that does not fit."""
    fixed = _fixed_training(config) + _BATCH * resumes
    best = _best_layout(config, nodes, unsupported, _kept_training(config) + _BATCH * resumes)
    fixes = [] if best is None else [_suggest_layout(config, best)]
    fixes += map(str, fitting_changes(config, nodes, unsupported, [*DEGREES, *fixed]))
    if not fixes:
        return _suggest_fixes(config, nodes, unsupported, fixed)
    if best is None and not resumes:
        fixes.append("`slurmllm plan` with the same options has what fits with other layouts")
    return fixes


def _suggest_layout(config: RunConfig, candidate: LayoutEstimate) -> str:
    return f"this would fit: {_set_options(config, candidate)} ({_rate_text(candidate)})"


def _best_layout(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> LayoutEstimate | None:
    """Return the fastest layout that fits; of equally fast ones, that with the fewest changes."""
    fitting = search(config, nodes, unsupported, fixed).fitting
    tied = [layout for layout in fitting if order(layout)[0] <= _TIE * order(fitting[0])[0]]
    return min(tied, key=lambda layout: len(changes(config, layout)), default=None)


def _set_options(config: RunConfig, candidate: LayoutEstimate) -> str:
    return " ".join(f"--set {change}" for change in changes(config, candidate))


def changes(config: RunConfig, candidate: LayoutEstimate, chosen: bool = True) -> list[str]:
    """Return the settings in which a candidate differs, as `parallel.tensor=8`.

    Settings that the precompile stage measures are excluded, and those left to the planner, if the
    candidate is the one that it has `chosen`.
    """
    open_paths = config.open_settings() if chosen else []
    if measures_micro_batch(config):
        open_paths.append(_MICRO_BATCH)
    return [
        f"{path}={yaml_text(_setting(candidate.config, path))}"
        for path in VARIED
        if path not in open_paths and _setting(config, path) != _setting(candidate.config, path)
    ]


def _setting(config: RunConfig, path: str) -> object:
    """Return one of `VARIED`; an `auto` micro batch as the number that is assumed for it."""
    value = attrgetter(path)(config.recipe)
    return assumed_micro_batch(config) or value if value == "auto" else value


def _rate_text(candidate: LayoutEstimate) -> str:
    rate = candidate.seq_per_s
    return f"{rate:,.0f} seq/s predicted" if rate >= 100 else f"{rate:.3g} seq/s predicted"


def layout_text(candidate: LayoutEstimate) -> str:
    return f"{candidate.mesh.description}, micro batch {candidate.mesh.micro_batch}"
