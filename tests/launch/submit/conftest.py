"""The fake cluster and something to read, for the tests of submission."""

from pathlib import Path

import pytest
from command_line import call
from fake_slurm import FakeSlurm

from slurmllm.core.slurm import client
from slurmllm.launch.submit import launch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    cluster = FakeSlurm()
    monkeypatch.setattr(client, "SlurmClient", lambda: cluster)
    monkeypatch.setattr(launch, "SlurmClient", lambda: cluster)
    monkeypatch.chdir(tmp_path)
    return cluster


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A small corpus and a tokenizer, as --set options."""
    folder = tmp_path_factory.mktemp("inputs")
    text = folder / "text.txt"
    sentence = "the quick brown fox jumps over the lazy dog and runs away from them all"
    words = sentence.split()
    lines = (" ".join(words[i % 7 :] + words[: i % 11]) for i in range(3000))
    text.write_text("\n\n".join(lines))
    for arguments in (
        ("data", "build", str(text), "--out", str(folder / "c.arrow")),
        ("tokenizer", "train", str(text), "--out", str(folder / "t.json"), "--vocab-size", "300"),
    ):
        assert call(*arguments).exit_code == 0
    corpus, tokenizer = f"data.corpus={folder}/c.arrow", f"data.tokenizer={folder}/t.json"
    return ("--set", corpus, "--set", tokenizer)
