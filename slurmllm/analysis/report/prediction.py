"""Comparison of a prediction with the measurements of a run, part by part.

Step times are medians over the run's steady steps (`metrics/step_time.py`). Parts that were not
measured separately are combined, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import mean, median

from pydantic import computed_field

from slurmllm.analysis.status.history import read_history, read_incarnations, read_submissions
from slurmllm.analysis.status.utilization import account_node_hours
from slurmllm.core.config.cluster import GIB
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig, change
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Texts
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.metrics.step_time import SteadySteps, read_steady_steps, step_rates
from slurmllm.core.run.artifact_records import MicroBatchRecord
from slurmllm.core.run.records import Record, WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.plan.lost_time import assumed, lost_time
from slurmllm.plan.mesh import load_mesh, make_mesh
from slurmllm.plan.parameters import parameters
from slurmllm.plan.search import LayoutEstimate, predict
from slurmllm.plan.step import peak_flops

# Parts of `plan.candidate.StepTime` between the loss and the norms. Under FSDP2 (native) gradients
# are reduced within the backward pass and weights gathered within the forward pass; under NxD both
# are the optimizer's.
_OPTIMIZER = {"native": ("optimizer",), "nxd": ("data", "optimizer")}


def expected_overheads(candidate: LayoutEstimate) -> dict[str, float | None]:
    """Return the figures of a run outside its steps, by row; None if no progress is expected."""
    config = candidate.config
    nodes = candidate.mesh.nodes
    size = parameters(config.recipe.model)
    durations, save = assumed(
        size, nodes, config.cluster.device, config.recipe.checkpoint.asynchronous
    )
    try:
        effective = lost_time(config, nodes, candidate.step.total).effective
    except ConfigError:  # no progress by the assumptions, but the run made some
        effective = None
    return {
        "start-up": durations.start_up,
        "first step, longer by": durations.first_step,  # than later ones
        "save, training waits": save.waited_s,
        "effective utilization": effective,
    }


class PredictedFigure(Record):
    """One figure, predicted and measured."""

    name: str
    predicted: float | None  # None: no prediction
    measured: float
    unit: str  # s, seq/s, tokens/s, bytes; empty: a share of 1
    note: str = ""  # what the figure includes

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None if the prediction is absent or 0."""
        return self.measured / self.predicted if self.predicted else None


class PredictionCheck(Record):
    """A prediction compared with a run."""

    run: str
    cluster: str  # profile of the hardware figures
    nodes: int
    attempts: tuple[int, ...]  # attempts whose steps were used
    steps: int  # number of steady steps
    rows: tuple[PredictedFigure, ...]
    warnings: Texts = ()


def check_run_prediction(run: RunDir, cluster: str | None = None) -> PredictionCheck:
    """Predict a run with its own configuration and compare that with its measurements.

    `cluster` names another profile for the hardware figures.

    Raises:
        ConfigError: there are no hardware figures, or those of other nodes than the run's.
        RunError: the run has too few steady steps, or its files cannot be read.
    """
    config = _config(run, cluster)
    history = read_history(run, read_incarnations(read_submissions(run), SlurmClient()))
    steady = read_steady_steps(run, history.attempts, read_submissions(run))
    mesh = load_mesh(run.plan)
    # plan.json holds only the mesh of the last submission, which may have other nodes.
    if steady.nodes is not None and steady.nodes != mesh.nodes:
        measured = run.micro_batch.is_file()
        micro = MicroBatchRecord.load(run.micro_batch).micro_batch if measured else None
        mesh = make_mesh(config, steady.nodes, micro)
    candidate = predict(config, mesh)
    expected = expected_overheads(candidate)
    used = account_node_hours(history)
    rows = [
        *_step_rows(steady, candidate),
        *_memory(run, steady, candidate),
        *_overhead_rows(run, steady, expected),
    ]
    if used.effective is not None:
        hours = f"of {used.node_hours:.4g} node hours, all attempts"
        name = "effective utilization"
        rows.append(_row(name, expected[name], used.effective, "", hours))
    warnings = [*steady.warnings, *used.warnings]
    if config.cluster.hardware and config.cluster.hardware.rough:
        warnings.append(
            f"the hardware figures of profile {config.cluster.name} are rough; `slurmllm "
            "calibrate` measures them"
        )
    return PredictionCheck(
        run=run.name,
        cluster=config.cluster.name,
        nodes=candidate.mesh.nodes,
        attempts=steady.attempts,
        steps=steady.steps,
        rows=rows,
        warnings=warnings,
    )


def _config(run: RunDir, cluster: str | None) -> RunConfig:
    """Return the run's configuration, with the hardware figures for the prediction."""
    run_config = load(run.config)
    run_config.recipe.require_training("report --prediction", "leave out --prediction")
    title = f"run {run.name} cannot be compared with a prediction"
    if run_config.backend not in _OPTIMIZER:
        raise ConfigError(
            title,
            [f"backend: {run_config.backend} computes nothing; use a run with another backend"],
        )
    config = run_config if cluster is None else change(run_config, cluster, ())
    faults = [
        f"cluster.{name}: {value} in --cluster {cluster}, {run_value} in the run; a profile of "
        "nodes like the run's is needed"
        for name in ("device", "devices_per_node")
        if (run_value := getattr(run_config.cluster, name))
        != (value := getattr(config.cluster, name))
    ]
    if not config.cluster.hardware:
        faults.append(
            f"cluster.hardware: missing in profile {config.cluster.name}; --cluster PROFILE takes "
            "another's, and `slurmllm calibrate --out FILE.yaml` measures one"
        )
    if faults:
        raise ConfigError(title, faults)
    return config


def _step_rows(steady: SteadySteps, candidate: LayoutEstimate) -> Iterator[PredictedFigure]:
    mesh = candidate.mesh
    taken_s = steady.step_s
    rates = step_rates(taken_s, mesh.global_batch, candidate.config.recipe.model.seq_len)
    peak = mesh.world_size * peak_flops(candidate.config)
    yield _row("step", candidate.step.total, taken_s, "s")
    yield _row("sequences", candidate.seq_per_s, rates.seq_per_s, "seq/s")
    yield _row("tokens", candidate.tokens_per_s, rates.tokens_per_s, "tokens/s")
    peak_note = "of bf16" if candidate.config.recipe.train.is_fp8 else ""
    yield _row("MFU", candidate.mfu, candidate.model_flops / taken_s / peak, "", peak_note)
    # Medians of the parts need not add up to the median of the step.
    predicted = candidate.step.parts()
    late = _OPTIMIZER[candidate.config.backend]
    early = [name for name in predicted if name not in late]
    yield _row("data wait", 0.0, steady.data_wait_s, "s")
    if not steady.split:
        # A Neuron device computes while the host waits for data.
        waited_s = 0.0 if candidate.config.cluster.device == "neuron" else steady.data_wait_s
        note = f"not measured separately: {_listed(predicted, predicted)}"
        whole = "forward, backward, optimizer"
        yield _row(whole, candidate.step.total, steady.step_s - waited_s, "s", note)
        return
    for name, parts, measured in (
        ("forward and backward", early, steady.split.forward_backward_s),
        ("optimizer and norms", late, steady.split.optimizer_s),
    ):
        seconds = sum(predicted[term] for term in parts)
        yield _row(name, seconds, measured, "s", _listed(predicted, parts))
    yield _row("rest", 0.0, steady.split.rest_s, "s", "workers agree on stops and saves")


def _listed(predicted: Mapping[str, float], names: Iterable[str]) -> str:
    """`compute 1.2 s, bubble 0.3 s`, without parts that are 0."""
    return ", ".join(f"{name} {predicted[name]:.3g} s" for name in names if predicted[name])


def _memory(
    run: RunDir, steady: SteadySteps, candidate: LayoutEstimate
) -> Iterator[PredictedFigure]:
    """Yield the highest peak memory of a worker, in the first steps without a save."""
    measured = next(
        (
            event.values
            for attempt in reversed(steady.attempts)
            for event in read_events(run, attempt)
            if event.kind == "memory" and {"peak_bytes", "limit_bytes"} <= event.values.keys()
        ),
        None,
    )
    if measured is None:
        return
    cluster = candidate.config.cluster
    predicted = float(candidate.memory.peak)
    note = f"a worker may use {measured['limit_bytes'] / 1e9:.2f} GB"
    # Memory of a process includes interpreter and malloc's reserve; that of a GPU only tensors.
    if cluster.device == "cpu" and cluster.hardware:
        reserved = cluster.hardware.reserved_gib * GIB
        predicted += reserved
        note += f"; predicted: {reserved / 1e9:.2f} GB of it without a model"
    yield _row("peak memory", predicted, measured["peak_bytes"], "bytes", note)


def _overhead_rows(
    run: RunDir, steady: SteadySteps, expected: Mapping[str, float | None]
) -> Iterator[PredictedFigure]:
    """Yield the start-up of the slowest workers, as mean over the attempts, and of saves."""
    slowest = []
    for attempt in steady.attempts:
        folder = run.attempt("train", attempt).path / "workers"
        records = [WorkerRecord.load(path) for path in sorted(folder.glob("rank_*.json"))]
        if records:
            slowest.append(max(records, key=lambda record: record.start_up_s))
    if slowest:
        note = "" if len(slowest) == 1 else f"mean of {len(slowest)} starts"
        start_up_s = mean(record.start_up_s for record in slowest)
        longer_s = mean(max(0.0, record.first_step_s - steady.step_s) for record in slowest)
        for name, seconds in (("start-up", start_up_s), ("first step, longer by", longer_s)):
            yield _row(name, expected[name], seconds, "s", note)
    events = [event for attempt in steady.attempts for event in read_events(run, attempt)]
    waits = [e.waited_s for e in events if e.kind == "save" and e.waited_s is not None]
    if waits:
        note = f"median of {len(waits)} saves"
        name = "save, training waits"
        yield _row(name, expected[name], median(waits), "s", note)


def _row(
    name: str, predicted: float | None, measured: float, unit: str, note: str = ""
) -> PredictedFigure:
    return PredictedFigure(name=name, predicted=predicted, measured=measured, unit=unit, note=note)
