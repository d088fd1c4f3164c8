"""A trainer's environment: its own Python packages, without slurmllm, and its clone if any."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from _trainers.catalog import BUILD, ROOT, Trainer
from _trainers.commands import StageError, last_line, run_limited

_INSTALL_S = 1800.0  # gigabytes, on a slow network
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
# Of the machine that runs this: a trainer must neither see our packages nor ask a hub.
_ALONE = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "PYTHONNOUSERSITE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# PYTHONDONTWRITEBYTECODE: each process would compile the packages anew.
_REMOVED = (
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"),
    *("SLURM_JOB_ID", "SLURMLLM_RUNS", "SLURMLLM_CLUSTER", "SLURMLLM_LOCAL_NODES"),
)


def venv_of(trainer: Trainer) -> Path:
    return BUILD / "environments" / (trainer.environment or trainer.name)


def variables(trainer: Trainer) -> dict[str, str]:
    """Return the environment as a user has it who has activated the trainer's."""
    path = f"{venv_of(trainer) / 'bin'}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in _REMOVED}
    return {**kept, **_ALONE, "PATH": path}


def make_environment(trainer: Trainer, logs: Path) -> None:
    """Make the virtual environment, unless it has these requirements already."""
    venv = venv_of(trainer)
    python = trainer.python or sys.executable
    contents = "\n".join((python, *trainer.requirements))
    mark = venv / f".installed-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"
    if not mark.is_file():
        if shutil.which(python) is None:
            raise StageError(f"{python} is not installed")
        if not (venv / "bin/python").exists():
            _run(trainer, [python, "-m", "venv", str(venv)], logs / "venv.log")
        if trainer.requirements:
            index = os.environ.get("TORCH_INDEX")
            pip = [str(venv / "bin/python"), "-m", "pip", "install", "--no-compile", "--quiet"]
            pip += ["--extra-index-url", index] if index else []
            _run(trainer, [*pip, *trainer.requirements], logs / "pip.log")
        mark.touch()
    if trainer.source is not None and not trainer.clone.is_dir():
        address = os.environ.get(trainer.source.variable) or trainer.source.address
        clone = ["git", "clone", "--quiet", "--depth=1", address, str(trainer.clone)]
        _run(trainer, clone, logs / "clone.log")
    trainer.work.mkdir(parents=True, exist_ok=True)
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text("utf-8") for page in pages)
    (trainer.work / "docs.txt").write_text(text, "utf-8")
    if trainer.prepare:
        prepare = ["bash", "-euc", trainer.fill(trainer.prepare)]
        _run(trainer, prepare, logs / "prepare.log", folder=trainer.work)


def _run(trainer: Trainer, command: list[str], log: Path, folder: Path | None = None) -> None:
    label = f"{trainer.name}: {log.stem}"
    code = run_limited(label, command, log, variables(trainer), _INSTALL_S, folder=folder)
    if code != 0:
        reason = last_line(log.with_suffix(".err"), log)
        raise StageError(f"{log.stem}: exit code {code}: {reason}")


def version_of(trainer: Trainer) -> str:
    """Return name and version of the trainer that is installed; empty if it is not."""
    if trainer.source is not None:
        command = ["git", "-C", str(trainer.clone), "log", "-1", "--format=%h of %cs"]
    else:
        command = [str(venv_of(trainer) / "bin/python"), "-c", _VERSION, trainer.package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{trainer.package} {done.stdout.strip()}".strip()
