"""`make gpu` where no GPU is: its code on tiny models, its exit codes and its report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _gpu.report import Part, aim_of

ROOT = Path(__file__).resolve().parents[2]
OURS, LOOP = "slurmllm, native backend", "compiled loop, transformers"


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/benchmarks/gpu.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_tiny_models(tmp_path: Path) -> None:
    out = tmp_path / "build" / "gpu.md"
    done = benchmark("--device", "cpu", "--tiny", "--out", str(out), "--minutes", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.with_suffix(".json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert [part["failure"] for part in parts.values()] == [None] * len(parts)
    assert "all 120 steps bit-identical" in parts["resume"]["result"]["summary"]
    assert "skipped" in parts["tests"]["result"]["summary"]
    assert parts["calibrate"]["result"]["hardware"]["memory_gb_s"] > 0
    lines = map(cells, out.read_text().splitlines())
    rows = {(row[0], row[1]): row for row in lines if len(row) == 13}
    for model in ("tiny_gpt3", "tiny_llama"):
        ours, loop = rows[model, OURS], rows[model, LOOP]
        assert float(ours[2].replace(",", "")) > 0, "tokens/s"
        assert 6 < float(ours[8]) < 9, "the loss of 4096 random tokens"
        assert "not comparable" in loop[8]
        assert float(ours[9]) > 0, "the planned step, ms"
        assert float(ours[12]) == pytest.approx(float(ours[3]) / float(loop[3]), rel=0.02)
        measured = parts[f"{model} ours"]["result"]
        assert [*measured["head"]] == ["2**17", "2**18", "2**19"]
        # Other threads compute too: operations are not idle times.
        assert measured["profile"]["classes"]["head: products"] > 0
        assert measured["profile"]["classes"]["blocks: products"] > 0
        assert (model, "native backend, torch's AdamW") in rows
    for variant in ("muon", "bf16_sr"):
        assert (f"tiny_gpt3, {variant}", OURS) in rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_aims() -> None:
    part = Part("", required=True, budget_s=1, model="gpt3_1.3b", result={"step_s": 0.2601})
    assert aim_of(part) == "≤ 258: missed by 2.1 ms"
    part.result["step_s"] = 0.2579
    assert aim_of(part) == "≤ 258: reached"


def test_a_required_part_that_fails(tmp_path: Path) -> None:
    out = tmp_path / "gpu.md"
    done = benchmark("--device", "cpu", "--tiny", "--out", str(out), "--minutes", "0")
    assert done.returncode == 1
    assert "failed: device, tiny_gpt3 ours, tiny_llama ours, tests, resume" in done.stderr
    assert "| tests | yes | 0 | **failed**: no time left |" in out.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(tmp_path: Path) -> None:
    done = benchmark("--out", str(tmp_path / "gpu.md"))
    assert done.returncode == 2
    assert done.stderr.startswith("nothing was run: no GPU here (torch ")
    assert not (tmp_path / "gpu.md").exists()
