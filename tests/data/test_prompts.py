import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from slurmllm.core.errors import DataError, StorageError
from slurmllm.data.sources import open_source
from slurmllm.data.sources.base import UNTRAINED
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder, train_tokenizer

from .corpora import slot_tokens, streams, take, write_prompts, write_table

ROWS = [("What is 1 + 1?", "2"), ("  Größe? ", '東京 {"a": 1}'), ("", "")]


def folder(path: Path, **config: Any) -> Path:
    tokenizer = Tokenizer.from_str(train_tokenizer(["What is it?"] * 3, 300))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path / "tokenizer.json"


def marked(path: Path, tokenizer: Path, row: tuple[str, str]) -> tuple[str, str]:
    encoder = TokenEncoder(tokenizer)
    read = open_source(write_prompts(path / "c.arrow", [row]), encoder, None).read([(0, 0)])
    untrained = (read.marks & UNTRAINED) > 0
    assert untrained.tolist() == sorted(untrained.tolist(), reverse=True)
    return encoder.decode(read.tokens[untrained]), encoder.decode(read.tokens[~untrained])


def test_prompts_are_read_and_completions_trained(tmp_path: Path) -> None:
    plain = folder(tmp_path)
    assert marked(tmp_path, plain, ("Q: x", " y")) == ("Q: x", " y<|endoftext|>")
    assert marked(tmp_path, plain, ("", "y")) == ("", "y<|endoftext|>")
    assert marked(tmp_path, plain, ("x", "y<|endoftext|>")) == ("x", "y<|endoftext|>")
    for end in ("<|im_end|>", {"__type": "AddedToken", "content": "<|im_end|>"}):
        other_end = folder(tmp_path, eos_token=end, chat_template="{{ 'is not used' }}")
        assert marked(tmp_path, other_end, ("x", "y")) == ("x", "y<|im_end|>")
        assert marked(tmp_path, other_end, ("x", "y<|im_end|>\n")) == ("x", "y<|im_end|>\n")
    # A config belongs to its own tokenizer.
    other = other_end.rename(tmp_path / "other.tokenizer.json")
    assert marked(tmp_path, other, ("x", "y")) == ("x", "y<|endoftext|>")


def test_invalid_files(tmp_path: Path) -> None:
    path = folder(tmp_path, eos_token="<none>")
    corpus = write_prompts(tmp_path / "c.arrow", ROWS)
    with pytest.raises(DataError, match=r"eos_token '<none>' .* is not in the tokenizer's"):
        open_source(corpus, TokenEncoder(path), None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not readable JSON"):
        open_source(corpus, TokenEncoder(path), None)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not a JSON object"):
        open_source(corpus, TokenEncoder(path), None)
    corpus.write_bytes(corpus.read_bytes().replace(b"What is", b"What\xff s"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(StorageError, match=r"document 0 of .*c.arrow is damaged: byte 4"):
        open_source(corpus, TokenEncoder(path), None).read([(0, 0)])


def test_conversations_are_refused(tmp_path: Path) -> None:
    corpus = write_table(tmp_path / "c.arrow", {"messages": ["[]"]})
    with pytest.raises(DataError, match=r"holds conversations, which are no longer trained;.* TRL"):
        open_source(corpus, TokenEncoder(folder(tmp_path)), None)


def test_labels_of_a_packed_batch(tmp_path: Path, corpus: Path) -> None:
    path = folder(tmp_path)
    rows = [(f"question {i} " * (i % 3), f"answer {i}") for i in range(20)]
    prompts = write_prompts(tmp_path / "c.arrow", rows)
    spec = StreamSpec([(prompts, 1.0)], path, 12, 4, 1, mask="document")
    (stream,), encoder = streams(spec), TokenEncoder(path)
    assert not stream.trains_every_token
    batches = [stream.next_batch() for _ in range(30)]
    for batch in batches:
        labels = batch.labels(-100)
        assert np.array_equal(labels == -100, batch.untrained[:, 1:])
        is_trained = labels != -100
        assert np.array_equal(labels[is_trained], batch.tokens[:, 1:][is_trained])
        assert (batch.positions[batch.begins[:, :-1]] == 0).all()
    for slot in range(4):
        row = np.concatenate([batch.labels(-100)[slot] for batch in batches])
        answers = encoder.decode(row[row != -100]).split("<|endoftext|>")[1:-1]
        assert answers
        assert set(answers) <= {answer for _, answer in rows}
    (mixture,) = streams(StreamSpec([(prompts, 1.0), (corpus, 1.0)], path, 12, 4, 1))
    untrained = mixture.next_batch().untrained
    assert sorted(untrained.any(axis=1).tolist()) == [False, False, True, True]


def test_other_special_tokens_are_another_tokenizer_and_eos_ends_documents(tmp_path: Path) -> None:
    path = folder(tmp_path, bos_token="<|im_end|>")
    spec = StreamSpec([(write_prompts(tmp_path / "c.arrow", ROWS), 1.0)], path, 12, 4, 1)
    (stream,) = streams(spec)
    take([stream], 2)
    state = stream.state()
    slot_tokens(take([stream], 3), 0)
    folder(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer \(fingerprint\)"):
        streams(spec)[0].load_state(state)
    path = folder(tmp_path, eos_token="<|im_end|>")
    content = path.read_text().replace("<|endoftext|>", "<|other|>")
    path.write_text(content)
    encoder = TokenEncoder(path)
    assert encoder.end_of_document == encoder.token_id("<|im_end|>")
    path.with_name("tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"nor an eos_token of a tokenizer_config\.json"):
        TokenEncoder(path)
