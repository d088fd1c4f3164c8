"""Cache of long metrics files as columns, which read ten times as fast.

A file that is uniform throughout, and that nobody has written to for a while, is stored next to it
as an Arrow file `.<name>.arrow`. The cache is valid as long as the file's size and times are the
same; the change time of the inode, which no user can set, detects a copy, and a file that was
edited and dated back. If it is not valid, or a checksum finds it damaged, the file is read again.
If the folder is not writable, nothing is stored.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slurmllm.metrics.curves import COLUMNS
from slurmllm.metrics.merge import RowBlock
from slurmllm.safe_files import open_regular

# A shorter file is read in a tenth of a second.
MIN_BYTES = 16 << 20
MAX_BYTES = 1 << 29  # of a cache, which is read whole: five million steps
_QUIET_S = 60.0
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_VERSION = 3
_CHECKSUM_BYTES = 4  # CRC-32 at the end: after a full disk or a power cut a file may contain zeros


def load_columns(path: Path, index: int, status: os.stat_result) -> list[RowBlock] | None:
    """Load the rows of a metrics file from its cache; None if there is no valid one for its status.

    `index` is the file's among the run's: the attempt of rows that do not have one.
    """
    if status.st_size < MIN_BYTES:
        return None
    # Not memory-mapped: the kernel kills a process (SIGBUS) if another one truncates the file.
    try:
        with open_regular(_cache_path(path), follow=False) as stream:
            info = os.fstat(stream.fileno())
            # Written by this user or by the file's owner, and by nobody whom the file keeps out.
            if info.st_uid not in (os.geteuid(), status.st_uid) or info.st_mode & _OTHERS:
                return None
            if info.st_size > MAX_BYTES:  # a sparse file of terabytes takes no space
                return None
            content = stream.read(MAX_BYTES)
    except OSError:
        return None
    body = memoryview(content)[:-_CHECKSUM_BYTES]
    if content[len(body) :] != _checksum(body):
        return None
    import pyarrow as pa

    blocks = []
    try:
        reader = pa.ipc.open_file(pa.py_buffer(body))
        if dict(reader.schema.metadata or {}) != _metadata(index, status):
            return None
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            buffers = [column.buffers()[1] for column in batch.columns]
            steps, attempts = (np.frombuffer(each, np.int64, len(batch)) for each in buffers[:2])
            values = (np.frombuffer(each, np.float64, len(batch)) for each in buffers[2:])
            columns = dict(zip(batch.schema.names[2:], values, strict=True))
            blocks.append(RowBlock(steps, attempts, columns))
    except (pa.ArrowException, ValueError, IndexError, OSError):  # not what `store_columns` wrote
        return None
    return blocks


def store_columns(
    path: Path, index: int, status: os.stat_result, blocks: Sequence[RowBlock]
) -> None:
    """Store the rows of a metrics file in its cache, if it is long and no longer written to.

    The status is that before the file was read; the blocks hold all its rows.
    """
    if status.st_size < MIN_BYTES or time.time() - status.st_mtime < _QUIET_S or not blocks:
        return
    names = list(blocks[0].columns)
    if any(block.absent or list(block.columns) != names for block in blocks):
        return
    if sum(len(block.steps) for block in blocks) * 8 * (2 + len(names)) > MAX_BYTES:
        return  # `load_columns` would not read it
    import pyarrow as pa

    fields = [("step", pa.int64()), ("attempt", pa.int64()), *((n, pa.float64()) for n in names)]
    schema = pa.schema(fields, metadata=_metadata(index, status))
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w+b") as stream:
                with pa.ipc.new_file(stream, schema) as writer:
                    for block in blocks:
                        columns = (block.steps, block.attempts, *block.columns.values())
                        arrays = [  # `pa.array` would import pandas.
                            pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])
                            for kind, column in zip(schema.types, columns, strict=True)
                        ]
                        writer.write_batch(pa.record_batch(arrays, schema=schema))
                stream.seek(0)
                stream.write(_checksum(stream.read()))
                # Not by its name, in place of which others may put a link.
                os.fchmod(stream.fileno(), status.st_mode & 0o644)
            temporary.replace(_cache_path(path))
        finally:
            temporary.unlink(missing_ok=True)


def _cache_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.arrow")


def _metadata(index: int, status: os.stat_result) -> dict[bytes, bytes]:
    """Returns what must be the same for a cache to be valid."""
    written = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return {b"of": repr((_VERSION, COLUMNS, index, *written)).encode()}


def _checksum(content: Any) -> bytes:
    return zlib.crc32(content, _VERSION).to_bytes(_CHECKSUM_BYTES, "little")
