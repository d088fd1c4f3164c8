"""Input files → one corpus and its manifest, with bounded memory: the steps in their order.

The corpus appears under its name complete or not at all. Shards that an unfinished build has read
stay in the work folder, and the next build continues from them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from slurmllm.core.display.progress import OnNote, OnStage
from slurmllm.core.errors import (
    CodeError,
    DataError,
    NodeError,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.core.format import Json, Texts, format_plural
from slurmllm.core.run.records import Record
from slurmllm.data.corpus.inputs import FormatOption, InputFile
from slurmllm.data.corpus.join import (
    FinishedShard,
    column_parts,
    column_size,
    mark_duplicates,
    write_arrow,
    write_tokens,
)
from slurmllm.data.corpus.options import ERROR_EXAMPLES, BuildOptions, ReadOptions, TokenizeOptions
from slurmllm.data.corpus.shard import (
    Shard,
    load_shard,
    peak_bytes,
    plan_shards,
    write_shard,
    write_shards,
)
from slurmllm.data.corpus.work_folder import (
    OutputFile,
    WorkFolder,
    output_files,
    refuse_existing,
    writing,
)
from slurmllm.data.sources.tokenized import with_ending

if TYPE_CHECKING:
    from slurmllm.core.slurm.arrays import SlurmOptions
    from slurmllm.core.slurm.processes import FailedCall

# Jobs per worker with --slurm: each writes several shards, so queueing does not dominate.
_JOBS_PER_WORKER = 4


class CorpusInput(Record):
    """One input file."""

    path: str  # as named at the build, or below the folder named there
    bytes: int  # on disk
    documents: int
    # xxh3-128 of the file on disk; None for Parquet and Arrow, not read whole.
    xxh3: str | None = None


class CorpusManifest(Record):
    """`<corpus>.json`: inputs, options and counts of a build; equal builds give equal bytes."""

    version: Literal[2] = 2
    documents: int
    text_bytes: int  # UTF-8 bytes of all documents
    columns: Texts = ("text", "source")  # of the corpus
    tokens: int | None = None  # with --tokenize
    tokenizer: str | None = None  # --tokenize
    tokenizer_fingerprint: str | None = None
    dtype: str | None = None  # of the token ids
    arrow_bytes: int | None = None
    arrow_sha256: str | None = None
    bin_bytes: int | None = None
    bin_sha256: str | None = None
    idx_bytes: int | None = None
    idx_sha256: str | None = None
    format: str  # --format
    text_by: str  # --text-by
    text_key: str  # --text-key
    prompt_key: str | None = None  # --prompt-key
    completion_key: str | None = None  # --completion-key
    dedup: bool = False  # --dedup
    empty: int  # documents skipped because they held no text
    duplicates: int = 0  # skipped by --dedup
    bad: int  # unreadable documents and files, skipped
    bad_examples: Texts  # the first of them: file, place, reason
    inputs: tuple[CorpusInput, ...]  # in the order they were read

    def content(self) -> bytes:
        """Return the file's content, without fields that are None."""
        return (self.model_dump_json(indent=2, exclude_none=True) + "\n").encode()


def manifest_path(corpus: Path) -> Path:
    """Return the path of a corpus's manifest (`.arrow` or `.bin`)."""
    return corpus.with_name(corpus.name + ".json")


@dataclass(frozen=True)
class BuildResult:
    """A finished build."""

    manifest: CorpusManifest
    outputs: tuple[Path, ...]  # the corpus, or `.bin` and `.idx`
    shards: int
    continued: int  # shards that an earlier build had finished
    workers: int  # with Slurm, jobs that ran at a time
    # Resident sets: this process's maximum plus those of its workers; with Slurm, the largest of
    # any one process.
    peak_memory_bytes: int


def build_corpus(
    files: Sequence[InputFile],
    out: Path,
    read: ReadOptions,
    *,
    dedup: bool = False,
    tokenize: TokenizeOptions | None = None,
    format: FormatOption = "auto",
    overwrite: bool = False,
    workers: int = 1,
    slurm: SlurmOptions | None = None,
    on_progress: OnStage = lambda stage, done, total: None,
    on_note: OnNote = lambda note: None,
) -> BuildResult:
    """Write a corpus, or the files of token ids (`output_paths`), and the manifest next to it.

    Args:
        format: The `--format` that the files were found with, for the manifest.
        workers: Processes that read (one: this process), or with `slurm` jobs at a time.

    Raises:
        DataError: `out` exists, an input cannot be read, no input has text, or another build
            writes the same file.
        NodeError, SlurmError: a worker was killed, or a job failed.
        StorageError: the output cannot be written.
    """
    options = BuildOptions(read, dedup, tokenize)
    outputs = output_paths(out, tokenize=tokenize is not None)
    if not files:
        raise DataError("no input file")
    refuse_outputs(outputs, overwrite)
    shards = plan_shards(files, options)
    work = WorkFolder.of(outputs[0])
    with work.lock():
        try:
            continued = _finished_shards(shards, work, on_note)
            peaks = _write_missing_shards(
                shards, continued, work, workers, slurm, on_progress, on_note
            )
            finished = _verify_shards(shards, work, on_progress)
            with output_files([*outputs, manifest_path(outputs[0])], work) as (*opened, last):
                manifest = _join(finished, files, opened, options, format, work, on_progress)
                last.write(manifest.content())
            work.remove()
        except BaseException:
            work.remove_unfinished()  # also on Ctrl-C
            raise
    # Processes of one machine run at the same time; Slurm jobs have memory of their own.
    peak = peak_bytes()
    return BuildResult(
        manifest=manifest,
        outputs=outputs,
        shards=len(shards),
        continued=len(continued),
        workers=workers,
        peak_memory_bytes=max([peak, *peaks]) if slurm else peak + sum(peaks),
    )


def output_paths(out: Path, *, tokenize: bool) -> tuple[Path, ...]:
    """Return the corpus, or of `NAME`, `NAME.bin` or `NAME.idx` the files of token ids."""
    if not tokenize:
        return (out,)
    return with_ending(out, ".bin"), with_ending(out, ".idx")


def refuse_outputs(outputs: Sequence[Path], overwrite: bool) -> None:
    corpus, *index = outputs
    refuse_existing(corpus, overwrite)
    for path in index:
        # With a manifest and without a corpus: of a build that was killed while it renamed them.
        refuse_existing(path, overwrite or manifest_path(corpus).exists())


def _finished_shards(shards: Sequence[Shard], work: WorkFolder, on_note: OnNote) -> set[str]:
    """Return the shards of an earlier build; removes all else from the work folder."""
    names = work.shard_names()
    finished = {
        shard.name
        for shard in shards
        if shard.name in names and load_shard(work.shard(shard.name), shard.options.read.skip_bad)
    }
    if finished:
        on_note(f"continuing: {len(finished):,} of {len(shards):,} shards are finished")
    elif names:
        on_note(
            f"starting over: the {len(names):,} shards in {work.path} are damaged or were read "
            "from other inputs or with other options"
        )
    work.remove_except(finished)
    return finished


def _write_missing_shards(
    shards: Sequence[Shard],
    finished: set[str],
    work: WorkFolder,
    workers: int,
    slurm: SlurmOptions | None,
    on_progress: OnStage,
    on_note: OnNote,
) -> list[int]:
    """Write the unfinished shards; return the peak memory of each process that did, bytes."""
    missing = [shard for shard in shards if shard.name not in finished]
    sizes = {shard.name: shard.size_bytes for shard in shards}
    total = sum(sizes.values())

    def report(running: Mapping[str, int], names: set[str]) -> None:
        counts = {**running, **dict.fromkeys(names, total)}
        # A decompressor reads ahead, so a running shard may report more than its size.
        done = sum(min(count, sizes.get(name, 0)) for name, count in counts.items())
        on_progress("reading", done, total)

    if not missing or (slurm is None and 1 in (workers, len(missing))):
        names = work.shard_names()  # not at each of a million files: it lists the folder
        for shard in missing:
            write_shard(shard, work, lambda name, done: report({name: done}, names))
            names.add(shard.name)
            report({}, names)
        return []
    # 0.3 s that a build in this process does not need.
    from slurmllm.core.slurm.arrays import MOST_TASKS, ArrayRequest, map_calls
    from slurmllm.core.slurm.processes import FailedCall

    def on_submit(job_id: str, num_jobs: int) -> None:
        tasks = f"{len(missing):,} shards in {num_jobs:,} tasks, {workers:,} at a time"
        on_note(f"Slurm job {job_id}: {tasks}")

    array = None
    if slurm is not None:
        texts = "the jobs that read the inputs", "read them on this machine without --slurm"
        array = ArrayRequest("slurmllm-data", slurm, *texts, on_submit, cpus=1)
    calls = min(workers * _JOBS_PER_WORKER, MOST_TASKS) if slurm else workers
    groups = _equal_parts(missing, calls)
    results = map_calls(
        write_shards,
        [(group, work.path) for group in groups],
        names=[group[0].name for group in groups],
        logs=work.logs,
        at_once=workers,
        on_poll=lambda: report(work.running(), work.shard_names()),
        array=array,
    )
    peaks = []
    with contextlib.closing(results):
        for index, result in results:
            if isinstance(result, FailedCall):
                raise _call_error(result, groups[index], in_job=slurm is not None)
            if isinstance(result, SlurmllmError):
                raise result
            peaks.append(result)
    report({}, work.shard_names())
    return peaks


def _equal_parts(shards: Sequence[Shard], count: int) -> list[list[Shard]]:
    """Distribute shards over at most `count` parts of similar size: large ones first."""
    parts: list[list[Shard]] = [[] for _ in range(min(count, len(shards)))]
    sizes = [0] * len(parts)
    for shard in sorted(shards, key=lambda shard: -shard.size_bytes):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(shard)
        sizes[smallest] += 1 + shard.size_bytes
    return parts


def _call_error(failed: FailedCall, shards: Sequence[Shard], in_job: bool) -> Exception:
    hint = "Finished shards are kept; run the same command again to continue"
    if in_job:
        return SlurmError(f"Slurm {failed.message}. {hint}")
    files = [file.name for shard in shards for file in shard.files]
    reader = f"the process that read {len(files):,} input files, the first {files[0]},"
    if failed.signal is None:
        return CodeError(f"{reader} failed: {failed.message}. {hint}")
    return NodeError(
        f"{reader} was killed by {signal.Signals(failed.signal).name}; the usual cause is that the "
        f"machine is out of memory: see `dmesg`, or lower --workers. {hint}"
    )


def _verify_shards(
    shards: Sequence[Shard], work: WorkFolder, on_progress: OnStage
) -> list[FinishedShard]:
    finished = []
    checked = 0
    total = sum(shard.size_bytes for shard in shards)
    for shard in shards:
        folder = work.shard(shard.name)
        record = load_shard(folder, shard.options.read.skip_bad)
        if record is None:
            raise StorageError(
                f"{folder} differs from what was written: the disk or the machine failed in "
                "between; start the same command again, which reads these inputs again"
            )
        finished.append(FinishedShard(folder, record))
        checked += shard.size_bytes
        on_progress("verifying shards", checked, total)
    return finished


def _write_outputs(
    shards: Sequence[FinishedShard],
    outputs: Sequence[OutputFile],
    options: BuildOptions,
    names: Sequence[str],
    documents: int,
    work: WorkFolder,
    on_progress: OnStage,
) -> Json:
    """Write the corpus; return counts and digests for the manifest."""
    counts: Json
    if tokenize := options.tokenize:
        tokens = column_size(shards, "tokens")
        total = tokens * np.dtype(tokenize.dtype).itemsize
        outputs[0].on_write = lambda done: on_progress("writing", done, total)
        write_tokens(outputs[0], outputs[1], shards, documents, tokenize.dtype)
        sizes = column_parts(shards, "text_bytes")
        counts = {
            "text_bytes": sum(int(np.asarray(shard_sizes).sum()) for shard_sizes in sizes),
            "columns": (),
            "tokens": tokens,
            "tokenizer": str(tokenize.tokenizer),
            "tokenizer_fingerprint": tokenize.fingerprint,
            "dtype": tokenize.dtype,
        }
    else:
        text_sizes = {column: column_size(shards, column) for column in options.read.columns}
        text_bytes = sum(text_sizes.values())
        # The file also holds ids, offsets and metadata: report no more than the text's bytes.
        outputs[0].on_write = lambda done: on_progress("writing", min(done, text_bytes), text_bytes)
        columns = write_arrow(outputs[0], shards, documents, text_sizes, names, work)
        counts = {"text_bytes": text_bytes, "columns": columns}
    for ending, file in zip(("bin", "idx") if tokenize else ("arrow",), outputs, strict=True):
        counts |= {f"{ending}_bytes": file.size_bytes, f"{ending}_sha256": file.sha256}
    return counts


def _join(
    shards: Sequence[FinishedShard],
    inputs: Sequence[InputFile],
    outputs: Sequence[OutputFile],
    options: BuildOptions,
    format: FormatOption,
    work: WorkFolder,
    on_progress: OnStage,
) -> CorpusManifest:
    """Write the documents of all shards; return the manifest."""
    records = [shard.record for shard in shards]
    empty = sum(record.empty for record in records)
    bad = sum(record.bad for record in records)
    if not any(record.documents for record in records):
        # Wrong options (--text-key) are the usual cause: shards read with them are of no use.
        work.remove_except(())
        raise DataError(
            f"no text in {format_plural(len(inputs), 'input file')} ({empty} empty "
            f"documents, {bad} unreadable); no corpus was written. The first input "
            f"is {inputs[0].name}: see --format and --text-key"
        )
    with writing(work.path):
        duplicates = mark_duplicates(shards, work.path) if options.dedup else 0
    by_input = [count for shard in shards for count in shard.documents_by_input()]
    documents = sum(by_input)
    names = [file.name for file in inputs]
    counts = {"documents": documents, "duplicates": duplicates}
    counts |= _write_outputs(shards, outputs, options, names, documents, work, on_progress)
    read_inputs = [entry for record in records for entry in record.inputs]
    settings = asdict(options.read)
    del settings["skip_bad"], settings["zstd_long"]  # what was skipped is counted
    examples = [example for record in records for example in record.bad_examples]
    return CorpusManifest(
        **counts,
        **settings,
        dedup=options.dedup,
        format=format,
        empty=empty,
        bad=bad,
        bad_examples=examples[:ERROR_EXAMPLES],
        inputs=[
            CorpusInput(path=file.name, bytes=file.size_bytes, documents=count, xxh3=entry.xxh3)
            for file, count, entry in zip(inputs, by_input, read_inputs, strict=True)
        ],
    )
