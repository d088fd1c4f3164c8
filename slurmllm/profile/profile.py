"""The profile of a run's attempt: its workers' summaries, and who waits for whom.

A worker waits for another one while it is in a collective and computes nothing, and the other one
is in no collective yet. Clocks of different nodes must agree to less than the times compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurmllm.config.load import load
from slurmllm.errors import RunError, StorageError
from slurmllm.profile.trace import Interval, RankProfile, disjoint, summarize, take
from slurmllm.run.rundir import ProfileFiles, RunDir


class RankResult(NamedTuple):
    """The profile of one worker among those of its attempt."""

    profile: RankProfile
    files: ProfileFiles
    parts: dict[str, float]  # s a step; time that the others cause is `waiting`
    waits_for: dict[int, float]  # rank → s a step, longest first; the times may overlap


class Profile(NamedTuple):
    """All profiled workers of an attempt."""

    attempt: int
    ranks: list[RankResult]
    neuron: Path | None  # folder of Neuron's own profiles


def read_profile(run: RunDir, attempt: int | None, rank: int | None) -> Profile:
    """Read the newest attempt's profile, or that of `attempt`.

    Raises:
        RunError: There is none, or none of `rank`; the message has the command for one.
        StorageError: A trace is damaged.
    """
    found = run.profiled()
    if not found:
        raise RunError(_without_profile(run))
    number = max(found) if attempt is None else attempt
    if number not in found:
        raise RunError(
            f"{run.name}: attempt {number} has no profile; choose --attempt "
            f"{', '.join(map(str, found))}"
        )
    files = found[number]
    ranks = [one.rank for one in files]
    if rank is not None and rank not in ranks:
        raise RunError(
            f"{run.name}: rank {rank} has no profile in attempt {number}; choose --rank "
            f"{', '.join(map(str, ranks))}, or profile it: --set profile.ranks=[{rank}]"
        )
    profiles = [_read(one) for one in files]
    neuron = run.neuron_profiles
    return Profile(
        number,
        [_result(profile, one, profiles) for profile, one in zip(profiles, files, strict=True)],
        neuron if neuron.is_dir() else None,
    )


def _without_profile(run: RunDir) -> str:
    steps, last = None, 0
    config = load(run.config, trusted=True)
    if config.recipe.profile.steps is not None:
        steps, last = config.recipe.profile.steps, config.recipe.train.steps
    again = f"`slurmllm resume {run.name} --set 'profile.steps=[FIRST, LAST]'`"
    if steps is None:
        return (
            f"{run.name} has no profile; {again} profiles steps that it has not trained yet, or "
            "submit a run with profile.steps"
        )
    return (
        f"{run.name} has no profile yet: profile.steps is {list(steps)} of {last} steps; wait for "
        f"step {steps[1]}, or after it, profile later steps with {again}"
    )


def _read(files: ProfileFiles) -> RankProfile:
    try:
        if (found := RankProfile.find(files.summary)) is not None:
            return found
    except StorageError:
        pass  # the trace has the same, but takes longer to read
    return summarize(files.trace, files.rank)


def _result(own: RankProfile, files: ProfileFiles, profiles: list[RankProfile]) -> RankResult:
    waits: dict[int, float] = {}
    waiting: list[Interval] = []
    for other in profiles:
        common = _intervals([other.window])
        exposed, _ = take(common, _intervals(own.exposed))
        _, before = take(exposed, _intervals(other.collectives))
        if other is not own and (seconds := _seconds(before) / own.num_steps) > 0:
            waits[other.rank] = seconds
            waiting += before
    # Rounding, and the window's ends, could make the difference negative.
    total = min(_seconds(disjoint(waiting)) / own.num_steps, own.parts["communication"])
    parts = dict(own.parts)
    parts["communication"] -= total
    parts["waiting"] += total
    ordered = sorted(waits.items(), key=lambda item: -item[1])
    return RankResult(own, files, parts, dict(ordered))


def _intervals(pairs: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> list[Interval]:
    return [Interval(start, end, "") for start, end in pairs]


def _seconds(intervals: list[Interval]) -> float:
    return sum(one.end - one.start for one in intervals) / 1e6
