"""A run on a real Slurm that was requeued once, reported, and its page in a real browser."""

from __future__ import annotations

import json
import subprocess

import pytest
from end_to_end.bench import REHEARSED, Bench
from end_to_end.slurm_runs import Cluster, submit, wait
from report.browser import open_report, require_chromium, require_sound

pytestmark = pytest.mark.slurm


def test_a_requeued_run(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    require_chromium()
    job = submit(bench, inputs, "reported", *REHEARSED)["train"]
    bench.wait_for_step("reported", 12)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)  # as the time limit
    wait(bench, "reported", "done", "stopped", "cancelled")

    (run,) = json.loads(bench.call("report", "reported", "--price", "21.5", "--json"))["runs"]
    assert (run["state"], run["steps"], run["planned_steps"]) == ("done", 40, 40)
    assert (run["nodes"], run["restarts"], run["recipe"]) == (2, 1, "tiny_neox")
    assert run["utilization"]["node_hours"] > 0
    assert run["usd"] == pytest.approx(21.5 * run["utilization"]["node_hours"])
    assert run["seq_per_s_first_500"] > 0
    assert run["tokens"] == 40 * 8 * 128
    assert run["checkpoints"][-1]["step"] == 40
    assert run["versions"]["python"]

    work = tmp_path_factory.mktemp("browser")
    opened = open_report(bench.runs / "reported" / "reports" / "report.html", work)
    require_sound(opened)
    plots = opened.seen["plots"]
    assert {"loss", "grad_norm", "lr", "seq_per_s", "parts-0", "utilization"} <= set(plots)
    assert "attempt 0 ended: advance_signal" in plots["loss"]["hover"]
    assert plots["lr"]["points"] >= 1
