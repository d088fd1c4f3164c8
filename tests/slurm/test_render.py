"""Whole generated scripts, against goldens, and values that must not reach a directive.

The goldens in tests/golden/ are written by hand-run of
`SLURMLLM_WRITE_GOLDENS=1 pytest tests/slurm/test_render.py` and read by people in the diff; a
missing golden is a failure.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.errors import ConfigError
from slurmllm.rundir import RunDir, Stage
from slurmllm.slurm import render as render_module
from slurmllm.slurm.render import node_local_cache, render

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
STAGES: tuple[Stage, ...] = ("precompile", "train")


@pytest.fixture(autouse=True)
def _one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module.getpass, "getuser", lambda: "ada")


def text(recipe: str, stage: Stage, nodes: int, *overrides: str, run: str = "/fsx/runs/r1") -> str:
    config = resolve(recipe, overrides=overrides)
    return render(stage, config, RunDir(Path(run)), nodes, "/fsx/venv/bin/python")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("recipe", "nodes", "overrides"),
    [
        ("neox_20b", 4, ("slurm.partition=trn1", "slurm.account=ml", "slurm.exclude=n[7-9]")),
        ("pythia_6.9b", 1, ("slurm.reservation=night", "slurm.qos=high")),
        ("tiny_neox", 4, ()),
    ],
)
def test_scripts_are_the_goldens(
    recipe: str, nodes: int, overrides: tuple[str, ...], stage: Stage
) -> None:
    path = GOLDEN / f"{recipe}.{stage}.sbatch"
    made = text(recipe, stage, nodes, *overrides)
    if os.environ.get("SLURMLLM_WRITE_GOLDENS") == "1":
        path.write_text(made)
    assert made == path.read_text()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recipe", ["neox_20b", "tiny_neox"])
def test_bash_accepts_the_scripts(recipe: str, stage: Stage) -> None:
    done = subprocess.run(["bash", "-n"], input=text(recipe, stage, 4), text=True, check=False)
    assert done.returncode == 0


def test_exports_reach_the_shell_unchanged(tmp_path: Path) -> None:
    nasty = "a b'c\"d$e`f\\g"
    config = resolve("tiny_neox")
    cluster = config.cluster.model_copy(update={"env": {"NASTY": nasty}})
    config = type(config)(config.recipe, cluster, config.origins)
    script = render("train", config, RunDir(tmp_path), 1, "/bin/python").split("# Body")[0]
    done = subprocess.run(
        ["bash", "-c", script + '\nprintf %s "$NASTY"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == nasty


def test_paths_are_quoted_or_refused() -> None:
    made = text("tiny_neox", "train", 1, run="/fsx/my runs/r%j")
    assert '#SBATCH --output="/fsx/my runs/r%%j/logs/train.log"' in made
    for bad in ("/fsx/a\nb/r1", '/fsx/a"b/r1', "/fsx/$HOME/r1"):
        with pytest.raises(ConfigError, match="--output"):
            text("tiny_neox", "train", 1, run=bad)


def test_caches_of_two_runs_of_one_name_stay_apart() -> None:
    config = resolve("tiny_neox")
    one, other = (node_local_cache(config, RunDir(Path(p))) for p in ("/a/runs/x", "/b/runs/x"))
    assert one != other
    assert one.startswith("/var/tmp/slurmllm-ada-x-")
