"""Prepare a run for submission: choose the layout, check it, render the scripts, write it all.

`submit`, `resume` and `drill` all call `prepare`; `launch.py` then starts what it returns.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from slurmllm.core.config.load import save
from slurmllm.core.config.profiles import shipped_dir
from slurmllm.core.config.resolve import RunConfig, Settings
from slurmllm.core.config.trackers import missing_for_trackers, read_token
from slurmllm.core.errors import ConfigError, StorageError, UserError
from slurmllm.core.format import Json
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, write_atomic
from slurmllm.core.slurm.client import Names, SlurmClient
from slurmllm.core.slurm.container import container_faults
from slurmllm.core.slurm.setup import setup_faults
from slurmllm.launch.graphs import reuse
from slurmllm.launch.graphs.archive import load_manifest
from slurmllm.launch.submit.inputs import (
    data_folder,
    locate,
    missing_data,
    plugin_faults,
    resolve_inputs,
    warn_if_changed,
    with_folder,
)
from slurmllm.launch.submit.render import Faults, check_jobs, render
from slurmllm.launch.submit.run_folder import (
    claim_run,
    group_error,
    make_folders,
    new_run,
    remove_half_record,
    remove_unsubmitted,
    require_own,
)
from slurmllm.launch.supervise.exclusion import excluded_names, nodes_to_avoid
from slurmllm.launch.supervise.trainer_command import command_line, command_values
from slurmllm.plan.mesh import (
    Mesh,
    MeshError,
    adapt_to_nodes,
    possible_nodes,
    replica_nodes,
    save_mesh,
)
from slurmllm.train.backends.environment import load_environment, needs_precompile
from slurmllm.train.checkpoint.catalogue import usable_steps
from slurmllm.train.checkpoint.foreign import saved_steps
from slurmllm.train.schedules import unfinished_decay

if TYPE_CHECKING:
    from slurmllm.plan.choose_layout import FitCheck
    from slurmllm.plan.search import Unsupported

Precompile = Literal["auto", "always", "never"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRequest:
    """A run to prepare."""

    config: RunConfig
    nodes: int  # nodes of the train stage; of a resume, 0: as before
    root: Path  # folder of all runs
    folder: Path | None = None  # parent of a new run, if not `root`: the directory of a sweep
    run: RunDir | None = None  # the run to resume; None for a new one
    name: str | None = None  # name of a new run; None: the recipe's name with the next free number
    local: bool = False  # whether the nodes are launchers on this machine
    precompile: Precompile = "auto"
    # `always` compiles the graphs again whatever exists; `never` compiles the rest in training.
    force: bool = False  # whether a run that is predicted not to fit is only warned of
    dry_run: bool = False  # whether to write nothing; refusals are then returned
    check_layout: bool = True  # whether to compare the layout with the planner's
    check_weights: bool = True  # whether to check `train.init_from`
    find_graphs: bool = True  # whether to look for a run that has compiled its graphs
    slurm: SlurmClient | None = None  # whose limits are checked; None: no job is submitted
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
    # Nodes, in addition to `slurm.exclude`; not in the scripts: they are excluded for a time only.
    excluded: Names = ()
    fit: FitCheck | None = None  # the planner's prediction; None if there is none
    warnings: Sequence[str] = ()  # why it may be slow, start late or on unequal nodes
    # After a dry run: why `submit` would refuse the run, and why it cannot start, which is raised
    refused: Sequence[ConfigError] = ()
    unstartable: Sequence[ConfigError] = ()
    compiles: bool = True  # whether precompile has graphs, or a micro batch to measure
    graphs_from: str | None = None  # run whose graphs are used; None: precompile first
    is_new: bool = False  # whether `prepare` created the directory
    from_scratch: bool = False  # whether to start again from step 0, whatever was saved
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # of a resume's settings

    @property
    def stages(self) -> tuple[Stage, ...]:
        return STAGES if self.compiles and self.graphs_from is None else ("train",)

    @property
    def from_step(self) -> int:
        if not self.config.recipe.worker.has_model:
            return max(saved_steps(self.run, self.config), default=0)
        return 0 if self.from_scratch else max(usable_steps(self.run), default=0)

    @property
    def command_line(self) -> str | None:
        """The next attempt's command of a trainer of another project, filled in."""
        if (command := self.config.recipe.command) is None:
            return None
        attempt = self.run.next_attempt_number("train")
        return command_line(
            command, command_values(self.run, self.config, attempt, self.mesh.nodes)
        )

    def mesh_json(self) -> Json:
        """Return the mesh for JSON; of a trainer of another project its size alone."""
        return self.mesh.to_json() if self.config.recipe.worker.has_model else self.mesh.size_json()

    @property
    def refusals(self) -> list[str]:
        """The faults of all errors of a dry run."""
        return [fault for error in (*self.refused, *self.unstartable) for fault in error.faults]


def avoid_excluded(prepared: PreparedRun, request: RunRequest) -> PreparedRun:
    """Exclude the nodes that a run or its site excludes, as many as it can start without.

    Raises a SlurmError if slurmctld is unreachable, a StorageError if the run's record is damaged.
    """
    if request.slurm is None:
        return prepared
    suspects = excluded_names(request.slurm, prepared.run, prepared.config, request.root)
    names = nodes_to_avoid(request.slurm, prepared.scripts["train"], (), suspects)
    lines = {
        "excluded: {}; `slurmllm nodes` shows why": names,
        "not excluded: {}: the job needs it; see `slurmllm nodes`": sorted({*suspects} - {*names}),
    }
    warnings = [*prepared.warnings]
    warnings += (line.format(" ".join(nodes)) for line, nodes in lines.items() if nodes)
    return replace(prepared, excluded=names, warnings=warnings)


def check_mode(local: bool, options: Settings) -> None:
    """Raise UserError if a run with these options cannot train on this machine, or from here."""
    if local and options.get("slurm.min_nodes", ("", None))[1] is not None:
        raise UserError("--nodes M-N: a range is for Slurm's jobs; give one number")
    if local and threading.current_thread() is not threading.main_thread():
        raise UserError("local=True: call it in the main thread, whose signals end the run")


class RunLayout(NamedTuple):
    """What was chosen of a run: its nodes, and the settings that were open."""

    config: RunConfig
    nodes: int
    run: RunDir
    mesh: Mesh


class Checks(NamedTuple):
    """What the checks of a layout returned."""

    fields: Json  # of `PreparedRun`: fit, warnings, compiles
    errors: Sequence[ConfigError]
    limit_faults: Faults


def prepare(request: RunRequest) -> PreparedRun:
    """Check a run, then write its configuration, plan and scripts.

    Nothing is written before all checks have passed, and nothing at all in a dry run.

    Raises:
        ConfigError: the layout does not fit, or the backend cannot train the run.
        DataError: an input is unusable.
        RunError: the name is taken, or the initial weights are no checkpoint of this model.
    """
    cluster = request.config.cluster
    if (reason := request.config.planning_only) is not None:
        raise ConfigError(
            f"cluster profile {cluster.name} is for planning only",
            [f"{reason}; choose another --cluster (`slurmllm recipes --clusters`)"],
        )
    if request.run is not None:
        require_own(request.run, cluster.trusted_group)
    layout = choose(request)
    checks = check(request, layout)
    if request.dry_run:
        return _preview(request, layout, checks)
    for error in checks.errors:
        raise error
    if checks.limit_faults["train"]:
        raise _limit_error(layout, checks, STAGES)
    config = _with_weights(request, layout.config)
    if request.fetch is not None and (missing := locate(config, request.root).missing):
        request.fetch(config, request.root, missing)
    config = _with_inputs(request, config, build=True)
    run = layout.run
    if request.run is None:
        run = claim_run(request.folder or request.root, request.name, config.recipe.name, cluster)
        if request.claimed is not None:
            # It takes the run's lock: of two that reuse a directory only one goes on.
            request.claimed(run)
            remove_half_record(run)
    try:
        # After the claim: an adopted archive's manifest is stored in the run's directory, and may
        # bring the micro batch that its run measured.
        graphs_from = None
        if request.find_graphs:
            graphs_from = _find_graphs(request, layout.nodes, config, run)
        prepared = render_run(
            config,
            layout.nodes,
            run,
            graphs_from=graphs_from,
            is_new=request.run is None,
            **checks.fields,
        )
        if graphs_from is None and checks.limit_faults["precompile"]:
            raise _limit_error(layout, checks, ("precompile",))
        prepared = avoid_excluded(prepared, request)
        write_run(prepared)
    except BaseException:
        if request.run is None:
            remove_unsubmitted(run)
        raise
    return prepared


def _preview(request: RunRequest, layout: RunLayout, checks: Checks) -> PreparedRun:
    """Return what a dry run shows, with the errors that `prepare` would raise."""
    config = _with_weights(request, layout.config)
    unstartable = []
    if any(checks.limit_faults.values()):
        unstartable.append(_limit_error(layout, checks, STAGES))
    if config.recipe.worker.has_model:
        located = locate(config, request.root)
        missing = missing_data(config, request.root, located)
        if request.fetch is not None and located.missing:
            log.warning(
                "a submit with --fetch downloads the data set %s to %s first",
                " and ".join(located.missing),
                data_folder(config, request.root),
            )
            if "corpus" in located.values:
                missing = []  # without a corpus among them, it would fail after the download
        if missing:
            unstartable.append(ConfigError(f"{config.recipe.name} has no training data", missing))
    config = _with_inputs(request, config, build=False)
    prepared = render_run(
        config,
        layout.nodes,
        layout.run,
        refused=checks.errors,
        unstartable=unstartable,
        **checks.fields,
    )
    return prepared if unstartable else avoid_excluded(prepared, request)


def _limit_error(layout: RunLayout, checks: Checks, stages: Sequence[Stage]) -> ConfigError:
    return ConfigError(
        f"Slurm can never start {layout.config.recipe.name} like this",
        [fault for stage in stages for fault in checks.limit_faults[stage]],
    )


def check(request: RunRequest, layout: RunLayout) -> Checks:
    """Check the settings of a run; its weights and data are checked later."""
    config = layout.config
    fit = None
    errors = []
    recipe = config.recipe
    if faults := site_faults(config, request.local):
        errors.append(ConfigError(f"{recipe.name}: these settings cannot be used here", faults))
    if recipe.worker.has_model:
        if faults := _setting_faults(request, layout):
            errors.append(
                ConfigError(
                    f"backend {config.backend} cannot train {recipe.name} like this", faults
                )
            )
        # The fewest nodes: shards of the model are the largest there.
        fewest = min(layout.nodes, recipe.slurm.min_nodes or layout.nodes)
        if request.check_layout and config.cluster.hardware is not None:
            from slurmllm.plan.choose_layout import check_fit

            fit = check_fit(
                config,
                fewest,
                load_environment(config.backend).unsupported,
                reuse.measured_micro_batch(layout.run),
                chosen=request.config.recipe.parallel.auto,
                force=request.force,
                resumes=request.run is not None,
            )
        if fit is not None and fit.refusals:
            title = (
                f"the planner predicts that {recipe.name} does not fit into the memory of "
                f"{fewest} node(s) of {config.cluster.name}; --force submits all the same"
            )
            errors.append(ConfigError(title, fit.refusals))
    compiles = request.precompile == "always"
    if request.precompile == "auto":
        compiles = needs_precompile(config)
    warnings, limit_faults = check_jobs(request.slurm, config, layout.run, layout.nodes, compiles)
    warnings = [*(fit.warnings if fit is not None else ()), *warnings]
    if config.recipe.worker.has_model:
        warnings += unfinished_decay(config.recipe)
    if config.is_beta:
        warnings.append("TorchNeuron, by which backend native uses a Trainium, is a public beta")
    return Checks({"fit": fit, "warnings": warnings, "compiles": compiles}, errors, limit_faults)


def _with_weights(request: RunRequest, config: RunConfig) -> RunConfig:
    """Return the configuration with the path of its initial weights, which are checked."""
    if not request.check_weights or not config.recipe.worker.has_model:
        return config
    if (weights := config.recipe.train.init_from) is None:
        return config
    from slurmllm.train.checkpoint.catalogue import find_checkpoint, newest_verified
    from slurmllm.train.checkpoint.state import require_model

    source = find_checkpoint(weights, request.root)
    if isinstance(source, RunDir):  # the workers verify the checksums
        source, _ = newest_verified(source, checksums=False)
    source = source.absolute()
    require_model(source, config.recipe.model)
    return config.with_settings("train", init_from=str(source))


def _with_inputs(request: RunRequest, config: RunConfig, build: bool) -> RunConfig:
    """Return the configuration with absolute paths of its inputs, which are checked."""
    if not config.recipe.worker.has_model:
        return with_folder(config)
    config = resolve_inputs(config, request.root, build)
    if config.is_trial:
        log.warning(
            "TRIAL RUN: with --data builtin, %s trains on the source files of this machine's "
            "Python instead of %s; its losses cannot be compared with the recipe's",
            config.recipe.name,
            " and ".join(config.recipe.data.sources) or "a corpus",
        )
    return config


def choose(request: RunRequest) -> RunLayout:
    """Return the run's directory, with `parallel.auto` and the number of nodes resolved."""
    config = request.config
    if request.precompile == "never" and config.recipe.worker.has_model:
        config = config.with_settings("train", incomplete_graphs="compile")
    run = request.run or new_run(request.folder or request.root, request.name, config.recipe.name)
    unsupported = load_environment(config.backend).unsupported
    if config.recipe.parallel.auto or config.open_settings():
        config = _resolve_open(request, config, unsupported)
    nodes = _largest_node_count(config, request.nodes)
    try:
        config = adapt_to_nodes(config, nodes)
        mesh = reuse.make_run_mesh(config, nodes, run)
    except MeshError as error:
        if not request.check_layout or config.cluster.hardware is None:
            raise
        from slurmllm.plan.choose_layout import mesh_fixes

        raise ConfigError(
            error.title,
            [error.rule, *mesh_fixes(config, nodes, unsupported, resumes=request.run is not None)],
        ) from None
    return RunLayout(config, nodes, run, mesh)


def _resolve_open(request: RunRequest, config: RunConfig, unsupported: Unsupported) -> RunConfig:
    """Return the configuration with the settings that the planner chooses.

    Without hardware figures a recipe's `parallel: auto` is data parallelism alone.
    """
    from slurmllm.plan.choose_layout import check_fit, choose_parallel

    nodes = request.nodes
    auto = config.origins.get("parallel.auto", "default")
    source = "no hardware figures"
    if config.cluster.hardware is None and not auto.startswith("--set"):
        if config.recipe.parallel.auto:
            log.warning(
                "profile %s has no hardware figures to choose a layout by: data parallelism "
                "alone; `slurmllm calibrate` measures them, --set parallel.tensor=… sets degrees",
                config.cluster.name,
            )
        config = config.with_settings("train", dict.fromkeys(config.open_settings(), source))
        return config.with_settings("parallel", {"parallel.auto": source}, auto=False)
    resumes = request.run is not None
    fewest = config.recipe.slurm.min_nodes or nodes
    choose = partial(
        choose_parallel, config, unsupported=unsupported, resumes=resumes, force=request.force
    )
    chosen = choose(nodes)
    if fewest < nodes:
        with suppress(ConfigError):  # shards are the largest on the fewest nodes
            fit = check_fit(chosen, fewest, unsupported, chosen=True)
            if fit is not None and fit.refusals:
                return adapt_to_nodes(choose(fewest), nodes)
    return chosen


def _setting_faults(request: RunRequest, layout: RunLayout) -> list[str]:
    """Return why the backend cannot train a run with these settings."""
    config = layout.config
    mesh = layout.mesh
    recipe = config.recipe
    faults = list(load_environment(config.backend).unsupported(config))
    weights = recipe.train.finetune
    if weights and not config.is_trial and recipe.train.init_from is None:
        fix = (
            "add --set train.init_from=FOLDER, a checkpoint of another run or one that "
            "`slurmllm checkpoint import` made"
        )
        if isinstance(weights, str):
            fix = (
                f"get them with `slurmllm checkpoint import {weights} --out weights`, then add "
                "--set train.init_from=weights"
            )
        faults.append(
            "train.init_from: not set, and this recipe starts from trained weights "
            f"(train.finetune); {fix}"
        )
    if request.precompile == "never" and mesh.unmeasured:
        fix = "leave out --precompile never, or set a number"
        faults.append(f"train.micro_batch: auto: the precompile stage measures it; {fix}")
    profile = recipe.profile
    workers = mesh.world_size
    if profile.steps is not None and max(profile.ranks) >= workers:
        rank = max(profile.ranks)
        fix = f"choose ranks from 0 to {workers - 1}"
        fault = f"profile.ranks: {rank}: the run has {workers} workers; {fix}"
        if request.run is None:
            faults.append(fault)
        else:  # the profile may be over
            log.warning("%s, or profile.steps=null", fault)
    if not faults:
        faults += plugin_faults(config)
    if request.run is not None:
        warn_if_changed(config, request.run)
    return faults


def _largest_node_count(config: RunConfig, nodes: int) -> int:
    """Return the largest possible node count up to `nodes`, if slurm.min_nodes permits fewer."""
    fewest = config.recipe.slurm.min_nodes
    if fewest is None or fewest >= nodes:
        return nodes
    title = "the range of nodes is not possible"
    option = f"--nodes {fewest}-{nodes}"
    if load_environment(config.backend).precompile_nodes(config, nodes) > replica_nodes(config):
        raise ConfigError(
            title,
            [f"{option}: graphs of backend {config.backend} are for one node count; give one"],
        )
    possible = possible_nodes(config, fewest, nodes)
    if fewest not in possible:
        choices = ", ".join(map(str, possible)) or "none of them"
        raise ConfigError(
            title,
            [f"{option}: {fewest} is not possible with this mesh and global batch; {choices} is"],
        )
    if possible[-1] < nodes:
        log.warning("%s: %d nodes at most, by mesh and global batch", option, possible[-1])
    return possible[-1]


def site_faults(config: RunConfig, local: bool) -> list[str]:
    """Return the faults of a run's settings for this site that are known on this machine."""
    recipe = config.recipe
    notify = recipe.slurm.notify
    faults = setup_faults(config.cluster.setup)
    faults += container_faults(config.cluster, local)
    if config.cluster.runs_group and (reason := group_error(config.cluster.runs_group)):
        faults.append(f"cluster.runs_group: {reason}; name one of your groups (`id`)")
    if notify.command and shutil.which(notify.command[0]) is None:
        faults.append(
            f"slurm.notify.command: {notify.command[0]} is no program that can be run here; "
            "name an executable file with its folder"
        )
    if recipe.trackers and config.cluster.trackers.network:
        faults += missing_for_trackers(config, recipe.trackers)
    suite = recipe.evaluate and recipe.evaluate.suite
    file = f"{suite}{'' if '/' in str(suite) else '.yaml'}"
    if suite and recipe.command is not None:
        faults.append("evaluate.suite reads only slurmllm's own checkpoints; set evaluate.command")
    # An absolute path replaces the folder of the shipped ones.
    elif suite and not (shipped_dir() / "configs" / "evaluation" / file).is_file():
        faults.append(f"evaluate.suite: {suite} is neither a shipped suite nor a file")
    try:
        read_token(config)
    except ConfigError as error:
        faults += error.faults
    return faults


def render_run(config: RunConfig, nodes: int, run: RunDir, **fields: Any) -> PreparedRun:
    """Compute mesh and scripts, with `parallel.auto` resolved; write nothing; raise ConfigError."""
    mesh = reuse.make_run_mesh(config, nodes, run)
    python = config.cluster.python or sys.executable
    return PreparedRun(
        config,
        mesh,
        run,
        {stage: render(stage, config, run, nodes, python) for stage in STAGES},
        **fields,
    )


def write_run(prepared: PreparedRun) -> None:
    run = prepared.run
    make_folders(prepared.config.cluster, run.script("train").parent, run.logs)
    save(prepared.config, run)
    save_mesh(prepared.mesh, run.plan)
    for stage, script in prepared.scripts.items():
        write_atomic(run.script(stage), script)


def _find_graphs(request: RunRequest, nodes: int, config: RunConfig, run: RunDir) -> str | None:
    """Return the run that compiled all graphs of this one; None if the precompile stage must run.

    Another run's archive is adopted if it is complete and trusted. Raises StorageError.
    """
    local = request.local
    group = config.cluster.trusted_group
    if request.precompile == "always":
        reuse.delete_manifest(run)
        return None
    if not needs_precompile(config):
        return None
    if os.path.lexists(run.graphs_manifest):
        try:
            load_manifest(run, group)
        except StorageError as error:
            log.warning("ignoring the compiled graphs of %s: %s", run.name, error)
            reuse.delete_manifest(run)
    # `compile` trains with an incomplete archive: what is missing is compiled on the way.
    any_ok = config.recipe.train.incomplete_graphs == "compile" and run.graphs_manifest.is_file()
    if any_ok or reuse.has_all_graphs(config, nodes, local, run):
        return GraphManifest.load(run.graphs_manifest).reused_from or run.name
    refused = []
    for source in reuse.find(config, nodes, local, run):
        make_folders(config.cluster, run.graphs)
        reason = reuse.link_or_copy_graphs(source, run, group)
        if reason is None:
            return GraphManifest.load(run.graphs_manifest).reused_from
        refused.append(f"run {source.name!r}, which has them: {reason}")
    if refused:
        log.warning(
            "compiling the graphs, not using those of %s%s; --set cluster.trusted_group=GROUP uses "
            "those of a group's members",
            refused[0],
            f" (and {len(refused) - 1} more)" if refused[1:] else "",
        )
    return None
