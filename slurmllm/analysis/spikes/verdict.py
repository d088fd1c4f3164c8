"""What an analysis of spikes says in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from slurmllm.analysis.spikes.analysis import Growth, SpikeAnalysis, State


def judge(found: SpikeAnalysis) -> tuple[State, str]:
    """The state of a run and a sentence on it, by the other fields of its analysis."""
    state = _state(found)
    return state, "; ".join(_clauses(found))


def _state(found: SpikeAnalysis) -> State:
    if found.not_finite_steps:
        return "not_finite"
    if not found.judged:
        return "too_short"
    if _stays(found):
        return "rising"
    if found.unreturned or found.longest >= found.window:
        return "lasting"
    return "passing" if found.count else "calm"


def _stays(found: SpikeAnalysis) -> bool:
    """Whether the running mean rose and stayed: one high loss lifts it for a window alone."""
    return found.growth is not None and found.growth.longest > 2 * found.window


def _clauses(found: SpikeAnalysis) -> Iterator[str]:
    if found.not_finite:
        number, first = _steps(found.not_finite_steps), found.not_finite[0].step
        yield f"the loss is not a finite number at {number}, first at step {first}"
    if not found.judged:
        yield (
            f"{_steps(found.steps)} and a running mean over {found.window} before each: "
            "none can be judged"
        )
        return
    if not found.count:
        yield f"no spike in {_steps(found.judged)}"
    else:
        yield from _of_spikes(found)
    growth = found.growth
    if growth is not None:
        yield _of_growth(growth, _stays(found))


def _of_spikes(found: SpikeAnalysis) -> Iterator[str]:
    count = found.count
    many = "1 spike" if count == 1 else f"{count:,} spikes"
    yield f"{many} in {_steps(found.judged)} ({found.per_1000_steps:.3g} per 1,000)"
    if count == 1:
        yield f"it lasts {_steps(found.longest)}"
    else:
        yield (
            f"{found.one_step:,} of them ({found.one_step_share:.0%}) last one step, the "
            f"longest {_steps(found.longest)}"
        )
    highest = max(found.spikes, key=lambda spike: spike.height)
    yield f"the highest is {highest.height:.3g} above the mean, at step {highest.peak_step}"
    if found.unreturned:
        which = "it" if count == 1 else f"{found.unreturned:,} of them"
        yield f"{which} did not come back to the mean"
    elif found.returned_after_median is not None:
        which = "it came" if count == 1 else "they came"
        yield f"{which} back to the mean after {_steps(round(found.returned_after_median))}" + (
            "" if count == 1 else " (median)"
        )
    for number, what in ((found.at_restarts, "a restart"), (found.at_skips, "skipped batches")):
        if number:
            yield f"{number:,} {'coincides' if number == 1 else 'coincide'} with {what}"


def _of_growth(growth: Growth, stays: bool) -> str:
    if stays:
        where = f"and was more than {growth.limit:.3g} above it for {_steps(growth.longest)}"
        return (
            f"the running mean rose {growth.largest:.3g} above its lowest value (step "
            f"{growth.step}), {where} from step {growth.longest_from} on: slow divergence"
        )
    return f"the running mean never rose more than {growth.largest:.3g} above its lowest value"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
