"""What a report knows of a run: throughput as AWS measures it, state; of a damaged run too."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import call
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st
from present import present
from reported_runs import make_reported_run
from training_rows import make_row, write_rows

from slurmllm.analysis.report.facts import RunFacts, per_s, scaling_rows
from slurmllm.analysis.report.figures import figures
from slurmllm.analysis.report.sources import name_and_compare, read_run_facts
from slurmllm.analysis.report.tables import scaling_table
from slurmllm.analysis.report.write import sections, to_html
from slurmllm.core.config.load import load
from slurmllm.core.metrics.curves import Curve, piece_means, thin_rows
from slurmllm.core.metrics.source import distinct_names
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.parameters import model_flops


def read(run: RunDir, price: float = 7.59) -> RunFacts:
    return read_run_facts(run.path, {}, price, FakeSlurm(["n1"]))


def test_the_row_of_awss_table(tmp_path: Path) -> None:
    # Table 1 of the post: GPT-NeoX 20B on 4 nodes at $7.59: 13.6 seq/s are 3.3 M tokens/$.
    facts = read(make_reported_run(RunDir(tmp_path / "r"), seq_per_s=13.6))
    rate = present(facts.rate)
    assert (rate.nodes, rate.workers, rate.steps, rate.first_steps) == (4, 128, 60, 60)
    assert rate.seq_per_s_first_500 == pytest.approx(13.6)
    assert rate.usd_per_hour == pytest.approx(30.36)
    assert rate.tokens_per_usd == pytest.approx(13.6 * 2048 * 3600 / 30.36)
    assert rate.tokens_per_usd == pytest.approx(3.3e6, rel=0.01)
    model = load(facts.path / "config.yaml").recipe.model
    assert rate.mfu == pytest.approx(13.6 * model_flops(model, 1) / (128 * 95e12))
    assert facts.usd == pytest.approx(7.59 * facts.used.node_hours if facts.used else 0)
    assert facts.tokens_per_usd_bought == pytest.approx(60 * 256 * 2048 / (facts.usd or 1))
    assert present(facts.tokens_per_usd_bought) < present(rate.tokens_per_usd)
    assert (facts.state, facts.restarts, facts.steps) == ("done", 1, 60)
    assert facts.parameters == 20_552_994_816
    (checkpoint,) = facts.saved
    assert (checkpoint.step, checkpoint.state, checkpoint.seconds) == (30, "removed", 2.0)


def test_the_first_500_steps_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    rows = [make_row(s, seq_per_s=10.0 if s <= 500 else 20.0) for s in range(1, 1001)]
    write_rows(run.metrics(0), rows)
    rate = present(read(run).rate)
    assert (rate.first_steps, rate.seq_per_s_first_500, rate.seq_per_s) == (500, 10.0, 15.0)
    assert (rate.nodes, rate.mfu, rate.tokens_per_usd) == (None, None, None)


@pytest.mark.parametrize(
    ("metric", "value"), [("seq_per_s", 4.0), ("tokens_per_s", 512.0), ("step_time_s", 2.0)]
)
def test_throughput_is_computed_from_what_is_logged(metric: str, value: float) -> None:
    settings = {"model.seq_len": 128, "train.global_batch": 8}
    steps = np.arange(1, 3)
    curve = Curve("r", Path("r"), steps, steps * 0, {metric: np.array([value, np.nan])})
    assert per_s(curve) == (curve.columns.get("seq_per_s"), curve.columns.get("tokens_per_s"))
    for rate, expected in zip(per_s(replace(curve, settings=settings)), (4.0, 512.0), strict=True):
        np.testing.assert_array_equal(rate, [expected, np.nan])


def test_scaling_is_against_the_fewest_nodes(tmp_path: Path) -> None:
    sizes = ((16, 54.3), (4, 13.6), (8, 40.0))
    runs = [make_reported_run(RunDir(tmp_path / f"on{n}"), nodes=n, seq_per_s=s) for n, s in sizes]
    facts = [read(run) for run in runs]
    assert [f.name for f in name_and_compare([*facts, facts[0]])][2:] == ["on8", "on16 (2)"]
    ends = ["a/log.csv", "b/log.csv", "b/log.csv", "r"]
    assert distinct_names(["log", "log", "log", "r"], [Path(end) for end in ends]) == ends
    rows = scaling_rows(facts)
    assert [row.rate.nodes for row in rows] == [4, 8, 16]
    assert [row.efficiency for row in rows] == pytest.approx([1.0, 40 / 27.2, 54.3 / 54.4])
    assert [row.degrees for row in rows] == [(8, 4, 4), (8, 4, 8), (8, 4, 16)]
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
    config = run.config.read_text()
    assert "precision: bf16_sr" in config
    run.config.write_text(config.replace("precision: bf16_sr", "precision: fp8_mixed"))
    table = scaling_table(scaling_rows([read(run)]))
    mfu = table.headings.index("MFU")
    assert all(cells[mfu].endswith(" % of bf16") for cells in table.rows)


def test_states(tmp_path: Path) -> None:
    for changed, state in (
        ({"action": "stop", "class": "code_error"}, "stopped"),
        ({"action": "requeue", "class": "hang"}, "requeued"),
        ({"ended_at": None, "class": None, "action": None}, "open"),
    ):
        run = RunDir(tmp_path / state)
        assert read(make_reported_run(run, steps=6, **changed)).state == state


def keep_only(name: str) -> Callable[[RunDir], None]:
    def cut(run: RunDir) -> None:
        for entry in run.path.iterdir():
            if entry.name != name:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    return cut


def newer_config(run: RunDir) -> None:
    text = run.config.read_text().replace("train:\n", "train:\n  quantum: true\n", 1)
    run.config.write_text(text + "flux: {a: 1}\n")


def newer_attempt(run: RunDir) -> None:
    record = run.attempt("train", 1).record
    record.write_text(record.read_text().replace('"done"', '"teleported"'))


def cut_metrics(run: RunDir) -> None:
    run.metrics(1).write_bytes(run.metrics(1).read_bytes()[:-150])


def broken_in_the_middle(run: RunDir) -> None:
    lines = run.metrics(0).read_text().splitlines()
    lines[1] = lines[1][:30]
    run.metrics(0).write_text("\n".join(lines) + "\n")


def newer_events(run: RunDir) -> None:
    path = run.events(1)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write('{"kind": "teleported", "step": 1, "attempt": 1, "time": 1.0}\n{"kind": "sa')


def no_losses(run: RunDir) -> None:
    rows = [json.loads(line) for line in run.metrics(1).read_text().splitlines()]
    run.metrics(1).write_text("".join(json.dumps(row | {"loss": None}) + "\n" for row in rows))


# What is done to a run; the file that a warning names; whether steps and parameters are known yet.
@pytest.mark.parametrize(
    ("damage", "named", "steps", "parameters"),
    [
        (lambda run: run.config.write_bytes(b"\x00\xff"), "config.yaml", True, False),
        (newer_config, "config.yaml", True, True),
        (keep_only("metrics"), "config.yaml", True, False),
        (keep_only("attempts"), "metrics", False, False),
        (keep_only("config.yaml"), "metrics", False, True),
        (newer_attempt, "attempts/001/attempt.json", True, True),
        (lambda run: run.attempt("train", 0).record.write_text(""), "000/attempt.json", True, True),
        (lambda run: run.plan.write_text("[1]"), "plan.json", True, True),
        (lambda run: run.jobs.write_text("no"), "jobs.json", True, True),
        (lambda run: run.skips.write_text('{"skips": 3}'), "skips.json", True, True),
        (cut_metrics, "attempt_001.jsonl", True, True),
        (broken_in_the_middle, "attempt_000.jsonl:2", True, True),
        (no_losses, "", True, True),
        (newer_events, "events/attempt_001.jsonl", True, True),
    ],
)
def test_what_is_left_is_reported(
    tmp_path: Path, damage: Callable[[RunDir], object], named: str, steps: bool, parameters: bool
) -> None:
    run = make_reported_run(RunDir(tmp_path / "runs" / "r"), steps=6)
    damage(run)
    arguments = ["report", "r", "--runs-dir", str(tmp_path / "runs"), "--json", "--no-files"]
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.stdout)["runs"]
    assert (shown["steps"] > 0) is steps
    assert (shown["parameters"] is not None) is parameters
    assert not named or any(named in warning for warning in shown["warnings"]), shown["warnings"]
    assert not any("\n" in warning for warning in shown["warnings"])
    facts = [read_run_facts(run.path, {}, None, FakeSlurm(["n1"]))]
    page = to_html("r", sections(facts, figures(facts)), "now")
    assert ("Warnings</h2>" in page) is bool(shown["warnings"])


_VALUES = st.lists(
    st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=300
).map(np.array)


@given(_VALUES, st.integers(4, 60))
def test_extremes_are_kept(values: np.ndarray, most: int) -> None:
    rows = thin_rows(values, most)
    assert np.all(np.diff(rows) > 0)
    assert rows[0] == 0
    assert rows[-1] == len(values) - 1
    finite = np.isfinite(values)
    assert np.count_nonzero(np.isfinite(values[rows])) <= most + 1
    if finite.any():
        thinned = values[rows][np.isfinite(values[rows])]
        assert (thinned.min(), thinned.max()) == (values[finite].min(), values[finite].max())
    assert (~np.isfinite(values[rows])).any() == (~finite).any()


@given(_VALUES, st.integers(1, 60))
def test_means_are_of_all_rows(values: np.ndarray, most: int) -> None:
    means = piece_means(values, most)
    assert len(means) <= max(most, 1) or len(means) == len(values)
    finite = values[np.isfinite(values)]
    if len(finite) == len(values) and len(values) % len(means) == 0:
        assert means.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert np.isfinite(means).any() == (len(finite) > 0)
    if len(finite):
        inside = means[np.isfinite(means)]
        assert finite.min() - 1e-3 <= inside.min() <= inside.max() <= finite.max() + 1e-3
