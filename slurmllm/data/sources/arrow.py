"""An Arrow corpus, read by memory map: opening costs the same at any size.

An Arrow IPC file with a string column `text`, one row a document, in one record batch or many.
Pages are read when a document is, and processes on one machine share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from slurmllm.errors import DataError, StorageError

_MAGIC = b"ARROW1"
_REMEDY = "build it again with `slurmllm data build`"


class Corpus:
    """The documents of an Arrow corpus by index.

    Raises:
        DataError: missing, not an Arrow file, truncated, without a text column, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = pa.memory_map(str(path))
            reader = pa.ipc.open_file(self._map)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except FileNotFoundError as error:
            raise DataError(
                f"no corpus {path}; make one with `slurmllm data build INPUT... --out {path}`"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read corpus {path}: {error}") from error
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{path} is not a whole Arrow file: {error}; was it cut while it was copied, or "
                f"is it another format? {_REMEDY.capitalize()}"
            ) from error
        schema = reader.schema
        index = schema.get_field_index("text")
        kind = schema.field(index).type if index >= 0 else None
        if kind not in (pa.string(), pa.large_string()):
            raise DataError(
                f"{path} has no string column 'text' (there is {', '.join(schema.names)}); "
                f"{_REMEDY}"
            )
        self._texts = [batch.column(index) for batch in batches]
        # [batches + 1], the index of each batch's first document
        self._first = np.cumsum([0, *(len(texts) for texts in self._texts)])
        if len(self) == 0:
            raise DataError(f"{path} holds no documents; {_REMEDY} from files that hold text")

    def __len__(self) -> int:
        return int(self._first[-1])

    def text(self, index: int) -> str:
        """The document at `index`, in 0 … len - 1.

        Raises:
            StorageError: the bytes there are no text: the file was damaged after the build.
        """
        batch = int(np.searchsorted(self._first, index, side="right")) - 1
        try:
            text = self._texts[batch][index - int(self._first[batch])].as_py()
        except UnicodeDecodeError as error:
            raise StorageError(
                f"document {index} of {self.path} is damaged: {error}; compare the file with the "
                f"sha256 in its manifest, and {_REMEDY}"
            ) from error
        return "" if text is None else str(text)

    def __iter__(self) -> Iterator[str]:
        return (self.text(index) for index in range(len(self)))

    @cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all documents, from the first and last offset of each batch."""
        total = 0
        for texts in self._texts:
            if len(texts):
                large = texts.type == pa.large_string()
                offsets = np.frombuffer(texts.buffers()[1], np.int64 if large else np.int32)
                total += int(offsets[texts.offset + len(texts)]) - int(offsets[texts.offset])
        return total

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the file's size and footer (schema, place and size of each batch).

        Tells another corpus from this one at once, at any size; it does not see bytes changed
        inside a batch, which the manifest's sha256 does.
        """
        with self.path.open("rb") as stream:
            size = stream.seek(0, 2)
            tail = len(_MAGIC) + 4  # the footer's length is an int32 before the magic
            stream.seek(size - tail)
            footer = int.from_bytes(stream.read(4), "little")
            stream.seek(size - tail - footer)
            digest = hashlib.sha256(stream.read(footer))
        digest.update(str(size).encode())
        return digest.hexdigest()[:16]
