"""tools/benchmarks/large_run.py: its run is valid, and how many of its files commands open."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import large_run
import pytest
from _large_run.faults import WEIGHTS
from _large_run.write import Size

from slurmllm.run.rundir import RunDir
from slurmllm.supervise.attempts import failure_records, load_attempts, node_records

NODES, PER_NODE = 8, 32
FEW, MANY = 20, 40  # attempts
# Lists what the command line opens, files and folders; the last line of its error output.
LIST = """
import os, runpy, sys
opened = []
def note(event, args):
    if event in ("open", "os.scandir", "os.listdir") and isinstance(args[0], (str, os.PathLike)):
        opened.append(os.fspath(args[0]))
sys.addaudithook(note)
try:
    runpy.run_module("slurmllm", run_name="__main__", alter_sys=True)
finally:
    print("opened", *opened, sep="\\t", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Attempts → the folder of a run that has so many."""
    found = {}
    for attempts in (FEW, MANY):
        found[attempts] = tmp_path_factory.mktemp("large")
        large_run.make(found[attempts], Size(NODES, attempts, steps=20))
    return found


def run_of(folder: Path) -> RunDir:
    return RunDir(folder / "runs" / large_run.NAME)


def shown(folder: Path, line: str) -> tuple[str, Counter[str]]:
    """What a command prints, and how often it opens each file and folder of the run."""
    done = subprocess.run(
        [sys.executable, "-c", LIST, *line.split()], env=large_run.environment(folder),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *paths = done.stderr.strip().splitlines()[-1].split("\t")
    run = f"{run_of(folder).path}/"
    return done.stdout, Counter(path[len(run) :] for path in paths if path.startswith(run))


def test_the_run_is_a_valid_one(folders: dict[int, Path]) -> None:
    folder = folders[MANY]
    run = run_of(folder)
    attempts = load_attempts(run, "train")
    classes = {str(attempt.ending) for attempt in attempts[:-1]}
    assert classes >= {
        "advance_signal", "node_failure", "hang", "out_of_memory", "compile_failure",
        "bad_configuration", "storage_failure", "code_error", "divergence", "cancelled",
        "superseded",
    }  # fmt: skip
    assert len(WEIGHTS) <= FEW
    of_device = next(a for a in attempts if "HBM" in " ".join(a.evidence))
    ranks = {rank for node in node_records(run, of_device).values() for rank in node.exit_codes}
    assert ranks == set(range(NODES * PER_NODE))
    assert failure_records(run, of_device)
    state = json.loads(shown(folder, "status large --json")[0])
    assert (state["state"], len(state["attempts"])) == ("training", MANY)
    assert (state["workers"]["phase"], state["warnings"]) == ("stepping", [])
    assert len(state["versions"]) == len(state["first_steps"]) == NODES
    report = json.loads(shown(folder, "report large --no-files --json")[0])
    damage = [text for text in report["runs"][0]["warnings"] if re.search("damaged|skipped", text)]
    assert damage == []
    assert report["runs"][0]["utilization"]["attempts"] == MANY
    failed = shown(folder, "logs large --failed")[0]
    assert "first failing worker: rank" in failed


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
    folders: dict[int, Path], line: str, for_an_attempt: int, for_a_node: int
) -> None:
    opened = {attempts: shown(folder, line)[1] for attempts, folder in folders.items()}
    for attempts, paths in opened.items():
        assert paths.total() <= for_an_attempt * attempts + for_a_node * NODES + 40
    # Opening every node's record of every attempt would be 160 more; the last attempt that failed
    # has up to 64 records of failures.
    more = opened[MANY].total() - opened[FEW].total()
    assert more <= for_an_attempt * (MANY - FEW) + 80


def test_metrics_and_manifests_are_read_once_for_a_report(folders: dict[int, Path]) -> None:
    _, opened = shown(folders[MANY], "report large --no-files")
    read = {
        path: n for path, n in opened.items() if re.match(r"metrics/a|checkpoints/.*json", path)
    }
    assert len(read) > MANY / 2
    assert set(read.values()) == {1}


def test_logs_of_all_ranks_are_opened_once(folders: dict[int, Path]) -> None:
    folder = folders[MANY]
    printed, opened = shown(folder, "logs large --all-ranks")
    logs = {path: n for path, n in opened.items() if path.endswith(".log") and "rank_" in path}
    on_disk = {str(path.relative_to(run_of(folder).path)) for path in _rank_logs(folder)}
    assert logs == dict.fromkeys(on_disk, 1)
    # Listing them all for each of them would be 40 times.
    listed = {path: n for path, n in opened.items() if re.fullmatch(r"logs/[a-z]+_\d+", path)}
    assert listed
    assert max(listed.values()) <= 2
    # Every line of every log, once
    lines = sum(len(path.read_text().splitlines()) for path in _rank_logs(folder))
    stage = len(run_of(folder).stage_log("train").read_text().splitlines())
    own = [line for line in printed.splitlines() if line.startswith("[rank ")]
    assert len(own) == lines + stage


def _rank_logs(folder: Path) -> list[Path]:
    return list(run_of(folder).logs.glob("*/rank_*.log"))
