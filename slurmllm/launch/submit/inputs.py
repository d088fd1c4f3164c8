"""What a run reads: located, built if it is built in, and checked; and the plugins that it loads.

These are checked in another process, because they may load torch.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slurmllm.core import plugins
from slurmllm.core.config.data_sources import read_source
from slurmllm.core.config.resolve import TRIAL, RunConfig, Settings
from slurmllm.core.config.variables import is_secret
from slurmllm.core.errors import ConfigError, DataError, StorageError
from slurmllm.core.run.records import AttemptRecord
from slurmllm.core.run.rundir import RunDir, runs_root, storage_errors
from slurmllm.core.run.safe_files import make_private_folder, untrusted_error
from slurmllm.launch.submit.run_folder import make_folders

log = logging.getLogger(__name__)
LIMIT_S = 180.0  # torch from a busy network file system takes a minute
STDLIB = "stdlib"  # the built-in corpus and its tokenizer


def data_settings(data: str | None) -> Settings:
    """Return the settings of --data, as `resolve` takes them: `builtin`, or names of data sets."""
    if data != "builtin":
        return {} if data is None else {"data.source": ("--data", data.split(","))}
    return {f"data.{name}": (TRIAL, STDLIB) for name in ("corpus", "tokenizer")}


def data_folder(config: RunConfig, root: Path) -> Path:
    """Return the folder of fetched data sets: `cluster.data_folder`, else `.data` of the runs."""
    if config.cluster.data_folder is not None:
        return Path(config.cluster.data_folder).expanduser()
    return own_folder(root, config)


def own_folder(root: Path, config: RunConfig) -> Path:
    """Return the folder of data that several runs share, or this user's own next to another's."""
    folder = root / ".data"
    # Every link has mode 777: its owner counts, and the folder that it names.
    if os.path.lexists(folder):
        is_foreign = folder.lstat().st_uid not in (0, os.geteuid())
        group = config.cluster.trusted_group
        if is_foreign or (folder.exists() and untrusted_error(folder.stat(), group)):
            return make_private_folder(root / f".data-{os.geteuid()}")
    return folder


def source_folder(folder: Path, name: str) -> Path:
    # The stem of `...yaml` is `..`.
    return folder / (Path(name).stem.lstrip(".") or "data")


class LocatedData(NamedTuple):
    """What a recipe's data sets provide, and which of them were not found."""

    values: dict[str, str]  # `corpus` and `tokenizer`
    origins: dict[str, str]  # dotted path → where its value comes from
    missing: list[str]  # data sets that are not there


def locate(config: RunConfig, root: Path) -> LocatedData:
    """Find corpus and tokenizer of a recipe's `data.source`, if `data.corpus` is not set."""
    data = config.recipe.data
    located = LocatedData({}, {}, [])
    for name in data.sources if data.corpus is None else ():
        source = read_source(name)
        site = config.cluster.data.get(name)
        for field in ("corpus", "tokenizer"):
            if site is not None:
                path = getattr(site, field)
                origin = f"cluster.data.{name}"
                origin += f" ({config.origins.get(f'{origin}.{field}', 'default')})"
            elif (path := getattr(source, field)) is not None:
                file = source_folder(data_folder(config, root), name) / path
                path = str(file)
                origin = f"fetched: {name}"
                # A tokenized corpus is named by the common prefix of its two files.
                parts = [Path(f"{file}{end}") for end in (".bin", ".idx")]
                is_fetched = file.is_file() or all(part.is_file() for part in parts)
                if not is_fetched and name not in located.missing:
                    located.missing.append(name)
            if path is not None and getattr(data, field) is None:
                located.values.setdefault(field, path)
                located.origins.setdefault(f"data.{field}", origin)
    return located


def missing_data(config: RunConfig, root: Path, located: LocatedData) -> list[str]:
    """Return why a run has no training data, with what to do; empty if it has."""
    data = config.recipe.data
    if data.corpus is not None or ("corpus" in located.values and not located.missing):
        return []
    faults = [
        f"data.{name}: not set; add --set data.{name}={example} ({maker})"
        for name, example, maker in (
            ("corpus", "corpus.arrow", "made by `slurmllm data build`"),
            ("tokenizer", "tokenizer.json", "or `slurmllm tokenizer train`"),
        )
        if getattr(data, name) is None
    ]
    faults.append(
        "for a first trial, --data builtin trains on the source files of this machine's Python"
    )
    if not located.missing:
        return faults
    folder = data_folder(config, root)
    elsewhere = "" if folder == data_folder(config, runs_root()) else f" --to {folder}"
    sizes = [read_source(name).gigabytes for name in located.missing]
    size = "" if None in sizes else f" (about {sum(filter(None, sizes)):,.3g} GB)"
    return [
        f"data.source: data set {' and '.join(located.missing)} was not found in {folder}; run "
        f"`slurmllm data fetch {' '.join(located.missing)}{elsewhere}`{size}, or add --fetch to "
        "download it before the run is submitted",
        *faults,
    ]


def _builtin_files(config: RunConfig, root: Path) -> tuple[Path, Path]:
    """Return corpus and tokenizer of the built-in data, built if they are missing."""
    from slurmllm.data.corpus.builtin import ensure_stdlib

    # Another user's: what is in it need not be the standard library.
    folder = own_folder(root, config)
    with storage_errors(
        f"cannot create the built-in data set in {folder}", "choose another --runs-dir"
    ):
        make_folders(config.cluster, root, folder)
        return ensure_stdlib(folder, config.recipe.model.vocab_size)


def _require_files(paths: Sequence[tuple[str, str]]) -> None:
    for option, path in paths:
        # A tokenized corpus may be named by the common prefix of its two files.
        prefix, file = plugins.split_prefix(path)
        exists = prefix is not None or Path(file).exists() or Path(f"{file}.idx").exists()
        if path != STDLIB and not exists:
            raise DataError(f"{option}: {path!r} is not a file; name one that exists")


def resolve_inputs(config: RunConfig, root: Path, build: bool) -> RunConfig:
    """Make corpus and tokenizer absolute paths and check them.

    Args:
        root: The folder of all runs; built-in data is stored in its `.data`.
        build: Whether to build `stdlib` if it is missing. Without it, a configuration that names
            no corpus, or `stdlib`, is returned as it is.

    Raises:
        ConfigError: no corpus is set.
        DataError: an input is missing or unusable.
    """
    located = locate(config, root)
    if not located.missing and "corpus" in located.values:
        config = config.with_settings(
            "data", located.origins, **{"tokenizer": config.recipe.data.tokenizer, **located.values}
        )
    data = config.recipe.data
    texts = config.recipe.eval.corpora
    if data.corpus is None and build:
        raise ConfigError(
            f"{config.recipe.name} has no training data", missing_data(config, root, located)
        )
    paths = [("data.corpus", share.path) for share in data.corpora]
    paths += [(f"eval.corpora.{name}", path) for name, path in texts.items()]
    has_builtin = STDLIB in [*(path for _, path in paths), data.tokenizer]
    if not build and (data.corpus is None or has_builtin):
        _require_files([*paths, ("data.tokenizer", data.tokenizer or STDLIB)])
        if data.corpus is not None and config.recipe.eval.every_steps is not None:
            # Texts are counted in tokens: with the built-in tokenizer, which takes seconds to make.
            with tempfile.TemporaryDirectory(prefix="slurmllm-") as temporary:
                resolve_inputs(config, Path(temporary), build=True)
        return config
    from slurmllm.data.inspection import check_corpora, check_evaluation_texts
    from slurmllm.data.spec import StreamSpec

    corpus = Path()
    tokenizer = Path()
    if has_builtin:
        corpus, tokenizer = _builtin_files(config, root)

    def absolute(path: str, builtin: Path = corpus) -> str:
        return plugins.absolute(builtin if path == STDLIB else path)

    shares = [share.model_copy(update={"path": absolute(share.path)}) for share in data.corpora]
    evaluated = {name: absolute(path) for name, path in texts.items()}
    config = config.with_settings(
        "data",
        corpus=shares[0].path if isinstance(data.corpus, str) else tuple(shares),
        tokenizer=None if data.tokenizer is None else absolute(data.tokenizer, tokenizer),
    ).with_settings("eval", corpora=evaluated)
    spec = StreamSpec.of(config.recipe)
    # The built-in texts are shorter than a batch of the largest recipes, which repeats them.
    check_corpora(replace(spec, global_batch=1) if config.is_trial else spec)
    if config.recipe.eval.every_steps is not None:
        for warning in check_evaluation_texts(spec, evaluated):
            log.warning("%s", warning)
    return config


def with_folder(config: RunConfig) -> RunConfig:
    """Check a command's settings, and make its working directory absolute; raise ConfigError."""
    from slurmllm.launch.supervise.progress import check_progress

    command = config.recipe.command
    assert command is not None
    folder = Path(command.folder or ".").expanduser().absolute()
    faults = []
    if not folder.is_dir():
        faults.append(f"command.folder: {folder} is not a folder; name one that all nodes can read")
    try:
        check_progress(command.progress or "torchtitan")
    except ValueError as error:
        faults.append(f"command.progress: {error}")
    if faults:
        raise ConfigError(f"{config.recipe.name} cannot start", faults)
    return config.with_settings("command", folder=str(folder))


def plugin_faults(config: RunConfig) -> list[str]:
    """Return what is wrong with the recipe's parts of other packages; torch is not loaded here.

    With `cluster.container` nothing is checked here; with `cluster.setup` faults are logged as
    warnings. The workers check in both cases.
    """
    recipe = config.recipe
    cluster = config.cluster
    if not recipe.plugins and not recipe.plugin_refs:
        return []
    if cluster.container is not None:
        log.warning("hooks and optimizers are checked by the workers: the image has their packages")
        return []
    values = {**cluster.env, **recipe.env}
    public = {name: value for name, value in values.items() if not is_secret(name, value)}
    environment = {**os.environ, **public, "CUDA_VISIBLE_DEVICES": ""}
    # -P: a file in the current folder must not shadow a module.
    command = [cluster.python or sys.executable, "-P", "-m", "slurmllm.train.plugins"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(config.values()),
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        last = done.stderr.strip().rpartition("\n")[2] or "no output"
        faults = [f"plugins: the process that imports them failed: {last}"]
        if done.returncode == 0:
            faults = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        faults = [
            f"plugins: not imported within {LIMIT_S:.0f} s on this machine; import less at the top "
            "of their modules, or submit again if the file system was slow"
        ]
    except (OSError, ValueError) as error:
        faults = [
            f"plugins: cannot run their check: {error}; set cluster.python to a Python that can "
            "import slurmllm"
        ]
    if cluster.setup:
        for fault in faults:
            log.warning("%s (on this machine, without cluster.setup)", fault)
        return []
    return faults


def warn_if_changed(config: RunConfig, run: RunDir) -> None:
    """Log a warning if other versions of the parts trained the run before."""
    from slurmllm.launch.supervise.attempts import node_records

    attempts = run.attempts("train")
    if not attempts:
        return
    now = plugins.versions(config.recipe.plugin_refs, config.recipe.plugins)
    try:
        nodes = node_records(run, AttemptRecord.load(attempts[-1].record)).values()
    except StorageError:  # resume reports damaged records itself
        return
    for name, version in now.items():
        earlier = {node.versions[name] for node in nodes if name in node.versions}
        if earlier - {version}:
            log.warning(
                "plugin %s: %s now, %s in attempt %d; results may differ from earlier ones",
                name,
                version,
                " and ".join(sorted(earlier)),
                attempts[-1].number,
            )
