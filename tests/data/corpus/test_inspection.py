import json
import platform
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from click.testing import Result
from command_line import answer, call

from data.conftest import names_in, some_texts
from slurmllm.core.errors import DataError
from slurmllm.data import inspection
from slurmllm.data.corpus import builtin
from slurmllm.data.corpus.build import CorpusManifest, manifest_path
from slurmllm.data.corpus.builtin import ensure_stdlib
from slurmllm.data.inspection import check_corpora, first_sequences, inspect_corpus
from slurmllm.data.sources import open_source
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder


def arrow(path: Path, **columns: list[str]) -> Path:
    table = {name: pa.array(values, pa.large_string()) for name, values in columns.items()}
    with pa.OSFile(str(path), "wb") as sink:
        batch = pa.record_batch(table)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    return path


def inspect(*arguments: object) -> Result:
    return call("data", "inspect", *arguments)


def test_small_corpora_are_counted(tmp_path: Path, tokenizer: Path, texts: list[str]) -> None:
    encoder = TokenEncoder(tokenizer)
    report = inspect_corpus(open_source(arrow(tmp_path / "c.arrow", text=texts), encoder, None))
    lengths = [len(encoder.encode(text)) for text in texts]
    assert (report.documents, report.tokens, report.tokens_are) == (97, sum(lengths), "exact")
    assert report.size == sum(len(text.encode()) for text in texts)
    assert report.lengths.longest == max(lengths)
    assert report.lengths.mean == pytest.approx(np.mean(lengths))
    for bucket in report.lengths.histogram:
        inside = [length for length in lengths if bucket.least <= length < bucket.below]
        assert bucket.share == pytest.approx(len(inside) / 97)
    assert sum(bucket.share for bucket in report.lengths.histogram) == pytest.approx(1)


def test_large_corpora_are_sampled_and_token_ids_counted(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "COUNTED_SIZE", 1000)
    monkeypatch.setattr(inspection, "SAMPLED_DOCUMENTS", 400)
    monkeypatch.setattr("slurmllm.data.sources.text.PIECE_BYTES", 500)
    texts = some_texts(5000)
    texts[::50] = [text * random.Random(text).randint(1, 60) for text in texts[::50]]
    encoder = TokenEncoder(tokenizer)
    source = open_source(arrow(tmp_path / "c.arrow", text=texts), encoder, None)
    estimate, counted = inspect_corpus(source), inspect_corpus(source, exact=True)
    assert (estimate.tokens_are, estimate.documents_counted) == ("estimated", 400)
    assert (counted.tokens_are, counted.tokens_error) == ("exact", 0)
    assert 0 < estimate.tokens_error < 0.1 * counted.tokens
    assert abs(estimate.tokens - counted.tokens) < 1.5 * estimate.tokens_error
    monkeypatch.setattr(inspection, "SAMPLED_DOCUMENTS", 5)
    np.save(tmp_path / "t.npy", np.arange(100_000, dtype=np.uint16) % 999)
    report = inspect_corpus(open_source(tmp_path / "t.npy", None, None))
    assert (report.tokens, report.tokens_error, report.unit) == (100_000, 0, "tokens")
    assert report.tokens_are == "exact"


def test_what_a_recipe_takes(tmp_path: Path, tokenizer: Path, texts: list[str]) -> None:
    corpus = arrow(tmp_path / "c.arrow", text=texts)
    recipe = ["--recipe", "tiny_neox", "--tokenizer", tokenizer, "--set", "model.seq_len=16"]
    sizes = ["--set", "train.global_batch=4", "--set", "train.steps=50"]
    actual = answer(inspect(corpus, *recipe, *sizes, "--json", "--sequences", 3))
    (reach,) = actual["recipe"]
    assert reach["epochs"] == pytest.approx(50 * 4 * 16 / actual["tokens"])
    assert reach["steps_per_epoch"] == pytest.approx(actual["tokens"] / 64)
    assert [sequence["tokens"] for sequence in actual["sequences"]] == [16] * 3
    assert any(actual["sequences"][0]["parts"][0]["text"][:20] in text for text in texts)
    shown = inspect(corpus, *recipe, *sizes)
    assert f"{actual['tokens']:,} (exact)" in shown.stdout
    assert "tiny_neox: 50 steps x 64 tokens" in shown.stdout


def test_what_is_trained_of_prompts(tmp_path: Path, tokenizer: Path) -> None:
    prompts = [f"what is {i}? " for i in range(9)]
    corpus = arrow(tmp_path / "p.arrow", prompt=prompts, completion=["a number"] * 9)
    result = inspect(corpus, "--tokenizer", tokenizer, "--json", "--sequences", 1)
    (sequence,) = json.loads(result.stdout)["sequences"]
    parts = [(part["text"], part["trained"]) for part in sequence["parts"][:2]]
    assert parts[1] == ("a number<|endoftext|>", True)
    assert parts[0][0] in prompts
    assert parts[0][1] is False
    (report,) = json.loads(result.stdout)["corpora"]
    assert (report["answers"], report["documents"]) == (1.0, 9)
    shown = inspect(corpus, "--tokenizer", tokenizer).stdout
    assert f"trained  {report['trained']:.1%} of the tokens; 1.0 answers a document" in shown
    text = inspect(arrow(tmp_path / "t.arrow", text=["a"]), "--tokenizer", tokenizer, "--json")
    assert json.loads(text.stdout)["corpora"][0]["trained"] is None


def test_no_part_of_a_sequence_is_empty(tmp_path: Path, tokenizer: Path) -> None:
    corpus = arrow(tmp_path / "c.arrow", prompt=["Why? "] * 50, completion=["Because."] * 50)
    for seq_len in range(8, 40):  # one ends where an answer begins
        spec = StreamSpec([(corpus, 1.0)], tokenizer, seq_len, 2, seed=0)
        for sequence in first_sequences(spec, TokenEncoder(tokenizer), 2):
            assert all(part.text for part in sequence.parts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a corpus"),
        (["none.arrow", "--tokenizer", "TOKENIZER"], "no corpus none.arrow"),
        (["CORPUS"], "--tokenizer"),
        (["CORPUS", "--set", "optim.lr=1"], "add --recipe"),
    ],
)
def test_errors(tmp_path: Path, tokenizer: Path, arguments: list[str], message: str) -> None:
    names = {"CORPUS": arrow(tmp_path / "c.arrow", text=["a"]), "TOKENIZER": tokenizer}
    result = inspect(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in str(result.exception) + result.output


def test_stdlib_can_train(stdlib: tuple[Path, Path]) -> None:
    corpus, tokenizer = stdlib
    assert platform.python_version() in corpus.name
    assert platform.python_version() in tokenizer.name
    check_corpora(StreamSpec([(corpus, 1.0)], tokenizer, 256, 32, 1, builtin.VOCAB_SIZE))
    assert TokenEncoder(tokenizer).num_ids == builtin.VOCAB_SIZE
    manifest = CorpusManifest.load(manifest_path(corpus))
    assert manifest.documents > 1000
    assert manifest.text_bytes > 3e6
    names = [entry.path for entry in manifest.inputs]
    assert "argparse.py" in names
    assert not any(name.startswith(("/", "test/", "site-packages")) for name in names)
    assert any('"""' in text for text in pa.ipc.open_file(corpus).read_all()["text"].to_pylist())


def test_the_same_is_made_once(tmp_path: Path, stdlib: tuple[Path, Path]) -> None:
    inodes = [path.stat().st_ino for path in stdlib]
    assert ensure_stdlib(stdlib[0].parent) == stdlib
    assert [path.stat().st_ino for path in stdlib] == inodes
    corpus, tokenizer = ensure_stdlib(tmp_path, 300)
    assert corpus.read_bytes() == stdlib[0].read_bytes()
    assert manifest_path(corpus).read_bytes() == manifest_path(stdlib[0]).read_bytes()
    assert tokenizer.name.endswith(".300.tokenizer.json")
    assert names_in(tmp_path) == sorted([corpus.name, manifest_path(corpus).name, tokenizer.name])


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"no Python sources under .* set data.corpus"):
        ensure_stdlib(tmp_path / "out")
