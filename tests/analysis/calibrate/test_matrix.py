"""Matrix size against utilization: measured on this machine, and the planner's curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slurmllm.analysis.calibrate.fits import matrix_figures
from slurmllm.analysis.calibrate.matrix import (
    draw_matrix_utilization,
    is_device_here,
    measured_products,
    predicted_products,
)
from slurmllm.analysis.calibrate.node import Sample
from slurmllm.analysis.calibrate.run import run_task, task_of
from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.resolve import resolve
from slurmllm.launch.supervise.allocation import LocalAllocation


def p5() -> Hardware:
    hardware = resolve("tiny_neox", "p5").cluster.hardware
    assert hardware is not None
    return hardware


def test_this_machine_measures_products_only() -> None:
    config = resolve("tiny_neox", "local")
    update = {"products_only": True}
    task = task_of(config, LocalAllocation(), quick=True).model_copy(update=update)
    samples, _ = run_task(config.cluster, task, LocalAllocation(), print)
    assert {sample.kind for sample in samples} == {"busy", "reserved", "memory", "product"}
    assert config.cluster.hardware is not None
    products = [sample for sample in samples if sample.kind == "product"]
    rows = measured_products(matrix_figures(products, "bf16", config.cluster.hardware), products)
    assert [(row["precision"], row["n"], row["k"]) for row in rows] == [
        (precision, n, k)
        for precision in ("bf16", "fp32")
        for n in (256, 512, 1024)
        for k in (64, 128, 256)
    ]
    # The figures of the profile are a guess: the peak is what was fastest.
    assert all(
        0 < row["measured_utilization"] <= 1.001 for row in rows if row["precision"] == "bf16"
    )


def test_known_peaks_are_the_scale() -> None:
    hardware = p5()
    # Half of the peak: 3 products of 2 m n k FLOP.
    seconds = 6 * 8192 * 4096 * 16384 / (hardware.bf16_tflops * 1e12 / 2)
    head = Sample(kind="product", of="bf16", sizes=(2048, 50304, 2048), value=1.0)
    sample = Sample(kind="product", of="bf16", sizes=(8192, 16384, 4096), value=seconds)
    (row,) = measured_products(hardware, [head, sample])
    assert row["measured_utilization"] == pytest.approx(0.5)
    curves = predicted_products(p5(), "cuda")
    (curve,) = (item for item in curves if (item["k"], item["n"]) == (4096, 16384))
    assert curve == row | {"measured_tflops": None, "measured_utilization": None}


def test_the_picture_has_both() -> None:
    """Left k and n = 4k, right k alone for three n: measured and predicted."""
    rows = predicted_products(p5(), "cuda")
    assert {(row["n"], row["k"]) for row in rows} >= {(n, 256) for n in (1024, 8192, 32768)}
    measured = [row | {"measured_utilization": 1.2} for row in rows]
    together, alone = draw_matrix_utilization(measured, "p5").axes
    assert [str(line.get_label()).rpartition(", ")[2] for line in together.lines] == [
        "measured",
        "planner",
    ]
    assert together.get_ylim()[1] > 120
    labels = {str(line.get_label()).rpartition(", ")[0] for line in alone.lines}
    assert len(alone.lines) == 6
    assert len(labels) == 3
    assert all(len(np.asarray(line.get_xdata())) == 6 for line in alone.lines)
    together, alone = draw_matrix_utilization(rows, "p5").axes
    assert (len(together.lines), len(alone.lines)) == (1, 3)
    feed_forward = [row for row in measured if row["n"] == 4 * row["k"]]  # as `calibrate` measures
    assert len(draw_matrix_utilization(feed_forward, "p5").axes) == 1


@pytest.mark.parametrize(
    ("profile", "file", "here"),
    [
        ("local", None, True),
        ("p5", "nvidiactl", False),
        ("p5", "nvidia0", True),
        ("trn1", "neuron0", False),
    ],
)
def test_devices_that_are_here(profile: str, file: str | None, here: bool, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    if file is not None:
        (tmp_path / "dev" / file).touch()
    assert is_device_here(resolve("tiny_neox", profile), tmp_path) is here
