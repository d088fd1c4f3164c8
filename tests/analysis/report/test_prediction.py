"""Predictions beside what runs measured, of runs written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import save_attempt
from training_rows import Row as Line
from training_rows import make_row, write_rows

from slurmllm.analysis.report import prediction as module
from slurmllm.analysis.report.prediction import PredictionCheck, check_run_prediction
from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.errors import ConfigError, RunError
from slurmllm.core.run.records import Event, JobsRecord, Submission, WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import load_mesh, make_mesh, save_mesh
from slurmllm.plan.search import LayoutEstimate, predict
from slurmllm.plan.step import StepTime

HARDWARE = Hardware(
    source="made up",
    bf16_tflops=0.05,
    fp32_tflops=0.05,
    memory_gib=2,
    reserved_gib=0.5,
    memory_gb_s=10,
    node_link_gb_s=2,
    network_gb_s=2,
    attention_efficiency=0.5,
    matrix_efficiency=0.8,
    memory_efficiency=0.8,
    node_link_efficiency=0.8,
    network_efficiency=0.8,
)
# Seconds of each part: the step is their sum.
PARTS = StepTime(
    **{"compute": 1.0, "recompute": 0.5, "tensor": 0.25, "bubble": 0.125, "transfer": 0.0625},
    **{"data": 2.0, "optimizer": 4.0, "overhead": 8.0},
)
GB = 10**9


def config_of(*overrides: str, hardware: Hardware | None = HARDWARE) -> RunConfig:
    config = resolve("tiny_neox", "local", ["train.global_batch=8", *overrides])
    return replace(config, cluster=config.cluster.model_copy(update={"hardware": hardware}))


def lines(
    attempt: int, first: int, last: int, step_s: float = 0.5, *, split: bool = True
) -> list[Line]:
    """Steps of which the first six are slow; all but 0.01 s of each is in a part."""
    parts = {"forward_backward_s": 0.3, "optimizer_s": step_s - 0.01 - 0.01 - 0.3}
    steady = {"step_time_s": step_s, "data_wait_s": 0.01, **parts}
    rows = [
        make_row(step, attempt) | steady | ({"step_time_s": 9.0} if step < first + 6 else {})
        for step in range(first, last + 1)
    ]
    return rows if split else [{k: v for k, v in row.items() if k not in parts} for row in rows]


class Run:
    """A run directory, attempt by attempt."""

    def __init__(self, folder: Path, config: RunConfig, nodes: int = 2) -> None:
        self.dir = RunDir(folder)
        folder.mkdir(parents=True)
        self.dir.config.write_text(config.to_yaml())
        save_mesh(make_mesh(config, nodes), self.dir.plan)

    def attempt(self, number: int, rows: Iterable[Line], nodes: int = 2) -> Run:
        rows = list(rows)
        write_rows(self.dir.metrics(number), rows)
        begin = rows[0]["time"] - 100 if rows else 0.0
        names = tuple(f"n{i}" for i in range(nodes))
        end = (rows[-1]["time"] if rows else begin) + 1
        times = {"started_at": begin, "ended_at": end, "ending": "done"}
        save_attempt(self.dir, number, nodes=names, **times)
        return self


def candidate_of(config: RunConfig) -> LayoutEstimate:
    return replace(predict(config, make_mesh(config, 2)), step=PARTS)


def row(check: PredictionCheck, name: str) -> module.PredictedFigure:
    return next(figure for figure in check.rows if figure.name == name)


def test_each_figure_beside_its_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    run = Run(tmp_path / "r", config).attempt(0, lines(0, 1, 30))
    peak = {"peak_bytes": 1.5 * GB, "limit_bytes": 3.0 * GB}
    events = (
        {"kind": "memory", "values": peak},
        {"kind": "save", "waited_s": 1.0},
        {"kind": "save", "waited_s": 0.0},
        {"kind": "save", "waited_s": 2.0},
        {"kind": "save"},  # of an older version
        {"kind": "evaluation", "waited_s": 9.0},
        {"kind": "copied", "seconds": 1.0},
        {"kind": "memory", "values": {"peak_bytes": 9.0 * GB, "limit_bytes": 3.0 * GB}},
    )
    run.dir.events(0).parent.mkdir()
    with run.dir.events(0).open("w") as stream:
        for event in events:
            whole = Event.model_validate({"step": 1, "attempt": 0, "time": 0.0, **event})
            stream.write(f"{whole.model_dump_json()}\n")
    for rank, start_up_s in enumerate((20.0, 30.0)):
        times = {"start_up_s": start_up_s, "first_step_s": 9.0}
        worker = WorkerRecord(rank=rank, node=f"n{rank}", cache_hits=0, cache_misses=0, **times)
        worker.save(run.dir.attempt("train", 0).worker(rank))
    candidate = candidate_of(config)
    names = ("start-up", "first step, longer by", "save, training waits")
    expected = dict(zip(names, (15.0, 17.0, 0.5), strict=True)) | {"effective utilization": None}
    monkeypatch.setattr(module, "predict", lambda *_: candidate)
    monkeypatch.setattr(module, "expected_overheads", lambda _: expected)
    check = check_run_prediction(run.dir)
    seconds = PARTS.total
    memory = candidate.memory.peak + 0.5 * 2**30
    peak_flops = 2 * 0.05e12
    assert {figure.name: (figure.predicted, figure.measured) for figure in check.rows} == {
        "step": (seconds, 0.5),
        "sequences": pytest.approx((8 / seconds, 16.0)),
        "tokens": pytest.approx((8 * 128 / seconds, 16.0 * 128)),
        "MFU": pytest.approx((candidate.mfu, candidate.model_flops / 0.5 / peak_flops)),
        "data wait": (0.0, 0.01),
        "forward and backward": (pytest.approx(seconds - 4.0), 0.3),
        "optimizer and norms": (4.0, pytest.approx(0.18)),
        "rest": (0.0, pytest.approx(0.01)),
        "peak memory": (memory, 1.5 * GB),
        "start-up": (15.0, 30.0),
        "first step, longer by": (17.0, 8.5),
        "save, training waits": (0.5, 1.0),
        "effective utilization": (None, row(check, "effective utilization").measured),
    }
    assert row(check, "start-up").ratio == 2
    assert row(check, "data wait").ratio is row(check, "effective utilization").ratio is None
    assert (check.steps, check.attempts, check.nodes, check.cluster) == (24, (0,), 2, "local")
    assert json.loads(check.model_dump_json())["rows"][0]["ratio"] == 0.5 / seconds


def test_nxd_s_optimizer_reduces_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("backend=nxd")
    run = Run(tmp_path / "r", config).attempt(0, lines(0, 1, 12))
    monkeypatch.setattr(module, "predict", lambda *_: candidate_of(config))
    check = check_run_prediction(run.dir)
    assert {"peak memory", "start-up", "save, training waits"}.isdisjoint(
        figure.name for figure in check.rows
    )
    assert row(check, "optimizer and norms").predicted == 6.0
    assert row(check, "forward and backward").predicted == pytest.approx(PARTS.total - 6.0)


@pytest.mark.parametrize(("device", "measured"), [("cpu", 0.49), ("neuron", 0.5)])
def test_parts_that_were_not_told_apart_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, measured: float
) -> None:
    """Rows of an old version, or of a device that works on its own."""
    run = Run(tmp_path / "r", config_of()).attempt(0, lines(0, 1, 30, split=False))
    config = config_of("backend=nxd")
    cluster = config.cluster.model_copy(update={"device": device})
    candidate = replace(candidate_of(config), config=replace(config, cluster=cluster))
    monkeypatch.setattr(module, "predict", lambda *_: candidate)
    check = check_run_prediction(run.dir)
    figure = row(check, "forward, backward, optimizer")
    assert figure.predicted == PARTS.total
    assert figure.measured == pytest.approx(measured)
    assert figure.note.startswith("not measured separately: compute 1 s, ")
    assert not any(other.name == "rest" for other in check.rows)


def submitted(run: Run, *first_attempts: int) -> None:
    fields = {"submitted_at": 0.0, "nodes": 2, "local": True}
    sent = tuple(Submission(**fields, first_attempt=first) for first in first_attempts)
    JobsRecord(submissions=sent).save(run.dir.jobs)


def test_attempts_of_one_submission_count_together(tmp_path: Path) -> None:
    run = Run(tmp_path / "r", config_of())
    submitted(run, 0)
    run.attempt(0, lines(0, 1, 9, 0.4)).attempt(1, lines(1, 5, 7)).attempt(2, lines(2, 5, 16, 0.6))
    check = check_run_prediction(run.dir)
    assert (check.attempts, check.steps) == ((0, 2), 3 + 6)
    assert row(check, "step").measured == 0.6
    assert not [warning for warning in check.warnings if "used" in warning]


@pytest.mark.parametrize("last", [6, 20])
def test_the_newest_node_count_with_enough_steps_is_used(tmp_path: Path, last: int) -> None:
    """Attempt 0 on two nodes; resumed on four, with or without enough steps."""
    run = Run(tmp_path / "r", config_of(), nodes=4)
    submitted(run, 0, 1)
    run.attempt(0, lines(0, 1, 20)).attempt(1, lines(1, 1, last, 0.25), nodes=4)
    check = check_run_prediction(run.dir)
    nodes, attempt = (4, 1) if last == 20 else (2, 0)
    assert (check.nodes, check.attempts) == (nodes, (attempt,))
    config = load(run.dir.config)
    assert row(check, "step").predicted == predict(config, make_mesh(config, nodes)).step.total
    message = " ".join(check.warnings)
    if last == 20:
        assert "attempt 0: of another submission or node count, not used" in message
    else:
        assert "attempt 1 on 4 nodes: fewer than 5 steady steps, not used" in message
        assert "may have changed its configuration" in message


@pytest.mark.parametrize(
    ("attempts", "message"),
    [
        ([], "has made no step yet"),
        ([lines(0, 1, 10)], "has made 10 steps, of which 4 are steady: the first 6"),
        ([[make_row(1, step_time_s=0.0)]], "attempt_000.jsonl:1: step_time_s is 0.0"),
        ([[make_row(1, forward_backward_s="x")]], "attempt_000.jsonl:1: forward_backward_s: "),
    ],
)
def test_too_little_to_go_by(tmp_path: Path, attempts: Sequence[list[Line]], message: str) -> None:
    run = Run(tmp_path / "r", config_of())
    for number, rows in enumerate(attempts):
        write_rows(run.dir.metrics(number), rows)
    with pytest.raises(RunError) as caught:
        check_run_prediction(run.dir)
    assert message in str(caught.value)


def profile(folder: Path, config: RunConfig, **changed: Any) -> str:
    values = config.cluster.model_dump(mode="json") | {"name": "measured"} | changed
    path = folder / "measured.yaml"
    path.write_text(json.dumps(values))
    return str(path)


def test_another_profile_brings_the_figures(tmp_path: Path) -> None:
    run = Run(tmp_path / "r", config_of(hardware=None)).attempt(0, lines(0, 1, 20))
    with pytest.raises(ConfigError, match=r"cluster\.hardware: missing in profile local"):
        check_run_prediction(run.dir)
    check = check_run_prediction(run.dir, profile(tmp_path, config_of()))
    config = config_of()
    mesh = load_mesh(run.dir.plan)
    assert check.cluster == "measured"
    assert row(check, "step").predicted == predict(config, mesh).step.total
    rough = HARDWARE.model_copy(update={"rough": True}).model_dump(mode="json")
    check = check_run_prediction(run.dir, profile(tmp_path, config_of(), hardware=rough))
    assert "`slurmllm calibrate` measures them" in check.warnings[-1]


@pytest.mark.parametrize(
    ("setting", "changed", "message"),
    [
        ("backend=native", {"devices_per_node": 2}, r"devices_per_node: 2 in --cluster .*, 1 in"),
        ("backend=rehearsal", {}, "backend: rehearsal computes nothing"),
    ],
)
def test_refused_runs(tmp_path: Path, setting: str, changed: dict[str, Any], message: str) -> None:
    run = Run(tmp_path / "r", config_of(setting)).attempt(0, lines(0, 1, 20))
    with pytest.raises(ConfigError, match=message):
        check_run_prediction(run.dir, profile(tmp_path, config_of(), **changed))
