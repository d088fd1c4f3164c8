"""Corpora of each kind, written without the package, and streams over them."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.data.sources.base import document_hash, prompt_content
from slurmllm.data.spec import State, StreamSpec, merge_states
from slurmllm.data.stream import PackedStream

Batches = npt.NDArray[np.int64]  # [steps, rows, seq_len + 1]


def write_table(path: Path, columns: dict[str, Any], rows_per_batch: int | None = None) -> Path:
    table = pa.table(columns)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, rows_per_batch)
    return path


def write_texts(path: Path, texts: Sequence[str], *, ids: bool = True, **other: Any) -> Path:
    columns: dict[str, Any] = {"text": pa.array(texts, pa.large_string())}
    if ids:
        columns["id"] = pa.array([document_hash(t.encode()) for t in texts], pa.uint64())
    return write_table(path, columns, **other)


def write_prompts(path: Path, rows: Sequence[tuple[str, str]], *, ids: bool = True) -> Path:
    prompts, completions = ([row[i] for row in rows] for i in (0, 1))
    columns: dict[str, Any] = {"prompt": prompts, "completion": completions}
    if ids:
        hashes = [document_hash(prompt_content(p.encode(), c.encode())) for p, c in rows]
        columns["id"] = pa.array(hashes, pa.uint64())
    return write_table(path, columns)


_CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16"
) -> Path:
    """Documents of sequences of ids, as Megatron-LM's `IndexedDatasetBuilder` writes them."""
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])[: len(sizes)]
    bounds = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    flat = np.array([t for sequence in sequences for t in sequence], dtype=dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(flat.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, _CODES[dtype], len(sizes), len(bounds))
    item = np.dtype(dtype).itemsize
    parts = (sizes.tobytes(), (offsets * item).astype(np.int64).tobytes(), bounds.tobytes())
    prefix.with_name(prefix.name + ".idx").write_bytes(b"".join((header, *parts)))
    return prefix


def streams(spec: StreamSpec, dp_size: int = 1, workers: int = 0) -> list[PackedStream]:
    return [PackedStream(spec, rank, dp_size, workers) for rank in range(dp_size)]


def take(ranks: Sequence[PackedStream], steps: int) -> Batches:
    """Global batches: those of the ranks one under the other."""
    batches = [np.concatenate([rank.next_batch().tokens for rank in ranks]) for _ in range(steps)]
    return np.stack(batches)


def saved(ranks: Sequence[PackedStream]) -> State:
    """The merged state, through JSON as a checkpoint keeps it."""
    state: State = json.loads(json.dumps(merge_states([rank.state() for rank in ranks])))
    return state


def restored(ranks: list[PackedStream], state: State) -> list[PackedStream]:
    for rank in ranks:
        rank.load_state(state)
    return ranks


def close(ranks: Sequence[PackedStream]) -> None:
    for rank in ranks:
        rank.close()


def slot_tokens(batches: Batches, slot: int) -> list[int]:
    """The stream of a slot: sequences overlap by the token that each was handed out with."""
    rows = batches[:, slot]
    assert np.array_equal(rows[1:, 0], rows[:-1, -1])
    return [*rows[:, :-1].reshape(-1).tolist(), int(rows[-1, -1])]
