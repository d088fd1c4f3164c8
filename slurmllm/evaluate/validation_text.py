"""Which text `validation` reads, as the data stream wants to hear it; torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from slurmllm.checkpoint.formats.tokenizer_files import TOKENIZER, TOKENIZER_FOLDER
from slurmllm.checkpoint.origin import read_origin
from slurmllm.config.load import load
from slurmllm.data.spec import StreamSpec
from slurmllm.errors import DataError, UserError
from slurmllm.evaluate.request import HeldOut
from slurmllm.evaluate.suites import VALIDATION
from slurmllm.rundir import RunDir

# Read where --limit says nothing: enough to know a loss to some thousandths of a nat.
MOST_SEQUENCES = 1000
# Counts up when the same text and weights would give another figure.
LOOP = "slurmllm validation 1"
# Read as they are; anything else is a text to be made into documents first.
_CORPORA = (".arrow", ".npy", ".bin", ".idx")


def held_out_text(run: RunDir | None, corpus: Path | None) -> HeldOut:
    """The text that a run's checkpoints are validated on.

    Args:
        run: The run; None where only a model is there.
        corpus: A file named for it.

    Raises:
        UserError: there is none; the message says what to do.
        ConfigError: the run's configuration cannot be read.
    """
    if corpus is not None:
        if not corpus.exists():
            raise DataError(f"--validation-corpus {corpus}: no such file; name one that is there")
        return HeldOut(
            None if run is None else run.path, corpus.absolute(), f"{VALIDATION}:{corpus.name}"
        )
    if run is None:
        raise UserError(
            "validation needs text that the model was not trained on, and no run says which; name "
            "it: --validation-corpus FILE"
        )
    if load(run.config).recipe.data.validation == 0:
        raise UserError(
            f"run {run.name} holds no documents out (data.validation is 0), so there are none to "
            "validate on; set data.validation=0.01 before a run begins, or name a text: "
            "--validation-corpus FILE"
        )
    return HeldOut(run.path, None, VALIDATION)


def settled_by(held_out: HeldOut, tokenizer: Path | None) -> dict[str, Any]:
    """What settles the loss beside the checkpoint, which holds data order and tokenizer's name."""
    parts: dict[str, Any] = {"loop": LOOP}
    if held_out.corpus is not None:
        parts["corpus"] = _digest(held_out.corpus)
    elif held_out.run is not None:
        parts["validation"] = load(RunDir(held_out.run).config).recipe.data.validation
    if tokenizer is not None:
        parts["tokenizer"] = _digest(tokenizer)
    return parts


@contextlib.contextmanager
def stream_spec(held_out: HeldOut, directory: Path, tokenizer: Path | None) -> Iterator[StreamSpec]:
    """What to read for a checkpoint, one sequence a batch.

    Args:
        held_out: The text.
        directory: The checkpoint.
        tokenizer: Instead of the run's, or of the imported checkpoint's.

    Raises:
        DataError: the named text cannot be read.
    """
    model = read_origin(directory).model
    own = directory / TOKENIZER_FOLDER / TOKENIZER
    named = tokenizer or (own if own.is_file() else None)
    seed, mask, share, corpora = 0, "none", 0.0, []
    if held_out.run is not None:
        recipe = load(RunDir(held_out.run).config).recipe
        seed, mask = recipe.train.seed, recipe.data.mask
        if named is None and recipe.data.tokenizer is not None:
            named = Path(recipe.data.tokenizer)
        corpora = [(Path(one.path), one.weight) for one in recipe.data.corpora]
        share = recipe.data.validation
    with contextlib.ExitStack() as stack:
        if held_out.corpus is not None:
            corpora = [(stack.enter_context(_as_corpus(held_out.corpus)), 1.0)]
            share = 0.0
        yield StreamSpec(
            corpora=corpora,
            tokenizer=named,
            seq_len=model.seq_len,
            global_batch=1,
            seed=seed,
            vocab_size=model.vocab_size,
            mask="document" if mask == "document" else "none",
            validation=share,
            split="train" if held_out.corpus is not None else "validation",
        )


@contextlib.contextmanager
def _as_corpus(path: Path) -> Iterator[Path]:
    """A corpus as it is, or one made of a text, JSON lines, CSV or Parquet file."""
    if path.suffix in _CORPORA:
        yield path
        return
    from slurmllm.corpus.build import build_corpus
    from slurmllm.corpus.inputs import find_inputs
    from slurmllm.corpus.options import ReadOptions

    with tempfile.TemporaryDirectory(prefix="slurmllm-validation-") as folder:
        out = Path(folder) / "corpus.arrow"
        build_corpus(find_inputs([str(path)], "auto"), out, ReadOptions(text_by="document"))
        yield out


def _digest(path: Path) -> str:
    try:
        found = path.stat()
        return _digest_of(path, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}; name a file that can be read"
        ) from error


@cache
def _digest_of(path: Path, size: int, mtime_ns: int) -> str:
    """Of a file as it is now: it is asked for once a row, and a corpus may be large."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
