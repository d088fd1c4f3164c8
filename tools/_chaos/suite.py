"""Many runs on several clusters, and the table at the end."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _devcluster.errors import Fault

from _chaos.bench import Bench, ChaosError, Setup
from _chaos.checks import Figures, check, figures, hits, records
from _chaos.plan import describe, make_plan
from _chaos.running import Running
from slurmllm.core.run.rundir import RunDir

MENDED_S = 1.0
CHECK_S = 15.0  # a run's checks, and the repair of its cluster


@dataclass(frozen=True)
class Outcome:
    """One run."""

    seed: int
    plan: str
    faults: dict[str, str]  # check → what is wrong
    seconds: float  # from the submission to the end
    attempts: tuple[str, ...]  # classes, oldest first
    injected: tuple[dict[str, Any], ...]  # what happened, and what could not
    pairs: tuple[tuple[str, str], ...]  # (kind, class of the attempt it hit)
    kept: str = ""  # the run's directory, if a check failed

    @property
    def ok(self) -> bool:
        return not any(self.faults.values())


class Arena:
    """A running cluster, and the undisturbed run with which the others are compared.

    The directories of runs that fail a check are copied to `failed`.
    """

    def __init__(self, bench: Bench, failed: Path) -> None:
        self.bench, self._failed = bench, failed
        self._reference = self._unbroken()

    def _unbroken(self) -> Figures:
        course = Running(self.bench, "reference", ()).to_end()
        run = RunDir(self.bench.runs / "reference")
        reference, odd = figures(run)
        if course.ended != "finished" or odd or len(reference) != self.bench.setup.steps:
            with suppress(shutil.Error):  # files that a run which goes on has removed meanwhile
                shutil.copytree(run.path, self._failed / self.bench.root.name, dirs_exist_ok=True)
            raise ChaosError(f"the undisturbed run failed: {course}, {len(reference)} steps; {odd}")
        return reference

    def run(self, seed: int, kinds: Sequence[str]) -> Outcome:
        """One run with the failures of a seed."""
        name = f"seed-{seed:04d}"
        plan = make_plan(seed, self.bench.setup.steps, kinds, self.bench.setup.dbd_away_s)
        running = Running(self.bench, name, plan)
        course = running.to_end()
        run = RunDir(self.bench.runs / name)
        faults = check(self.bench, run, course, self._reference)
        time.sleep(MENDED_S)  # for sacct
        closed = records(run)
        classes = {r["attempt"]: str(r.get("class")) for r in closed}
        outcome = Outcome(
            seed=seed,
            plan=describe(plan),
            faults=faults,
            seconds=course.seconds,
            attempts=tuple(classes.values()),
            injected=tuple(asdict(injected) for injected in course.injected),
            pairs=tuple((k, classes.get(a, "none")) for a, ks in hits(course).items() for k in ks),
        )
        if not outcome.ok:
            copy = self._failed / name
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run.path, copy, symlinks=True)
            shutil.copytree(self.bench.root / "log", copy / "cluster_log")
            (copy / "outcome.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n")
            outcome = Outcome(**{**vars(outcome), "kept": str(copy)})
        shutil.rmtree(run.path, ignore_errors=True)
        try:
            self.bench.repair()
        except (ChaosError, Fault):  # one that cannot be restored does not end the suite
            self.bench.down()
            self.bench.up()
            self._reference = self._unbroken()
        return outcome


_arena: Arena | None = None


def _open(setup: Setup, work: Path, numbers: Any) -> None:
    global _arena
    number = numbers.get()
    _arena = Arena(Bench(work / f"cluster-{number}", setup), work / "failed")


def _one(seed: int, kinds: Sequence[str]) -> Outcome:
    assert _arena is not None
    return _arena.run(seed, kinds)


def run_all(
    setup: Setup,
    work: Path,
    seeds: Sequence[int],
    kinds: Sequence[str],
    parallel: int,
    ends_at: float = math.inf,
) -> Iterator[Outcome]:
    """Run the seeds on `parallel` clusters at once, then stop these; yields results as runs end.

    No run is started that would end after `ends_at` (monotonic, s) if it took as long as the
    longest so far.
    """
    (work / "failed").mkdir(parents=True, exist_ok=True)
    benches = [Bench(work / f"cluster-{number}", setup) for number in range(parallel)]
    numbers: Any = multiprocessing.Queue()
    waiting, longest_s = list(seeds), 0.0
    try:
        for number, bench in enumerate(benches):
            bench.up()
            numbers.put(number)
        pool = ProcessPoolExecutor(parallel, initializer=_open, initargs=(setup, work, numbers))
        try:
            running = {pool.submit(_one, waiting.pop(0), kinds) for _ in range(parallel)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    longest_s = max(longest_s, outcome.seconds + CHECK_S)
                    yield outcome
                    if waiting and time.monotonic() + longest_s < ends_at:
                        running.add(pool.submit(_one, waiting.pop(0), kinds))
        finally:  # an interrupt leaves no run behind
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()
    finally:
        for bench in benches:
            bench.down()


def line(outcome: Outcome) -> str:
    """One line for a run, and one more for each failed check."""
    head = (
        f"seed {outcome.seed:<4} {'ok    ' if outcome.ok else 'FAILED'} {outcome.seconds:5.1f} s  "
        f"{outcome.plan} → {', '.join(outcome.attempts)}"
    )
    faults = [f"    {name}: {words}" for name, words in outcome.faults.items() if words]
    return "\n".join([head, *faults, *([f"    {outcome.kept}"] if outcome.kept else [])])


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts and the confusion table of outcomes, as they are in the result files."""
    injections = [injected for run in runs for injected in run["injected"]]
    unsupported = (i for i in injections if i["unsupported"])
    return {
        "runs": len(runs),
        "failed": [run["seed"] for run in runs if any(run["faults"].values())],
        "checks": {
            name: sum(bool(run["faults"][name]) for run in runs)
            for name in (runs[0]["faults"] if runs else ())
        },
        "median_s": round(statistics.median([run["seconds"] for run in runs] or [0.0]), 1),
        "unsupported": _counts((i["failure"]["kind"], i["victim"]) for i in unsupported),
        "failures": sum(i["happened"] for i in injections),
        "confusion": _counts(tuple(pair) for run in runs for pair in run["pairs"]),
    }


def _counts(pairs: Iterable[tuple[str, ...]]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for (first, second), count in sorted(Counter(pairs).items()):
        counts.setdefault(first, {})[second] = count
    return counts
