"""Verifies another project's checkpoint by its format, in seconds and without torch.

Many threads check names, sizes and headers, for a limited time. Known formats:

- torch.distributed.checkpoint (DCP): `.metadata` lists the entries of all shards;
- safetensors, with an index or without; archives of torch.save, not those before torch 1.6;
- Megatron's `metadata.json`, which names its backends; trainers' states that are JSON;
- files that are numbered by ranks (DeepSpeed, Megatron, Hugging Face): no number is missing.

CAUTION: without a checksum, a changed bit of a tensor or letter of a name is not detected; nor is a
file that no format lists (`optimizer.pt`), if it is missing or belongs to another checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from slurmllm.core.run.safe_files import open_regular, os_error_text, read_limited
from slurmllm.train.checkpoint import pickle_process
from slurmllm.train.checkpoint.archive_checks import DamagedError, check_archive

VERIFY_S = 30.0  # for all checkpoints that are checked before a start
FULL_S = 86_400.0  # to read a whole one, when a user asks for it
_THREADS = 16
_MAX_FILES = 100_000
_MAX_FAULTS = 4  # that are named
_INDEX = ".safetensors.index.json"
_RANK = re.compile(r"(?:rank_?|rng_state_)(\d+)")
# The file that each backend named in Megatron's metadata.json needs:
# megatron/core/dist_checkpointing/strategies/{torch,common}.py
_BACKENDS = {
    ("sharded_backend", "torch_dist"): ".metadata",
    ("common_backend", "torch"): "common.pt",
}


# Errors of reading that are temporary or a limit of ours: no damage.
_PASSING = (errno.EFBIG, errno.ESTALE, errno.ETIMEDOUT)


class _UnverifiedError(Exception):
    """Why a file cannot be checked."""


class Verification(NamedTuple):
    """What is wrong with a checkpoint, and what could not be checked, one line each."""

    faults: tuple[str, ...]
    unverified: tuple[str, ...]
    is_listed: bool  # whether the format lists all its files, so that none can be missing


def verify_checkpoint(path: Path, until: float, full: bool = False) -> Verification:
    """Verify a checkpoint until a time of `time.monotonic`.

    `full`: read the files, and compare the checksums of those that have them.
    """
    faults = list[str]()
    folder, files = (path, _files(path, faults)) if path.is_dir() else (path.parent, [path.name])
    faults += _missing_ranks(files)
    unverified = list[str]()

    def run(name: str, check: Callable[..., Any]) -> Any:
        try:
            return check(folder / name)
        except _UnverifiedError as error:
            unverified.append(f"{name}: {error}")
        except OSError as error:
            reasons = unverified if error.errno in _PASSING else faults
            reasons.append(f"{name}: {Path(error.filename or name).name}: {os_error_text(error)}")
        except DamagedError as error:
            faults.append(f"{name}: {error}")
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            faults.append(f"{name}: it is damaged ({error})")

    checks: dict[str, Callable[..., Any]] = {}
    for name in files:
        # A checkpoint that is one file is checked whatever its name.
        default = None if folder == path else _check_torch_file
        matches = (check for pattern, check in _CHECKS if pattern.fullmatch(Path(name).name))
        if (check := next(matches, default)) is not None:
            checks[name] = partial(check, full=full) if check is _check_torch_file else check
    for name in (name for name in files if Path(name).name == ".metadata"):
        for shard, entries in (run(name, partial(_read_metadata, until=until)) or {}).items():
            check = partial(_check_torch_file, full=full, until=until, entries=entries)
            checks[str(Path(name).parent / shard)] = check
    if not (checks or faults or unverified):
        unverified.append("no file has a known format")
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(run, checks, checks.values()))
    if len(faults) > _MAX_FAULTS:
        faults = [*sorted(faults)[:_MAX_FAULTS], "and more"]
    is_listed = folder != path or any(name.endswith((_INDEX, ".metadata")) for name in files)
    return Verification(tuple(faults), tuple(unverified), is_listed)


def _files(folder: Path, faults: list[str]) -> list[str]:
    """List the files in a folder; adds to `faults` the folders that cannot be read."""

    def add(error: OSError) -> None:
        faults.append(f"{Path(error.filename).name}: {os_error_text(error)}")

    paths = (Path(base, name) for base, _, names in os.walk(folder, onerror=add) for name in names)
    return [str(file.relative_to(folder)) for file in islice(paths, _MAX_FILES)]


def _missing_ranks(files: Iterable[str]) -> Iterator[str]:
    """Yield the missing files of ranks, if most ranks have one.

    Else the number is part of a name (`adapter_rank8`), or some ranks save for others.
    """
    ranks: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in files:
        for match in _RANK.finditer(name):
            ranks[name[: match.start(1)], name[match.end(1) :]].add(int(match[1]))
    for (begin, end), numbers in ranks.items():
        if 2 * len(numbers) > max(numbers) + 1:
            missing = (rank for rank in range(max(numbers)) if rank not in numbers)
            yield from (
                f"{begin}{rank}{end} is missing" for rank in islice(missing, _MAX_FAULTS + 1)
            )


def _read_metadata(path: Path, until: float) -> dict[str, list[list[int]]]:
    """Return the shards that a `.metadata` lists, with the entries of each: offset and length."""
    open_regular(path).close()
    command = [sys.executable, "-I", pickle_process.__file__, str(path)]
    limit_s = max(until - time.monotonic(), 1.0)
    try:
        output = subprocess.run(command, capture_output=True, timeout=limit_s).stdout
        kind, answer = json.loads(output)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise _UnverifiedError(
            "it could not be read within the limits of time and memory"
        ) from error
    if kind == "unknown":
        raise _UnverifiedError(answer)
    if kind == "damaged":
        raise DamagedError(f"it is damaged ({answer})")
    return cast(dict[str, list[list[int]]], answer)


def _check_torch_file(
    path: Path, full: bool, until: float = 0.0, entries: Iterable[Sequence[int]] = ()
) -> None:
    """Check a file of torch.save, or the entries of a shard of DCP that it has written."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        needed = max((sum(entry) for entry in entries), default=0)
        if size < needed:
            raise DamagedError(f"it has {size:,} bytes, its entries need {needed:,}")
        for offset, length in entries or [(0, size)]:
            if entries and time.monotonic() > until:
                raise _UnverifiedError("the time limit was reached before its entries were checked")
            if not check_archive(cast(BinaryIO, stream), offset, length, full) and not entries:
                raise _UnverifiedError("it is not an archive of torch.save")


def _check_shard(path: Path) -> None:
    """Check that a shard of DCP, which may be empty, has a `.metadata` in its folder."""
    path.with_name(".metadata").stat()


def _tensor_names(path: Path) -> set[str]:
    """Return the names in a header of safetensors, whose tensors must fill the rest of the file."""
    from safetensors import SafetensorError, safe_open  # 30 ms

    open_regular(path).close()
    try:
        with safe_open(path, framework="numpy") as file:
            return {*file.keys()}
    except SafetensorError as error:
        raise DamagedError(str(error)) from error


def _check_index(path: Path) -> None:
    """Check the files of safetensors against their index."""
    listed: dict[str, str] = json.loads(read_limited(path))["weight_map"]
    stored = {
        (name, file) for file in {*listed.values()} for name in _tensor_names(path.parent / file)
    }
    for name, file in sorted(stored ^ {*listed.items()})[:1]:
        raise DamagedError(f"{name} is not in both the index and {file}")


def _check_json(path: Path) -> None:
    """Check that a file is whole JSON, and that the files of Megatron's backends exist."""
    content = json.loads(read_limited(path))
    for (key, backend), name in _BACKENDS.items():
        if isinstance(content, dict) and content.get(key) == backend:
            path.with_name(name).stat()


# The JSON is read at a resume: trainer_state.json (transformers src/transformers/trainer.py),
# metadata.json (Megatron-LM megatron/core/dist_checkpointing/core.py), .metadata.json (OLMo-core
# src/olmo_core/train/checkpoint.py).
_CHECKS: list[tuple[re.Pattern[str], Callable[..., Any]]] = [
    (re.compile(rf".*{re.escape(_INDEX)}"), _check_index),
    (re.compile(r"trainer_state\.json|\.?metadata\.json"), _check_json),
    (re.compile(r".*\.safetensors"), _tensor_names),
    (re.compile(r".*\.distcp"), _check_shard),
    (
        re.compile(r".+\.(?:pt|pth|ckpt)|(?:pytorch_model|optimizer|scheduler|scaler).*\.bin"),
        _check_torch_file,
    ),
]
