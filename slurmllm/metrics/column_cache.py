"""Long metrics files as columns, kept beside them: the second reading takes a tenth of the first.

Kept is what was read of a file that is even throughout and that nobody has written to for a
while, as an Arrow file `.<name>.arrow`. It counts as long as the file's size and times are what
they were; the time of change of its inode, which nobody sets, tells a copy from the original, and a
file that was edited and dated back. Else, and where a checksum finds it damaged, the file is read
again. A folder that may not be written to is none's fault: nothing is kept there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmllm.metrics.curves import COLUMNS
from slurmllm.metrics.merge import RowBlock

# Below this a file is read in a tenth of a second.
LEAST_BYTES = 16 << 20
_QUIET_S = 60.0
_VERSION = 2
_CHECKSUM = b"crc32"


def load_kept(path: Path, order: int, status: os.stat_result) -> list[RowBlock] | None:
    """The rows of a metrics file from the columns beside it.

    Args:
        path: The metrics file.
        order: Its place among the run's: the attempt of rows that do not name theirs.
        status: The file's, now.

    Returns:
        The rows; None where nothing is kept that counts.
    """
    if status.st_size < LEAST_BYTES:
        return None
    # Not mapped into memory: a process dies of a map whose file another one cuts short.
    try:
        content = _beside(path).read_bytes()
    except OSError:
        return None
    import pyarrow as pa

    parts = []
    with contextlib.suppress(OSError, ValueError, pa.ArrowException):
        reader = pa.ipc.open_file(pa.py_buffer(content))
        known = dict(reader.schema.metadata or {})
        checksum = known.pop(_CHECKSUM, b"")
        if known != _metadata(order, status):
            return None
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            buffers = [column.buffers()[1] for column in batch.columns]
            steps, attempts = (np.frombuffer(each, np.int64, len(batch)) for each in buffers[:2])
            values = (np.frombuffer(each, np.float64, len(batch)) for each in buffers[2:])
            parts.append(
                RowBlock(steps, attempts, dict(zip(batch.schema.names[2:], values, strict=True)))
            )
        return parts if checksum == _checksum(parts) else None
    return None


def keep(path: Path, order: int, status: os.stat_result, parts: Sequence[RowBlock]) -> None:
    """Keep the rows of a metrics file, where that is of use and allowed.

    Args:
        path: The metrics file.
        order: As for `load_kept`.
        status: The file's before it was read.
        parts: All its rows, none of them without one of the metrics.
    """
    if status.st_size < LEAST_BYTES or time.time() - status.st_mtime < _QUIET_S or not parts:
        return
    names = list(parts[0].columns)
    if any(part.absent or list(part.columns) != names for part in parts):
        return
    import pyarrow as pa

    fields = [("step", pa.int64()), ("attempt", pa.int64()), *((n, pa.float64()) for n in names)]
    metadata = _metadata(order, status) | {_CHECKSUM: _checksum(parts)}
    schema = pa.schema(fields, metadata=metadata)
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream, pa.ipc.new_file(stream, schema) as writer:
                for part in parts:
                    # `pa.array` would import pandas.
                    arrays = [
                        pa.Array.from_buffers(kind, len(part.steps), [None, pa.py_buffer(column)])
                        for kind, column in zip(schema.types, _values(part), strict=True)
                    ]
                    writer.write_batch(pa.record_batch(arrays, schema=schema))
            temporary.chmod(status.st_mode & 0o666)
            temporary.replace(_beside(path))
        finally:
            temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.arrow")


def _metadata(order: int, status: os.stat_result) -> dict[bytes, bytes]:
    """What must be the same for kept rows to count."""
    known = {
        "version": _VERSION,
        "metrics": ",".join(COLUMNS),
        "order": order,
        "size": status.st_size,
        "written_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }
    return {name.encode(): str(value).encode() for name, value in known.items()}


def _values(part: RowBlock) -> Iterable[npt.NDArray[Any]]:
    return part.steps, part.attempts, *part.columns.values()


def _checksum(parts: Sequence[RowBlock]) -> bytes:
    """Over names and values: a disk that was full or lost power leaves zeros within a file."""
    found = 0
    for part in parts:
        found = zlib.crc32(",".join(part.columns).encode(), found)
        for values in _values(part):
            found = zlib.crc32(values.data, found)
    return b"%d" % found
