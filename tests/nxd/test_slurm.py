"""submit → precompile → train → requeue on a real Slurm, through the real NxD on CPUs.

neuron_parallel_compile and the runtime's compile cache are stood in for (standins/).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import SMALL, Bench

from nxd.conftest import nxd_environment

pytestmark = [pytest.mark.nxd, pytest.mark.slurm, pytest.mark.timeout(600)]

STANDINS = Path(__file__).resolve().parent / "standins"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: object) -> Iterator[Bench]:
    for name, value in nxd_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{STANDINS}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_CONTROL", str(tmp_path / "control.json"))
    with Bench(tmp_path / "runs") as bench:
        yield bench


def test_a_failed_graph_then_a_whole_run(
    bench: Bench, inputs: tuple[str, ...], tmp_path: Path
) -> None:
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"fail": ["optimizer_step"], "exit_code": 0}))
    run = (
        "--nodes=4",
        *SMALL,
        *inputs,
        "--set=backend=nxd",
        "--set=train.micro_batch=1",
        "--set=checkpoint.asynchronous=true",
    )
    bench.call("submit", "tiny_neox", "--name=r", *run)
    stopped = lambda: bench.status("r")["state"] in ("stopped", "done")  # noqa: E731
    bench.until(stopped, "precompile went on", 240, every_s=1.5)
    shown = bench.status("r")
    assert shown["state"] == "stopped"
    assert not (bench.runs / "r" / "attempts").exists(), "training did not start"
    assert "failed" in shown["uncompiled"][0]
    (log,) = (bench.runs / "r" / "graphs" / "failed").iterdir()
    assert f"graphs/failed/{log.name}" in shown["uncompiled"][0]
    assert "instructions 5001 exceed the limit" in log.read_text()

    control.write_text("{}")
    job = json.loads(bench.call("resume", "r", "--json"))["jobs"]["train"]
    bench.wait_for_step("r", 8, timeout_s=240)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    done = lambda: bench.status("r")["state"] in ("stopped", "done", "cancelled")  # noqa: E731
    bench.until(done, "never done", 300, every_s=1.5)
    assert bench.endings("r") == [("advance_signal", "requeue"), ("done", "finish")]
    first = bench.first_steps("r")
    assert len(first) == 4
    assert all(step["cache_hits"] > 0 and step["cache_misses"] == 0 for step in first.values())
    left = bench.attempt("r", 0)
    assert bench.attempt("r", 1)["first_step"] == left["last_step"] + 1

    # The next run of the same configuration finds its graphs compiled.
    sent = json.loads(bench.call("submit", "tiny_neox", "--name=again", *run, "--json"))
    assert sent["graphs_from"] == "r"
    assert sent["jobs"]["precompile"] is None
    bench.until(
        lambda: bench.status("again")["state"] in ("stopped", "done"), "again never done", 240, 1.5
    )
    assert bench.endings("again") == [("done", "finish")]
    bench.compare_exactly("r", "again")
