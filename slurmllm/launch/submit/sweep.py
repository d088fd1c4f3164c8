"""Sweeps: runs of one recipe that differ in some values, in one directory.

Runs of equal graph fingerprints share one precompile job, that of a run of its own (`graphs/` in
the sweep's directory): any of the others may be cancelled or fail. With a limit, the train jobs are
dealt out to as many lanes. The jobs of a lane have one name and the dependency `singleton`, so that
Slurm itself starts one after the other, however the one before ended.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slurmllm.core.config.recipe_file import untrusted_fault
from slurmllm.core.config.resolve import RunConfig, Settings, resolve
from slurmllm.core.config.variables import is_secret_at
from slurmllm.core.config.yaml_source import flatten, parse_scalar, read_yaml
from slurmllm.core.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, SlurmError, UserError
from slurmllm.core.run.records import SweepCase, SweepRecord
from slurmllm.core.run.rundir import RUN_NAME, SweepDir
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.launch.graphs.reuse import graph_fingerprint
from slurmllm.launch.submit.launch import record_local, run_locally, submit_jobs
from slurmllm.launch.submit.prepare import PreparedRun, RunRequest, prepare
from slurmllm.launch.submit.run_folder import claim_run, new_run
from slurmllm.launch.supervise.attempts import this_process
from slurmllm.launch.supervise.run_lock import locked

LARGEST = 10_000  # cases; Slurm's default MaxJobCount
# A comma between two values, not one inside brackets or quotes.
_VALUE = re.compile(r"""(?:[^,\[\]{}"']|"[^"]*"|'[^']*'|\[[^\[\]]*\]|\{[^{}]*\})+""")


class Case(NamedTuple):
    """What one run of a sweep changes."""

    values: dict[str, str]  # dotted path → value, as for --set
    name: str | None = None  # end of its run's name; None: made of the values


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep that can be launched."""

    sweep: SweepDir
    record: SweepRecord
    graphs: Sequence[PreparedRun]  # runs that only compile graphs; their archive may exist already
    runs: Sequence[PreparedRun]  # one for each case, in their order

    @property
    def precompiles(self) -> list[PreparedRun]:
        return [graphs for graphs in self.graphs if graphs.graphs_from is None]

    def lane(self, number: int) -> str | None:
        if self.record.max_running is None:
            return None
        # Sweeps of one name may be in several folders.
        digest = hashlib.sha256(str(self.sweep.path).encode()).hexdigest()[:6]
        return f"{self.sweep.name}-{digest}-lane-{number % self.record.max_running + 1}"


def grid(options: Sequence[str]) -> list[Case]:
    """Return all combinations of `path=value,value,…`, the last path changing fastest."""
    axes = {}
    for option in options:
        path, equals, listed = option.partition("=")
        path = path.strip()
        values = [value.strip() for value in _VALUE.findall(listed)]
        if not equals or not path or not values or not all(values):
            raise UserError(f"--sweep {option!r}: expected path=value,value, such as optim.lr=1e-4")
        if path in axes:
            raise UserError(f"--sweep {option}: {path} is given twice; give all values at once")
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            raise UserError(f"--sweep {option}: {twice[0]} is given twice; give each value once")
        axes[path] = values
    _require_number(math.prod(map(len, axes.values())))
    return [
        Case(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]


def read_cases(path: Path) -> list[Case]:
    """Read the cases of a YAML file: a mapping from the end of each run's name to its values."""
    entries, _ = read_yaml(path)
    _require_number(len(entries))
    cases = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not entry:
            raise UserError(
                f"{path}: case {name!s:.60} is {entry!r:.60}; a case is a name and what it "
                "changes, such as `low: {optim.lr: 1e-4}`"
            )
        values = {dotted: _text(value) for dotted, value in flatten(entry).items()}
        # As in a recipe, and as --set will read it: the file may be another user's.
        for dotted, value in flatten({k: parse_scalar(v) for k, v in values.items()}).items():
            if dotted.split(".")[0] == "cluster":
                raise UserError(f"{path}: {dotted} belongs in a profile; give it by --set")
            if fault := untrusted_fault(dotted, value, path.name):
                raise UserError(fault)
        cases.append(Case(values, str(name)))
    return cases


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=math.inf)
        .removesuffix("\n...\n")
        .strip()
    )


def _require_number(count: int) -> None:
    if count > LARGEST:
        raise UserError(f"the sweep has {count:,} cases; {LARGEST:,} at most: give fewer values")


def resolve_cases(
    cases: Sequence[Case],
    recipe: str,
    cluster: str | None,
    overrides: Sequence[str],
    options: Settings,
) -> list[RunConfig]:
    """Return the configuration of each case; the arguments are those of `resolve`."""
    configs = []
    faults = dict[str, None]()
    for case in cases:
        faults |= dict.fromkeys(
            f"{path}: a sweep may not hold secrets"
            for path, value in case.values.items()
            if is_secret_at(path, value)
        )
        try:
            values = (f"{path}={value}" for path, value in case.values.items())
            configs.append(resolve(recipe, cluster, (*overrides, *values), options))
        except ConfigError as error:
            faults |= dict.fromkeys(error.faults or [error.title])
        if len(faults) >= 10:
            break
    if faults:
        raise ConfigError("the sweep has invalid cases; nothing was submitted", list(faults))
    return configs


def name_cases(sweep: str, cases: Sequence[Case]) -> tuple[SweepCase, ...]:
    """Return the cases with the names of their runs: `<sweep>-<name>`.

    Without a name it is made of the values that vary, such as `lr1e-4-seed2`; the cases are
    numbered if that is too long or ambiguous.

    Raises:
        UserError: two cases are equal, or have the same or invalid names.
    """
    for values, count in Counter(tuple(sorted(case.values.items())) for case in cases).items():
        if count > 1:
            equal = " ".join(f"{path}={value}" for path, value in values)
            raise UserError(f"{count} cases of the sweep are equal: {equal}; remove all but one")
    labels = SweepRecord(
        recipe="",
        created_at=0,
        cases=tuple(SweepCase(run=sweep, values=case.values) for case in cases),
    ).labels
    varying = [p for p in labels if len({case.values.get(p) for case in cases}) > 1] or list(labels)
    names = []
    for case in cases:
        settings = [f"{labels[path]}{case.values[path]}" for path in varying if path in case.values]
        end = case.name or re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(settings))
        names.append(f"{sweep}-{end}")
    clear = len(set(names)) == len(names) and all(map(RUN_NAME.fullmatch, names))
    if not clear and all(case.name is None for case in cases):
        names = [f"{sweep}-{number:03d}" for number in range(1, len(cases) + 1)]
    for name, count in Counter(names).items():
        if not RUN_NAME.fullmatch(name):
            raise UserError(
                f"run name {name!r}: must be letters, digits, '.', '_' and '-', at most 100; "
                "choose another name of the case or of the sweep"
            )
        if count > 1:
            raise UserError(f"{count} cases of the sweep are named {name}; name each differently")
    return tuple(
        SweepCase(run=name, values=case.values) for name, case in zip(names, cases, strict=True)
    )


def _prepare_runs(
    request: RunRequest, sweep: SweepDir, record: SweepRecord, configs: Sequence[RunConfig]
) -> tuple[list[PreparedRun], list[PreparedRun]]:
    """Return the prepared runs, and those that compile the graphs of several."""
    request = replace(request, folder=sweep.path, find_graphs=False)
    runs = list[PreparedRun]()
    graphs: dict[object, PreparedRun] = {}
    checked = None  # the limits of equal jobs are compared once: it takes commands of Slurm
    for case, config in zip(record.cases, configs, strict=True):
        job = (config.recipe.slurm, config.cluster)
        client = None if job == checked else request.slurm
        checked = job
        try:
            run = prepare(replace(request, config=config, name=case.run, slurm=client))
        except ConfigError as error:
            raise ConfigError(f"{case.run}: {error.title}", error.faults) from error
        if client is None and runs:
            run = replace(run, excluded=runs[-1].excluded)
        if not run.compiles:
            runs.append(run)
            continue
        # Equal for runs that can use the same graphs. Whatever micro batch will be measured:
        # the candidates follow from the global batch.
        train = run.config.recipe.train
        auto = train.micro_batch == "auto"
        fingerprint = graph_fingerprint(run.config, run.mesh, request.local, 1 if auto else None)
        key = fingerprint, train.global_batch if auto else 0
        if key not in graphs:
            graphs[key] = prepare(
                replace(
                    request,
                    config=run.config,
                    name=f"{sweep.name}-graphs-{len(graphs) + 1}",
                    folder=sweep.graphs,
                    find_graphs=True,
                    check_layout=False,
                    check_weights=False,
                )
            )
        runs.append(replace(run, graphs_from=graphs[key].run.name))
    return runs, list(graphs.values())


def prepare_sweep(
    request: RunRequest,
    cases: Sequence[Case],
    configs: Sequence[RunConfig],
    max_running: int | None = None,
) -> PreparedSweep:
    """Check all runs of a sweep, then write their directories; if one is refused, none is kept.

    Args:
        request: What the runs have in common; `name` is the sweep's.
        cases: What each of them changes.
        configs: Their configurations.
        max_running: How many may train at a time; None: any number.
    """
    recipe = configs[0].recipe.name
    location = request.root, request.name, f"{recipe}-sweep"
    # Faults of the names are found before the directory is made.
    name_cases(new_run(*location).name, cases)
    folder = new_run(*location) if request.dry_run else claim_run(*location, configs[0].cluster)
    sweep = SweepDir(folder.path)
    try:
        record = SweepRecord(
            recipe=recipe,
            created_at=time.time(),
            max_running=max_running,
            cases=name_cases(sweep.name, cases),
            **this_process(),
        )
        if not request.dry_run:
            record.save(sweep.record)
        runs, graphs = _prepare_runs(request, sweep, record, configs)
    except BaseException:
        if not request.dry_run:
            shutil.rmtree(sweep.path, ignore_errors=True)
        raise
    return PreparedSweep(sweep, record, graphs, runs)


def submit_sweep(prepared: PreparedSweep, client: SlurmClient) -> Iterator[str]:
    """Submit the jobs of a sweep and yield their ids: of precompile, then of all train jobs.

    Raises:
        SlurmError: sbatch refused one; the others are cancelled, and the directory is removed.
    """
    jobs = []
    compiled: dict[str, str | None] = {graphs.run.name: None for graphs in prepared.graphs}
    try:
        for graphs in prepared.precompiles:
            job = submit_jobs(graphs, client, ["precompile"]).precompile_job
            assert job is not None
            compiled[graphs.run.name] = job
            jobs.append(job)
            yield job
        for number, run in enumerate(prepared.runs):
            with locked(run.run, "submit"):
                submission = submit_jobs(
                    run,
                    client,
                    ["train"],
                    graphs_of=run.graphs_from,
                    precompile_job=compiled.get(str(run.graphs_from)),
                    lane=prepared.lane(number),
                )
            assert submission.train_job is not None
            jobs.append(submission.train_job)
            yield submission.train_job
    except SlurmError as error:
        try:
            client.cancel(jobs[::-1])
        except SlurmError as reason:
            raise SlurmError(
                f"{error}\n  and {len(jobs)} jobs of the sweep are still queued: {reason}; "
                f"`slurmllm cancel {prepared.sweep.name}` ends them"
            ) from error
        shutil.rmtree(prepared.sweep.path, ignore_errors=True)
        raise


def run_sweep_locally(prepared: PreparedSweep, quiet: bool = False) -> dict[str, int]:
    """Run the runs of a sweep on this machine, one after the other; Ctrl-C ends all of them.

    Returns:
        Exit code of each run that was started, by name; the first of them are of precompile.
    """
    codes = dict[str, int]()
    precompiles = prepared.precompiles
    for run in (*precompiles, *prepared.runs):
        if codes.get(str(run.graphs_from), EXIT_OK) != EXIT_OK:
            continue
        record_local(run, graphs_of=run.graphs_from)
        codes[run.run.name] = run_locally(
            run, quiet, ["precompile"] if run in precompiles else None
        )
        if codes[run.run.name] == EXIT_INTERRUPTED:
            break
    return codes
