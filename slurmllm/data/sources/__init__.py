"""Corpora of all kinds as documents of token ids; recognized by content, ending or prefix."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmllm.core import plugins
from slurmllm.core.errors import DataError
from slurmllm.core.run.safe_files import open_regular

if TYPE_CHECKING:
    from slurmllm.data.sources.base import Source
    from slurmllm.data.spec import StreamSpec
    from slurmllm.data.tokenizer import TokenEncoder


def open_source(
    path: Path, encoder: TokenEncoder | None, vocab_size: int | None, modules: Sequence[str] = ()
) -> Source:
    """Open a corpus.

    Args:
        path: An Arrow corpus; a Megatron `.idx`, its `.bin` or the name of both without the ending;
            a `.npy`; `name:path` for the data source of this name, another package's.
        encoder: Tokenizes texts; not needed for token ids.
        vocab_size: Upper bound of the ids of tokenized corpora.
        modules: The recipe's `plugins`, which may register data sources.
    """
    # Imports here: `sources.base`, which recipes need too, must not load tokenizers and pyarrow.
    from slurmllm.data.sources.tokenized import NPY_MAGIC, MegatronSource, NumpySource, is_megatron

    prefix, path_text = plugins.split_prefix(str(path))
    if prefix is not None:
        from slurmllm.data.sources.base import Source

        plugins.find("data_sources", prefix, "data source", modules)
        arguments = (Path(path_text), encoder, vocab_size)
        expected: type[Source] = Source  # type: ignore[type-abstract]
        return plugins.build("data_sources", prefix, "data source", expected, {}, *arguments)
    if is_megatron(path):
        return MegatronSource(path, encoder, vocab_size)
    magic = b""
    # Errors are suppressed here: opening the file below raises them with a message.
    with contextlib.suppress(OSError), open_regular(path) as stream:
        magic = stream.read(len(NPY_MAGIC))
    if path.suffix == ".npy" or magic == NPY_MAGIC:
        return NumpySource(path, encoder, vocab_size)
    # 0.1 s of imports that token ids do not need.
    from slurmllm.data.sources.arrow import ArrowFile, ArrowTokenSource
    from slurmllm.data.sources.text import PromptSource, TextSource

    file = ArrowFile(path)
    kind: type[PromptSource | TextSource] = TextSource
    if {"prompt", "completion"} <= {*file.names}:
        kind = PromptSource
    elif "text" not in file.names:
        if file.has_tokens():
            return ArrowTokenSource(file, encoder, vocab_size)
        if "messages" in file.names:
            raise DataError(
                f"{path} holds conversations, which are no longer trained; build a corpus of "
                "prompts and completions, or train chats with TRL, supervised by `command:`"
            )
    if encoder is None:
        raise DataError(
            f"{path} has text, and no tokenizer is set; name a tokenizer.json in data.tokenizer "
            "(data inspect: --tokenizer)"
        )
    return kind(file, encoder)


def open_all(spec: StreamSpec) -> tuple[list[Source], TokenEncoder | None]:
    encoder = None
    if spec.tokenizer is not None:
        from slurmllm.data.tokenizer import TokenEncoder

        encoder = TokenEncoder(spec.tokenizer)
    sources = [
        open_source(path, encoder, spec.vocab_size, spec.plugins) for path, _ in spec.corpora
    ]
    for source in sources:
        if spec.mask == "document" and not source.knows_documents:
            raise DataError(
                f"data.mask is document, and the documents' bounds in {source.path} are unknown; "
                "set data.tokenizer, whose end-of-document token marks them, or data.mask=none"
            )
    return sources, encoder
