"""What would do where a run's layout does not, as options of the command line; torch-free."""

from __future__ import annotations

from collections.abc import Collection

from slurmllm.config.resolve import RunConfig
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.mesh import assumed_micro_batch, measures_micro_batch
from slurmllm.plan.search import LARGEST, VARIED, Unsupported, search, smallest_nodes

# Layouts that the predictions do not tell apart: of those, the one with the fewest changes.
_SAME = 0.99


def suggest_fixes(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> list[str]:
    """What to type where no layout of a run fits: other training settings, other node counts.

    Args:
        config: The run's.
        nodes: On which nothing fits.
        unsupported: As for `search`.
        fixed: Of `VARIED`, what was not varied.
    """
    free = [path for path in fixed if not path.startswith("train.")]
    other = best_layout(config, nodes, unsupported, free)
    found = (
        [] if other is None else [f"this would fit: {set_options(config, other)} ({rate(other)})"]
    )
    degrees = "" if config.recipe.parallel.auto else ", with --set parallel=auto"
    enough = smallest_nodes(config, nodes, unsupported, fixed)
    if enough is not None:
        which = "the fewest that would fit" if enough > nodes else "would fit"
        found.append(f"--nodes {enough}: {which}{degrees}")
    elif other is None:
        enough = smallest_nodes(config, nodes, unsupported, free)
        if enough is not None:
            mode = "train.activation_checkpointing=full train.micro_batch=auto"
            settings = " ".join(f"--set {setting}" for setting in mode.split())
            found.append(f"--nodes {enough}: would fit{degrees or ', with'} {settings}")
    if found:
        return found
    given = [path for path in free if path.startswith("parallel.")]
    leave = f"leave out {', '.join(given)}, or " if given else ""
    return [f"nothing fits up to {LARGEST} nodes; {leave}choose another --cluster"]


def best_layout(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> LayoutEstimate | None:
    """The fastest layout that fits; of those as fast, the one with the fewest changes."""
    fitting = search(config, nodes, unsupported, fixed).fitting
    if not fitting:
        return None
    enough = _SAME * fitting[0].seq_per_s
    alike = [candidate for candidate in fitting if candidate.seq_per_s >= enough]
    return min(alike, key=lambda candidate: len(changes(config, candidate)))


def set_options(config: RunConfig, candidate: LayoutEstimate) -> str:
    """The `--set` options that make a configuration's layout a candidate's."""
    return " ".join(f"--set {change}" for change in changes(config, candidate))


def changes(config: RunConfig, candidate: LayoutEstimate) -> list[str]:
    """What differs, as `parallel.tensor=8`; not what is the planner's or the precompile stage's."""
    others = config.open_degrees()
    if measures_micro_batch(config):
        others.append("train.micro_batch")
    return [
        f"{path}={str(value(candidate.config, path)).lower()}"
        for path in VARIED
        if path not in others and value(config, path) != value(candidate.config, path)
    ]


def value(config: RunConfig, path: str) -> object:
    """The value of one of `VARIED`; of a micro batch that nothing measures, what stands for it."""
    section, _, field = path.partition(".")
    found = getattr(getattr(config.recipe, section), field)
    return assumed_micro_batch(config) or found if found == "auto" else found


def rate(candidate: LayoutEstimate) -> str:
    """The predicted throughput: `12.6 seq/s predicted`."""
    found = candidate.seq_per_s
    return f"{found:,.0f} seq/s predicted" if found >= 100 else f"{found:.3g} seq/s predicted"


def layout_text(candidate: LayoutEstimate) -> str:
    """A layout in words: `tensor 8, pipeline 4, data 4, micro batch 1`."""
    mesh = candidate.mesh
    chunks = f" × {mesh.virtual_pipeline} chunks" if mesh.virtual_pipeline > 1 else ""
    return (
        f"tensor {mesh.tensor}, pipeline {mesh.pipeline}{chunks}, data {mesh.data}, "
        f"micro batch {mesh.micro_batch}"
    )
