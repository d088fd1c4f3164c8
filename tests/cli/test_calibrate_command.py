"""`slurmllm calibrate`: profiles and pictures of what is measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from command_line import call, refused

from slurmllm.analysis.calibrate.node import Sample
from slurmllm.analysis.calibrate.run import Calibration
from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.resolve import resolve
from slurmllm.launch.supervise.allocation import Allocation


def calibrate_here(*arguments: str) -> Result:
    return call("calibrate", *arguments)


def test_measurements_become_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring itself is in tests/calibrate; here it is done at once."""
    hardware = resolve("neox_20b", "p4d").cluster.hardware
    figures = Hardware.model_validate(hardware.model_dump() | {"bf16_tflops": 123.0})

    def measure(_: object, allocation: Allocation, show: Callable[[str], None]) -> Calibration:
        show("measuring")
        products = tuple(
            Sample(kind="product", of="bf16", sizes=(4000, 4 * k, k), value=seconds)
            for k, seconds in ((1000, 0.012), (2000, 0.024))
        )
        return Calibration(figures, tuple(allocation.nodes), ("a note",), 1.0, products)

    monkeypatch.setattr("slurmllm.analysis.calibrate.run.calibrate", measure)
    monkeypatch.setenv("SLURMLLM_LOCAL_NODES", "1")
    path = tmp_path / "mine.yaml"
    options = ("--local", "--cluster", "p4d")
    done = calibrate_here(*options, "--out", str(path))
    assert done.exit_code == 0, done.output
    assert resolve("neox_20b", str(path)).cluster.hardware == figures
    assert "measuring" in done.stderr
    assert "note: a note" in done.stderr
    assert call("plan", "gpt3_125m", "--nodes", "1", "--cluster", str(path)).exit_code == 0
    assert "is not overwritten" in refused(calibrate_here(*options, "--out", str(path)))
    shown = calibrate_here(*options)
    assert shown.stdout == path.read_text(encoding="utf-8")
    picture = tmp_path / "products.png"
    drawn = calibrate_here(*options, "--plot", str(picture), "--json")
    measured = json.loads(drawn.stdout)
    assert (measured["plot"], measured["notes"]) == (str(picture), ["a note"])
    assert measured["hardware"]["bf16_tflops"] == 123
    assert [product["k"] for product in measured["products"]] == [1000, 2000]
    # Three products of 2 m n k FLOP: 6 · 4000 · 4000 · 1000 in 12 ms.
    assert [product["tflops"] for product in measured["products"]] == pytest.approx([8.0, 16.0])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_matrix_size_without_a_device_is_the_planners_curve(tmp_path: Path) -> None:
    picture = tmp_path / "matrix.png"
    arguments = ("--matrix-figure", str(picture), "--cluster", "trn1")
    answer = json.loads(calibrate_here(*arguments, "--json").stdout)
    assert answer["measured"] is False
    widths = [256, 512, 1024, 2048, 4096, 8192]
    for rows in (
        [row for row in answer["products"] if row["n"] == 8192],
        [row for row in answer["products"] if row["n"] == 4 * row["k"]],
    ):
        assert [row["k"] for row in rows] == widths
        shares = [row["planner_utilization"] for row in rows]
        assert shares == sorted(shares)
    hardware = resolve("neox_20b", "trn1").cluster.hardware
    assert hardware is not None
    # The work at the efficiency, and the traffic of its operands and its result in bf16.
    m, k, n = 8192, 8192, 32768
    work = 2 * m * k * n / (hardware.bf16_tflops * 1e12)
    traffic = (
        2 * (m * k + k * n + m * n) / (hardware.memory_gb_s * hardware.memory_efficiency * 1e9)
    )
    took = math.hypot(work / hardware.matrix_efficiency, traffic)
    assert shares[-1] == pytest.approx(work / took)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = calibrate_here(*arguments).stdout
    assert "8,192 × 8,192 × 32,768  -        -" in shown
    assert "no neuron device that can be measured" in shown


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ("--nodes 4 --out a.yaml --matrix-figure p.png", "does not take --nodes, --out;"),
        ("--matrix-figure p.png --time 5 --local", "does not take --local, --time;"),
        ("--matrix-figure p.pdf", "--matrix-figure p.pdf: pictures are PNG files"),
        ("--matrix-figure absent/p.png", "--matrix-figure absent/p.png: the folder absent does no"),
        ("--local --plot absent/p.png", "the folder absent does not exist"),
        ("--local --nodelist n1 --qos q", "leave out --nodelist, --qos"),
        ("--nodes 0", "--nodes"),
        ("--local --out x.txt", "ends in .yaml"),
        ("--local --cluster trn1", "cannot be calibrated"),
    ):
        done = calibrate_here(*arguments.split())
        assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
        assert message in done.stderr
