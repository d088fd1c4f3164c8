"""Hostile files, and the valid ones that they were made from, on every reader; see tools/fuzz."""

import sys
import time
import warnings
from pathlib import Path

import pytest
from amounts import amount
from hypothesis import HealthCheck, given, settings

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from _fuzz.mutations import hostile_files  # noqa: E402
from _fuzz.targets import CORPUS, TARGETS, corpus_files, run_target  # noqa: E402

# In seconds a file, or with an import that takes seconds.
_SLOW = {"run", "huggingface"}


@pytest.fixture(autouse=True)
def _no_warnings() -> None:
    warnings.simplefilter("ignore")


def test_every_target_has_files() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str, tmp_path: Path) -> None:
    """No file raises anything but an error of ours, or takes 5 s of CPU time."""
    faults = []
    for name, content in corpus_files(target).items():
        begin = time.process_time()
        try:
            run_target(target, name, content, tmp_path / "files")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error!s:.200}")
        if (took_s := time.process_time() - begin) > 5:
            faults.append(f"{name}: {took_s:.1f} s")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in _SLOW])
def test_some_new_files(target: str, tmp_path: Path) -> None:
    """A few files of the kind that `make fuzz` tries for an hour, the same ones each time."""

    @settings(
        max_examples=amount(7, of=30),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile_files(corpus_files(target)))
    def try_file(file: tuple[str, bytes]) -> None:
        run_target(target, *file, tmp_path / "files")

    try_file()
