"""`submit --local` where graphs were compiled before: on another processor, and graphs gone bad."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from end_to_end.bench import SMALL, Bench

# Three compilations; what decides about graphs is in tests/graphs, what about a bad step in
# tests/train/test_guard.py and tests/launch/supervise/test_policy.py.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64's AVX2"),
]
TRAIN = (
    "submit",
    "tiny_neox",
    "--local",
    "--nodes=1",
    *SMALL,
    "--set=train.steps=4",
    "--set=optim.warmup_steps=2",
    "--set=cluster.cpus_per_node=1",
)
# As if graphs that were compiled before computed garbage.
_PLUGIN = """
from slurmllm.train.guard import Guard
honest = Guard.check_finite
def check_finite(self, name, value, step, batch):
    honest(self, name, float("nan") if self.reused_graphs else value, step, batch)
Guard.check_finite = check_finite
"""


@pytest.fixture(scope="module")
def first(bench: Bench, inputs: tuple[str, ...]) -> str:
    assert "precompile attempt 0" in bench.call(*TRAIN, *inputs, "--name=first")
    return "first"


def losses(bench: Bench, name: str, attempt: int = 0) -> list[float]:
    rows = (bench.runs / name / "metrics" / f"attempt_{attempt:03d}.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def test_a_run_on_another_processor_compiles_for_itself(
    bench: Bench, inputs: tuple[str, ...], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = bench.status(first)["graphs"]["versions"]["cpu_capability"]
    other = "AVX2" if capability == "DEFAULT" else "DEFAULT"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", other.lower())
    assert "precompile attempt 0" in bench.call(*TRAIN, *inputs, "--name=other")
    assert bench.endings("other") == [("done", "finish")]
    # fp32, and sums of the same terms in another order.
    assert losses(bench, "other") == pytest.approx(losses(bench, first), rel=1e-4)
    assert bench.status("other")["graphs"]["versions"]["cpu_capability"] == other


def test_a_first_step_that_goes_wrong_is_tried_with_fresh_graphs(
    bench: Bench,
    inputs: tuple[str, ...],
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bad_graphs.py").write_text(_PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = bench.call(*TRAIN, *inputs, "--name=bad", "--set=plugins=[bad_graphs]")
    assert f"compiled by run {first} already" in text
    assert bench.endings("bad") == [("stale_graphs", "requeue"), ("done", "finish")]
    reason = "the loss of step 1 is nan, with graphs that an earlier attempt or run compiled"
    assert reason in bench.attempt("bad", 0)["evidence"][0]
    assert "ignoring the graph archive: train attempt 0 failed with it" in text
    assert bench.node("bad", 1, "local0")["cache"] == "rejected"
    assert losses(bench, "bad", 1) == losses(bench, first)
    state = bench.status("bad")
    assert state["unused_graphs"] == {"local0": "train attempt 0 failed with it"}
    assert state["first_steps"]["local0"]["cache_hits"] == 0, "none of the old cache"
    assert (state["graphs"]["rejected"], state["graphs"]["reused_from"]) == ("", None)
