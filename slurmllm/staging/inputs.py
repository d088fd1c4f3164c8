"""The small files that each worker reads, copied once to a node's own disk.

These are the tokenizer, small corpora and, of corpora in Megatron's format, the index: one reader a
node instead of one a worker. Larger corpora are read from the shared file system, a document at a
time. Workers find the copies by `worker_files.local_copy`.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slurmllm.config.resolve import RunConfig
from slurmllm.run.safe_files import check_private_folder, open_regular, os_error_text
from slurmllm.run.worker_files import copy_name
from slurmllm.staging.archive import free_for

FOLDER = "inputs"  # in the user's private folder on a node
MAX_FILE_BYTES = 4_000_000_000  # a larger index is mapped from the shared file system
MAX_CORPUS_BYTES = 256_000_000  # read in a second by each of many nodes at a time
MAX_AGE_S = 14 * 86400.0  # of a copy that no attempt has used

log = logging.getLogger(__name__)


def stage_inputs(config: RunConfig, private: Path) -> Path:
    """Copy a run's small inputs into the user's private folder; returns the folder of the copies.

    A file that cannot be copied is read from the shared file system.
    """
    folder = private / FOLDER
    for path, limit in _small_inputs(config):
        try:
            check_private_folder(private)
            folder.mkdir(mode=0o700, exist_ok=True)
            with open_regular(path) as source:
                copy = folder / copy_name(path)
                if copy.is_file():
                    os.utime(copy)
                    continue
                size = os.fstat(source.fileno()).st_size
                if size > limit:
                    continue
                free_for(folder, size)
                with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as target:
                    try:
                        shutil.copyfileobj(source, target, 1 << 20)
                        target.flush()
                        Path(target.name).replace(copy)
                    except BaseException:
                        Path(target.name).unlink()
                        raise
        except FileNotFoundError:
            continue  # most tokenizers have no further files
        except OSError as error:
            reason = os_error_text(error)
            log.warning("cannot copy %s into %s, workers read it there: %s", path, folder, reason)
    with suppress(OSError):
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()
    return folder


def _small_inputs(config: RunConfig) -> Iterator[tuple[Path, int]]:
    """Yield the files, each with the largest size, in bytes, that is copied."""
    data = config.recipe.data
    if data.tokenizer is not None:
        tokenizer = Path(data.tokenizer)
        for name in (tokenizer.name, "tokenizer_config.json", "chat_template.jinja"):
            yield tokenizer.with_name(name), MAX_FILE_BYTES
    for text in (*(share.path for share in data.corpora), *config.recipe.eval.corpora.values()):
        path = Path(text)
        stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
        yield stem.with_name(f"{stem.name}.idx"), MAX_FILE_BYTES
        yield stem.with_name(f"{stem.name}.bin"), MAX_CORPUS_BYTES
        if stem == path and not path.is_dir():
            yield path, MAX_CORPUS_BYTES
