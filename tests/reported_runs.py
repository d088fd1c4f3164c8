"""A run with a restart, as its directory holds it, for the tests of its report."""

import json
from typing import Any

from made_records import save_attempt
from training_rows import make_row, write_rows

from slurmllm.analysis.evaluate.request import task_key
from slurmllm.analysis.evaluate.suites import find_suite
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.artifact_records import EvaluationRecord
from slurmllm.core.run.records import Event
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import make_mesh

BEGIN = 1.7e9


def make_reported_run(
    run: RunDir, *, nodes: int = 4, steps: int = 60, seq_per_s: float = 30.0, **changed: Any
) -> RunDir:
    """Two thirds of the steps in one attempt, lost back to half of them, the rest in another.

    It is on trn1, 32 workers a node; `changed` are fields of the second attempt's record.
    """
    changes = ["optim.warmup_steps=2", "data.validation=0.01", "eval.every_steps=20"]
    config = resolve("neox_20b", "trn1", [f"train.steps={steps}", *changes])
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(config.to_yaml())
    run.plan.write_text(json.dumps(make_mesh(config, nodes).to_json()))
    taken = 256 / seq_per_s
    lost, half = steps * 2 // 3, steps // 2
    resumed_at = BEGIN + taken * (lost - half) + 90
    for number, first, last, begin in ((0, 1, lost, BEGIN), (1, half + 1, steps, resumed_at)):
        rates = {"step_time_s": taken, "seq_per_s": seq_per_s, "tokens_per_s": 2048 * seq_per_s}
        parts = {"forward_backward_s": 0.8 * taken, "optimizer_s": 0.1 * taken}
        rows = (
            make_row(s, number, time=begin + taken * s, tokens=256 * 2048 * s, **rates, **parts)
            for s in range(first, last + 1)
        )
        write_rows(run.metrics(number), rows)
    first_record = {
        **{"started_at": BEGIN - 30, "ended_at": BEGIN + taken * lost + 5},
        **{"class": "node_failure", "action": "requeue", "evidence": ["Slurm: NODE_FAIL <n3>"]},
        **{"checkpoint_after": half, "first_step": 1, "last_step": lost},
        **{"steps_gained": half, "steps_lost": lost - half},
    }
    second = {
        **{"started_at": resumed_at + taken * half - 20, "class": "done", "action": "finish"},
        **{"ended_at": resumed_at + taken * steps + 2, "checkpoint_after": steps},
        **{"first_step": half + 1, "last_step": steps},
    }
    names = tuple(f"n{i}" for i in range(nodes))
    for number, fields in enumerate((first_record, second | changed)):
        save_attempt(run, number, nodes=names, **({"world_size": 32 * nodes} | fields))
    memory = {"peak_bytes": 9e9, "limit_bytes": 16e9, "rank": 3}
    events = [
        Event(kind="save", step=half, attempt=0, time=BEGIN, seconds=2.0, bytes=10**9),
        Event(kind="memory", step=5, attempt=0, time=BEGIN, values=memory),
    ]
    run.events(0).parent.mkdir()
    run.events(0).write_text("".join(event.model_dump_json() + "\n" for event in events))
    return run


def add_scores(run: RunDir, *steps: int) -> None:
    """What checkpoints scored in a group of the suite `hlat`."""
    placed = find_suite("hlat")
    (group,) = [group for group in placed.suite.groups if group.name == "world knowledge"]
    for step in steps:
        for row in group.tasks:
            scored = {"scores": {f"{row.metric},none": step / 100}, "evaluated_at": BEGIN}
            at = {"step": step, "tokens": step * 256 * 2048, "checkpoint": f"{step:064d}"}
            errors = {f"{row.metric},none": 0.01}
            how = {"version": "lm_eval 1", "seconds": 1, "errors": errors}
            record = EvaluationRecord(task=row.task, **at, **scored, **how)
            key = task_key(row, placed.folder, None, "lm_eval 1")
            record.save(run.evaluation(record.checkpoint[::-1], key))
