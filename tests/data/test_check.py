import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models

from slurmllm.cli.data import data
from slurmllm.cli.data import tokenizer as command
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import DataError
from slurmllm.data.corpus.build import build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.readers import ReadOptions
from slurmllm.data.inspection import check_corpora, check_evaluation_texts
from slurmllm.data.sources import open_source
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder, train_tokenizer
from slurmllm.launch.submit.inputs import resolve_inputs

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


def test_held_out_texts(corpus: Path, tokenizer: Path, texts: list[str], tmp_path: Path) -> None:
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
    refused(write_arrow(tmp_path / "o.arrow", other), r"no column 'text' of .* but body \(")
    refused(write_arrow(tmp_path / "i.arrow", pa.table({"text": [1]})), "no column 'text' of")


def test_any_text_comes_back_whatever_the_file_s_settings(tokenizer: Path, tmp_path: Path) -> None:
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
        TokenEncoder(path).encode_as_generation(["a"], begins=True)
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


TEXTS = [f"document {i} is about the number {i * 7919 % 1000} " * 9 for i in range(200)]


def corpus(folder: Path, name: str, texts: list[str]) -> str:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_corpus(find_inputs([str(source)]), folder / f"{name}.arrow", ReadOptions())
    return str(folder / f"{name}.arrow")


@pytest.fixture
def training(tmp_path: Path) -> StreamSpec:
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, 320))
    path = Path(corpus(tmp_path, "training", TEXTS))
    return StreamSpec([(path, 1.0)], tmp_path / "tokenizer.json", 32, 8, 1, 320, validation=0.1)


def test_other_text_and_text_that_is_trained_on(tmp_path: Path, training: StreamSpec) -> None:
    other = corpus(tmp_path, "other", [f"{text} too" for text in TEXTS])
    assert check_evaluation_texts(training, {"other": other}) == []
    some = corpus(tmp_path, "some", [*TEXTS[:50], "not in it " * 50])
    (warning,) = check_evaluation_texts(training, {"some": some})
    # Of the 50, about 5 are held out.
    count = int(warning.removeprefix("eval.corpora.some: ").partition(" ")[0])
    assert 40 <= count < 50
    assert "of the first 51 documents" in warning
    assert "remove them from data.corpus" in warning
    long = StreamSpec(training.corpora, training.tokenizer, 5000, 8, 1, 320, validation=0.1)
    with pytest.raises(DataError, match=r"data.validation: .* on the held-out side.* raise"):
        check_evaluation_texts(long, {})


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("short", np.arange(32) % 300, r"eval.corpora.short: .* has 32 tokens, fewer than one"),
        ("vocabulary", np.full(99, 320), r"eval.corpora.vocabulary: .* model.vocab_size is 320"),
        ("empty", np.zeros(0, dtype=np.uint16), r"eval.corpora.empty: "),
        ("absent", None, r"eval.corpora.absent: .*absent.npy"),
    ],
)
def test_text_that_cannot_be_evaluated(
    tmp_path: Path, training: StreamSpec, name: str, ids: np.ndarray | None, message: str
) -> None:
    path = tmp_path / f"{name}.npy"
    if ids is not None:
        np.save(path, ids.astype(np.uint16))
    with pytest.raises(DataError, match=message):
        check_evaluation_texts(training, {name: str(path)})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "eval.corpora.other: .* is not a file"),
        (np.arange(9), "eval.corpora.other: .* has 9 tokens, fewer than one sequence"),
        (np.arange(999) % 300, ""),
    ],
)
def test_a_dry_run_checks_them_like_a_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: np.ndarray | None, message: str
) -> None:
    made = tmp_path / "stdlib.arrow", tmp_path / "stdlib.json"
    corpus(tmp_path, "stdlib", TEXTS)
    made[1].write_text(train_tokenizer(TEXTS, 320))
    ensure_stdlib = "slurmllm.data.corpus.builtin.ensure_stdlib"
    monkeypatch.setattr(ensure_stdlib, lambda folder, vocab_size: made)
    other = tmp_path / "other.npy"
    if ids is not None:
        np.save(other, ids.astype(np.uint16))
    size = ("model.seq_len=32", "train.global_batch=8", "train.micro_batch=1")
    overrides = (*size, "eval.every_steps=5", f"eval.corpora.other={other}")
    config = resolve("tiny_neox", "local", overrides)
    for build in (False, True):
        if message:
            with pytest.raises(DataError, match=message if not build else "eval.corpora.other: "):
                resolve_inputs(config, tmp_path, build)
        else:
            assert (resolve_inputs(config, tmp_path, build) == config) is not build
