from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from tokenizers import Tokenizer, models

from slurmllm.data.inspection import check_corpora
from slurmllm.data.sources import open_source
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

from .corpora import write_megatron


def write_arrow(path: Path, table: pa.Table, stream: bool = False) -> Path:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def check(
    corpus: Path,
    tokenizer: Path | None,
    vocab_size: int,
    seq_len: int,
    global_batch: int,
    **settings: Any,
) -> int | None:
    """Of one corpus."""
    spec = StreamSpec([(corpus, 1.0)], tokenizer, seq_len, global_batch, 1, vocab_size, **settings)
    (tokens,) = check_corpora(spec)
    return tokens


def test_counted_tokens_and_corpora_shorter_than_one_batch(
    corpus: Path, tokenizer: Path, texts: list[str], tmp_path: Path
) -> None:
    encoder = TokenEncoder(tokenizer)
    tokens = sum(len(encoder.encode(text)) for text in texts)
    assert check(corpus, tokenizer, 320, seq_len=tokens, global_batch=1) == tokens
    assert check(corpus, tokenizer, 400, seq_len=8, global_batch=8) is None
    message = f"has {tokens} tokens in 97 documents, .* 1 x model.seq_len {tokens + 1} = "
    with pytest.raises(DataError, match=message):
        check(corpus, tokenizer, 320, seq_len=tokens + 1, global_batch=1)
    # Of a blend it need not be the whole batch.
    corpora = [(corpus, 1.0), (corpus, 1.0)]
    assert len(check_corpora(StreamSpec(corpora, tokenizer, tokens + 1, 1, 1, 320))) == 2
    message = f"5 x model.seq_len {tokens} x its share 0.333 = {-(-5 * tokens // 3)}"
    corpora = [(corpus, 0.5), (corpus, 1.0)]
    with pytest.raises(DataError, match=message):
        check_corpora(StreamSpec(corpora, tokenizer, tokens, 5, 1, 320))
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"</s>": 999, "a": 1}, [])).save(str(path))
    with pytest.raises(DataError, match="has 1000 token ids"):
        check(corpus, path, 500, 1, 1)


def test_documents_held_out_do_not_count(
    corpus: Path, tokenizer: Path, texts: list[str], tmp_path: Path
) -> None:
    tokens = sum(len(TokenEncoder(tokenizer).encode(text)) for text in texts)
    actual = check(corpus, tokenizer, 320, tokens // 3, 1, validation=0.5)
    assert actual is None or actual < tokens
    with pytest.raises(DataError, match="97 documents with those held out, fewer than one"):
        check(corpus, tokenizer, 320, tokens, 1, validation=0.5)
    alone = write_arrow(tmp_path / "one.arrow", pa.table({"text": ["all there is"]}))
    with pytest.raises(DataError, match=r"none of the 1 documents of .*one\.arrow is on the"):
        check(alone, tokenizer, 320, 1, 1, validation=0.3)


def test_token_ids_need_no_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    prefix = write_megatron(tmp_path / "m", [[[1, 2, 3]], [[4, 319]]])
    for encoder in (None, tokenizer):
        source = open_source(prefix, TokenEncoder(encoder) if encoder else None, 320)
        assert (len(source), source.total_size, source.size_unit) == (2, 5, "tokens")
        check(prefix, encoder, 320, 5, 1)
    with pytest.raises(DataError, match=r"m\.bin is 319, .*model.vocab_size is 300"):
        check(prefix, None, 300, 5, 1)
    text = write_arrow(tmp_path / "c.arrow", pa.table({"text": ["a"]}))
    with pytest.raises(DataError, match=r"c\.arrow has text, and no tokenizer is set"):
        check(text, None, 320, 5, 1)
    np.save(tmp_path / "t.npy", np.zeros(50, dtype=np.int32))
    assert check(tmp_path / "t.npy", None, 300, 10, 5) == 50
    assert check(tmp_path / "t.npy", None, 300, 5, 5) is None
    with pytest.raises(DataError, match=r"data.mask is document, .*t\.npy are unknown; set"):
        check(tmp_path / "t.npy", None, 300, 10, 5, mask="document")


def test_bad_corpora(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            check(path, tokenizer, 320, 8, 8)

    refused(tmp_path / "none.arrow", r"no corpus .*none.arrow; make one with `slurmllm data build")
    refused(tmp_path, "is a folder, and not of Hugging Face")
    whole = corpus.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / f"cut{size}.arrow"
        cut.write_bytes(whole[:size])
        refused(cut, f"cut{size}.arrow is not a complete Arrow file")
    table = pa.table({"text": ["a", "b"]})
    refused(write_arrow(tmp_path / "e.arrow", table.slice(0, 0)), "has no documents")
    other = pa.table({"body": ["a"], "n": [1]})
    refused(write_arrow(tmp_path / "o.arrow", other), r"no string column 'text' \(columns: body, n")
    refused(write_arrow(tmp_path / "i.arrow", pa.table({"text": [1]})), "no string column")
