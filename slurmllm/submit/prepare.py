"""Prepare a run for submission: choose the layout, check it, render the scripts, write it all.

`submit`, `resume` and `drill` all call `prepare`; `launch.py` then starts what it returns.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slurmllm.backends.environment import load_environment
from slurmllm.config.container import paths_of
from slurmllm.config.load import save
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError, StorageError
from slurmllm.graphs import reuse
from slurmllm.graphs.archive import load_manifest
from slurmllm.plan.mesh import (
    Mesh,
    MeshError,
    load_mesh,
    make_mesh,
    possible_nodes,
    replica_nodes,
    save_mesh,
)
from slurmllm.run.artifact_records import GraphManifest
from slurmllm.run.rundir import STAGES, RunDir, Stage, write_atomic
from slurmllm.run.safe_files import (
    group_error,
    read_limited,
)
from slurmllm.slurm.setup import setup_faults, setup_warnings
from slurmllm.submit.inputs import locate, missing_data, resolve_inputs
from slurmllm.submit.plugins import plugin_faults, warn_if_changed
from slurmllm.submit.render import render
from slurmllm.submit.run_folder import (
    claim_run,
    limit_umask,
    new_run,
    remove_unsubmitted,
    require_own,
)
from slurmllm.supervise.allocation import forget_site

if TYPE_CHECKING:
    from slurmllm.plan.fit_check import FitCheck

Precompile = Literal["auto", "always"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRequest:
    """A run to prepare."""

    config: RunConfig
    nodes: int  # nodes of the train stage
    root: Path  # folder of all runs
    folder: Path | None = None  # where a new run is made, if not there: the directory of a sweep
    run: RunDir | None = None  # the run to resume; None for a new one
    name: str | None = None  # name of a new run; None: the recipe's name with the next free number
    local: bool = False  # whether the nodes are launchers on this machine
    precompile: Precompile = "auto"  # `always` compiles the graphs again whatever exists
    # Whether a run that is predicted not to fit is a warning instead of an error.
    force: bool = False
    # Whether to write nothing; faults that would refuse the run are then returned in
    # `PreparedRun.refusals`.
    dry_run: bool = False
    check_layout: bool = True  # whether to compare the layout with the planner's
    check_weights: bool = True  # whether to check `train.init_from`
    find_graphs: bool = True  # whether to look for a run that has compiled its graphs
    exclude: Sequence[str] = ()  # nodes to exclude, in addition to `slurm.exclude`
    # Fetches the recipe's published data, if they are missing; None: their absence is an error.
    fetch: Callable[[RunConfig, Path, Sequence[str]], object] | None = None
    claimed: Callable[[RunDir], object] | None = None  # called with the directory of a new run


@dataclass(frozen=True)
class PreparedRun:
    """A run that can be launched."""

    config: RunConfig  # the configuration with layout and inputs resolved
    mesh: Mesh
    run: RunDir
    scripts: dict[Stage, str]  # text of each stage's batch script
    # The planner's prediction; None without hardware figures, or if not asked for.
    fit: FitCheck | None = None
    # Reasons why the run cannot be trained, and those that are missing data; only after a dry run.
    refusals: tuple[str, ...] = ()
    missing_data: tuple[str, ...] = ()
    # Name of the run whose compiled graphs are used; None: precompile first.
    graphs_from: str | None = None
    is_new: bool = False  # whether `prepare` created the directory
    rederived: tuple[str, ...] = ()  # damaged files that were written again, with the reasons
    from_scratch: bool = False  # whether to start again from step 0, whatever was saved
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # of a resume's settings

    @property
    def stages(self) -> tuple[Stage, ...]:
        return ("train",) if self.graphs_from is not None else STAGES

    def require_data(self) -> None:
        """Raise after a dry run what a submission would raise without data."""
        if self.missing_data:
            title = f"{self.config.recipe.name} has no training data"
            raise ConfigError(title, self.missing_data)


def prepare(request: RunRequest) -> PreparedRun:
    """Check a run, then write its configuration, plan and scripts.

    Nothing is written before all checks have passed, and nothing at all in a dry run.

    Raises:
        ConfigError: the layout does not fit, or the backend cannot train the run.
        DataError: an input is unusable.
        RunError: the name is taken, or the initial weights are no checkpoint of this model.
        StorageError: the file system fails.
    """
    config, nodes, root, dry_run = request.config, request.nodes, request.root, request.dry_run
    if config.cluster.planning_only is not None:
        raise ConfigError(
            f"cluster profile {config.cluster.name} is for planning only",
            [
                f"{config.cluster.planning_only}; choose another --cluster "
                "(`slurmllm recipes --clusters`)"
            ],
        )
    if request.run is not None:
        require_own(request.run, config.cluster.trusted_group)
    if not dry_run:
        limit_umask(config.cluster)
        forget_site()
    folder = request.folder or root
    run = request.run or new_run(folder, request.name, config.recipe.name)
    chosen = config.recipe.parallel.auto
    unsupported = load_environment(config.backend).unsupported
    if chosen:
        from slurmllm.plan.fit_check import choose_parallel

        config = choose_parallel(config, nodes, unsupported, resumes=request.run is not None)
    nodes = _most_nodes(config, nodes)
    try:
        prepared = render_run(config, nodes, run, request.exclude)
    except MeshError as error:
        if not request.check_layout or config.cluster.hardware is None:
            raise
        from slurmllm.plan.fit_check import mesh_fixes

        fixes = mesh_fixes(config, nodes, unsupported, resumes=request.run is not None)
        raise ConfigError(error.title, [error.rule, *fixes]) from None
    reasons = list(unsupported(config))
    weights = config.recipe.train.finetune
    if weights and not config.is_trial and config.recipe.train.init_from is None:
        fix = "add --set train.init_from=FOLDER, a checkpoint of another run or one that "
        fix += "`slurmllm checkpoint import` made"
        if isinstance(weights, str):
            fix = f"get them with `slurmllm checkpoint import {weights} --out weights`, then add "
            fix += "--set train.init_from=weights"
        reasons.append(
            "train.init_from: not set, and this recipe starts from trained weights "
            f"(train.finetune); {fix}"
        )
    profile, workers = config.recipe.profile, prepared.mesh.world_size
    if profile.steps is not None and max(profile.ranks) >= workers:
        fault = (
            f"profile.ranks: {max(profile.ranks)}: the run has {workers} workers; choose ranks "
            f"from 0 to {workers - 1}"
        )
        if request.run is None:
            reasons.append(fault)
        else:  # the profile may be over
            log.warning("%s, or profile.steps=null", fault)
    if not reasons:
        reasons += plugin_faults(config)
    if request.run is not None:
        warn_if_changed(config, request.run)
    if reasons and not dry_run:
        raise ConfigError(
            f"backend {config.backend} cannot train {config.recipe.name} like this", reasons
        )
    if faults := _unreachable(config, request.local):
        if not dry_run:
            raise ConfigError(f"{config.recipe.name}: these settings cannot be used here", faults)
        reasons += faults
    fit = None
    if request.check_layout and config.cluster.hardware is not None:
        from slurmllm.plan.fit_check import check_fit

        measured = reuse.measured_micro_batch(run)
        # The fewest nodes: shards of the model are the largest there.
        fewest = min(nodes, config.recipe.slurm.min_nodes or nodes)
        fit = check_fit(
            config, fewest, unsupported, measured,
            chosen=chosen, force=request.force, resumes=request.run is not None,
        )  # fmt: skip
    if fit is not None and fit.refusals:
        if not dry_run:
            raise ConfigError(
                f"the planner predicts that {config.recipe.name} does not fit into the memory of "
                f"{fewest} node(s) of {config.cluster.name}",
                [*fit.refusals, "if the prediction is wrong, --force submits all the same"],
            )
        reasons += fit.refusals
    init_from = config.recipe.train.init_from
    if request.check_weights and init_from is not None:
        from slurmllm.checkpoint.state import require_model

        source = Path(init_from).absolute()
        require_model(source, config.recipe.model)
        config = config.with_init_from(str(source))
    located = locate(config, root)
    missing = missing_data(config, root, located)
    if request.fetch is not None and located.missing:
        if dry_run:
            log.warning("--fetch would download the data first: %s", missing[0])
            # Without a corpus among them, a submission would fail after the download.
            missing = [] if "corpus" in located.values else missing
        else:
            request.fetch(config, root, located.missing)
    config = resolve_inputs(config, root, build=not dry_run)
    if config.is_trial:
        log.warning(
            "TRIAL RUN: with --data builtin, %s trains on the source files of this machine's "
            "Python instead of %s; its losses cannot be compared with the recipe's",
            config.recipe.name,
            " and ".join(config.recipe.data.sources) or "a corpus",
        )
    if dry_run:
        return replace(prepared, fit=fit, refusals=tuple(reasons), missing_data=tuple(missing))
    if request.run is None:
        run = claim_run(folder, request.name, config.recipe.name, config.cluster)
    try:
        if request.run is None and request.claimed is not None:
            request.claimed(run)
        # After the claim: an adopted archive's manifest is stored in the run's directory.
        graphs_from = _find_graphs(request, config, run) if request.find_graphs else None
        prepared = replace(
            # Again: the scripts name the claimed directory, and an adopted archive may have brought
            # the micro batch that its run measured.
            render_run(config, nodes, run, request.exclude),
            fit=fit,
            graphs_from=graphs_from,
            is_new=request.run is None,
            rederived=_damaged_files(run) if run.jobs.is_file() else (),
        )
        write_run(prepared)
    except BaseException:
        if request.run is None:
            remove_unsubmitted(run)
        raise
    return prepared


def _most_nodes(config: RunConfig, nodes: int) -> int:
    """The largest possible node count up to `nodes`, if slurm.min_nodes permits fewer.

    Raises:
        ConfigError: slurm.min_nodes is not possible, or the graphs depend on the node count.
    """
    least = config.recipe.slurm.min_nodes
    if least is None or least >= nodes:
        return nodes
    title, asked = "the range of nodes is not possible", f"--nodes {least}-{nodes}"
    if load_environment(config.backend).precompile_nodes(config, nodes) > replica_nodes(config):
        text = f"{asked}: graphs of backend {config.backend} are for one node count; give one"
        raise ConfigError(title, [text])
    possible = possible_nodes(config, least, nodes)
    if least not in possible:
        others = ", ".join(map(str, possible)) or "none of them"
        text = f"{asked}: {least} is not possible with this mesh and global batch; {others} is"
        raise ConfigError(title, [text])
    if possible[-1] < nodes:
        log.warning("%s: %d nodes at most, by mesh and global batch", asked, possible[-1])
    return possible[-1]


def _unreachable(config: RunConfig, local: bool) -> list[str]:
    """Faults of what a run uses of this site, as far as they are known here."""
    notify, faults = config.recipe.slurm.notify, setup_faults(config.cluster.setup)
    faults += _container_faults(config, local)
    for warning in setup_warnings(config.cluster.setup):
        log.warning("%s", warning)
    if config.cluster.runs_group and (reason := group_error(config.cluster.runs_group)):
        faults.append(f"cluster.runs_group: {reason}; name one of your groups (`id`)")
    if (name := notify.webhook) is not None:
        url = config.variable(name)
        if not url:
            what = "is not set; `export` it and add"
            faults.append(f"slurm.notify.webhook: {name} {what} --set env.{name}")
        elif not url.startswith(("https://", "http://")):
            faults.append(f"slurm.notify.webhook: {name} holds no http(s) URL; correct it")
    if notify.command and shutil.which(notify.command[0]) is None:
        what = f"{notify.command[0]} is not a program here; name it with its folder"
        faults.append(f"slurm.notify.command: {what}")
    if config.recipe.trackers and config.cluster.trackers.network:
        from slurmllm.track.trackers import missing

        faults += missing(config, config.recipe.trackers)
    return faults


def _container_faults(config: RunConfig, local: bool) -> list[str]:
    container = config.cluster.container
    if container is None:
        return []
    path = "cluster.container"
    missing = [str(file) for file in paths_of(container) if not file.exists()]
    faults = [f"{path}: {file} does not exist; correct image and mounts" for file in missing]
    if config.cluster.stage_environment:
        faults.append(
            f"{path}: stage_environment copies the host's environment; set it to false: the image "
            "has the environment"
        )
    if local and container.srun_runs_it:
        faults.append(f"{path}.runtime: pyxis needs srun; leave out --local, or set another one")
    return faults


def render_run(
    config: RunConfig, nodes: int, run: RunDir, exclude: Sequence[str] = ()
) -> PreparedRun:
    """Compute mesh and scripts, with `parallel.auto` resolved; writes nothing.

    Args:
        exclude: Nodes to exclude, in addition to `slurm.exclude`. The configuration does not keep
            them: they are excluded for a time only.

    Raises:
        ConfigError: the mesh does not fit the nodes, or a value cannot be put into a script.
    """
    mesh = make_mesh(config, nodes, reuse.measured_micro_batch(run))
    slurm = config.recipe.slurm
    excluded = [*([slurm.exclude] if slurm.exclude else []), *exclude]
    slurm = slurm.model_copy(update={"exclude": ",".join(excluded) or None})
    excluding = replace(config, recipe=config.recipe.model_copy(update={"slurm": slurm}))
    python = config.cluster.python or sys.executable
    scripts = {stage: render(stage, excluding, run, nodes, python) for stage in STAGES}
    return PreparedRun(config, mesh, run, scripts)


def _damaged_files(run: RunDir) -> tuple[str, ...]:
    """The files of `write_run` that are missing or damaged, with the reasons."""
    found = []
    try:
        load_mesh(run.plan)
    except StorageError as error:
        found.append(str(error).partition("; ")[0])
    for path in map(run.script, STAGES):
        try:
            if not read_limited(path).startswith(b"#!/bin/bash\n"):
                found.append(f"{path} is damaged")
        except OSError as error:
            found.append(f"cannot read {path}: {error.strerror}")
    return tuple(found)


def write_run(prepared: PreparedRun) -> None:
    run = prepared.run
    save(prepared.config, run)
    save_mesh(prepared.mesh, run.plan)
    for stage, script in prepared.scripts.items():
        write_atomic(run.script(stage), script)
    run.logs.mkdir(parents=True, exist_ok=True)


def _find_graphs(request: RunRequest, config: RunConfig, run: RunDir) -> str | None:
    """Name of the run that compiled all graphs of this one; None if the precompile stage must run.

    Another run's archive is adopted if it is complete and trusted. Raises StorageError.
    """
    nodes, local, group = request.nodes, request.local, config.cluster.trusted_group
    if request.precompile == "always":
        reuse.delete_manifest(run)
        return None
    if os.path.lexists(run.graphs_manifest):
        try:
            load_manifest(run, group)
        except StorageError as error:
            log.warning("ignoring the compiled graphs of %s: %s", run.name, error)
            reuse.delete_manifest(run)
    # `compile` trains with an incomplete archive: what is missing is compiled on the way.
    any_ok = config.recipe.train.incomplete_graphs == "compile" and run.graphs_manifest.is_file()
    if any_ok or reuse.has_all_graphs(config, nodes, local, run, run):
        return GraphManifest.load(run.graphs_manifest).reused_from or run.name
    refused = []
    for source in reuse.find(config, nodes, local, run):
        reason = reuse.link_or_copy_graphs(source, run, group)
        if not reason:
            return GraphManifest.load(run.graphs_manifest).reused_from
        refused.append(f"run {source.name!r}, which has them: {reason}")
    if refused:
        log.warning(
            "compiling the graphs, not using those of %s%s; --set cluster.trusted_group=GROUP uses "
            "those of a group's members", refused[0],
            f" (and {len(refused) - 1} more)" if refused[1:] else "",
        )  # fmt: skip
    elif reason := reuse.other_processor(config, nodes, local, run):
        log.warning("compiling the graphs, not using those of %s", reason)
    return None
