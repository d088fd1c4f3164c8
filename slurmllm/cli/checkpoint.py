"""`slurmllm checkpoint`: what there is, whether it is sound, and from format to format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from slurmllm.checkpoint.catalogue import CheckpointEntry
    from slurmllm.checkpoint.formats.converting import Precision
    from slurmllm.rundir import RunDir

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "source": None}

out = click.option("--out", required=True, metavar="DIR", help="Folder to make; not there yet.")
dtype = click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES)),
    default="source",
    show_default=True,
    help="Type of the weights to write; source keeps each as it is.",
)
shard_size = click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    help="Largest file of weights, and about what is held in memory.",
)


@click.group()
def checkpoint() -> None:
    """List, verify, import, export and convert checkpoints."""


@checkpoint.command("list")
@click.argument("run")
@click.option("--verify", "verifying", is_flag=True, help="Check sizes and checksums of all files.")
@options.runs_dir
@options.as_json
def list_(run: str, verifying: bool, runs_dir: str | None, as_json: bool) -> None:
    """List the checkpoints of RUN, in its directory and in checkpoint.replica."""
    from slurmllm.checkpoint.catalogue import list_checkpoints
    from slurmllm.rundir import find_run, runs_root

    found = find_run(run, runs_root(runs_dir))
    entries = list_checkpoints(found)
    if verifying:
        entries = _verified(entries)
    copies = _copies(found)
    if as_json:
        listed = [{"tier": 1, **_as_json(entry)} for entry in entries]
        listed += [{"tier": 2, **_as_json(entry)} for entry in copies]
        click.echo(json.dumps({"run": found.name, "checkpoints": listed}, indent=2))
    elif entries or copies:
        _print([*entries, *copies])
    else:
        click.echo(f"run {found.name} has no checkpoint yet")


@checkpoint.command()
@click.argument("target", metavar="CKPT|RUN")
@options.runs_dir
@options.as_json
@click.pass_context
def verify(ctx: click.Context, target: str, runs_dir: str | None, as_json: bool) -> None:
    """Check every file of a checkpoint, or of all checkpoints of a run.

    Exit codes: 0 all files are there with their sizes and checksums, 4 something is wrong.
    """
    from slurmllm.checkpoint.catalogue import list_checkpoints, read_entry
    from slurmllm.errors import CheckpointError, RunError
    from slurmllm.rundir import find_run, is_run, runs_root

    path, root = Path(target), runs_root(runs_dir)
    if path.is_dir() and not is_run(path) and not is_run(root / target):
        entries = [read_entry(path.absolute())]
    else:
        entries = list_checkpoints(find_run(target, root))
        if not entries:
            raise RunError(f"run {target} has no checkpoint yet; see `slurmllm status {target}`")
    entries = _verified(entries)
    if as_json:
        click.echo(json.dumps({"checkpoints": [_as_json(entry) for entry in entries]}, indent=2))
    else:
        for entry in entries:
            files = len(entry.manifest.files) if entry.manifest else 0
            word = f"{len(entry.faults or ())} fault(s)" if entry.faults else "verified"
            click.echo(f"{entry.directory}: {word}; {files} files, {_size(entry.num_bytes)}")
            for fault in entry.faults or ():
                click.echo(f"  {fault}")
    if any(entry.faults for entry in entries):
        ctx.exit(CheckpointError.exit_code)


@checkpoint.command("import")
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@out
@dtype
@shard_size
@options.as_json
def import_(source: Path, out: str, dtype: str, shard_size: str, as_json: bool) -> None:
    """Make a checkpoint of a Hugging Face model folder DIR.

    GPTNeoXForCausalLM, LlamaForCausalLM and GPT2LMHeadModel, with weights in safetensors files.
    A run starts from the result by train.init_from=DIR.
    """
    import time

    from slurmllm.checkpoint.folder import require_absent
    from slurmllm.checkpoint.formats.importing import plan_import, run_import
    from slurmllm.progress import input_progress

    limit, target, begun = _limit(shard_size), Path(out), time.monotonic()
    require_absent(target)
    plan = plan_import(source, _dtype(dtype))
    with input_progress("importing", plan.read_bytes) as on_progress:
        manifest = run_import(plan, target, limit, on_progress)
    size = sum(file.bytes for file in manifest.files)
    if as_json:
        answer = {
            "checkpoint": str(target),
            "source": str(source),
            "architecture": plan.config.architecture,
            "model": plan.config.model.model_dump(mode="json"),
            "tokenizer": sorted(plan.tokenizer.files),
            "files": len(manifest.files) + 1,
            "bytes": size,
            "seconds": round(time.monotonic() - begun, 3),
        }
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(
        f"{target}: {plan.config.architecture}, {_parameters(plan.mappings)}, {_size(size)} in "
        f"{len(manifest.files) + 1} files, {time.monotonic() - begun:.1f} s"
    )
    if "tokenizer.json" in plan.tokenizer.files:
        click.echo(f"tokenizer: {target / 'tokenizer' / 'tokenizer.json'}")
    else:
        click.echo(f"{source} has no tokenizer.json: name the tokenizer in data.tokenizer")
    click.echo(f"train from it: --set train.init_from={target}")


@checkpoint.command()
@click.argument("source", metavar="CKPT")
@out
@click.option("--run", metavar="RUN", help="CKPT is a step of this run, or latest.")
@dtype
@shard_size
@click.option(
    "--tokenizer",
    "tokenizer_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A tokenizer.json.  [default: the run's, or the one that was imported]",
)
@options.runs_dir
@options.as_json
def export(
    source: str,
    out: str,
    run: str | None,
    dtype: str,
    shard_size: str,
    tokenizer_file: Path | None,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Make a Hugging Face model folder of a checkpoint.

    CKPT is a checkpoint folder, a run's or an imported one; with --run a step, or latest: the
    newest that verifies. AutoModelForCausalLM and AutoTokenizer load the result.
    """
    import time

    from slurmllm.checkpoint.folder import require_absent
    from slurmllm.checkpoint.formats.exporting import plan_export, run_export
    from slurmllm.checkpoint.formats.tokenizer_files import checkpoint_tokenizer
    from slurmllm.progress import input_progress

    limit, target, begun = _limit(shard_size), Path(out), time.monotonic()
    require_absent(target)
    directory = _sound(source, run, runs_dir)
    tokenizer = checkpoint_tokenizer(directory, tokenizer_file)
    plan = plan_export(directory, tokenizer, _dtype(dtype))
    size = sum(plan.sizes_bytes)
    with input_progress("exporting", size) as on_progress:
        names = run_export(plan, target, limit, on_progress)
    if as_json:
        answer = {
            "checkpoint": str(directory),
            "out": str(target),
            "model": plan.model.model_dump(mode="json"),
            "tokenizer": sorted(tokenizer.files),
            "files": names,
            "bytes": size,
            "seconds": round(time.monotonic() - begun, 3),
        }
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(
        f"{target}: {_parameters(plan.mappings)}, {_size(size)} of weights in "
        f"{sum(name.endswith('.safetensors') for name in names)} file(s), from {directory}, "
        f"{time.monotonic() - begun:.1f} s"
    )
    if not tokenizer.files:
        click.echo("no tokenizer is known: --tokenizer FILE puts one beside the weights")


@checkpoint.command()
@click.argument("source", metavar="CKPT")
@click.option(
    "--to",
    "backend",
    required=True,
    type=click.Choice(["native", "nxd"]),
    help="Backend whose format to write.",
)
@out
@click.option("--run", metavar="RUN", help="CKPT is a step of this run, or latest.")
@click.option(
    "--tensor",
    type=click.IntRange(1),
    help="nxd: tensor-parallel workers.  [default: those of the run around CKPT, else 1]",
)
@click.option(
    "--pipeline", type=click.IntRange(1), help="nxd: pipeline stages.  [default: likewise]"
)
@click.option(
    "--virtual-pipeline",
    type=click.IntRange(1),
    help="nxd: chunks of layers a stage.  [default: likewise]",
)
@click.option(
    "--data", type=click.IntRange(1), help="nxd: data-parallel workers.  [default: likewise]"
)
@click.option(
    "--zero/--no-zero",
    default=None,
    help="nxd: share the optimizer's state out over them.  [default: the run's, else zero]",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16_mixed", "bf16_sr", "bf16"]),
    help="Of the run that is to read it.  [default: of the one that wrote it]",
)
@options.runs_dir
@options.as_json
def convert(
    source: str,
    backend: str,
    out: str,
    run: str | None,
    precision: Precision | None,
    runs_dir: str | None,
    as_json: bool,
    **mesh: Any,
) -> None:
    """Write a checkpoint in another backend's format: weights, optimizer state and position.

    CKPT is a checkpoint folder, a run's or an imported one; with --run a step, or latest. Needs
    neither a cluster nor the backends. A run reads checkpoints of both formats on any mesh, so
    this is for other programs: NxD loads the result by nxd.load_checkpoint(DIR, tag="nxd").
    """
    import time
    from dataclasses import replace

    from slurmllm.checkpoint.folder import require_absent
    from slurmllm.checkpoint.formats.converting import mesh_of_run, plan_conversion, run_conversion
    from slurmllm.errors import UserError
    from slurmllm.progress import input_progress

    target, begun = Path(out), time.monotonic()
    given = {name: value for name, value in mesh.items() if value is not None}
    if backend == "native" and given:
        option = next(iter(given)).replace("_", "-")
        raise UserError(
            f"--{option}: the native format is the same for every mesh; leave it out, or say "
            "--to nxd"
        )
    require_absent(target)
    directory = _sound(source, run, runs_dir)
    target_mesh = replace(mesh_of_run(directory), **given) if backend == "nxd" else None
    plan = plan_conversion(directory, target_mesh, precision)
    with input_progress("converting", plan.num_bytes) as on_progress:
        manifest = run_conversion(plan, target, on_progress)
    size, trained = sum(file.bytes for file in manifest.files), plan.training is not None
    if as_json:
        answer = {
            "checkpoint": str(directory),
            "out": str(target),
            "format": backend,
            "step": manifest.step,
            "optimizer_state": trained,
            "precision": plan.precision,
            "layout": plan.layout.model_dump(mode="json", exclude={"names"})
            if plan.layout
            else None,
            "files": len(manifest.files) + 1,
            "bytes": size,
            "seconds": round(time.monotonic() - begun, 3),
        }
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(
        f"{target}: step {manifest.step}, {plan.precision}, {_size(size)} in "
        f"{len(manifest.files) + 1} files, from {directory}, {time.monotonic() - begun:.1f} s"
    )
    if not trained:
        click.echo("it has weights and no optimizer state, as the checkpoint that it came from")
        click.echo(f"train from it: --set train.init_from={target}")
    elif plan.layout is not None and not plan.known_optim:
        click.echo(
            "betas, eps and weight_decay in NxD's files are slurmllm's defaults, for no run is "
            "around the checkpoint; a run of slurmllm takes its recipe's"
        )


def _sound(source: str, run: str | None, runs_dir: str | None) -> Path:
    """The checkpoint folder that the arguments mean, verified."""
    from slurmllm.checkpoint.catalogue import newest_verified, read_entry
    from slurmllm.checkpoint.origin import read_origin
    from slurmllm.errors import CheckpointError, RunError
    from slurmllm.rundir import find_run, runs_root

    if run is None:
        directory = Path(source)
        if not directory.is_dir():
            step = source == "latest" or source.isdecimal()
            hint = " (a step or latest needs --run RUN)" if step else ""
            raise RunError(f"no checkpoint folder {source!r}{hint}; name one that is there")
        read_origin(directory)
    else:
        found = find_run(run, runs_root(runs_dir))
        if source == "latest":
            directory, skipped = newest_verified(found)
            for line in skipped:
                click.echo(f"skipped a checkpoint that does not verify: {line}", err=True)
            return directory
        steps = found.checkpoint_steps()
        if not source.isdecimal() or int(source) not in steps:
            known = ", ".join(map(str, steps[-10:])) or "none"
            raise RunError(
                f"run {found.name} has no checkpoint of step {source}; it has: {known} "
                "(or say latest)"
            )
        directory = found.checkpoint(int(source))
    (entry,) = _verified([read_entry(directory)])
    if entry.faults:
        lines = "\n".join(f"  {fault}" for fault in entry.faults)
        raise CheckpointError(f"{directory} does not verify; restore it, or name another:\n{lines}")
    return directory


def _limit(text: str) -> int:
    """Bytes of `5GB`, `500MB` or `2GiB`."""
    from slurmllm.errors import UserError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is not None:
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        size = int(float(number) * (1024 if binary else 1000) ** power)
        if size > 0:
            return size
    raise UserError(f"--shard-size {text}: write a size such as 5GB, 500MB or 2GiB")


def _dtype(name: str) -> torch.dtype | None:
    import torch

    attribute = _DTYPES[name]
    return None if attribute is None else getattr(torch, attribute)


def _verified(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    from slurmllm.checkpoint.catalogue import verify_entry
    from slurmllm.progress import input_progress

    entries = list(entries)
    done, before = [], 0
    with input_progress("verifying", sum(entry.num_bytes for entry in entries)) as on_progress:
        for entry in entries:
            done.append(verify_entry(entry, partial(_further, on_progress, before)))
            before += entry.num_bytes
    return done


def _copies(found: RunDir) -> list[CheckpointEntry]:
    """What is in the second place by its manifests; a place that cannot be read is told."""
    from slurmllm.checkpoint.catalogue import CheckpointEntry
    from slurmllm.checkpoint.replicas import open_replica
    from slurmllm.config.load import load
    from slurmllm.errors import SlurmllmError

    try:
        tier = open_replica(load(found.config).recipe.checkpoint, found.name)
        if tier is None:
            return []
        return [
            CheckpointEntry(found.checkpoint(step), tier.manifest(step), None, tier.url(step))
            for step in tier.steps()
        ]
    except SlurmllmError as error:
        click.echo(f"warning: {error}", err=True)
        return []


def _further(on_progress: Callable[[int], None], before: int, now: int) -> None:
    on_progress(before + now)


def _as_json(entry: CheckpointEntry) -> dict[str, Any]:
    manifest = entry.manifest
    held = manifest.model_dump(mode="json", exclude={"files", "fingerprint"}) if manifest else {}
    return {
        "path": entry.replica_url or str(entry.directory),
        **held,
        "files": len(manifest.files) if manifest else None,
        "bytes": entry.num_bytes if manifest else None,
        "verified": None if entry.faults is None else not entry.faults,
        "faults": list(entry.faults or ()),
    }


def _print(entries: list[CheckpointEntry]) -> None:
    import time

    from slurmllm.tables import print_table

    rows = []
    for entry in entries:
        manifest = entry.manifest
        saved = time.localtime(manifest.saved_at) if manifest else None
        state = "not checked" if entry.faults is None else "; ".join(entry.faults) or "verified"
        if entry.replica_url is not None:
            state = f"copy in {entry.replica_url}"
        rows.append(
            (
                str(int(entry.directory.name.rpartition("_")[2])),
                time.strftime("%Y-%m-%d %H:%M:%S", saved) if saved else "",
                _size(entry.num_bytes) if manifest else "",
                str(manifest.attempt) if manifest else "",
                str(manifest.world_size) if manifest else "",
                state,
            )
        )
    print_table(("step", "saved", "size", "attempt", "workers", "state"), rows, fold="state")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _parameters(pieces: Iterable[Any]) -> str:
    import math

    count = sum(math.prod(piece.shape) for piece in pieces)
    return f"{count / 1e9:.2f}B parameters" if count >= 1e9 else f"{count / 1e6:.1f}M parameters"
