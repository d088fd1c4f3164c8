import random
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from slurmllm.core.errors import DataError, StorageError
from slurmllm.data.sources import open_source, text, tokenized
from slurmllm.data.sources.base import BEGINS, Source, document_hash, fingerprint
from slurmllm.data.tokenizer import _WORDS, TokenEncoder

from .corpora import write_megatron, write_table, write_texts


def whole(source: Source, document: int) -> list[int]:
    pieces = [(document, piece) for piece in range(source.num_pieces(document))]
    return [int(token) for token in source.read(pieces).tokens]


def test_documents_read_together_equal_those_read_singly(
    tmp_path: Path, tokenizer: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", *texts[:20], "", "last"]
    source = open_source(write_texts(tmp_path / "c.arrow", texts), TokenEncoder(tokenizer), None)
    monkeypatch.setattr(text, "_CALL_BYTES", 500)
    together = source.read([(document, 0) for document in range(len(texts))])
    ends = together.ends.tolist()
    encoder = TokenEncoder(tokenizer)
    for begin, end, document in zip([0, *ends], ends, texts, strict=False):
        assert np.array_equal(together.tokens[begin:end], encoder.encode(document))
        assert together.marks[begin:end].tolist() == [BEGINS] + [0] * (end - begin - 1)


def test_hashes_without_their_column_and_rows_of_numpy(tmp_path: Path, tokenizer: Path) -> None:
    texts = ["x", "", "é"]
    paths = [write_texts(tmp_path / f"{ids}.arrow", texts, ids=ids) for ids in (True, False)]
    # Of another tool.
    paths += [write_table(tmp_path / "c.arrow", {"id": list("abc"), "text": texts})]
    for path in paths:
        source = open_source(path, TokenEncoder(tokenizer), None)
        hashes = [document_hash(text.encode()) for text in texts]
        assert source.document_hashes(np.arange(3)).tolist() == hashes
        assert len(whole(source, 0)) == 2
    source = open_source(save(tmp_path / "t.npy", np.arange(12).reshape(4, 3), "uint8"), None, 12)
    assert len(source) == 4
    assert source.read([(2, 0), (0, 0)]).tokens.tolist() == [6, 7, 8, 0, 1, 2]
    assert source.read([(2, 0), (0, 0)]).marks.tolist() == [1, 0, 0, 1, 0, 0]


def damaged(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def test_bytes_of_no_text(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 40)
    long = "some words " * 10 + "and THIS"
    path = damaged(write_texts(tmp_path / "c.arrow", ["fine", long]), b"THIS", b"TH\xffS")
    source = open_source(path, TokenEncoder(tokenizer), None)
    with pytest.raises(StorageError, match=r"document 1 of .*c\.arrow .*byte 116 .*\(0xff\)"):
        whole(source, 1)
    assert len(whole(source, 0)) > 1


@pytest.mark.parametrize("last", [-1, 2, 1 << 30])
def test_damaged_offsets_and_lengths(tmp_path: Path, tokenizer: Path, last: int) -> None:
    path = tmp_path / "c.arrow"
    table = pa.table({"text": pa.array(["one", "two words"], pa.large_string())})
    write_table(path, table)
    damaged(path, struct.pack("<3q", 0, 3, 12), struct.pack("<3q", 0, 3, last))
    with pytest.raises((DataError, StorageError), match=r"damaged|not a complete Arrow file"):
        whole(open_source(path, TokenEncoder(tokenizer), None), 1)
    write_table(path, table)
    node = struct.pack("<2q", 2, 0)  # rows and nulls of the column
    content = path.read_bytes()
    path.write_bytes(content.replace(node, struct.pack("<2q", 1 << 20, 0)))
    with pytest.raises(DataError, match="Array length did not match"):
        open_source(path, TokenEncoder(tokenizer), None)


def test_a_document_changed_since_the_build(tmp_path: Path, tokenizer: Path) -> None:
    path = damaged(write_texts(tmp_path / "c.arrow", ["first", "the old one"]), b"old", b"new")
    source = open_source(path, TokenEncoder(tokenizer), None)
    with pytest.raises(
        StorageError, match=r"document 1 of .*c\.arrow was changed or damaged since"
    ):
        source.read([(0, 0), (1, 0)])


def test_fingerprints_see_size_and_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    actual = set()
    for content in (b"", b"a", b"b", b"a" * 9_999 + b"b", b"a" * 10_001):
        path.write_bytes(content)
        actual |= {fingerprint([path]), fingerprint([path], "kind")}
    size = 64 << 20
    with path.open("wb") as stream:
        stream.truncate(size)
    actual.add(fingerprint([path]))
    with path.open("r+b") as stream:
        stream.seek(size // 63)  # of 64 samples the second begins just before
        stream.write(b"x")
    actual.add(fingerprint([path]))
    assert len(actual) == 12
    with pytest.raises(StorageError, match=r"cannot read .*none: No such file or directory$"):
        fingerprint([tmp_path / "none"])


def save(path: Path, tokens: Sequence[int] | np.ndarray, dtype: str) -> Path:
    np.save(path, np.array(tokens, dtype=dtype))
    return path


@pytest.mark.parametrize("dtype", ["uint16", ">u4"])
def test_numpy_tokens_in_blocks(tmp_path: Path, tokenizer: Path, dtype: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 300, 10_000)
    encoder = TokenEncoder(tokenizer)
    source = open_source(save(tmp_path / "t.npy", tokens, dtype), encoder, 300)
    assert (len(source), source.total_size) == (3, 10_000)
    read = source.read([(0, 0), (1, 0), (2, 0)])
    assert read.ends.tolist() == [4096, 8192, 10_000]
    assert np.array_equal(read.tokens, tokens)
    begins = [0, 4096, 8192, *(np.flatnonzero(tokens[:-1] == encoder.end_of_document) + 1)]
    assert np.flatnonzero(read.marks == BEGINS).tolist() == sorted(set(begins))


@pytest.mark.parametrize(
    ("tokens", "dtype", "message"),
    [
        (None, "", "no corpus .*t.npy"),
        ([1.5], "float32", r"float32 of shape \[1\]; .* integers"),
        ([], "int32", r"int32 of shape \[0\]"),
        (np.ones((2, 2, 2)), "int32", r"shape \[2, 2, 2\]"),
        ([1] * 5000 + [100], "int64", r"token 904 of document 1 .* is 100, .*vocab_size is 100"),
        ([1] * 5000 + [-1], "int64", r"token 904 of document 1 .* is -1, .*vocab_size is 100"),
    ],
)
def test_invalid_numpy_files(tmp_path: Path, tokens: Any, dtype: str, message: str) -> None:
    path = tmp_path / "t.npy"
    if tokens is not None:
        save(path, tokens, dtype)
    with pytest.raises(DataError, match=message):
        open_source(path, None, 100).read([(1, 0)])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.Split(Regex(_WORDS), "isolated")
QWEN = pre_tokenizers.Split(Regex(_WORDS.replace("{1,3}", "")), "isolated")
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Which splits are known, so that documents are cut.
CUT = {
    "gpt2": (None, GPT2),
    "gpt2, nfc": (normalizers.NFC(), GPT2),
    "gpt2, nfkd": (normalizers.Sequence([normalizers.NFKD()]), GPT2),
    "llama3": (None, pre_tokenizers.Sequence([WORDS, BYTES])),
    "qwen2": (normalizers.NFC(), pre_tokenizers.Sequence([QWEN, BYTES])),
}
UNCUT = {
    "llama2": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
    ),
    "gemma": (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "mistral": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "roberta": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "whole bytes": (None, BYTES),
    "pairs of words": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"), BYTES]),
    ),
    "quotes": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex('"[^"]*"'), "isolated"), BYTES]),
    ),
    "prefix": (normalizers.Prepend("x"), GPT2),
    "inverted": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "removed", True), BYTES]),
    ),
}
SAMPLES = "the|'s|I'll|42|1234|naïve|你好|，|。|东京|䷀|\"|x = f(y)|    return|<|x|>|🙂|！|ﬁ|½|a b"
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\xa0", "\u2028", "\u0301", "e\u0301", "。\n"]
PARTS = st.sampled_from([*SAMPLES.split("|"), *SPACES]) | st.text(max_size=3)


def tokenizer_of(normalizer: object, pre_tokenizer: object, folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    generator = random.Random(0)
    words = ["the", "fox", "it's", "I'll", "42", "1234", "你好", "，", "。", "return", "x = f(y)"]
    sample = [" ".join(generator.choices(words, k=50)) + "\n\n  \n" for _ in range(50)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def pieces_and_whole(path: Path, document: str, folder: Path, size: int) -> int:
    """Compare the tokens; returns the number of pieces with tokens."""
    table = pa.table({"text": [document]})
    with pa.ipc.new_stream(str(folder / "c.arrow"), table.schema) as stream:
        stream.write_table(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE_BYTES", size)
        encoder = TokenEncoder(path)
        source = open_source(folder / "c.arrow", encoder, None)
        pieces = [(0, piece) for piece in range(source.num_pieces(0))]
        one_by_one = [source.read([piece]).tokens for piece in pieces]
        assert np.array_equal(source.read(pieces).tokens, np.concatenate(one_by_one))
    library = Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    expected = library.encode(document, add_special_tokens=False).ids
    assert np.concatenate(one_by_one).tolist() == [*expected, encoder.end_of_document]
    return sum(len(tokens) > 0 for tokens in one_by_one)


@pytest.mark.parametrize("name", [*CUT, *UNCUT])
def test_pieces_have_all_tokens(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    path = tokenizer_of(*(CUT | UNCUT)[name], folder)
    assert TokenEncoder(path).splits_words == (name in CUT)

    @settings(max_examples=amount(30 if name in CUT else 5, of=400))
    @given(st.lists(PARTS, max_size=60), st.integers(1, 40))
    def check(parts: list[str], size: int) -> None:
        pieces_and_whole(path, "".join(parts), folder, size)

    check()


@pytest.mark.parametrize("name", CUT)
def test_text_code_and_chinese_are_cut(name: str, tmp_path: Path) -> None:
    path = tokenizer_of(*CUT[name], tmp_path)
    for unit in ("the quick fox ", "你好东京，快乐。", "x = f(y)\nif (a):\n"):
        pieces = pieces_and_whole(path, unit * 300, tmp_path, 256)
        assert pieces > len(unit.encode()) * 300 // 256 // 2


def test_a_document_without_a_place_to_cut_is_one_piece(tmp_path: Path) -> None:
    path = tokenizer_of(*CUT["gpt2"], tmp_path)
    assert pieces_and_whole(path, "0123456789" * 1000, tmp_path, 64) == 2, "and its end"
    mixed = "ab cd " * 100 + "9" * 5000 + " ef gh" * 100
    assert 10 < pieces_and_whole(path, mixed, tmp_path, 64) < 25


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("x = f", special=False, normalized=False),
        AddedToken("fox", special=False, rstrip=True),
        AddedToken("fox", special=False, lstrip=True),
        AddedToken(")\n", special=False),
    ],
)
def test_added_tokens_across_words_prevent_cuts(token: AddedToken, tmp_path: Path) -> None:
    path = tokenizer_of(*CUT["gpt2"], tmp_path)
    library = Tokenizer.from_file(str(path))
    library.add_tokens([token])
    library.save(str(path))
    assert not TokenEncoder(path).splits_words
    pieces_and_whole(path, "the fox jumps\nfox x = f(y)\nover the fox " * 20, tmp_path, 32)
    library = Tokenizer.from_file(str(tokenizer_of(*CUT["gpt2"], tmp_path)))
    library.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("  ", special=False)])
    library.save(str(path))
    assert TokenEncoder(path).splits_words
    pieces_and_whole(path, re.sub("z", "  ", "the foxz<tool_call> jumps " * 90), tmp_path, 32)


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
