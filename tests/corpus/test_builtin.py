from __future__ import annotations

import platform
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest
from data.conftest import names_in

from slurmllm.corpus import builtin
from slurmllm.corpus.build import CorpusManifest, manifest_path
from slurmllm.corpus.builtin import ensure_stdlib
from slurmllm.data.inspection import check_corpora
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import vocab_size_of
from slurmllm.errors import DataError


def test_stdlib_can_train(stdlib: tuple[Path, Path]) -> None:
    corpus, tokenizer = stdlib
    assert platform.python_version() in corpus.name
    assert platform.python_version() in tokenizer.name
    check_corpora(StreamSpec([(corpus, 1.0)], tokenizer, 256, 32, 1, builtin.VOCAB_SIZE))
    assert vocab_size_of(tokenizer.read_text()) == builtin.VOCAB_SIZE
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
