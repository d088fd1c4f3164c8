"""Writes the run: configuration, attempts of both stages, metrics, events, checkpoints and logs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _large_run.faults import BEFORE_STEPS, WEIGHTS, Ended, end_by, node_record
from _large_run.logs import log_line, write_rank_logs, write_stacks
from slurmllm.config.load import save
from slurmllm.config.resolve import RunConfig, resolve
from slurmllm.plan.mesh import make_mesh, save_mesh
from slurmllm.run.artifact_records import (
    CheckpointFile,
    CheckpointManifest,
    CorpusRecord,
    DataRecord,
    GraphFile,
    GraphManifest,
    GraphState,
)
from slurmllm.run.records import (
    AttemptRecord,
    Event,
    ExcludedNode,
    ExcludedNodes,
    Finding,
    Heartbeat,
    JobsRecord,
    MetricsRow,
    NodeHealth,
    Phase,
    Record,
    SkippedBatches,
    SkipsRecord,
    Submission,
    WorkerPhase,
    WorkerRecord,
)
from slurmllm.run.rundir import RunDir, Stage
from slurmllm.supervise.classify import Ending, classify
from slurmllm.supervise.policy import decide

RECIPE, CLUSTER = "llama2_70b", "trn1"
STEP_S = 14.3  # of the recipe on 128 nodes; see month.py
_START_UP_S, _FIRST_STEP_S, _STOPPING_S = 450.0, 60.0, 10.0
_SAVE_EVERY = 25
_KEPT, _KEPT_EVERY = 3, 10_000  # checkpoints on disk: the newest ones, and multiples of these steps
_LOGS_OF_ATTEMPT = 4  # ranks with a log in attempts before the last, besides those that failed
_BYTES = 970_000_000_000  # of a checkpoint


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        nodes: Number of nodes; a multiple of 8, for the recipe's mesh.
        attempts: Of the train stage.
        steps: Mean number of steps of an attempt.
    """

    nodes: int = 128
    attempts: int = 200
    steps: int = 500


def write_run(run: RunDir, size: Size, seed: int = 0) -> None:
    """Write a run whose last attempt is training now; equal seeds give equal figures."""
    config = resolve(RECIPE, CLUSTER, [f"train.steps={2 * size.attempts * size.steps + 2000}"])
    run.path.mkdir(parents=True)
    save(config, run)
    save_mesh(make_mesh(config, size.nodes), run.plan)
    _LargeRun(run, config, size, random.Random(seed)).write()


def _put(path: Path, record: Record) -> None:
    """Write a record as its `save` does, without the fsync that a crash would call for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.model_dump_json(indent=2, by_alias=True) + "\n")


class _LargeRun:
    def __init__(self, run: RunDir, config: RunConfig, size: Size, rng: random.Random) -> None:
        self.run, self.config, self.size, self.rng = run, config, size, rng
        self.per_node = config.cluster.devices_per_node
        self.partition = [f"trn1-dy-{index:04d}" for index in range(size.nodes + 4)]
        self.attempts: list[AttemptRecord] = []
        self.submissions: list[Submission] = []
        self.skips: list[SkippedBatches] = []
        self.excluded: list[ExcludedNode] = []
        self.checkpoint: int | None = None  # newest step
        self.saved: dict[int, tuple[int, float]] = {}  # step → attempt, Unix time
        kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=size.attempts - 1)
        if len(kinds) >= len(WEIGHTS):
            kinds[: len(WEIGHTS)] = WEIGHTS  # each of them once
        rng.shuffle(kinds)
        hour = 3600.0
        self.plan = [(kind, self._steps_of(kind)) for kind in kinds] + [("open", size.steps)]
        longest = sum(steps * STEP_S + 1200 for _, steps in self.plan)
        self.now = time.time() - longest - size.attempts * hour

    def _steps_of(self, kind: str) -> int:
        if kind in BEFORE_STEPS or kind == "preflight":
            return 0
        return max(3, min(round(self.rng.expovariate(1 / self.size.steps)), 6 * self.size.steps))

    def write(self) -> None:
        self._write_inputs()
        self._submit()
        self._write_precompile()
        for number, (fault, steps) in enumerate(self.plan):
            if fault == "open":
                self.now = time.time() - _START_UP_S - _FIRST_STEP_S - steps * STEP_S - 5
            self._attempt(number, fault, steps)
        JobsRecord(submissions=tuple(self.submissions)).save(self.run.jobs)
        if self.skips:
            SkipsRecord(skips=tuple(self.skips)).save(self.run.skips)
        ExcludedNodes(nodes=tuple(self.excluded[-8:])).save(self.run.excluded)
        self._write_checkpoints()

    def _write_inputs(self) -> None:
        train, model = self.config.recipe.train, self.config.recipe.model
        corpus = CorpusRecord(
            path="/fsx/corpora/c4", fingerprint="9c3ab0", documents=364_868_892, weight=1.0
        )
        DataRecord(
            corpora=(corpus,), tokenizer="b2f1", seed=train.seed, seq_len=model.seq_len,
            global_batch=train.global_batch, mask="document", validation=0.001,
        ).save(self.run.data)  # fmt: skip
        folders = [f"MODULE_{index:018d}+abc123" for index in range(60)]
        self.graphs = tuple(folders)
        self.run.graphs.mkdir()
        GraphManifest(
            complete=True, backend="nxd", versions={"torch": "2.9.1", "neuronx-cc": "2.22"},
            graphs=60, archive_bytes=4_000_000_000, archive_sha256="0" * 64,
            cold_first_step_s=2400.0, compile_s=1800.0,
            files=tuple(GraphFile(path=f"{f}/model.neff", bytes=60_000_000) for f in folders),
            states=tuple(
                GraphState(name=f"graph {i}", folder=f, state="compiled", compiler="neuronx-cc")
                for i, f in enumerate(folders)
            ),
        ).save(self.run.graphs_manifest)  # fmt: skip

    def _submit(self) -> None:
        job = 1000 + 2 * len(self.submissions)
        first = not self.submissions
        self.submissions.append(
            Submission(
                submitted_at=self.now, nodes=self.size.nodes, local=False,
                first_attempt=len(self.attempts), train_job=str(job + 1),
                precompile_job=str(job) if first else None,
            )
        )  # fmt: skip
        self.now += 60

    def _record(self, number: int, stage: Stage) -> AttemptRecord:
        sent = self.submissions[-1]
        nodes = tuple(sorted(self.partition[: self.size.nodes]))
        job = sent.precompile_job if stage == "precompile" else sent.train_job
        return AttemptRecord(
            attempt=number, stage=stage, job_id=job,
            restart_count=0 if stage == "precompile" else number - sent.first_attempt,
            host=nodes[0], pid=4711, process="boot 1", nodes=nodes,
            world_size=len(nodes) * self.per_node, master_addr=nodes[0], master_port=41000,
            started_at=self.now, checkpoint_before=self.checkpoint,
        )  # fmt: skip

    def _write_precompile(self) -> None:
        record = self._record(0, "precompile")
        self.now += 4500
        ended = end_by("done", record.nodes, self.per_node, 0, 2, self.now, self.rng)
        self._write_nodes(record, ended, 2, self.now)
        ending = classify(ended.evidence(record.nodes))
        self._close(record, ending, {"start_up": 400.0, "first_step": 2400.0, "workers": 4490.0})
        self.now += 60

    def _attempt(self, number: int, fault: str, steps: int) -> None:
        record = self._record(number, "train")
        begin = (self.checkpoint or 0) + 1
        last = begin + steps - 1
        log = [self._supervisor(record, f"{len(record.nodes)} node(s): {' '.join(record.nodes)}")]
        phases = {"preflight": 15.0, "cache": 10.0}
        if fault == "preflight":
            self._write_health(record, fail=True)
            name, self.now = record.nodes[0], self.now + 15.0
            text = f"preflight: {name}: 30 of 32 devices"
            ending = Ending("node_failure", (text,), (name,), started=False)
            self._after(self._close(record, ending, phases, log=log), log)
            return
        self._write_health(record)
        end = self.now + _START_UP_S
        if steps:
            end = self._write_steps(record, begin, last, log)
            phases |= {"start_up": _START_UP_S, "first_step": _FIRST_STEP_S}
            saving = 2.0 * sum(step % _SAVE_EVERY == 0 for step in range(begin, last + 1))
            phases |= {"training": end - self.now - _START_UP_S - saving, "saving": saving}
        if fault == "open":
            self._write_open(record, last, end)
            record.save(self.run.attempt("train", number).record)
            self._append_log(log)
            return
        ended = end_by(fault, record.nodes, self.per_node, number, last, end, self.rng)
        self._write_nodes(record, ended, last, end)
        self.now = end + _STOPPING_S
        onset = last - steps // 3
        rolled_back = fault == "divergence" and onset > (record.checkpoint_before or 0) > 0
        if rolled_back:
            self._roll_back(record, onset, last)
        before = record.checkpoint_before or 0
        after = self.checkpoint
        figures: dict[str, Any] = {}
        if steps:
            gained = max((after or 0) - before, 0)
            figures = {"first_step": begin, "last_step": last, "steps_gained": gained,
                       "steps_lost": last - max(after or 0, before)}  # fmt: skip
        phases["stopping"] = _STOPPING_S
        ending = classify(ended.evidence(record.nodes))
        self._after(self._close(record, ending, phases, figures, rolled_back, log), log)

    def _close(
        self, record: AttemptRecord, ending: Ending, phases: dict[str, float],
        figures: dict[str, Any] | None = None, rolled_back: bool = False,
        log: list[str] | None = None,
    ) -> AttemptRecord:  # fmt: skip
        known = {
            "ended_at": self.now, "ending": ending.ending, "evidence": ending.evidence,
            "blamed_nodes": ending.blamed_nodes, "checkpoint_after": self.checkpoint,
            "phases_s": {"queue": 120.0, **phases}, **(figures or {}),
        }  # fmt: skip
        begin = self.submissions[-1].first_attempt
        earlier = self.attempts[begin:] if record.stage == "train" else []
        closed = decide(
            record.model_copy(update=known), earlier, self.config.recipe,
            rolled_back=rolled_back, started=ending.started,
        )  # fmt: skip
        closed.save(self.run.attempt(record.stage, record.attempt).record)
        reasons = f"{closed.ending} → {closed.action}: {'; '.join(closed.evidence)}"
        if log is not None:
            log.append(self._supervisor(closed, reasons))
        return closed

    def _after(self, closed: AttemptRecord, log: list[str]) -> None:
        """The next job: requeued, or submitted by somebody after the run stopped."""
        self._append_log(log)
        self.attempts.append(closed)
        for name in closed.blamed_nodes:
            self.partition.remove(name)
            self.partition.append(name)
            reason = closed.evidence[0]
            self.excluded.append(
                ExcludedNode(node=name, reason=reason, since=self.now, until=self.now + 86_400)
            )
        self.now += 125 + closed.backoff_s
        if closed.action == "stop" and closed.ending != "superseded":
            self.now += 1800
            self._submit()

    def _roll_back(self, record: AttemptRecord, onset: int, last: int) -> None:
        target = max((s for s in self.saved if s < onset), default=None)
        self.checkpoint = target
        self.skips.append(
            SkippedBatches(
                first=onset,
                last=last,
                roll_back_to=target,
                onset=onset,
                attempt=record.attempt,
                reason="loss is nan",
            )
        )

    def _write_health(self, record: AttemptRecord, fail: bool = False) -> None:
        attempt = self.run.attempt(record.stage, record.attempt)
        for index, name in enumerate(record.nodes):
            devices = 30 if fail and index == 0 else 32
            findings = (
                Finding(check="devices", status="ok" if devices == 32 else "fail", value=devices,
                        expected=32, message=f"{devices} of 32 devices"),
                Finding(check="disk", status="ok", value=812.0, message="812 GB free in /scratch"),
                Finding(check="shared file system", status="ok", value=0.01),
            )  # fmt: skip
            health = NodeHealth(node=name, findings=findings, checks_s=2.5)
            _put(attempt.health(name), health)

    def _write_nodes(self, record: AttemptRecord, ended: Ended, step: int, at: float) -> None:
        attempt = self.run.attempt(record.stage, record.attempt)
        for index, (name, node) in enumerate(ended.nodes.items()):
            _put(attempt.node(name), node)
            self._write_heartbeat(record, index, step, at, "stepping")
        for failure in ended.failures:
            _put(attempt.failure(failure.rank), failure)
        ranks = [f.rank for f in ended.failures[:2]]
        if ended.hang is not None:
            ended.hang.save(attempt.hang)
            ranks += ended.hang.behind
            write_stacks(attempt, record, ended.hang.behind)
        more = self.rng.sample(range(1, record.world_size), _LOGS_OF_ATTEMPT)
        write_rank_logs(self.run, record, sorted({*ranks, *more} - {0}), at)

    def _write_heartbeat(
        self, record: AttemptRecord, index: int, step: int, at: float, phase: Phase
    ) -> None:
        attempt, name = self.run.attempt(record.stage, record.attempt), record.nodes[index]
        ranks = range(index * self.per_node, (index + 1) * self.per_node)
        since = at - 3.0
        beat = Heartbeat(
            node=name, written_at=at,
            ranks={r: WorkerPhase(phase=phase, step=step, since=since) for r in ranks},
        )  # fmt: skip
        path = attempt.heartbeat(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(beat.model_dump_json())
        if step == 0:
            return
        worker = WorkerRecord(
            rank=ranks[0], node=name, start_up_s=_START_UP_S, first_step_s=_FIRST_STEP_S + index,
            cache_hits=60, cache_misses=0, resumed_from=record.checkpoint_before,
        )  # fmt: skip
        _put(attempt.worker(ranks[0]), worker)

    def _write_open(self, record: AttemptRecord, step: int, at: float) -> None:
        attempt = self.run.attempt("train", record.attempt)
        for index, name in enumerate(record.nodes):
            _put(attempt.node(name), node_record(record.nodes, index, self.per_node))
            self._write_heartbeat(record, index, step, at, "stepping")
        write_rank_logs(self.run, record, range(1, record.world_size), at)

    def _write_steps(self, record: AttemptRecord, first: int, last: int, log: list[str]) -> float:
        """Write metrics and events; returns when the last step ended."""
        number, train, rng = record.attempt, self.config.recipe.train, self.rng
        tokens = train.global_batch * self.config.recipe.model.seq_len
        metrics, events = self.run.metrics(number), self.run.events(number)
        for path in (metrics, events):
            path.parent.mkdir(exist_ok=True)
        at = self.now + _START_UP_S
        node = record.nodes[0]
        with metrics.open("w") as rows, events.open("w") as happened:
            for step in range(first, last + 1):
                step_s = STEP_S * (1 + 0.02 * rng.random())
                step_s += _FIRST_STEP_S if step == first else 0.0
                at += step_s
                loss = 1.7 + 8 / (1 + step / 300) + rng.gauss(0, 0.01)
                loss += 1.5 if rng.random() < 2e-4 else 0.0
                row = MetricsRow.model_construct(
                    step=step, attempt=number, loss=loss, grad_norm=0.3 + 0.05 * rng.random(),
                    param_norm=900 + 0.01 * step, lr=1.5e-4 * min(1.0, step / 2000),
                    tokens=step * tokens, seq_per_s=train.global_batch / step_s,
                    tokens_per_s=tokens / step_s, step_time_s=step_s,
                    data_wait_s=0.02 * rng.random(), forward_backward_s=None, optimizer_s=None,
                    time=at,
                )  # fmt: skip
                rows.write(row.model_dump_json() + "\n")
                if step - first < 3 or step % 10 == 0:
                    text = f"step {step}/{train.steps}  loss {loss:.4f}  grad norm 0.300"
                    log.append(log_line(at, node, 0, "train.hooks.monitoring", text))
                if step - first == 5:
                    peak = {"peak_bytes": 14.1e9, "limit_bytes": 16e9, "rank": 3.0}
                    event = Event(kind="memory", step=step, attempt=number, time=at, values=peak)
                    happened.write(event.model_dump_json(exclude_defaults=True) + "\n")
                if step % _SAVE_EVERY == 0:
                    at += 2.0
                    event = Event(kind="save", step=step, attempt=number, time=at, seconds=58.0,
                                  waited_s=2.0, bytes=_BYTES, values={"cost_s": 2.0})  # fmt: skip
                    happened.write(event.model_dump_json(exclude_defaults=True) + "\n")
                    self.checkpoint, self.saved[step] = step, (number, at)
        return at

    def _write_checkpoints(self) -> None:
        newest = sorted(step for step in self.saved if step <= (self.checkpoint or 0))
        kept = {step for step in newest if step % _KEPT_EVERY == 0} | {*newest[-_KEPT:]}
        world = self.size.nodes * self.per_node
        names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(world))]
        for step in kept:
            attempt, at = self.saved[step]
            files = tuple(
                CheckpointFile(path=name, bytes=_BYTES // world, sha256=f"{step:x}".rjust(64, "a"))
                for name in names
            )
            manifest = CheckpointManifest(
                step=step, tokens=step * 4_194_304, world_size=world, attempt=attempt,
                recipe=RECIPE, saved_at=at, save_s=58.0, fingerprint="f" * 16, files=files,
            )  # fmt: skip
            _put(self.run.checkpoint(step) / "manifest.json", manifest)

    def _supervisor(self, record: AttemptRecord, text: str) -> str:
        message = f"{record.stage} attempt {record.attempt} of job {record.job_id}: {text}"
        return log_line(self.now, record.nodes[0], None, "supervise.supervisor", message)

    def _append_log(self, log: Sequence[str]) -> None:
        self.run.logs.mkdir(exist_ok=True)
        with self.run.stage_log("train").open("a") as stream:
            stream.writelines(log)
