"""CSV and TSV files by pandas: one row per document, the text in one column, or in two.

As `datasets` reads them, but that the file is hashed while it is read. Rows count from 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from slurmllm.data.corpus.decompress import OpenedInput
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.corpus.readers.base import Documents, OnError, no_column

_ROWS = 256  # at once


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    import pandas as pd

    path, name = stream.file.path, stream.file.name
    file_name = path.stem if stream.file.compression else path.name
    row = 0
    try:
        frames = pd.read_csv(
            stream,
            sep="\t" if file_name.lower().endswith(".tsv") else ",",
            dtype=str,
            na_filter=False,
            chunksize=_ROWS,
        )
        for frame in frames:
            missing = [key for key in options.keys if key not in frame.columns]
            if missing:
                on_error(f"{name}: {no_column(missing[0], [*map(str, frame.columns)])}", "file")
                return
            if not isinstance(frame.index, pd.RangeIndex):  # pandas takes it for a row's name
                on_error(f"{name}: rows have more columns than the header", "file")
                return
            yield tuple(
                pa.array(frame[key], pa.large_string()).fill_null("") for key in options.keys
            )
            row += len(frame)
    except pd.errors.EmptyDataError:
        on_error(f"{name}: an empty file, without a header", "file")
    except (pd.errors.ParserError, UnicodeError, pa.ArrowException) as error:
        reason = str(error).removeprefix("Error tokenizing data. C error: ")
        on_error(f"{name}: after row {row}: {reason}", "rest" if row else "file")
