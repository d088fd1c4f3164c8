from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models

from slurmllm.cli.data import data
from slurmllm.cli.data import tokenizer as command
from slurmllm.data.tokenizer import TokenEncoder, train_tokenizer
from slurmllm.errors import DataError


def test_any_text_comes_back_and_settings_of_the_file_lose_no_token(
    tokenizer: Path, tmp_path: Path
) -> None:
    encoder = TokenEncoder(tokenizer)
    text = "  größer 東京 \t\x00\r\n🙂 never <|endoftext|> seen in training"
    ids = encoder.encode(text)
    assert ids.dtype == np.int32
    assert ids[-1] == encoder.end_of_document == 0
    assert 0 not in ids[:-1], "a document cannot forge its end"
    assert encoder.decode(ids) == text + "<|endoftext|>"
    settings = Tokenizer.from_file(str(tokenizer))
    settings.enable_truncation(5)
    settings.enable_padding(length=100)
    other = tmp_path / "tokenizer.json"
    settings.save(str(other))
    text = "the quick brown fox jumps over a lazy dog " * 3
    assert np.array_equal(TokenEncoder(other).encode(text), TokenEncoder(tokenizer).encode(text))
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"</s>": 7, "a": 1}, [])).save(str(path))
    encoder = TokenEncoder(path)
    assert encoder.end_of_document == 7
    assert encoder.num_ids == 8


def test_training_is_deterministic_and_its_vocabulary_large_enough(texts: list[str]) -> None:
    first = train_tokenizer(texts, 400)
    assert first == train_tokenizer(iter(texts), 400)
    assert Tokenizer.from_str(first).get_vocab_size() == 400
    with pytest.raises(DataError, match=r"vocabulary of 256 cannot hold .* at least 257"):
        train_tokenizer(["a"], 256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read tokenizer .*: No such file or directory; name a tokenizer.json"),
        ("{", "is not a tokenizer.json of the tokenizers library"),
        (json.dumps({"model": {}}), "is not a tokenizer.json"),
        (Tokenizer(models.BPE({"a": 1}, [])).to_str(), r"neither <\|endoftext\|> nor </s> is"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        TokenEncoder(path)


def test_a_panic_of_the_library_is_an_error(tmp_path: Path) -> None:
    tokenizer = json.loads(Tokenizer(models.WordLevel({"</s>": 0}, "</s>")).to_str())
    path = tmp_path / "tokenizer.json"
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    template["single"] = [{"SpecialToken": {"id": "missing", "type_id": 0}}]
    path.write_text(json.dumps({**tokenizer, "post_processor": template}))
    with pytest.raises(DataError, match=r"tokenizer.json encodes no text: .*; name another one"):
        TokenEncoder(path).encode_dialogue(["a"], begins=True)
    path.write_text(json.dumps({**tokenizer, "normalizer": {"type": "Precompiled"}}))
    with pytest.raises(DataError, match=r"is not a tokenizer.json of the tokenizers library"):
        TokenEncoder(path)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n\n".join(text.strip() for text in texts))
    run = CliRunner()
    run.invoke(data, ["build", "a.txt", "--out", "c.arrow"], catch_exceptions=False)
    for source, out in (("a.txt", "1.json"), ("c.arrow", "2.json")):
        arguments = ["train", source, "--out", out, "--vocab-size", "300", "--json"]
        done = run.invoke(command, arguments, catch_exceptions=False)
        summary = json.loads(done.stdout)
        assert summary["vocab_size"] == 300
        assert summary["documents"] >= 97
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    done = run.invoke(command, ["train", "a.txt", "--out", "1.json", "--vocab-size", "300"])
    assert isinstance(done.exception, DataError)
    arguments = ["train", "a.txt", "--out", "1.json", "--vocab-size", "100000", "--overwrite"]
    done = run.invoke(command, arguments, catch_exceptions=False)
    assert "fewer than --vocab-size 100000" in done.stderr
    assert done.stdout.startswith("1.json: ")


def test_bad_input_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{')
    (tmp_path / "b.txt").write_text(" \n")
    for name, message in (("a.jsonl", "a.jsonl:2: not JSON"), ("b.txt", "nothing to train on")):
        arguments = ["train", str(tmp_path / name), "--out", str(tmp_path / "t.json")]
        with pytest.raises(DataError, match=message):
            CliRunner().invoke(command, [*arguments, "--vocab-size", "300"], catch_exceptions=False)
        assert not (tmp_path / "t.json").exists()
