"""The login node never loads torch; how a worker that has loaded it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import sys
from slurmllm.cli.main import cli
code = 0
try:
    cli(sys.argv[1:], prog_name="slurmllm")
except SystemExit as ending:
    code = ending.code
heavy = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.stdin.read().split()))
print("loaded", ",".join(heavy) or "nothing", "code", code, file=sys.stderr)
"""


LIGHT = "torch transformers matplotlib tensorboard numpy pandas pyarrow"


@pytest.mark.parametrize(
    ("arguments", "among"),
    [
        ("--help", "torch numpy pyarrow pydantic rich yaml tokenizers submitit asyncio"),
        ("recipes neox_20b --explain", LIGHT),
        ("submit neox_20b --nodes 4 --dry-run --fetch", LIGHT),
        ("submit neox_20b --nodes 4 --dry-run --fetch parallel=auto", LIGHT),
        ("status", LIGHT),
        ("plan llama2_70b --nodes 4096", "torch matplotlib pandas pyarrow"),
    ],
)
def test_the_login_node_loads_little(arguments: str, among: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments.split()],
        input=among,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stderr.strip().splitlines()[-1] == "loaded nothing code 0"


def test_resume_loads_no_numpy() -> None:
    script = "import sys, slurmllm.launch.submit.resume; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_module_but_the_workers_loads_without_torch() -> None:
    script = (
        "import pkgutil, importlib, sys, slurmllm\n"
        "worker = ('slurmllm.train', 'slurmllm.train.model', 'slurmllm.train.backends.native.', "
        "'slurmllm.train.backends.nxd.', 'slurmllm.train.backends.process_group', "
        "'slurmllm.train.checkpoint', 'slurmllm.__main__', "
        "'slurmllm.launch.diagnose.allreduce', 'slurmllm.analysis.calibrate.measuring', "
        "'slurmllm.analysis.calibrate.worker', "
        "'slurmllm.analysis.evaluate.validation_loss')\n"
        "light = ('slurmllm.train.backends.native.environment', "
        "'slurmllm.train.backends.nxd.environment', "
        "'slurmllm.analysis.evaluate.validation_text')\n"
        "for module in pkgutil.walk_packages(slurmllm.__path__, 'slurmllm.'):\n"
        "    if not module.name.startswith(worker) or module.name in light:\n"
        "        importlib.import_module(module.name)\n"
        "assert 'slurmllm.launch.supervise.supervisor' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


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
