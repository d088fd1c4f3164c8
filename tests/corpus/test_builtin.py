from __future__ import annotations

import platform
import subprocess
import sys
import time
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


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return ensure_stdlib(tmp_path_factory.mktemp("stdlib"))


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


def test_what_is_there_is_used(stdlib: tuple[Path, Path]) -> None:
    before = [path.stat() for path in stdlib]
    begun = time.perf_counter()
    assert ensure_stdlib(stdlib[0].parent) == stdlib
    assert time.perf_counter() - begun < 0.1
    assert [path.stat().st_ino for path in stdlib] == [stat.st_ino for stat in before]


def test_two_processes_at_once_make_the_same(tmp_path: Path, stdlib: tuple[Path, Path]) -> None:
    script = (
        "import sys; from pathlib import Path; from slurmllm.corpus.builtin import ensure_stdlib;"
        "ensure_stdlib(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    names = [path.name for path in stdlib]
    assert names_in(tmp_path) == sorted([*names, names[0] + ".json"])
    for path in (*stdlib, manifest_path(stdlib[0])):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"no Python sources under .* set data.corpus"):
        ensure_stdlib(tmp_path / "out")
