"""Whether another project's checkpoint can be loaded, by its format: in seconds, without torch.

Looked at are names, sizes and headers, by many threads, for a limited time. Known formats:

- torch.distributed.checkpoint (DCP): `.metadata` lists the entries of all shards;
- safetensors, with an index or without; archives of torch.save, not those before torch 1.6;
- Megatron's `metadata.json`, which names its backends; trainers' states that are JSON;
- files that are numbered by ranks (DeepSpeed, Megatron, Hugging Face): no number is missing.

CAUTION: what has no checksum can change unseen: a bit of a tensor, a letter of a name in a table.
So can a file that no format lists (`optimizer.pt`) be missing, or be another whole one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from slurmllm.core.format import format_names
from slurmllm.core.run.safe_files import open_regular, os_error_text, read_limited
from slurmllm.train.checkpoint import pickle_process
from slurmllm.train.checkpoint.archive_checks import ArchiveError, check_archive

VERIFY_S = 30.0  # for all checkpoints that are looked at before a start
FULL_S = 86_400.0  # to read a whole one, when a user asks for it
_THREADS = 16
_MOST_FILES = 100_000
_MOST_FAULTS = 4  # that are named
_INDEX = ".safetensors.index.json"
# Read at a resume: trainer_state.json (transformers src/transformers/trainer.py), metadata.json
# (Megatron-LM megatron/core/dist_checkpointing/core.py), .metadata.json (OLMo-core
# src/olmo_core/train/checkpoint.py)
_JSON = ("trainer_state.json", "metadata.json", ".metadata.json")
_TORCH = re.compile(r".+\.(?:pt|pth|ckpt)|(?:pytorch_model|optimizer|scheduler|scaler).*\.bin")
_RANK = re.compile(r"(?:rank_?|rng_state_)(\d+)")
_Check = Callable[[], Iterable[str]]  # yields what is wrong with a file


class _UnknownFormat(Exception):
    """Why a file cannot be checked."""


class Verification(NamedTuple):
    """What is wrong with a checkpoint, one line each, and what could not be seen."""

    faults: tuple[str, ...]
    unverified: tuple[str, ...]
    is_listed: bool  # whether the format lists all its files, so that none can be missing


def verify_checkpoint(path: Path, until: float, full: bool = False) -> Verification:
    """Verify a checkpoint until a time of `time.monotonic`.

    `full`: read the files, and compare the checksums of those that have them.
    """
    files = _files(path) if path.is_dir() else [path.name]
    folder = path if path.is_dir() else path.parent
    checks = dict[str, _Check]()
    faults, unverified = [*_missing_ranks(files)], list[str]()

    def run(name: str) -> tuple[list[str], str]:
        try:
            return [*checks[name]()], ""
        except FileNotFoundError as error:
            return [f"{Path(error.filename).name} is missing"], ""
        except OSError as error:
            return [f"it cannot be read: {os_error_text(error)}"], ""
        except (ArchiveError, KeyError, TypeError, AttributeError) as error:
            return [f"{error}"], ""
        except _UnknownFormat as error:
            return [], str(error)

    for name in files:
        if Path(name).name == ".metadata":
            answer = _read_metadata(folder / name, until)
            faults += (f"{name}: {line}" for line in answer.get("faults", ()))
            unverified += [f"{name}: {answer['unknown']}"] if "unknown" in answer else []
            for shard, entries in answer.get("files", {}).items():
                location = Path(name).parent / shard
                checks[str(location)] = partial(_torch, folder / location, full, until, entries)
        elif (check := _check_of(folder / name, files if folder == path else ())) is not None:
            checks[name] = partial(check, folder / name, full, until)
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, (lines, reason) in zip(checks, pool.map(run, checks), strict=True):
            faults += (f"{name}: {line}" for line in lines)
            unverified += [f"{name}: {reason}"] if reason else []
    more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
    is_listed = folder != path or any(name.endswith((_INDEX, ".metadata")) for name in files)
    return Verification((*faults[:_MOST_FAULTS], *more), tuple(unverified), is_listed)


def _files(folder: Path) -> list[str]:
    paths = (Path(base, name) for base, _, names in os.walk(folder) for name in names)
    return [str(file.relative_to(folder)) for file in islice(paths, _MOST_FILES)]


def _check_of(file: Path, files: Collection[str]) -> Callable[..., Iterable[str]] | None:
    if file.name.endswith(_INDEX):
        return _index
    if file.name in _JSON:
        return _json
    if file.suffix == ".safetensors":
        return _safetensors
    if file.suffix == ".distcp":
        return _shard
    # Of a path without files around it the user says that it is a checkpoint.
    return _torch if not files or _TORCH.fullmatch(file.name) else None


def _missing_ranks(files: Iterable[str]) -> Iterator[str]:
    """Yield the files that are missing between those of other ranks."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for name in files:
        for match in _RANK.finditer(name):
            ranks.setdefault((name[: match.start(1)], name[match.end(1) :]), set()).add(
                int(match[1])
            )
    for (begin, end), numbers in ranks.items():
        if len(numbers) > 1 and (missing := sorted({*range(max(numbers))} - numbers)):
            yield f"{begin}{format_names([str(rank) for rank in missing], 4)}{end}: it is missing"


def _read_metadata(path: Path, until: float) -> dict[str, Any]:
    """Return what `pickle_process` says of a `.metadata`, with the names of files checked."""
    command = [sys.executable, "-I", pickle_process.__file__, str(path)]
    try:
        limit_s = max(until - time.monotonic(), 1.0)
        output = subprocess.run(command, capture_output=True, timeout=limit_s).stdout
        answer: dict[str, Any] = json.loads(output)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {"unknown": "it could not be read within the limits of time and memory"}
    if "damaged" in answer:
        return {"faults": [f"it is damaged ({answer['damaged']})"]}
    unsafe = [n for n in answer.get("files", ()) if Path(n).is_absolute() or ".." in Path(n).parts]
    return {"faults": [f"it names {name!r:.80}, outside its folder" for name in unsafe]} | (
        {} if unsafe else answer
    )


def _torch(
    path: Path, full: bool, until: float, entries: Iterable[Sequence[int]] = ()
) -> Iterator[str]:
    """Check a file of torch.save, or the entries of a shard of DCP that it has written."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        needed = max((sum(entry) for entry in entries), default=0)
        if size < needed:
            yield f"it has {size:,} bytes, its entries need {needed:,}"
            return
        for offset, length in entries or [(0, size)]:
            if entries and time.monotonic() > until:
                raise _UnknownFormat("no time was left for its entries")
            if not check_archive(cast(BinaryIO, stream), offset, length, full) and not entries:
                raise _UnknownFormat("it is no archive of torch.save")


def _shard(path: Path, *_: float) -> Iterator[str]:
    """Check that a shard of DCP, which may be empty, has a list of its entries."""
    if not path.with_name(".metadata").exists():
        yield f"{path.with_name('.metadata').name} is missing"


def _safetensors(path: Path, *_: float) -> Iterable[str]:
    """Check a file's header, and that its tensors fill the rest."""
    _tensor_names(path)
    return ()


def _tensor_names(path: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open  # 30 ms

    open_regular(path).close()
    try:
        with safe_open(path, framework="numpy") as file:
            return {*file.keys()}
    except SafetensorError as error:
        raise ArchiveError(str(error)) from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_limited(path))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"it is no whole JSON ({error})") from error


def _index(path: Path, *_: float) -> Iterator[str]:
    """Check the files of safetensors against their index."""
    weights: dict[str, str] = _read_json(path)["weight_map"]
    for file in {*weights.values()}:
        listed = {name for name, location in weights.items() if location == file}
        names = _tensor_names(path.parent / file)
        if lost := sorted(listed ^ names):
            yield f"it and {file} differ in {format_names(lost, 2)}"


def _json(path: Path, *_: float) -> Iterator[str]:
    """Check that a file is whole, and that what Megatron's backends need is there."""
    # megatron/core/dist_checkpointing/strategies/{torch,common}.py
    backends = {
        ".metadata": ("sharded_backend", "torch_dist"),
        "common.pt": ("common_backend", "torch"),
    }
    content = _read_json(path)
    for name, (key, backend) in backends.items():
        if (
            isinstance(content, dict)
            and content.get(key) == backend
            and not path.with_name(name).exists()
        ):
            yield f"{name} is missing"
