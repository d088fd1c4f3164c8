"""How a worker's process ends once its work is done."""

from __future__ import annotations

import subprocess
import sys

_ENTRY = """
import atexit, os, sys, types
import slurmllm.train.worker
from slurmllm.cli.main import cli
sys.modules["torch"] = types.ModuleType("torch")
atexit.register(os.abort)  # as a thread of C++ that outlives the interpreter does
slurmllm.train.worker.run_worker = lambda *_: print("saved", end="") or 75
cli(["worker", ".", "--stage=train", "--attempt=0"])
"""


def test_what_torch_does_at_the_interpreters_end_changes_no_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", _ENTRY], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "saved", "")
