"""The text of the task `validation`, as a specification of the data stream; without torch."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from slurmllm.analysis.evaluate.request import ValidationText
from slurmllm.analysis.evaluate.suites import VALIDATION
from slurmllm.core.config.load import load
from slurmllm.core.errors import DataError, UserError
from slurmllm.core.format import Json, Texts
from slurmllm.core.run.rundir import RunDir, storage_errors
from slurmllm.data.sources.dataset_folder import corpus_files
from slurmllm.data.spec import StreamSpec
from slurmllm.train.checkpoint.formats.model_folders import TOKENIZER, TOKENIZER_FOLDER
from slurmllm.train.checkpoint.state import read_origin

MAX_SEQUENCES = 1000  # without --limit: enough for a standard error of some thousandths of a nat
# The version of our own loop: increased when the same text and weights give another loss.
LOOP = "slurmllm validation 1"
# Corpora, which are read directly; a file of any other type is first built into a corpus.
_CORPORA = (".arrow", ".npy", ".bin", ".idx")


def validation_text(run: RunDir | None, corpus: Path | None) -> ValidationText:
    """Return the text for a run's checkpoints, or for a model folder (`run` is None).

    `corpus` is the file of --validation-corpus. Raises UserError without any text.
    """
    if corpus:
        if not corpus.exists():
            raise DataError(f"--validation-corpus {corpus}: no such file; choose an existing one")
        return ValidationText(
            run.path if run else None, corpus.absolute(), f"{VALIDATION}:{corpus.name}"
        )
    if not run:
        raise UserError(
            "validation needs text that the model was not trained on; name it: "
            "--validation-corpus FILE"
        )
    if load(run.config).recipe.data.validation == 0:
        raise UserError(
            f"run {run.name} has no held-out documents (data.validation is 0); set "
            "data.validation=0.01 before a run starts, or name a text: --validation-corpus FILE"
        )
    return ValidationText(run.path, None, VALIDATION)


def cache_key_parts(validation: ValidationText, tokenizer: Path | None) -> Json:
    """Return what the loss depends on, except the checkpoint, its data order and tokenizer name."""
    parts: Json = {"loop": LOOP}
    if validation.corpus:
        parts["corpus"] = "".join(map(_digest, corpus_files(validation.corpus)))
    elif validation.run:
        parts["validation"] = load(RunDir(validation.run).config).recipe.data.validation
    if tokenizer:
        parts["tokenizer"] = _digest(tokenizer)
    return parts


@contextlib.contextmanager
def stream_spec(
    validation: ValidationText, directory: Path, tokenizer: Path | None
) -> Iterator[StreamSpec]:
    """Yield the data stream for a checkpoint, with one sequence in a batch.

    `tokenizer` replaces the run's, or that of an imported checkpoint.
    """
    model = read_origin(directory).model
    imported = directory / TOKENIZER_FOLDER / TOKENIZER
    named = tokenizer or (imported if imported.is_file() else None)
    seed, mask, share, corpora = 0, "none", 0.0, []
    modules: Texts = ()
    if validation.run:
        path = RunDir(validation.run).config
        recipe = load(path).recipe
        seed = recipe.train.seed
        mask = recipe.data.mask
        if named is None and recipe.data.tokenizer is not None:
            named = Path(recipe.data.tokenizer)
        corpora = [(Path(corpus.path), corpus.weight) for corpus in recipe.data.corpora]
        share = recipe.data.validation
        if recipe.plugins:  # imported, so that no other user may have named them
            modules = load(path, trusted=True).recipe.plugins
    with contextlib.ExitStack() as stack:
        if validation.corpus:
            corpora = [(stack.enter_context(_as_corpus(validation.corpus)), 1.0)]
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
            split="train" if validation.corpus else "validation",
            plugins=modules,
        )


@contextlib.contextmanager
def _as_corpus(path: Path) -> Iterator[Path]:
    """Yield a corpus, or one that is built from a text, JSON lines, CSV or Parquet file."""
    if path.suffix in _CORPORA or path.is_dir():
        yield path
        return
    from slurmllm.data.corpus.build import build_corpus
    from slurmllm.data.corpus.inputs import find_inputs
    from slurmllm.data.corpus.options import ReadOptions

    with tempfile.TemporaryDirectory(prefix="slurmllm-validation-") as folder:
        out = Path(folder) / "corpus.arrow"
        build_corpus(find_inputs([str(path)], "auto"), out, ReadOptions(text_by="document"))
        yield out


def _digest(path: Path) -> str:
    with storage_errors(f"cannot read {path}", "choose a readable file", DataError):
        status = path.stat()
        return _digest_of(path, status.st_size, status.st_mtime_ns)


@cache
def _digest_of(path: Path, size: int, mtime_ns: int) -> str:
    # Cached by size and time: it is needed once for each row, and a corpus may be large.
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
