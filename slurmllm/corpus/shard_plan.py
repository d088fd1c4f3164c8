"""How the inputs are cut into shards: runs of consecutive files, each read by one process.

Where the cuts are depends on the files alone, not on the number of processes, and a shard's name
on what it reads and how: a shard that is there is one that need not be read again, whatever else
changed between two builds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import xxhash

from slurmllm.corpus.inputs import InputFile
from slurmllm.corpus.options import BuildOptions

# Enough shards to keep processes busy to the end and to lose little when killed, and no more.
_SHARDS = 16
_LEAST_BYTES = 16 << 20
_MOST_BYTES = 256 << 20
# What a compressed byte counts, for it takes as long as several plain ones.
_PACKED = 3
# What opening a file counts, which a million small ones are mostly made of.
_FILE_BYTES = 64 << 10
# Changes when the same inputs and options make other columns.
_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """A run of input files.

    Attributes:
        name: Depends on the files (place, size, time of change) and on the options.
        files: In their order.
        options: How they are read.
    """

    name: str
    files: tuple[InputFile, ...]
    options: BuildOptions

    @property
    def size_bytes(self) -> int:
        """Of its files on disk."""
        return sum(file.size_bytes for file in self.files)


def cut(files: Sequence[InputFile], options: BuildOptions) -> list[Shard]:
    """Cut the inputs into shards; a file is never in two.

    Paths in them are absolute, for whoever reads a shard may stand in another folder.
    """
    if options.tokenize:
        tokenizer = options.tokenize.tokenizer.absolute()
        options = replace(options, tokenize=replace(options.tokenize, tokenizer=tokenizer))
    total = sum(map(_weight, files))
    target = min(max(total // _SHARDS, _LEAST_BYTES), _MOST_BYTES)
    return [Shard(_name(run, options), run, options) for run in _runs(files, target)]


def _runs(files: Sequence[InputFile], target: int) -> Iterator[tuple[InputFile, ...]]:
    run: list[InputFile] = []
    weight = 0
    for file in files:
        if run and weight + _weight(file) > target:
            yield tuple(run)
            run, weight = [], 0
        run.append(replace(file, path=file.path.absolute()))
        weight += _weight(file)
    if run:
        yield tuple(run)


def _weight(file: InputFile) -> int:
    return _FILE_BYTES + file.size_bytes * (_PACKED if file.compression else 1)


def _name(files: tuple[InputFile, ...], options: BuildOptions) -> str:
    # Whether faults are left out or stop the build makes no difference to a shard without any.
    options = replace(options, read=replace(options.read, skip_bad=False))
    content = [_VERSION, asdict(options), [asdict(file) for file in files]]
    return xxhash.xxh3_64_hexdigest(json.dumps(content, default=str).encode())
