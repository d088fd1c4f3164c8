"""Pieces of long documents: their tokens are those that `tokenizers` gives the whole document."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from slurmllm.data.sources import open_source, text
from slurmllm.data.tokenizer import _WORDS, TokenEncoder

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
def test_pieces_have_the_tokens_of_the_whole(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
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
