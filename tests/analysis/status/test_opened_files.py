"""How many files of a run `status`, `logs` and `report` open: never nodes times attempts."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from forked_verbs import run_verb
from made_records import save_attempt, save_manifest, save_submission
from training_rows import make_rows, write_rows

from slurmllm.core.config.load import save
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.records import (
    FailureRecord,
    Heartbeat,
    NodeRecord,
    WorkerPhase,
    WorkerRecord,
)
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import make_mesh, save_mesh

NODES, PER_NODE = 8, 4
FEW, MANY = 10, 20  # attempts
STEPS = 5


def write_run(folder: Path, attempts: int) -> RunDir:
    """A run whose attempts all failed: rank 0 with an error, the others stopped."""
    settings = ["train.global_batch=32", "train.micro_batch=1"]
    settings.append(f"cluster.devices_per_node={PER_NODE}")
    config = resolve("tiny_neox", overrides=settings)
    run = RunDir(folder / "runs" / "large")
    run.path.mkdir(parents=True)
    save(config, run)
    save_mesh(make_mesh(config, NODES), run.plan)
    names = tuple(f"n{index}" for index in range(NODES))
    world = NODES * PER_NODE
    for number in range(attempts):
        first, last = number * STEPS + 1, (number + 1) * STEPS
        began = 1.7e9 + 600.0 * number
        attempt = run.attempt("train", number)
        ending = {"ending": "code_error", "action": "stop", "evidence": ["ValueError: bad"]}
        steps = {"first_step": first, "last_step": last, "steps_gained": STEPS, "steps_lost": 0}
        times = {"started_at": began, "ended_at": began + 300.0}
        save_attempt(run, number, nodes=names, **ending, **steps, **times, world_size=world)
        for index, name in enumerate(names):
            ranks = range(index * PER_NODE, (index + 1) * PER_NODE)
            codes, versions = dict.fromkeys(ranks, 70), {"torch": "2.9"}
            NodeRecord(node=name, exit_codes=codes, versions=versions).save(attempt.node(name))
            phase = WorkerPhase(phase="stepping", step=last, since=began + 290.0)
            beat = Heartbeat(node=name, written_at=began, ranks=dict.fromkeys(ranks, phase))
            beat.save(attempt.heartbeat(name))
            fields = {"rank": ranks[0], "node": name, "start_up_s": 5, "first_step_s": 2}
            worker = WorkerRecord.model_validate({**fields, "cache_hits": 0, "cache_misses": 0})
            worker.save(attempt.worker(ranks[0]))
            log = run.worker_log("train", number, ranks[0] or 1)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"rank {ranks[0]} begins\n")
        fields = {"rank": 0, "node": "n0", "error": "ValueError", "message": "bad", "blame": "code"}
        failure = {**fields, "exit_code": 70, "time": began + 299.0, "step": last}
        FailureRecord.model_validate(failure).save(attempt.failure(0))
        save_manifest(run, last, attempt=number, world_size=world, saved_at=began + 298.0)
        write_rows(run.metrics(number), make_rows(first, last, number))
    run.stage_log("train").write_text("train attempt 0 begins\n")
    save_submission(run, submitted_at=1.7e9, nodes=NODES, local=True)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunDir]:
    """Attempts → a run that has so many."""
    return {count: write_run(tmp_path_factory.mktemp("large"), count) for count in (FEW, MANY)}


def opened_by(run: RunDir, line: str) -> tuple[str, Counter[str]]:
    """Return what a command prints, and how often it opens each file and folder of the run."""
    opened, prefix = run.path.parents[1] / "opened", f"{run.path}/"
    opened.unlink(missing_ok=True)

    def note() -> None:
        record = os.open(opened, os.O_CREAT | os.O_WRONLY)

        def hook(event: str, args: tuple[object, ...]) -> None:
            path = args[0] if event in ("open", "os.scandir", "os.listdir") else None
            if isinstance(path, str | os.PathLike):
                os.write(record, os.fsencode(f"{os.fspath(path)}\n"))

        sys.addaudithook(hook)

    code, printed = run_verb(*line.split(), prepare=note, SLURMLLM_RUNS=str(run.path.parent))
    assert code == 0, printed
    paths = opened.read_text().splitlines()
    return printed, Counter(path[len(prefix) :] for path in paths if path.startswith(prefix))


@pytest.mark.parametrize(
    ("line", "for_an_attempt", "for_a_node"),
    [
        ("status large", 1, 3),  # of the last attempt: heartbeat, workers, versions
        ("status", 1, 0),
        # The record for the curve and for the history, metrics, events for saves and for figures
        ("report large --no-files", 5, 1),
        ("logs large", 0, 0),
        ("logs large --rank 7", 0, 0),
        ("logs large --failed", 1, 2 * PER_NODE),  # of the last attempt that failed
    ],
)
def test_files_do_not_grow_with_nodes_times_attempts(
    runs: dict[int, RunDir], line: str, for_an_attempt: int, for_a_node: int
) -> None:
    total = {count: opened_by(run, line)[1].total() for count, run in runs.items()}
    for count, opened in total.items():
        # 3 more for the versions of a run without graphs: two folders and a node's record
        most = for_an_attempt * count + for_a_node * NODES + 40 + 3 * line.startswith("report")
        assert opened <= most
    # Opening every node's record of every attempt would be 80 more.
    assert total[MANY] - total[FEW] <= for_an_attempt * (MANY - FEW) + 20


def test_metrics_and_manifests_are_read_once_for_a_report(runs: dict[int, RunDir]) -> None:
    _, opened = opened_by(runs[MANY], "report large --no-files")
    metrics = [count for path, count in opened.items() if re.match(r"metrics/a", path)]
    assert metrics == [1] * MANY
    manifests = [n for path, n in opened.items() if re.match(r"checkpoints/.*json", path)]
    assert set(manifests) == {1}


def test_logs_of_all_ranks_are_opened_once(runs: dict[int, RunDir]) -> None:
    printed, opened = opened_by(runs[MANY], "logs large --all-ranks")
    logs = [count for path, count in opened.items() if re.search(r"rank_\d+\.log$", path)]
    assert logs == [1] * (MANY * NODES)
    # Listing them all for each of them would be 20 times.
    listed = [count for path, count in opened.items() if re.fullmatch(r"logs/[a-z]+_\d+", path)]
    assert max(listed) <= 2
    assert len(re.findall(r"rank \d+ begins", printed)) == MANY * NODES
