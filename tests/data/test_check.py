from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest
from tokenizers import Tokenizer, models

from slurmllm.data.check import check_inputs
from slurmllm.data.sources.arrow import Corpus
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError, StorageError


def write_arrow(path: Path, table: pa.Table, stream: bool = False) -> Path:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def test_facts(corpus: Path, tokenizer: Path, texts: list[str]) -> None:
    encoder = TokenEncoder(tokenizer)
    tokens = sum(len(encoder.encode(text)) for text in texts)
    facts = check_inputs(corpus, tokenizer, 320, seq_len=tokens, global_batch=1)
    assert facts.documents == len(texts)
    assert facts.text_bytes == sum(len(text.encode()) for text in texts)
    assert facts.tokens == tokens
    assert facts.vocab_size == 320
    assert facts.end_of_document == 0
    assert check_inputs(corpus, tokenizer, 400, seq_len=8, global_batch=8).tokens is None


def test_shorter_than_one_batch(corpus: Path, tokenizer: Path, texts: list[str]) -> None:
    encoder = TokenEncoder(tokenizer)
    tokens = sum(len(encoder.encode(text)) for text in texts)
    message = f"has {tokens} tokens in 97 documents, .* 1 x model.seq_len {tokens + 1} = "
    with pytest.raises(DataError, match=message):
        check_inputs(corpus, tokenizer, 320, seq_len=tokens + 1, global_batch=1)


def test_vocabulary_larger_than_the_models(corpus: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match=r"has 320 token ids, more than model.vocab_size 319; set"):
        check_inputs(corpus, tokenizer, 319, 8, 8)


def test_ids_with_gaps_count_to_the_largest(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"</s>": 999, "a": 1}, [])).save(str(path))
    with pytest.raises(DataError, match="has 1000 token ids"):
        check_inputs(corpus, path, 500, 1, 1)


def test_bad_corpora(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            check_inputs(path, tokenizer, 320, 8, 8)

    refused(tmp_path / "none.arrow", r"no corpus .*none.arrow; make one with `slurmllm data build")
    refused(tmp_path, "cannot read corpus")
    whole = corpus.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / f"cut{size}.arrow"
        cut.write_bytes(whole[:size])
        refused(cut, f"cut{size}.arrow is not a whole Arrow file")
    table = pa.table({"text": ["a", "b"]})
    refused(write_arrow(tmp_path / "s.arrow", table, stream=True), "is not a whole Arrow file")
    refused(write_arrow(tmp_path / "e.arrow", table.slice(0, 0)), "holds no documents")
    other = pa.table({"body": ["a"], "n": [1]})
    refused(write_arrow(tmp_path / "o.arrow", other), r"no string column 'text' \(there is body, n")
    refused(write_arrow(tmp_path / "i.arrow", pa.table({"text": [1]})), "no string column")


def test_bad_tokenizer(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="cannot read tokenizer"):
        check_inputs(corpus, tmp_path / "none.json", 320, 8, 8)


def test_corpora_made_elsewhere(tmp_path: Path) -> None:
    texts = ["first", "größer", None, "last"]
    for kind in (pa.string(), pa.large_string()):
        table = pa.table({"id": [1, 2, 3, 4], "text": pa.array(texts, kind)}).slice(1)
        corpus = Corpus(write_arrow(tmp_path / "other.arrow", table))
        assert list(corpus) == ["größer", "", "last"]
        assert corpus.text_bytes == 12


def test_a_corpus_with_damaged_text(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "c.arrow", pa.table({"text": ["some words", "others"]}))
    path.write_bytes(path.read_bytes().replace(b"words", b"wor\xffs"))
    corpus = Corpus(path)
    with pytest.raises(StorageError, match=r"document 0 of .* is damaged"):
        corpus.text(0)
    assert corpus.text(1) == "others"


def test_fast_and_without_torch(corpus: Path, tokenizer: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slurmllm.data.check import check_inputs;"
        "import slurmllm.data.stream, slurmllm.data.builtin, slurmllm.data.worker;"
        "check_inputs(Path(sys.argv[1]), Path(sys.argv[2]), 320, 8, 8);"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tokenizer)]
    subprocess.run(command, check=True)


def test_large_corpora_open_in_no_time(tmp_path: Path, tokenizer: Path) -> None:
    batch = pa.record_batch({"text": pa.array(["x" * 1000] * 50_000, pa.large_string())})
    path = tmp_path / "large.arrow"
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        for _ in range(8):
            writer.write_batch(batch)  # 400 MB
    begun = time.perf_counter()
    facts = check_inputs(path, tokenizer, 320, 2048, 4)
    elapsed_s = time.perf_counter() - begun
    path.unlink()
    assert facts.documents == 400_000
    assert facts.text_bytes == 400_000_000
    assert elapsed_s < 0.3
