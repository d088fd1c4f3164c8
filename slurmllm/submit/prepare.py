"""What `submit` and `resume` share: check, write the run directory, hand the jobs over."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError, DataError, RunError, SlurmError, StorageError
from slurmllm.graphs import reuse
from slurmllm.plan.mesh import Mesh, make_mesh, save_mesh
from slurmllm.records import GraphManifest, JobsRecord, Submission
from slurmllm.rundir import RUN_NAME, RunDir, Stage, is_run, write_atomic
from slurmllm.slurm.client import SlurmClient, SlurmCommands
from slurmllm.submit.render import render

if TYPE_CHECKING:
    from slurmllm.plan.fit_check import Outlook

STDLIB = "stdlib"
Precompile = Literal["auto", "always"]


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and can be written and submitted."""

    config: RunConfig
    mesh: Mesh
    run: RunDir
    scripts: dict[Stage, str]
    outlook: Outlook | None = None


def prepare(config: RunConfig, nodes: int, run: RunDir, avoid: Sequence[str] = ()) -> Prepared:
    """Work out mesh and scripts; touches nothing.

    Args:
        config: The configuration.
        nodes: Of the train stage.
        run: The run's directory, which need not be there yet.
        avoid: Nodes that the jobs keep off, besides those of `slurm.exclude`.

    Raises:
        ConfigError: the mesh does not fit or a value cannot go into a script.
    """
    mesh = make_mesh(config, nodes, reuse.measured_micro_batch(run))
    given = config.recipe.slurm
    exclude = ",".join([*([given.exclude] if given.exclude else []), *avoid]) or None
    slurm = given.model_copy(update={"exclude": exclude})
    away = replace(config, recipe=config.recipe.model_copy(update={"slurm": slurm}))
    scripts = {s: render(s, away, run, nodes, sys.executable) for s in stages(None)}
    return Prepared(config, mesh, run, scripts)


def settled(config: RunConfig, nodes: int) -> RunConfig:
    """Have the planner choose the degrees that `parallel.auto` leaves to it.

    Raises:
        ConfigError: nothing fits, or the profile says nothing of its hardware.
    """
    if not config.recipe.parallel.auto:
        return config
    from slurmllm.plan.auto_parallel import settle

    return settle(config, nodes, load_environment(config.backend).unsupported)


def with_outlook(prepared: Prepared, chosen: bool, force: bool) -> Prepared:
    """Add what the planner predicts of the run, and print its warnings.

    Args:
        prepared: The run.
        chosen: Whether the planner has just chosen the layout.
        force: Whether the run goes on even where it is predicted not to fit.
    """
    config, nodes = prepared.config, prepared.mesh.nodes
    if config.cluster.hardware is None:
        return prepared
    from slurmllm.plan.fit_check import outlook

    unsupported = load_environment(config.backend).unsupported
    measured = reuse.measured_micro_batch(prepared.run)
    found = outlook(config, nodes, unsupported, measured, chosen=chosen, force=force)
    for warning in found.warnings if found else ():
        click.echo(f"warning: {warning}", err=True)
    return replace(prepared, outlook=found)


def check_fits(prepared: Prepared) -> None:
    """Refuse what the planner predicts not to fit into the workers' memory.

    Raises:
        ConfigError: with the parts, and what would fit.
    """
    found, recipe = prepared.outlook, prepared.config.recipe.name
    if found is not None and found.refusals:
        where = f"{prepared.mesh.nodes} node(s) of {prepared.config.cluster.name}"
        raise ConfigError(
            f"the planner predicts that {recipe} does not fit into the memory of {where}",
            [*found.refusals, "where the prediction is wrong, --force submits all the same"],
        )


def check_trainable(config: RunConfig) -> None:
    """Refuse what the backend of this version cannot train, or lacks the weights to begin with.

    Raises:
        ConfigError: with every reason.
    """
    reasons = refusals(config)
    if reasons:
        raise ConfigError(
            f"backend {config.backend} cannot train {config.recipe.name} like this", reasons
        )


def refusals(config: RunConfig) -> list[str]:
    """Why it cannot be trained; one line a reason."""
    reasons = load_environment(config.backend).unsupported(config)
    train = config.recipe.train
    if train.finetune and train.init_from is None:
        reasons.append(
            "train.init_from: not set, and this recipe starts from trained weights "
            "(train.finetune); add --set train.init_from=FOLDER, a checkpoint of another run or "
            "one that `slurmllm checkpoint import` made"
        )
    return reasons


def with_weights(config: RunConfig) -> RunConfig:
    """Settle the weights to start from, where the recipe names some: an absolute path, looked at.

    Raises:
        RunError: it is no checkpoint, or another model's.
        StorageError: it is damaged.
    """
    named = config.recipe.train.init_from
    if named is None:
        return config
    from slurmllm.checkpoint.origin import require_model

    source = Path(named).absolute()
    require_model(source, config.recipe.model)
    return config.with_init_from(str(source))


def with_inputs(config: RunConfig, root: Path, build: bool) -> RunConfig:
    """Settle corpus and tokenizer: absolute paths, `stdlib` built where asked for, all checked.

    Args:
        config: The resolved configuration.
        root: The folder of all runs; built-in data lie in its `.data`.
        build: Whether to build what is missing; else built-in data are left as they are named.

    Raises:
        ConfigError: none is set.
        DataError: one that cannot serve.
    """
    data = config.recipe.data
    missing = [
        f"data.{name}: not set; add --set data.{name}={example} ({maker})"
        for name, value, example, maker in (
            ("corpus", data.corpus, "corpus.arrow", "made by `slurmllm data build`"),
            ("tokenizer", data.tokenizer, "tokenizer.json", "or `slurmllm tokenizer train`"),
        )
        if value is None
    ]
    if data.corpus is None:
        if not build:
            return config
        raise ConfigError(f"{config.recipe.name} has nothing to read yet", missing)
    named = [share.path for share in data.corpora] + ([data.tokenizer] if data.tokenizer else [])
    if STDLIB in named and not build:
        _require_there(config)
        return config
    built: tuple[Path, Path] | None = None
    if STDLIB in named:
        from slurmllm.corpus.builtin import ensure_stdlib

        built = ensure_stdlib(root / ".data")

    def settled(path: str, place: int) -> str:
        chosen = built[place] if built is not None and path == STDLIB else Path(path)
        return str(chosen.absolute())

    corpora = tuple(
        share.model_copy(update={"path": settled(share.path, 0)}) for share in data.corpora
    )
    tokenizer = None if data.tokenizer is None else settled(data.tokenizer, 1)
    from slurmllm.data.check import check_corpora

    check_corpora(
        [(Path(share.path), share.weight) for share in corpora],
        None if tokenizer is None else Path(tokenizer),
        config.recipe.model.vocab_size,
        config.recipe.model.seq_len,
        config.recipe.train.global_batch,
        data.validation,
        data.mask,
    )
    corpus = corpora[0].path if isinstance(data.corpus, str) else corpora
    return config.with_data(corpus, tokenizer)


def _require_there(config: RunConfig) -> None:
    """That what is named is there, where nothing is to be built."""
    data = config.recipe.data
    for option, path in [
        *(("data.corpus", share.path) for share in data.corpora),
        ("data.tokenizer", data.tokenizer or STDLIB),
    ]:
        # A tokenized corpus may be named by what its two files have in common.
        files = (Path(path), Path(f"{path}.idx"))
        if path != STDLIB and not any(file.is_file() for file in files):
            raise DataError(f"{option}: {path!r} is no file; name one that exists")


def new_run(root: Path, name: str | None, recipe: str) -> RunDir:
    """The directory of a run to come: `name`, or the recipe's name with the next free number.

    Raises:
        RunError: the name is taken or no name for a directory.
    """
    if name is None:
        taken = {entry.name for entry in root.iterdir()} if root.is_dir() else set()
        number = next(n for n in range(1, 10**6) if f"{recipe}-{n:03d}" not in taken)
        return RunDir(root / f"{recipe}-{number:03d}")
    if not RUN_NAME.fullmatch(name):
        raise RunError(
            f"run name {name!r}: must be letters, digits, '.', '_' and '-', at most 100, "
            "beginning with a letter or digit; choose another --name"
        )
    run = RunDir(root / name)
    if run.path.exists():
        if is_run(run.path):
            from slurmllm.config.load import load

            owner = load(run.config).recipe.name
            hint = f"`slurmllm resume {name}` continues it" if owner == recipe else "not this one"
            raise RunError(
                f"run name {name!r} is taken: {run.path} is a run of recipe {owner!r} ({hint}); "
                "choose another --name"
            )
        raise RunError(f"run name {name!r} is taken: {run.path} exists; choose another --name")
    return run


def claim_run(root: Path, name: str | None, recipe: str) -> RunDir:
    """Make the run's directory: of two submits at the same moment one gets the name.

    Raises:
        RunError: the name is taken.
        StorageError: the file system refuses.
    """
    while True:
        run = new_run(root, name, recipe)
        try:
            root.mkdir(parents=True, exist_ok=True)
            run.path.mkdir()
        except FileExistsError:
            if not root.is_dir():
                raise RunError(f"--runs-dir: {root} is no folder; name another one") from None
            continue  # another submit was faster: look again
        except NotADirectoryError:
            raise RunError(f"--runs-dir: {root} lies below a file; name another one") from None
        except OSError as error:
            raise StorageError(
                f"cannot make {run.path}: {error.strerror or error}; choose another --runs-dir"
            ) from error
        return run


def write_run(prepared: Prepared) -> None:
    """Write (or, at a resume, rewrite) the run directory's configuration, plan and scripts."""
    run = prepared.run
    write_atomic(run.config, prepared.config.to_yaml())
    save_mesh(prepared.mesh, run.plan)
    for stage, script in prepared.scripts.items():
        write_atomic(run.script(stage), script)
    run.logs.mkdir(parents=True, exist_ok=True)


def take_graphs(
    config: RunConfig, nodes: int, local: bool, run: RunDir, precompile: Precompile
) -> str | None:
    """See whether the run's graphs are compiled already; takes another run's archive if so.

    Args:
        config: The configuration, inputs settled.
        nodes: Of the train stage.
        local: Whether they are launchers on this machine.
        run: The run, its directory made.
        precompile: `always`: whatever there is, the run compiles its own.

    Returns:
        The run that compiled the graphs, None where the precompile stage must do it.

    Raises:
        StorageError: the shared file system refuses.
    """
    if precompile == "always":
        reuse.forget(run)
        return None
    going_on = config.recipe.train.incomplete_graphs == "compile" and reuse.usable(run)
    if going_on or reuse.serves(config, nodes, local, run, run):
        return GraphManifest.load(run.graphs_manifest).reused_from or run.name
    source = reuse.find(config, nodes, local, run)
    taken = source is not None and reuse.adopt(source, run)
    return GraphManifest.load(run.graphs_manifest).reused_from if taken else None


def stages(graphs_from: str | None) -> tuple[Stage, ...]:
    """The stages to run, by where the graphs come from."""
    return ("train",) if graphs_from is not None else ("precompile", "train")


def jobs_of(run: RunDir) -> JobsRecord:
    """What was submitted so far."""
    return JobsRecord.load(run.jobs) if run.jobs.is_file() else JobsRecord()


def submit_jobs(
    prepared: Prepared, stages: Sequence[Stage], client: SlurmClient | None = None
) -> Submission:
    """Hand the scripts to sbatch, each after the success of the one before, and record the ids.

    Raises:
        SlurmError: sbatch refused; a precompile job that was taken already is cancelled.
    """
    client = client or SlurmCommands()
    before = jobs_of(prepared.run)
    sent = _submission(prepared, local=False)
    for stage in stages:
        try:
            job = client.submit(prepared.run.script(stage), after_ok=sent.precompile_job)
        except SlurmError as error:
            raise SlurmError(_taken_back(prepared.run, before, sent, client, str(error))) from error
        sent = sent.model_copy(update={f"{stage}_job": job})
        # Written at once: whatever comes next, no job is without a record.
        JobsRecord(submissions=(*before.submissions, sent)).save(prepared.run.jobs)
    return sent


def _taken_back(
    run: RunDir, before: JobsRecord, sent: Submission, client: SlurmClient, words: str
) -> str:
    """Cancel what was submitted before sbatch refused; returns what to tell."""
    words += "; --dry-run shows the scripts"
    if sent.precompile_job is None:
        return words
    try:
        client.cancel([sent.precompile_job])
    except SlurmError as error:
        return (
            f"{words}\n  and the precompile job is still there: {error}; "
            f"`scancel {sent.precompile_job}` ends it, {run.path} is kept"
        )
    if before.submissions:
        before.save(run.jobs)
    else:
        run.jobs.unlink(missing_ok=True)
    return words


def local_submission(prepared: Prepared) -> Submission:
    """The record of a run on this machine, in this process."""
    submission = _submission(prepared, local=True, pid=os.getpid(), host=socket.gethostname())
    record_submission(prepared.run, submission)
    return submission


def _submission(prepared: Prepared, **fields: object) -> Submission:
    attempts = prepared.run.attempts("train")
    return Submission.model_validate(
        {
            "submitted_at": time.time(),
            "nodes": prepared.mesh.nodes,
            "first_attempt": attempts[-1].number + 1 if attempts else 0,
            **fields,
        }
    )


def record_submission(run: RunDir, submission: Submission) -> None:
    """Add a submission to jobs.json."""
    JobsRecord(submissions=(*jobs_of(run).submissions, submission)).save(run.jobs)


def note_cancelled(run: RunDir) -> None:
    """Write down that the last submission was cancelled, for those whom no accounting tells."""
    *before, last = jobs_of(run).submissions
    cancelled = last.model_copy(update={"cancelled_at": time.time()})
    JobsRecord(submissions=(*before, cancelled)).save(run.jobs)


def forget(run: RunDir) -> None:
    """Remove the directory of a run that has no jobs: its name is free again."""
    if run.jobs.is_file():
        return
    shutil.rmtree(run.path, ignore_errors=True)
