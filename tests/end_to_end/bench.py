"""Runs as a user makes them: the real command line, real workers, a corpus made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLURMLLM = (sys.executable, "-m", "slurmllm")
# A model and a schedule small enough that a run is start-up time and little else.
SMALL = (
    "--set=model.num_layers=2", "--set=model.hidden_size=64", "--set=model.num_heads=4",
    "--set=model.ffn_hidden_size=256", "--set=model.seq_len=64", "--set=train.steps=40",
    "--set=checkpoint.every_steps=10", "--set=train.log_every=5",
)  # fmt: skip


class Bench:
    """The command line in a folder of runs."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        runs.mkdir(exist_ok=True)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*SLURMLLM, *arguments, "--runs-dir", str(self.runs)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def call(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == code, f"{process.returncode}: {output}"
        return output

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.call("status", name, "--json")))

    def attempt(self, name: str, number: int) -> dict[str, Any]:
        path = self.runs / name / "attempts" / f"{number:03d}" / "attempt.json"
        return dict(json.loads(path.read_text()))

    def endings(self, name: str) -> list[tuple[str, str]]:
        return [(a["class"], a["action"]) for a in self.status(name)["attempts"]]

    def node(self, name: str, number: int, node: str) -> dict[str, Any]:
        folder = self.runs / name / "attempts" / f"{number:03d}" / "nodes"
        return dict(json.loads((folder / f"{node}.json").read_text()))

    def first_steps(self, name: str) -> dict[str, dict[str, Any]]:
        return dict(self.status(name)["first_steps"])

    def wait_for_step(self, name: str, step: int, attempt: int = 0, timeout_s: float = 150) -> None:
        metrics = self.runs / name / "metrics" / f"attempt_{attempt:03d}.jsonl"
        self.until(
            lambda: metrics.is_file() and f'"step":{step},' in metrics.read_text(),
            f"attempt {attempt} of {name} made no step {step}",
            timeout_s,
        )

    def until(
        self,
        holds: Callable[[], bool],
        words: str,
        timeout_s: float = 150,
        every_s: float = 0.05,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, words
            time.sleep(every_s)

    def compare_exactly(self, one: str, other: str) -> dict[str, Any]:
        found = dict(json.loads(self.call("compare", one, other, "--exact", "--json")))
        assert found["verdict"] == "match"
        assert found["steps_compared"] == found["last_step"] == 40
        assert not found["only_in_a"]
        assert not found["only_in_b"]
        return found


def processes_with(word: str) -> list[int]:
    """Process ids whose command line or environment-free arguments hold a word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
