from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from slurmllm.core.errors import DataError
from slurmllm.data.sources import open_source, tokenized
from slurmllm.data.sources.base import BEGINS
from slurmllm.data.tokenizer import TokenEncoder

from .corpora import write_megatron
from .test_sources import whole

DOCUMENTS = [[[5, 6], [7]], [], [[8, 0]], [[9] * 40]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
@pytest.mark.parametrize(
    "named", ["my_text_document", "my_text_document.bin", "my_text_document.idx"]
)
def test_documents_are_their_sequences_joined(tmp_path: Path, dtype: str, named: str) -> None:
    write_megatron(tmp_path / "my_text_document", DOCUMENTS, dtype)
    source = open_source(tmp_path / named, None, 10)
    assert (len(source), source.total_size) == (4, 45)
    assert [whole(source, i) for i in range(4)] == [[5, 6, 7], [], [8, 0], [9] * 40]
    assert source.read([(2, 0), (1, 0), (0, 0)]).marks.tolist() == [BEGINS, 0, BEGINS, 0, 0]


def test_ends_of_documents_are_added_where_they_lack_and_long_ones_in_pieces(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_megatron(tmp_path / "m", DOCUMENTS)
    source = open_source(tmp_path / "m", TokenEncoder(tokenizer), 10)
    assert [whole(source, i) for i in range(3)] == [[5, 6, 7, 0], [0], [8, 0]]
    monkeypatch.setattr(tokenized, "PIECE_TOKENS", 16)
    source = open_source(tmp_path / "m", TokenEncoder(tokenizer), 10)
    assert source.num_pieces(3) == 3
    assert source.read([(3, 2)]).tokens.tolist() == [9] * 8 + [0]
    assert whole(source, 3) == [9] * 40 + [0]


def test_hashes_are_of_the_ids_whatever_their_type(tmp_path: Path) -> None:
    hashes = [
        open_source(write_megatron(tmp_path / dtype, DOCUMENTS, dtype), None, 10)
        .document_hashes(np.arange(4))
        .tolist()
        for dtype in ("uint16", "int64")
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 4


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "m", DOCUMENTS)
    index, tokens = tmp_path / "m.idx", tmp_path / "m.bin"
    good, ids = index.read_bytes(), tokens.read_bytes()

    def refused(message: str, idx: bytes = good, bin: bytes = ids) -> None:
        index.write_bytes(idx)
        tokens.write_bytes(bin)
        with pytest.raises(DataError, match=message):
            open_source(prefix, None, None)

    def with_header(version: int = 1, code: int = 8, sequences: int = 4, bounds: int = 5) -> bytes:
        return struct.pack("<9sQBQQ", good[:9], version, code, sequences, bounds) + good[34:]

    refused(r"m\.idx does not fit .*m\.bin: it describes 90 bytes, the file has 88", bin=ids[:-2])
    refused(
        r"has 125 bytes, but describes 4 sequences and 5 document bounds, .* 122", good + b"abc"
    )
    refused("begins with b'other in.*not b'MMIDIDX", b"other index" * 20)
    refused("begins with b'MMI", good[:3])
    refused("version 2 and token type 8; supported are version 1", with_header(version=2))
    refused("version 1 and token type 7", with_header(code=7))
    refused("has 122 bytes, but describes 9 sequences", with_header(sequences=9))
    refused("does not fit .*describes 50 bytes, the file has 90", with_header(code=1))
    refused("reach from sequence 0 to 3, but there are 0 to 4", good[:-8] + b"\x03" + bytes(7))
    refused("has no documents", with_header(sequences=0, bounds=1)[:34] + bytes(8))
    index.unlink()
    with pytest.raises(DataError, match=r"no file .*m\.idx: Megatron data are an .idx and a .bin"):
        open_source(tokens, None, None)


def test_an_index_broken_in_the_middle_or_with_modalities_after_it(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "m", DOCUMENTS)
    index = tmp_path / "m.idx"
    data = bytearray(index.read_bytes())
    data[34:38] = struct.pack("<i", 30)  # the first sequence's size
    index.write_bytes(data)
    source = open_source(prefix, None, None)
    with pytest.raises(DataError, match=r"document 0 of .*m\.idx \(sequences 0 to 1 of 4\) is not"):
        source.read([(0, 0)])
    prefix = write_megatron(tmp_path / "m", DOCUMENTS)
    index.write_bytes(index.read_bytes() + bytes(4))
    assert whole(open_source(prefix, None, None), 0) == [5, 6, 7]
