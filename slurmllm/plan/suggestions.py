"""Alternatives to a layout that does not fit, as options of the command line; torch-free."""

from __future__ import annotations

from collections.abc import Collection

from slurmllm.config.resolve import RunConfig
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.mesh import assumed_micro_batch, measures_micro_batch
from slurmllm.plan.search import LARGEST, VARIED, Unsupported, search, smallest_nodes

# Predictions closer than this are a tie, which the layout with the fewest changes wins.
_TIE = 0.99


def suggest_fixes(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> list[str]:
    """Suggest other training settings and node counts for a run of which no layout fits.

    Args:
        config: The run's configuration.
        nodes: The number of nodes on which nothing fits.
        unsupported: As for `search`.
        fixed: As for `search`.
    """
    free = [path for path in fixed if not path.startswith("train.")]
    other = best_layout(config, nodes, unsupported, free)
    found = [suggest_layout(config, other)] if other is not None else []
    degrees = "" if config.recipe.parallel.auto else ", with --set parallel=auto"
    enough = smallest_nodes(config, nodes, unsupported, fixed)
    if enough is not None:
        how = "the minimum that fits" if enough > nodes else "would fit"
        found.append(f"--nodes {enough}: {how}{degrees}")
    elif other is None:
        enough = smallest_nodes(config, nodes, unsupported, free)
        if enough is not None:
            found.append(
                f"--nodes {enough}: would fit{degrees or ', with'} "
                "--set train.activation_checkpointing=full --set train.micro_batch=auto"
            )
    if found:
        return found
    given = [path for path in free if path.startswith("parallel.")]
    leave = f"leave out {', '.join(given)}, or " if given else ""
    return [f"nothing fits up to {LARGEST} nodes; {leave}choose another --cluster"]


def suggest_layout(config: RunConfig, candidate: LayoutEstimate) -> str:
    """`this would fit: --set parallel.tensor=8 (12.6 seq/s predicted)`."""
    return f"this would fit: {set_options(config, candidate)} ({rate_text(candidate)})"


def best_layout(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> LayoutEstimate | None:
    """The fastest layout that fits; of several as fast, the one with the fewest changes."""
    fitting = search(config, nodes, unsupported, fixed).fitting
    if not fitting:
        return None
    enough = _TIE * fitting[0].seq_per_s
    tied = [candidate for candidate in fitting if candidate.seq_per_s >= enough]
    return min(tied, key=lambda candidate: len(changes(config, candidate)))


def set_options(config: RunConfig, candidate: LayoutEstimate) -> str:
    """The `--set` options that turn a configuration's layout into the candidate's."""
    return " ".join(f"--set {change}" for change in changes(config, candidate))


def changes(config: RunConfig, candidate: LayoutEstimate) -> list[str]:
    """The settings that differ, as `parallel.tensor=8`.

    Settings that the planner chooses or the precompile stage measures are left out.
    """
    others = config.open_degrees()
    if measures_micro_batch(config):
        others.append("train.micro_batch")
    return [
        f"{path}={str(setting(candidate.config, path)).lower()}"
        for path in VARIED
        if path not in others and setting(config, path) != setting(candidate.config, path)
    ]


def setting(config: RunConfig, path: str) -> object:
    """The value of one of `VARIED`; an `auto` micro batch as the number that is assumed for it."""
    section, _, field = path.partition(".")
    found = getattr(getattr(config.recipe, section), field)
    return assumed_micro_batch(config) or found if found == "auto" else found


def rate_text(candidate: LayoutEstimate) -> str:
    """`12.6 seq/s predicted`."""
    rate = candidate.seq_per_s
    return f"{rate:,.0f} seq/s predicted" if rate >= 100 else f"{rate:.3g} seq/s predicted"


def layout_text(candidate: LayoutEstimate) -> str:
    """`tensor 8, pipeline 4, data 4, micro batch 1`."""
    mesh = candidate.mesh
    chunks = f" × {mesh.virtual_pipeline} chunks" if mesh.virtual_pipeline > 1 else ""
    return (
        f"tensor {mesh.tensor}, pipeline {mesh.pipeline}{chunks}, data {mesh.data}, "
        f"micro batch {mesh.micro_batch}"
    )
