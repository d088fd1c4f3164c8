"""The `stdlib` corpus: text that every machine with Python has, for demos and first runs.

It holds the sources of this Python's standard library, a paragraph a document, among them the
language reference that `help()` prints (`pydoc_data/topics.py`). Its tokenizer is trained on a
sample of them.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slurmllm.core.errors import DataError
from slurmllm.core.run.rundir import write_atomic
from slurmllm.data.corpus.build import build_corpus, manifest_path
from slurmllm.data.corpus.inputs import InputFile, input_file
from slurmllm.data.corpus.options import InputErrors, ReadOptions
from slurmllm.data.corpus.readers import DocumentStream
from slurmllm.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer

VOCAB_SIZE = 4096
# Keeps the build to seconds; the whole library is about 11 MB in Python 3.11.
_MAX_BYTES = 12_000_000
# Every n-th file trains the tokenizer: the vocabulary hardly differs, the time does.
_TOKENIZER_STRIDE = 3
# Tests, third-party packages, and what distributions remove or package separately.
_EXCLUDED_FOLDERS = """
test tests idlelib lib2to3 turtledemo ensurepip tkinter
site-packages dist-packages __pycache__ __phello__
"""
# Written by a distribution or an administrator, not by Python.
_EXCLUDED_FILES = ("sitecustomize.py", "usercustomize.py")


def ensure_stdlib(folder: Path, vocab_size: int = VOCAB_SIZE) -> tuple[Path, Path]:
    """Make corpus and tokenizer under `folder`, unless they exist, and return their paths.

    The same Python makes the same bytes, so processes that do this at the same time replace each
    other's files with equal ones. `vocab_size` is the model's; only a smaller one counts.
    """
    version = f"{sys.implementation.name}-{'.'.join(map(str, sys.version_info[:3]))}"
    corpus = folder / f"stdlib-{version}.arrow"
    entries = max(min(vocab_size, VOCAB_SIZE), MIN_VOCAB_SIZE)
    size = "" if entries == VOCAB_SIZE else f".{entries}"
    tokenizer = folder / f"stdlib-{version}{size}.tokenizer.json"
    if corpus.is_file() and tokenizer.is_file():
        return corpus, tokenizer
    # Paragraphs: a short run would read only a handful of whole modules.
    options = ReadOptions(text_by="paragraph", skip_bad=True)
    files = _sources()
    if not corpus.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, since two builds of one output exclude each other.
        with tempfile.TemporaryDirectory(prefix=".stdlib-", dir=folder) as temporary:
            built = Path(temporary) / corpus.name
            build_corpus(files, built, options)
            manifest_path(built).replace(manifest_path(corpus))
            built.replace(corpus)
    if not tokenizer.is_file():
        texts = DocumentStream(files[::_TOKENIZER_STRIDE], options, InputErrors(skip_bad=True))
        write_atomic(tokenizer, train_tokenizer(texts, entries))
    return corpus, tokenizer


def _sources() -> list[InputFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    total = 0
    for path in _walk(root):
        file = input_file(path, "text", name=path.relative_to(root).as_posix())
        total += file.size_bytes
        if total > _MAX_BYTES:
            break
        files.append(file)
    if not files:
        raise DataError(
            f"no Python sources under {root}, so the `stdlib` corpus cannot be made here; set "
            "data.corpus and data.tokenizer to files made with `slurmllm data build` and "
            "`slurmllm tokenizer train`"
        )
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            # config-3.11-… holds the options that this Python was compiled with.
            excluded = path.name in _EXCLUDED_FOLDERS.split()
            if not excluded and not path.name.startswith(("config-", ".")):
                yield from _walk(path)
        elif path.suffix == ".py" and path.name not in _EXCLUDED_FILES and path.is_file():
            yield path
