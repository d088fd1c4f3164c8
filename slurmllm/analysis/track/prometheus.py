"""A run's metrics in the format of Prometheus, from what `status` and `report` show.

Names and units follow https://prometheus.io/docs/practices/naming/: instead of an age a page has
the Unix time, from which `time() - …` is right however old the page is. The job's id, which changes
with each successor, is a label of `slurmllm_run_info` only: series continue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import get_args

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from slurmllm import __version__
from slurmllm.analysis.status.details import excluded_nodes
from slurmllm.analysis.status.history import read_history
from slurmllm.analysis.status.recoveries import EndingLoss, find_recoveries, sum_by_ending
from slurmllm.analysis.status.runs import STATES, RunState
from slurmllm.analysis.status.utilization import HOUR_S
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.metrics.step_time import finite_number
from slurmllm.core.run.records import EndingClass
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import login_name
from slurmllm.launch.supervise.slow_ranks import read_slow_ranks
from slurmllm.plan.step import flops_utilization

_HELP = {
    "run_info": "The run; its value is 1.",
    "run_state": "1 for the state that status shows, 0 for the others.",
    "last_step": "Last trained optimizer step.",
    "target_steps": "Optimizer steps of the run.",
    "last_step_timestamp_seconds": "Unix time at the end of the last step.",
    "last_checkpoint_timestamp_seconds": "Unix time of the newest complete checkpoint.",
    "loss": "Loss of the last step.",
    "trained_tokens": "Tokens trained so far.",
    "tokens_per_second": "Tokens/s, median of recent steps.",
    "model_flops_utilization_ratio": "MFU, median of recent steps.",
    "attempt": "Number of the newest attempt, from 0.",
    "restarts_total": "Restarts, by class of ending of the attempt before.",
    "lost_node_seconds_total": "Node seconds lost to recomputed steps and restarts, by class of "
    "ending.",
    "node_seconds_total": "Node seconds of all attempts.",
    "slow_rank_ratio": "Time of a slow rank without waits, relative to its peers' median.",
    "excluded_nodes": "Number of excluded nodes.",
    "excluded_node_info": "1 for each excluded node.",
}
Sample = tuple[str, float | None, dict[str, str]]  # name, value, further labels


class Page(Collector):
    """The metrics of one run, as of the last update."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._families: Collection[Metric] = ()

    def collect(self) -> Collection[Metric]:
        return self._families

    def update(self, state: RunState) -> None:
        self._families = ()  # if this fails, no metrics are better than old ones
        run = self._run
        labels = {
            "run": run.name,
            "cluster": self._config.cluster.name,
            "user": login_name(),
        }
        families: dict[str, Metric] = {
            name: (Counter if name.endswith("_total") else Gauge)(f"slurmllm_{name}", meaning)
            for name, meaning in _HELP.items()
        }
        for name, value, more in _samples(run, self._config, state):
            if value is not None:
                families[name].add_sample(f"slurmllm_{name}", labels | more, float(value))
        self._families = families.values()


def _samples(run: RunDir, config: RunConfig, state: RunState) -> Iterator[Sample]:
    attempts = state.attempts
    job = attempts[-1].job_id if attempts else None
    for name in STATES:
        yield "run_state", name == state.state, {"state": name}
    labels = {
        "recipe": state.recipe,
        "run_dir": state.run_dir,
        "version": __version__,
        "job_id": job or "",
    }
    yield "run_info", 1, labels
    if state.state == "damaged":
        return
    saved = state.last_checkpoint
    values = {
        "last_step": state.step,
        "target_steps": state.steps,
        "last_step_timestamp_seconds": finite_number(state.metrics, "time"),
        "last_checkpoint_timestamp_seconds": None if saved is None else saved.saved_at,
        "loss": state.loss,
        "trained_tokens": state.tokens,
        "node_seconds_total": state.node_hours * HOUR_S,
        "attempt": attempts[-1].attempt if attempts else None,
    }
    if attempts and state.state == "training":  # `status` shows the last speed at any time
        values["tokens_per_second"] = state.tokens_per_s
        if state.seq_per_s is not None:
            values["model_flops_utilization_ratio"] = flops_utilization(
                config, attempts[-1].world_size, state.seq_per_s
            )
        for slow in read_slow_ranks(run, attempts[-1]) or ():
            yield "slow_rank_ratio", slow.ratio, {"rank": str(slow.rank), "node": slow.node}
    for name, value in values.items():
        yield name, value, {}
    # The attempts before the last one: each was followed by another.
    endings = [attempt.ending or "unknown" for attempt in attempts[:-1]]
    for ending in dict.fromkeys((*get_args(EndingClass), *endings)):
        yield "restarts_total", endings.count(ending), {"class": ending}
    ended = tuple((attempt.attempt, attempt.ended_at) for attempt in attempts)
    for loss in _losses(run, ended, state.metrics.get("attempt")):
        yield "lost_node_seconds_total", loss.node_hours * HOUR_S, {"class": loss.ending}
    nodes, _ = excluded_nodes(run, attempts)
    yield "excluded_nodes", len(nodes), {}
    for node in nodes:
        yield "excluded_node_info", 1, {"node": node.node}


@lru_cache(maxsize=1)  # read again when an attempt ends or another one trains
def _losses(run: RunDir, ended: object, training: object) -> list[EndingLoss]:
    return sum_by_ending(list(find_recoveries(read_history(run))))
