"""Tokenizers of others: none hangs, ends the process, or encodes a text in several ways."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from slurmllm.core.errors import DataError
from slurmllm.data.tokenizer import TokenEncoder, train_tokenizer

WORDS = "the import of a module returns the function def class self"


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(train_tokenizer([WORDS] * 50, 300))
    return content


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def steps(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: [*parts]}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": [], "special_tokens": {}}


def charsmap(size: int, texts: str = "") -> dict[str, Any]:
    content = size.to_bytes(4, "little") + bytes(8) + texts.encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


DOUBLE = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PIECE = {"Sequence": {"id": "A", "type_id": 0}}
LLAMA = steps("normalizers", {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": steps("normalizers", *[DOUBLE] * 24)}, "normalizer may make a text"),
        ({"normalizer": replace({"String": "a"}, "a" * 1000)}, "1e[+]03 times longer"),
        ({"normalizer": replace({"Regex": "x*"}, "a" * 1000)}, "1e[+]03 times longer"),
        ({"normalizer": {"pattern": {"String": "a"}, "content": "a" * 1000}}, "times longer"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10_000}}, "inf times longer"),
        ({"normalizer": steps("normalizers", *[{"type": "ByteLevel"}] * 24)}, "1.68e[+]07"),
        ({"normalizer": charsmap(0xFFFFFFFF)}, "inf times longer, or is damaged"),
        ({"normalizer": charsmap(8, "x" * 5000 + "\0")}, "5e[+]03 times longer"),
        ({"normalizer": {"precompiled_charsmap": 7}}, "or is damaged"),
        ({"pre_tokenizer": steps("pretokenizers", *[BYTES] * 24)}, "pre_tokenizer may make"),
        ({"post_processor": template(*[PIECE] * 100_000)}, "1e[+]05 times longer"),
        ({"post_processor": steps("processors", *[template(PIECE, PIECE)] * 24)}, "1.68e[+]07"),
        ({"decoder": steps("decoders", *[DOUBLE] * 24)}, "decoder may make a text"),
        ({"model.continuing_subword_prefix": "a" * 1000}, "exceeds 100 characters"),
        ({"model.max_input_chars_per_word": 10**9}, "is 1000000000, above 1000"),
        ({"model.vocab": {"a" * 5000: 0, "<|endoftext|>": 1}}, "a token has more than 4096"),
    ],
)
def test_tokenizers_without_bounds_are_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    content = {**base, "model": {**base["model"]}}
    for path, value in changes.items():
        section, _, name = path.rpartition(".")
        (content[section] if section else content)[name] = value
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=reason):
        TokenEncoder(path)


def test_a_field_that_is_there_twice(tmp_path: Path, base: dict[str, Any]) -> None:
    evil = json.dumps(steps("normalizers", *[DOUBLE] * 24))
    path = tmp_path / "tokenizer.json"
    path.write_text(f'{{"normalizer": {evil}, {json.dumps(base)[1:]}')
    with pytest.raises(DataError, match="a field is there twice"):
        TokenEncoder(path)


@pytest.mark.parametrize("normalizer", [None, LLAMA, {"type": "NFKC"}])
def test_usual_tokenizers_are_accepted(
    tmp_path: Path, base: dict[str, Any], normalizer: dict[str, Any] | None
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**base, "normalizer": normalizer}))
    assert len(TokenEncoder(path).encode(WORDS)) > 1


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_nothing_random_in_a_tokenizer(tmp_path: Path, base: dict[str, Any], kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    if kind == "BPE":
        content = {**base, "model": {**base["model"], "dropout": 0.5}}
    else:
        letters = [(letter, -9.0) for letter in sorted({*WORDS})]
        pieces = [(WORDS[i : i + 3], -2.0) for i in range(0, 57, 3)]
        vocab = [("</s>", 0.0), *{**dict(letters), **dict(pieces)}.items()]
        content = json.loads(Tokenizer(models.Unigram(vocab, 0)).to_str())
        content["model"] |= {"alpha": 0.1, "nbest_size": 64}
    path.write_text(json.dumps(content))
    encoder = TokenEncoder(path)
    assert len({tuple(encoder.encode(WORDS * 5)) for _ in range(20)}) == 1
    assert (
        len({tuple(encoder.encode_as_generation([WORDS], begins=True)[0]) for _ in range(9)}) == 1
    )
