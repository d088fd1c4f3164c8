"""A run, and caches of compiled graphs as Inductor leaves them."""

from pathlib import Path
from typing import Any

import pytest

from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs.archive import pack_archive

VERSIONS = {"torch": "2.9", "cpu_capability": "AVX512", "cpu_features": "avx2 avx512f"}


def compile_graphs(cache: Path, *names: str) -> None:
    """A graph and a kernel of each name."""
    for name in names:
        for path in (f"inductor/fxgraph/{name[:2]}/{name}/x", f"inductor/k/{name}.so"):
            (cache / path).parent.mkdir(parents=True, exist_ok=True)
            (cache / path).write_bytes(name.encode() * 100)


def pack(cache: Path, run: RunDir, *names: str, **fields: Any) -> GraphManifest:
    """Compile graphs into a cache, and pack it as the archive of a run."""
    compile_graphs(cache, *names)
    values = {"backend": "native", "cold_first_step_s": 1.0, "versions": VERSIONS}
    return pack_archive(cache, run, **(values | fields))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "r")
