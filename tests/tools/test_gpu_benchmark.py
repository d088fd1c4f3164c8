"""`make gpu` where no GPU is: its code on tiny models, its exit codes and its report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("tiny_gpt3, bf16_sr", "tiny_llama, documents")
TRAINERS = ("slurmllm, native backend", "compiled loop, transformers")


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
    lines = out.read_text().splitlines()
    rows = [
        line.split(" | ") for line in lines if line.startswith("| tiny") and " | 0 |" not in line
    ]
    rows = [row for row in rows if row[1] in TRAINERS]
    models = ("tiny_gpt3", "tiny_llama")
    expected = [(f"| {name}", TRAINERS[0]) for name in (*models, *VARIANTS)]
    expected += [(f"| {name}", TRAINERS[1]) for name in models]
    assert [tuple(row[:2]) for row in rows] == expected
    for row in rows:
        assert float(row[2].replace(",", "")) > 0, "tokens/s"
        assert 6 < float(row[8].split(",")[0]) < 9, "the loss of 4096 random tokens"
        assert ("not comparable" in row[8]) == (row[1] == TRAINERS[1])
    planned = [row[9] for row in rows[:2]]
    assert all(float(milliseconds) > 0 for milliseconds in planned)
    report = json.loads(out.with_suffix(".json").read_text())
    assert [part["failure"] for part in report["parts"] if part["required"]] == [None] * 6
    saves = lines[lines.index("## A save during training") + 4 :][:4]
    assert all(float(line.split(" | ")[1]) > 0.001 for line in saves)
    assert "skipped" in next(line for line in lines if line.startswith("| tests |"))


def test_a_required_part_that_fails(tmp_path: Path) -> None:
    out = tmp_path / "gpu.md"
    done = benchmark("--device", "cpu", "--tiny", "--out", str(out), "--minutes", "0")
    assert done.returncode == 1
    assert (
        "failed: device, tests, tiny_gpt3 ours, tiny_llama ours, tiny_gpt3, bf16_sr ours"
        in done.stderr
    )
    assert "| tests | yes | 0 | **failed**: no time left |" in out.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(tmp_path: Path) -> None:
    done = benchmark("--out", str(tmp_path / "gpu.md"))
    assert done.returncode == 2
    assert done.stderr.startswith("nothing was run: no GPU here (torch ")
    assert not (tmp_path / "gpu.md").exists()
