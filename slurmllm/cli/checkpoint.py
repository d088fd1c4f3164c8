"""`slurmllm checkpoint`: list, verify, import and export checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from slurmllm.cli import commands, options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import CheckpointError, RunError, SlurmllmError, UserError
from slurmllm.core.format import (
    Json,
    format_age,
    format_bytes,
    format_count,
    format_plural,
)
from slurmllm.core.run.rundir import RunDir, find_run

if TYPE_CHECKING:
    from slurmllm.core.config.command import CommandConfig
    from slurmllm.train.checkpoint.catalogue import CheckpointEntry


def _parse_size(ctx: click.Context, _: click.Parameter, size_text: str) -> int:
    """Return the bytes of `5GB`, `500MB` or `2GiB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size_text, re.IGNORECASE)
    if match is not None:
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        size = int(float(number) * (1024 if binary else 1000) ** power)
        if size > 0:
            return size
    raise UserError(f"--shard-size {size_text}: write a size such as 5GB, 500MB or 2GiB")


out = click.option(
    "--out", required=True, metavar="DIR", help="Folder to create; it must not exist yet."
)
of_run = click.option("--run", metavar="RUN", help="Read CKPT as a step of RUN (RUN@CKPT).")
dtype = options.choice(
    "--dtype",
    "fp32 bf16 source",
    "Type of the weights to write; source keeps the stored dtype.",
    default="source",
)
shard_size = click.option(
    "--shard-size",
    default="5GB",
    callback=_parse_size,
    help="Maximum size of a weight file; peak memory is similar.",
)


@click.group(cls=commands.Verbs)
def checkpoint() -> None:
    """List, verify, import and export checkpoints."""


@checkpoint.command("list")
@options.run_argument("run")
@options.flag("--verify verifying", "Verify sizes and checksums of all files but replicas'.")
@options.runs_dir
@options.as_json
def list_(run: str, verifying: bool, runs_dir: Path, as_json: bool) -> None:
    """List the checkpoints of RUN and their replicas.

    Replicas are copies in the folder or at the URL that the setting checkpoint.replica names.
    """
    from slurmllm.core.config.load import load
    from slurmllm.train.checkpoint.catalogue import CheckpointEntry, list_checkpoints
    from slurmllm.train.checkpoint.foreign import command_of
    from slurmllm.train.checkpoint.replicas import open_replica

    run_dir = find_run(run, runs_dir)
    if (command := command_of(run_dir)) is not None:
        _list_trainers(run_dir, command, verifying, as_json)
        return
    entries = list_checkpoints(run_dir)
    if verifying:
        entries = _verified(entries)
    try:
        replica = open_replica(load(run_dir.config).recipe.checkpoint, run_dir.name)
        if replica is not None:
            entries += [
                CheckpointEntry(run_dir.checkpoint(s), replica.manifest(s), None, replica.url(s))
                for s in replica.steps()
            ]
    except SlurmllmError as error:  # the run's own checkpoints are listed all the same
        options.warn(error)
    if as_json:
        listed = [{"replica": e.replica_url is not None, **_entry_json(e)} for e in entries]
        options.echo_json({"run": run_dir.name, "checkpoints": listed})
        return
    if not entries:
        click.echo(f"run {run_dir.name} has no checkpoint yet")
        return
    rows = []
    for entry in entries:
        state = "not checked" if entry.faults is None else "; ".join(entry.faults) or "verified"
        if entry.replica_url is not None:
            state = f"replica in {entry.replica_url}"
        row = [str(entry.step), "", "", "", "", state]
        if (manifest := entry.manifest) is not None:
            saved = f"{datetime.fromtimestamp(manifest.saved_at):%Y-%m-%d %H:%M:%S}"
            size = format_bytes(entry.num_bytes)
            row[1:5] = [saved, size, str(manifest.attempt), str(manifest.world_size)]
        rows.append(row)
    print_table(("step", "saved", "size", "attempt", "workers", "state"), rows, fold="state")


@checkpoint.command()
@options.run_argument("target", metavar="CKPT")
@options.runs_dir
@options.as_json
def verify(target: str, runs_dir: Path, as_json: bool) -> None:
    """Verify the files of a checkpoint: RUN@STEP, RUN@latest, a folder; or RUN: all of the run.

    Exit codes: 0 all sizes and checksums are correct, 4 a file is missing or damaged.
    """
    from slurmllm.train.checkpoint.catalogue import find_checkpoint, list_checkpoints, read_entry
    from slurmllm.train.checkpoint.foreign import command_of

    run = find_checkpoint(target, runs_dir, trainers=True)
    if isinstance(run, RunDir) and (command := command_of(run)) is not None:
        rows = _list_trainers(run, command, True, as_json)
        if not rows or any(row["complete"] and row["faults"] for row in rows):
            raise Exit(CheckpointError.exit_code)
        return
    if isinstance(run, Path):
        entries = [read_entry(run.absolute())]
    else:
        entries = list_checkpoints(run)[-1 if target.endswith("@latest") else 0 :]
        if not entries:
            raise RunError(
                f"run {run.name} has no checkpoint yet; see `slurmllm status {run.name}`"
            )
    entries = _verified(entries)
    if as_json:
        options.echo_json({"checkpoints": [_entry_json(entry) for entry in entries]})
    else:
        for entry in entries:
            files = len(entry.manifest.files) if entry.manifest else 0
            state = format_plural(len(entry.faults), "error") if entry.faults else "verified"
            size = format_bytes(entry.num_bytes)
            click.echo(f"{entry.directory}: {state}; {files} files, {size}")
            for fault in entry.faults or ():
                click.echo(f"  {fault}")
    if any(entry.faults for entry in entries):
        raise Exit(CheckpointError.exit_code)


@checkpoint.command("import")
@click.argument("source", metavar="DIR", type=click.Path())
@out
@dtype
@shard_size
@options.as_json
def import_(source: str, out: str, dtype: str, shard_size: int, as_json: bool) -> None:
    """Import the Hugging Face model folder DIR as a checkpoint.

    DIR may be hf://ORG/NAME[@REVISION], a model of the hub, which is downloaded into its cache.
    It is of a family of `model.family`, or of yours, with weights in safetensors files. A run
    starts from the result by train.init_from=DIR.
    """
    from slurmllm.core.display.progress import input_progress
    from slurmllm.train.checkpoint.folder import require_absent
    from slurmllm.train.checkpoint.formats.model_folders import model_folder

    target = Path(out)
    began = time.monotonic()
    require_absent(target)
    folder = model_folder(source)  # before torch is imported, which takes seconds
    from slurmllm.train.checkpoint.formats.importing import plan_import, run_import
    from slurmllm.train.checkpoint.formats.safetensors_files import WEIGHT_TYPES

    plan = plan_import(folder, WEIGHT_TYPES[dtype])
    with input_progress("importing", sum(plan.sizes_bytes)) as on_progress:
        files = run_import(plan, target, shard_size, on_progress).files
    num_bytes = sum(file.bytes for file in files)
    num_files = len(files) + 1  # the manifest does not list itself
    fields = {
        "checkpoint": str(target),
        "source": source,
        "architecture": plan.config.architecture,
        "model": plan.config.model.model_dump(mode="json"),
        "tokenizer": sorted(plan.tokenizer.files),
        "files": num_files,
        "bytes": num_bytes,
        "not_finite": plan.not_finite,  # empty: such weights are refused
    }
    tokenizer = f"tokenizer: {target / 'tokenizer' / 'tokenizer.json'}"
    if "tokenizer.json" not in plan.tokenizer.files:
        tokenizer = f"{source} has no tokenizer.json: name the tokenizer in data.tokenizer"
    summary = (
        f"{plan.config.architecture}, {format_count(plan.num_parameters)} parameters, "
        f"{format_bytes(num_bytes)} in {num_files} files"
    )
    use = f"train from it: --set train.init_from={target}"
    _report(as_json, target, began, fields, summary, tokenizer, use)


@checkpoint.command()
@options.run_argument("source", metavar="CKPT")
@out
@of_run
@dtype
@shard_size
@click.option(
    "--tokenizer",
    "tokenizer_file",
    metavar="FILE",
    type=options.FILE,
    help="A tokenizer.json.  [default: the run's or the imported one]",
)
@options.runs_dir
@options.as_json
def export(
    source: str,
    out: str,
    run: str | None,
    dtype: str,
    shard_size: int,
    tokenizer_file: Path | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Export a checkpoint as a Hugging Face model folder.

    CKPT is RUN or RUN@latest (the newest checkpoint that verifies), RUN@STEP, or a checkpoint
    folder. AutoModelForCausalLM and AutoTokenizer load the result.
    """
    from slurmllm.core.display.progress import input_progress
    from slurmllm.train.checkpoint.formats.exporting import export_model

    began = time.monotonic()
    name = source if run is None else f"{run}@{source}"
    exported = export_model(
        name, runs_dir, Path(out), dtype, tokenizer_file, shard_size, input_progress
    )
    num_files = sum(name.endswith(".safetensors") for name in exported.files)
    summary = (
        f"{format_count(exported.num_parameters)} parameters, {format_bytes(exported.num_bytes)} "
        f"of weights in {format_plural(num_files, 'file')}, from {exported.checkpoint}"
    )
    more = (
        []
        if exported.tokenizer
        else ["no tokenizer is known: --tokenizer FILE adds one to the weights"]
    )
    _report(as_json, exported.path, began, exported.to_dict(), summary, *more)


def _report(
    as_json: bool, target: Path, began: float, fields: Json, summary: str, *more: str
) -> None:
    seconds = time.monotonic() - began
    if as_json:
        options.echo_json({**fields, "seconds": round(seconds, 3)})
    else:
        click.echo("\n".join((f"{target}: {summary}, {seconds:.1f} s", *more)))


def _verified(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    """Verify checkpoints under one progress bar."""
    from slurmllm.core.display.progress import input_progress
    from slurmllm.train.checkpoint.catalogue import verify_entry

    verified = []
    before = 0  # bytes of the checkpoints verified so far
    with input_progress("verifying", sum(entry.num_bytes for entry in entries)) as on_progress:

        def on_entry_progress(done_bytes: int) -> None:
            on_progress(before + done_bytes)

        for entry in entries:
            verified.append(verify_entry(entry, on_entry_progress))
            before += entry.num_bytes
    return verified


def _entry_json(entry: CheckpointEntry) -> Json:
    manifest = entry.manifest
    fields = manifest.model_dump(mode="json", exclude={"files", "fingerprint"}) if manifest else {}
    return {
        "path": entry.replica_url or str(entry.directory),
        **fields,
        "files": len(manifest.files) if manifest else None,
        "bytes": entry.num_bytes if manifest else None,
        "verified": None if entry.faults is None else not entry.faults,
        "faults": list(entry.faults or ()),
    }


def _list_trainers(
    run: RunDir, command: CommandConfig, verifying: bool, as_json: bool
) -> list[Json]:
    """List the checkpoints of another project's trainer; returns the rows of the JSON."""
    from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints
    from slurmllm.train.checkpoint.verification import FULL_S, verify_checkpoint

    rows = []
    for entry in list_trainer_checkpoints(run, command):
        details: Json = {"path": str(entry.path), "verified": None, "faults": [], "unverified": []}
        if verifying:
            faults, unverified, _ = verify_checkpoint(entry.path, time.monotonic() + FULL_S, True)
            details |= {"faults": faults, "unverified": unverified}
            details["verified"] = not faults and not unverified
        age_s = max(time.time() - entry.changed_at, 0)
        rows.append({**entry._asdict(), "age_s": age_s, **details})
    if as_json:
        options.echo_json({"run": run.name, "checkpoints": rows})
    elif rows:
        columns: options.Columns = {
            "step": "step",
            "changed": lambda row: format_age(row["age_s"]),
            "state": _trainer_state,
            "path": "path",
        }
        options.print_rows(False, "checkpoints", rows, columns, "path")
    else:
        pattern = command.checkpoints or "not set"
        click.echo(f"run {run.name}: no checkpoint; command.checkpoints: {pattern}")
    return rows


def _trainer_state(row: Mapping[str, Any]) -> str:
    state = "complete" if row["complete"] else "half-written"
    if row["faults"]:  # one that is still being saved is not broken
        return f"{'broken' if row['complete'] else state}: {'; '.join(row['faults'])}"
    if row["unverified"]:
        return f"{state}, not verified: {'; '.join(row['unverified'])}"
    return f"{state}, verified" if row["verified"] else state
