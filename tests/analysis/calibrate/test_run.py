"""Calibration of this machine, and of nodes that fail."""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from analysis.calibrate.test_fits import TRUTH

from slurmllm.analysis.calibrate.fits import matrix_figures
from slurmllm.analysis.calibrate.matrix import (
    draw_matrix_utilization,
    is_device_here,
    measured_products,
    predicted_products,
)
from slurmllm.analysis.calibrate.node import Sample
from slurmllm.analysis.calibrate.run import Calibration, calibrate, run_task, task_of, write_profile
from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.resolve import clusters_dir, resolve
from slurmllm.core.errors import ConfigError, NodeError, SlurmError, StorageError
from slurmllm.launch.supervise.allocation import (
    LOCAL_NODES,
    LocalAllocation,
    SlurmAllocation,
    allocate_nodes,
)


class Saying(LocalAllocation):
    """A node that runs a script instead of the measurement."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def ask(self, command: Sequence[str]) -> Sequence[subprocess.Popen[bytes]]:
        return super().ask([sys.executable, "-c", self.script])


@pytest.mark.long  # `test_this_machine_measures_products_only` measures a part
def test_this_machine() -> None:
    messages: list[str] = []
    overrides = ["train.compile=false", "cluster.devices_per_node=2", "cluster.cpus_per_node=2"]
    config = resolve("tiny_neox", "local", overrides)
    result = calibrate(config, LocalAllocation(), messages.append, quick=True)
    hardware = result.hardware
    assert "by slurmllm calibrate, 20" in hardware.source
    network, *busy = result.notes
    assert network.startswith("network_…")
    assert all(note.startswith("local0: in use by others") for note in busy)
    assert hardware.rough == bool(busy), "nothing is refused on what others had a part in"
    # What two shared cores cannot be, and what an idle or a busy one is not either.
    assert 1e-4 < hardware.fp32_tflops < 10
    assert 0.1 < hardware.memory_gb_s < 1000
    assert 0.001 < hardware.node_link_gb_s < 100
    assert 0.1 < hardware.reserved_gib < 2 < 2 * hardware.memory_gib
    assert 0 <= hardware.operator_us < 1e6
    assert any("collectives" in message for message in messages)
    assert "done" in messages[-1]


def test_neuron_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="published runs"):
        calibrate(resolve("tiny_neox", "trn1"), LocalAllocation(), print)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("", "no output in"),
        ("raise SystemExit('RuntimeError: no such device')", "no such device"),
        (
            'print(\'slurmllm-calibrate {"kind": "copy", "sizes": [8], "value": 1.0}\')',
            "did not measure",
        ),
    ],
)
def test_nodes_that_fail(script: str, message: str) -> None:
    with pytest.raises(NodeError, match=message):
        calibrate(resolve("tiny_neox"), Saying(script), print)


def test_a_worker_that_fails() -> None:
    config = resolve("tiny_neox", "local", ["env.PYTHONHOME=/nowhere"])
    with pytest.raises(NodeError, match="the measurement failed"):
        calibrate(config, LocalAllocation(), print)


def test_which_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = resolve("tiny_neox", "p4d")
    monkeypatch.setenv(LOCAL_NODES, "9")
    assert allocate_nodes(config, [], "x", local=True, nodes=2).nodes == ("local0", "local1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="--local"):
        allocate_nodes(config, [], "x")
    for name, text in (("salloc", 'echo "$@"'), ("scontrol", "echo n7")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n7")
    result = allocate_nodes(config, [], "x")
    assert isinstance(result, SlurmAllocation)
    assert result.nodes == ("n7",)


def test_a_job_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "salloc").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "salloc").chmod(stat.S_IRWXU)
    script = (
        "from slurmllm.launch.supervise.allocation import allocate_nodes\n"
        "from slurmllm.core.config.resolve import resolve\n"
        "allocate_nodes(resolve('tiny_neox', 'p4d'), ['calibrate'], 'x', nodes=2,"
        " options={'account': 'a', 'time': None})"
    )
    path = f"{tmp_path}:{os.defpath}"
    output = subprocess.check_output(
        [sys.executable, "-c", script], text=True, env={**os.environ, "PATH": path}
    )
    assert "--account=a" in output
    assert "--nodes=2" in output
    assert "--time=15" in output
    assert "--exclusive" in output
    assert output.rstrip().endswith("slurmllm calibrate")


FOUND = Calibration(TRUTH, ("n1",), (), 60.0)


@pytest.mark.parametrize("name", ["trn1", "p5"])
def test_it_is_the_given_one_with_other_figures(tmp_path: Path, name: str) -> None:
    request = resolve("tiny_neox", name, ["cluster.devices_per_node=4"]).cluster
    path = tmp_path / "mine.yaml"
    write_profile(request, FOUND, path)
    assert resolve("tiny_neox", str(path)).cluster == request.model_copy(update={"hardware": TRUTH})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.json", "ends in .yaml"),
        ("absent/mine.yaml", "no folder"),
        ("folder.yaml", "exists and is not overwritten"),
        (str(clusters_dir() / "local.yaml"), "ship with slurmllm"),
    ],
)
def test_where_none_is_written(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=message):
        write_profile(resolve("tiny_neox").cluster, FOUND, tmp_path / target)


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_profile(resolve("tiny_neox").cluster, FOUND, tmp_path / "mine.yaml")
    assert list(tmp_path.iterdir()) == []


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
    hardware = config.cluster.hardware
    assert hardware is not None
    products = [sample for sample in samples if sample.kind == "product"]
    fitted = matrix_figures(products, "bf16", hardware, hardware.memory_gb_s)
    rows = measured_products(hardware.model_copy(update=fitted), products)
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
