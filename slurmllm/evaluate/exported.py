"""A checkpoint as a Hugging Face folder for the time that the harness needs it; loads torch."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slurmllm.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.checkpoint.formats.tokenizer_files import checkpoint_tokenizer
from slurmllm.errors import DataError, StorageError
from slurmllm.evaluate.request import EXPORT, Candidate, Settings

_SHARD_BYTES = 5 * 10**9


@contextlib.contextmanager
def exported(candidate: Candidate, store: Path, settings: Settings) -> Iterator[Path]:
    """A model as the harness reads it.

    Args:
        candidate: The model; a Hugging Face folder is taken as it is.
        store: Where a temporary folder may be made, on a disk that checkpoints fit on.
        settings: Where it is kept, if it is, and with which tokenizer.

    Raises:
        ConfigError: transformers has no such model.
        DataError: the tokenizer is missing or does not fit.
        StorageError: a file cannot be read or written.
    """
    if candidate.huggingface:
        yield candidate.directory
        return
    tokenizer = settings.tokenizer
    if settings.export_dir is not None:
        folder = settings.export_dir / f"{candidate.directory.name}-{candidate.checksum[:12]}"
        if not folder.is_dir():
            _export(candidate.directory, folder, tokenizer)
        yield folder
        return
    try:
        store.mkdir(parents=True, exist_ok=True)
        above = Path(tempfile.mkdtemp(prefix=f"{EXPORT}{settings.word}-", dir=store))
    except OSError as error:
        raise StorageError(
            f"cannot make a folder for the exported model in {store}: {error.strerror or error}; "
            "name another place: --export-dir DIR"
        ) from error
    try:
        folder = above / candidate.directory.name
        _export(candidate.directory, folder, tokenizer)
        yield folder
    finally:
        shutil.rmtree(above, ignore_errors=True)


def _export(directory: Path, folder: Path, named: Path | None) -> None:
    tokenizer = checkpoint_tokenizer(directory, named)
    if not tokenizer.files:
        raise DataError(
            f"no tokenizer is known for {directory}, and tasks are texts; give --tokenizer FILE"
        )
    run_export(plan_export(directory, tokenizer), folder, _SHARD_BYTES)
