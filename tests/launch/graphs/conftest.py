"""A run, and caches of compiled graphs as Inductor leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmllm.core.run.rundir import RunDir


def compile_graphs(cache: Path, *names: str) -> None:
    """A graph and a kernel of each name."""
    for name in names:
        for path in (f"inductor/fxgraph/{name[:2]}/{name}/x", f"inductor/k/{name}.so"):
            (cache / path).parent.mkdir(parents=True, exist_ok=True)
            (cache / path).write_bytes(name.encode() * 100)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "r")
