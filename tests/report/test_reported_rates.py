"""Throughput as AWS measures it, dollars, MFU, scaling; a run's state."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from reported_runs import make_reported_run
from training_rows import make_row, write_rows

from slurmllm.config.load import load
from slurmllm.plan.parameters import model_flops
from slurmllm.plan.prices import PriceChoice
from slurmllm.report.facts import RunFacts, scaling_rows
from slurmllm.report.sources import make_names_unique, read_run_facts
from slurmllm.run.rundir import RunDir


def read(run: RunDir, price: float = 7.59) -> RunFacts:
    return read_run_facts(run.path, {}, PriceChoice(price), FakeSlurm(["n1"]))


def test_the_row_of_awss_table(tmp_path: Path) -> None:
    # Table 1 of the post: GPT-NeoX 20B on 4 nodes at $7.59: 13.6 seq/s are 3.3 M tokens/$.
    facts = read(make_reported_run(RunDir(tmp_path / "r"), seq_per_s=13.6))
    rate = facts.rate
    assert rate is not None
    assert (rate.nodes, rate.workers, rate.steps, rate.first_steps) == (4, 128, 60, 60)
    assert rate.seq_per_s_first_500 == pytest.approx(13.6)
    assert rate.usd_per_hour == pytest.approx(30.36)
    assert rate.tokens_per_usd == pytest.approx(13.6 * 2048 * 3600 / 30.36)
    assert rate.tokens_per_usd == pytest.approx(3.3e6, rel=0.01)
    model = load(facts.path / "config.yaml").recipe.model
    assert rate.mfu == pytest.approx(13.6 * model_flops(model, 1) / (128 * 95e12))
    assert facts.usd == pytest.approx(7.59 * facts.used.node_hours if facts.used else 0)
    assert facts.tokens_per_usd_bought == pytest.approx(60 * 256 * 2048 / (facts.usd or 1))
    assert facts.tokens_per_usd_bought < rate.tokens_per_usd
    assert (facts.state, facts.restarts, facts.steps, facts.parameters) == (
        "done",
        1,
        60,
        20_552_994_816,
    )
    (checkpoint,) = facts.saved
    assert (checkpoint.step, checkpoint.state, checkpoint.seconds) == (30, "removed", 2.0)


def test_the_first_500_steps_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    rows = [make_row(s, seq_per_s=10.0 if s <= 500 else 20.0) for s in range(1, 1001)]
    write_rows(run.metrics(0), rows)
    rate = read(run).rate
    assert rate is not None
    assert (rate.first_steps, rate.seq_per_s_first_500, rate.seq_per_s) == (500, 10.0, 15.0)
    assert (rate.nodes, rate.mfu, rate.tokens_per_usd) == (None, None, None)


def test_scaling_is_against_the_fewest_nodes(tmp_path: Path) -> None:
    sizes = ((16, 54.3), (4, 13.6), (8, 40.0))
    runs = [make_reported_run(RunDir(tmp_path / f"on{n}"), nodes=n, seq_per_s=s) for n, s in sizes]
    rows = scaling_rows([read(run) for run in runs])
    assert [row.rate.nodes for row in rows] == [4, 8, 16]
    assert [row.efficiency for row in rows] == pytest.approx([1.0, 40 / 27.2, 54.3 / 54.4])
    assert [row.degrees for row in rows] == [(8, 4, 4), (8, 4, 8), (8, 4, 16)]


def test_a_run_on_two_node_counts_has_a_row_for_each(tmp_path: Path) -> None:
    nodes = tuple(f"m{i}" for i in range(8))
    run = make_reported_run(RunDir(tmp_path / "r"), nodes=4)
    record = run.attempt("train", 1).record
    record.write_text(
        record.read_text()
        .replace('"world_size": 128', '"world_size": 256')
        .replace('"n0",\n    "n1",\n    "n2",\n    "n3"', ", ".join(f'"{n}"' for n in nodes))
    )
    rows = scaling_rows([read(run)])
    assert [(row.rate.nodes, row.rate.steps) for row in rows] == [(4, 30), (8, 30)]
    assert [row.degrees[2] for row in rows] == [4, 8]


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"action": "stop", "class": "code_error"}, "stopped"),
        ({"action": "requeue", "class": "hang"}, "requeued"),
        ({"ended_at": None, "class": None, "action": None}, "open"),
    ],
)
def test_states(tmp_path: Path, changed: dict[str, object], state: str) -> None:
    assert read(make_reported_run(RunDir(tmp_path / "r"), **changed)).state == state


def test_names_are_told_apart(tmp_path: Path) -> None:
    runs = [make_reported_run(RunDir(tmp_path / folder / "r"), steps=6) for folder in "ab"]
    assert [f.name for f in make_names_unique([read(run) for run in runs])] == ["r", "r (2)"]
