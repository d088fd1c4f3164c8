"""The columns of the finished shards → the output, without duplicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slurmllm.corpus.arrow_output import write_arrow
from slurmllm.corpus.finished_shard import FinishedShard, mark_duplicates
from slurmllm.corpus.megatron_output import write_tokens
from slurmllm.corpus.options import BuildOptions
from slurmllm.corpus.output import OutputFile
from slurmllm.corpus.work_folder import WorkFolder
from slurmllm.errors import DataError


@dataclass(frozen=True)
class BuildCallbacks:
    """Functions that a build calls as it advances.

    Attributes:
        on_read: Called with the input bytes read so far.
        on_join: Called with the output bytes written so far, and their total.
        on_note: Called with a line for the user.
    """

    on_read: Callable[[int], None] = field(default=lambda done: None)
    on_join: Callable[[int, int], None] = field(default=lambda done, total: None)
    on_note: Callable[[str], None] = field(default=lambda note: None)


class JoinResult(NamedTuple):
    """The output's counts and digests."""

    documents: int
    text_bytes: int
    tokens: int | None  # None for text
    columns: tuple[str, ...]  # of an Arrow output
    duplicates: int
    by_input: list[int]  # documents of each input file
    files: dict[str, tuple[int, str]]  # size in bytes and sha256, by ending


def join(
    shards: Sequence[FinishedShard],
    inputs: Sequence[str],
    files: Mapping[str, OutputFile],
    options: BuildOptions,
    work: WorkFolder,
    callbacks: BuildCallbacks,
) -> JoinResult:
    """Write the documents of all shards to `files`, by ending `arrow`, or `bin` and `idx`.

    Raises:
        DataError: no input has text.
        StorageError: the output cannot be written, or a shard is damaged.
    """
    if not any(shard.record.documents for shard in shards):
        # Wrong options (--text-key) are the usual cause: shards read with them are of no use.
        work.remove_except(())
        empty, short, bad = (
            sum(getattr(shard.record, name) for shard in shards)
            for name in ("empty", "short", "bad")
        )
        raise DataError(
            f"no text in {len(inputs)} input file{'s' if len(inputs) != 1 else ''} ({empty} empty "
            f"documents, {short} short, {bad} unreadable); no corpus was written. The first input "
            f"is {inputs[0]}: see --format and --text-key"
        )
    duplicates = 0
    if options.clean.dedup:
        duplicates = mark_duplicates(shards, work.scratch("keep"))
    by_input = [count for shard in shards for count in shard.kept_by_input()]
    documents = sum(by_input)
    sizes = {
        column: sum(shard.kept_length(column) for shard in shards)
        for column in (*options.read.columns, *(["tokens"] if options.tokenize else []))
    }
    tokens = sizes.pop("tokens", None)
    columns: tuple[str, ...] = ()
    if options.tokenize and tokens is not None:
        dtype = options.tokenize.dtype
        total = tokens * np.dtype(dtype).itemsize
        write_tokens(
            files["bin"], files["idx"], shards, documents, dtype,
            lambda done: callbacks.on_join(done, total),
        )  # fmt: skip
    else:
        total = sum(sizes.values())
        # The file also holds ids, offsets and metadata: report no more than the text's bytes.
        schema = write_arrow(
            files["arrow"], shards, documents, sizes, inputs, work,
            lambda done: callbacks.on_join(min(done, total), total),
        )  # fmt: skip
        columns = tuple(schema.names)
    return JoinResult(
        documents=documents,
        text_bytes=sum(sizes.values()),
        tokens=tokens,
        columns=columns,
        duplicates=duplicates,
        by_input=by_input,
        files={ending: (file.size_bytes, file.sha256) for ending, file in files.items()},
    )
