"""A checkpoint exported to a Hugging Face folder while the harness reads it; loads torch."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slurmllm.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.checkpoint.formats.tokenizer_files import checkpoint_tokenizer
from slurmllm.errors import DataError, StorageError
from slurmllm.evaluate.request import EXPORT_PREFIX, EvaluationSettings, ModelRef

_SHARD_BYTES = 5 * 10**9


@contextlib.contextmanager
def exported(model: ModelRef, store: Path, settings: EvaluationSettings) -> Iterator[Path]:
    """The Hugging Face folder of a model.

    Args:
        model: The model; a Hugging Face folder is used as it is.
        store: Folder for a temporary export, on a disk with space for checkpoints.
        settings: With the folder of kept exports, if any, and the tokenizer.

    Raises:
        ConfigError: transformers has no such model.
        DataError: the tokenizer is missing or does not fit.
        StorageError: a file cannot be read or written.
    """
    if model.huggingface:
        yield model.directory
        return
    if settings.export_dir is not None:
        folder = settings.export_dir / f"{model.directory.name}-{model.checksum[:12]}"
        if not folder.is_dir():
            _export(model.directory, folder, settings.tokenizer)
        yield folder
        return
    try:
        store.mkdir(parents=True, exist_ok=True)
        prefix = f"{EXPORT_PREFIX}{settings.call_id}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=store))
    except OSError as error:
        raise StorageError(
            f"cannot create a folder for the exported model in {store}: "
            f"{error.strerror or error}; choose another one: --export-dir DIR"
        ) from error
    try:
        folder = temporary / model.directory.name
        _export(model.directory, folder, settings.tokenizer)
        yield folder
    finally:
        # If the job is killed, the next call removes the folder (evaluate.py).
        shutil.rmtree(temporary, ignore_errors=True)


def _export(directory: Path, folder: Path, tokenizer_file: Path | None) -> None:
    tokenizer = checkpoint_tokenizer(directory, tokenizer_file)
    if not tokenizer.files:
        raise DataError(f"no tokenizer is known for {directory}; give --tokenizer FILE")
    run_export(plan_export(directory, tokenizer), folder, _SHARD_BYTES)
