"""Tests with the real neuronx-distributed, on a CPU (how: docs/developing/development.md).

They run where it imports, or where $NXD_SRC names the `src` folder of its sources, on the torch and
torch-xla that it is made for; elsewhere they are skipped, and say so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mesh_pool import Case, MeshPool, Outcome, small_run

CPU = Path(__file__).parent / "cpu"
Reference = Callable[..., list[Outcome]]


def missing() -> str | None:
    """Why these tests cannot run here; None where they can."""
    source = os.environ.get("NXD_SRC")
    if source and source not in sys.path:
        sys.path.insert(0, source)
    if importlib.util.find_spec("neuronx_distributed") is None:
        return "no neuronx_distributed here ($NXD_SRC may name its sources)"
    if importlib.util.find_spec("torch_xla") is None:
        return "no torch_xla here"
    import torch

    if not torch.__version__.startswith("2.9."):
        return f"torch {torch.__version__} is not the 2.9 that torch-xla 2.9 is made for"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip those that need NxD where it is missing."""
    here = Path(__file__).parent
    needing = [
        item for item in items if here in item.path.parents and item.get_closest_marker("nxd")
    ]
    why = missing() if needing else None
    for item in needing:
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def nxd_environment() -> dict[str, str]:
    """Variables under which a Python's NxD backend computes on the CPU."""
    folders = [str(CPU), os.environ.get("NXD_SRC", ""), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
        "NXD_CPU_MODE": "1",
        "PJRT_DEVICE": "CPU",
        "NXD_LOG_LEVEL": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }


@pytest.fixture(scope="package")
def pool() -> Iterator[MeshPool]:
    """Four processes for any mesh that they can make, of either backend."""
    before = dict(os.environ)
    os.environ.update(nxd_environment())
    sys.path.insert(0, str(CPU))
    try:
        yield MeshPool(4)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="package")
def native(pool: MeshPool) -> Reference:
    """(family, overrides…) → 20 steps of the native backend in one process."""
    outcomes: dict[tuple[str, ...], list[Outcome]] = {}

    def run(family: str, *overrides: str) -> list[Outcome]:
        key = (family, *overrides)
        if key not in outcomes:
            outcomes[key] = pool.run(Case(small_run(family, 1, 1, 1, "backend=native", *overrides)))
        return outcomes[key]

    return run
