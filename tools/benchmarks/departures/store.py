"""The trainings of a benchmark: run by a pool of processes, and kept in a folder.

A file's name has a digest of the settings and of the sources of the training, so that a folder of
an older version is trained again where it differs, and only there.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from departures.kinds import Kind, all_kinds
from departures.logs import Log
from departures.settings import STEPS, Settings
from departures.training import Change, Columns, train

_SOURCES = ("corpus.py", "model.py", "training.py")


@dataclass(frozen=True)
class Case:
    """One departure of one training."""

    kind: str
    since: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.since}-{self.seed}"


def cases(kinds: Sequence[Kind], seeds: int) -> list[Case]:
    return [
        Case(kind.name, since, seed)
        for kind in kinds
        for since in kind.starts
        for seed in range(1, seeds + 1)
    ]


def train_missing(folder: Path, wanted: Sequence[Case], jobs: int) -> int:
    """Train what the folder lacks; returns the number of trainings.

    Cases that depart from the same reference are one job each of a few, so that its first steps are
    trained once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_reference: dict[Settings, list[Case]] = {}
    for case in wanted:
        kind = all_kinds()[case.kind]
        if not path_of(folder, case).exists() or not reference_path(folder, case).exists():
            by_reference.setdefault(kind.reference(case.seed), []).append(case)
    work = []
    for of_reference in by_reference.values():
        size = max(8, len(of_reference) // (2 * jobs) + 1)
        pieces = range(0, len(of_reference), size)
        work += [(folder, of_reference[first : first + size]) for first in pieces]
    started, done = time.monotonic(), 0
    if jobs == 1 or len(work) <= 1:
        for job in work:
            done += _train_job(job)
        return done
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, trained in enumerate(pool.imap_unordered(_train_job, work), start=1):
            done += trained
            elapsed = time.monotonic() - started
            note = f"{number} of {len(work)} jobs, {done} trainings, {elapsed:.0f} s"
            print(note, file=sys.stderr, flush=True)
    return done


def _train_job(job: tuple[Path, list[Case]]) -> int:
    folder, wanted = job
    kinds = [all_kinds()[case.kind] for case in wanted]
    wanted_changes: dict[Path, Change] = {}
    for kind, case in zip(kinds, wanted, strict=True):
        if kind.needs_training:
            wanted_changes[path_of(folder, case)] = kind.change(case.seed, case.since)
    first = wanted[0]
    reference, found = train(kinds[0].reference(first.seed), list(wanted_changes.values()), STEPS)
    _save(reference_path(folder, first), reference)
    for path, columns in zip(wanted_changes, found, strict=True):
        _save(path, columns)
    return 1 + len(found)


def load_pair(folder: Path, case: Case) -> tuple[Log, Log]:
    """Returns the columns of the reference and of the case's training."""
    return _load(reference_path(folder, case)), _load(path_of(folder, case))


def path_of(folder: Path, case: Case) -> Path:
    """The file of a case; the reference's if it changes only what is logged."""
    kind = all_kinds()[case.kind]
    if not kind.needs_training:
        return reference_path(folder, case)
    digest = _digest(repr((kind.reference(case.seed), kind.change(case.seed, case.since))))
    return folder / f"{case.name}-{digest}.npz"


def reference_path(folder: Path, case: Case) -> Path:
    digest = _digest(repr(all_kinds()[case.kind].reference(case.seed)))
    return folder / f"reference-{case.seed}-{digest}.npz"


def _digest(text: str) -> str:
    return hashlib.sha256((_version() + str(STEPS) + text).encode()).hexdigest()[:12]


@cache
def _version() -> str:
    here = Path(__file__).parent
    sources = b"".join((here / name).read_bytes() for name in _SOURCES)
    return hashlib.sha256(sources).hexdigest()


def _save(path: Path, columns: Columns) -> None:
    part = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    arrays = {name: np.array(values) for name, values in columns.items()}
    np.savez(part, allow_pickle=False, **arrays)
    part.rename(path)


def _load(path: Path) -> Log:
    with np.load(path) as held:
        return {name: held[name] for name in held.files}
