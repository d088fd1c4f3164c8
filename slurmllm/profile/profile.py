"""The profile of a run's attempt: its workers' summaries, and who waits for whom.

A worker waits for another one while it is in a collective and computes nothing, and the other one
is in no collective yet. Clocks of different nodes must agree to less than the times compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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
    profiled = run.profiled()
    if not profiled:
        raise RunError(_without_profile(run))
    number = max(profiled) if attempt is None else attempt
    if number not in profiled:
        raise RunError(
            f"{run.name}: attempt {number} has no profile; choose --attempt "
            f"{', '.join(map(str, profiled))}"
        )
    files = profiled[number]
    ranks = [worker.rank for worker in files]
    if rank is not None and rank not in ranks:
        raise RunError(
            f"{run.name}: rank {rank} has no profile in attempt {number}; choose --rank "
            f"{', '.join(map(str, ranks))}, or profile it: --set profile.ranks=[{rank}]"
        )
    profiles = [_read(worker) for worker in files]
    results = [_result(*pair, profiles) for pair in zip(profiles, files, strict=True)]
    neuron = run.neuron_profiles
    return Profile(number, results, neuron if neuron.is_dir() else None)


def _without_profile(run: RunDir) -> str:
    recipe = load(run.config, trusted=True).recipe
    recipe.require_training("profile", "profile its steps by the trainer's own options")
    resume = f"`slurmllm resume {run.name} --set 'profile.steps=[FIRST, LAST]'`"
    if (steps := recipe.profile.steps) is None:
        return (
            f"{run.name} has no profile; {resume} profiles steps that it has not trained yet, or "
            "submit a run with profile.steps"
        )
    return (
        f"{run.name} has no profile yet: profile.steps is {list(steps)} of {recipe.train.steps} "
        f"steps; wait for step {steps[1]}, or after it, profile later steps with {resume}"
    )


def _read(files: ProfileFiles) -> RankProfile:
    with suppress(StorageError):  # the trace has the same, but takes longer to read
        if (profile := RankProfile.find(files.summary)) is not None:
            return profile
    return summarize(files.trace, files.rank)


def _result(
    profile: RankProfile, files: ProfileFiles, profiles: Sequence[RankProfile]
) -> RankResult:
    waits: dict[int, float] = {}
    waiting: list[Interval] = []
    for other in profiles:
        exposed, _ = take(_intervals([other.window]), _intervals(profile.exposed))
        _, before = take(exposed, _intervals(other.collectives))
        if other is not profile and (seconds := _seconds(before) / profile.num_steps) > 0:
            waits[other.rank] = seconds
            waiting += before
    # Rounding, and the window's ends, could make the difference negative.
    total = min(_seconds(disjoint(waiting)) / profile.num_steps, profile.parts["communication"])
    parts = dict(profile.parts)
    parts["communication"] -= total
    parts["waiting"] += total
    return RankResult(profile, files, parts, dict(sorted(waits.items(), key=lambda item: -item[1])))


def _intervals(pairs: Sequence[tuple[int, int]]) -> list[Interval]:
    return [Interval(start, end, "") for start, end in pairs]


def _seconds(intervals: Sequence[Interval]) -> float:
    return sum(interval.end - interval.start for interval in intervals) / 1e6
