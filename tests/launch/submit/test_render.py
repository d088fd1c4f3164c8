"""Whole generated scripts, against goldens, and values that must not reach a directive.

`SLURMLLM_WRITE_GOLDENS=1 pytest tests/launch/submit/test_render.py` writes the goldens in
tests/golden/, which people read in the diff; a missing golden is a failure.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slurmllm.core.config.resolve import change, resolve
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.launch.submit.prepare import render_run
from slurmllm.launch.submit.render import precompile_nodes, render
from slurmllm.train.backends.environment import load_environment, worker_environment

PYTHON = "/fsx/venv/bin/python"
GOLDEN = Path(__file__).resolve().parent.parent.parent / "golden"
STAGES: tuple[Stage, ...] = ("precompile", "train")


@pytest.fixture(autouse=True)
def _one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("os.getgid", lambda: 1000)
    monkeypatch.setattr("sys.executable", PYTHON)


def text(recipe: str, stage: Stage, nodes: int, *overrides: str, run: str = "/fsx/runs/r1") -> str:
    config = resolve(recipe, overrides=overrides)
    return render(stage, config, RunDir(Path(run)), nodes, PYTHON)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("recipe", "nodes", "overrides"),
    [
        ("neox_20b", 4, ("slurm.partition=trn1", "slurm.account=ml", "slurm.exclude=n[7-9]")),
        ("pythia_6.9b", 1, ("slurm.reservation=night", "slurm.qos=high")),
        ("llama2_70b", 8, ()),
        ("gpt3_1.3b", 4, ()),
        ("tiny_neox", 4, ()),
    ],
)
def test_scripts_are_the_goldens(
    recipe: str, nodes: int, overrides: tuple[str, ...], stage: Stage
) -> None:
    assert_golden(f"{recipe}.{stage}", text(recipe, stage, nodes, *overrides))


def assert_golden(name: str, made: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("SLURMLLM_WRITE_GOLDENS") == "1":
        path.write_text(made)
    assert made == path.read_text()


SITE = ('cluster.setup=["module load cuda/12.4", "X=\'a b\'"]', "cluster.python=/opt/python")


MOUNTS = "[/fsx/envs, '/opt/x:/x:ro']"
WRITABLE, TORCH = "options=[--writable-tmpfs]", "pytorch/pytorch:2.9.0"


def container(runtime: str, image: str, *more: str) -> tuple[str, ...]:
    fields = (f"runtime={runtime}", f"image={image}", f"mounts={MOUNTS}", *more)
    return tuple(f"cluster.container.{field}" for field in fields)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("setup", SITE),
        ("pyxis", (*container("pyxis", "/fsx/images/pytorch.sqsh"), SITE[0])),
        ("apptainer", (*container("apptainer", "/fsx/a.sif", WRITABLE), SITE[0])),
        *(
            (name, (*container(name, TORCH), "cluster.device=cuda"))
            for name in ("docker", "podman")
        ),
    ],
)
def test_a_site_s_scripts_are_the_goldens(name: str, overrides: tuple[str, ...]) -> None:
    config = resolve("tiny_neox", overrides=overrides)
    rendered = render_run(config, 2, RunDir(Path("/fsx/runs/r1")))
    assert_golden(f"site_{name}.train", rendered.scripts["train"])


def test_singularity_is_called_as_apptainer_is() -> None:
    apptainer, singularity = (
        text("tiny_neox", "train", 2, *container(runtime, "docker://pytorch/pytorch:2.9.0"))
        for runtime in ("apptainer", "singularity")
    )
    assert "singularity exec --bind" in singularity
    assert singularity == apptainer.replace("apptainer", "singularity")


def test_the_recipe_is_stronger_than_the_profile_and_the_profile_than_the_backend() -> None:
    name = "MALLOC_ARENA_MAX"
    config, run = resolve("tiny_neox"), RunDir(Path("/fsx/runs/r1"))
    assert worker_environment(config, run)[name].value == "64"
    cluster = config.cluster.model_copy(update={"env": {name: "1", "B": "profile"}})
    recipe = config.recipe.model_copy(update={"env": {name: "2"}})
    variables = worker_environment(type(config)(config.recipe, cluster, {}), run)
    assert variables[name] == ("1", "cluster local")
    variables = worker_environment(type(config)(recipe, cluster, {}), run)
    assert variables[name] == ("2", "recipe tiny_neox")
    assert variables["B"] == ("profile", "cluster local")
    assert list(variables)[-1] == name
    changed = resolve("tiny_neox", overrides=["cluster.env.A=1", f"env.{name}="])
    assert worker_environment(changed, run)[name] == ("", "--set")


def test_no_value_or_name_writes_a_line_of_the_script(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    evil = f"a b'c\"d$e`f\\g\ntouch {marker}"
    script = text("tiny_neox", "train", 1, f"env.A={evil}", f"cluster.env.B={evil}")
    exports = script.partition("# Body")[0] + 'printf "%s|%s" "$A" "$B"'
    done = subprocess.run(["bash", "-c", exports], capture_output=True, text=True, check=True)
    assert done.stdout == f"{evil}|{evil}"
    assert not marker.exists()
    with pytest.raises(ConfigError, match=r"cluster\.name"):
        resolve("tiny_neox", overrides=[f"cluster.name={json.dumps(evil)}"])


@pytest.mark.parametrize(("stage", "allowed"), [("precompile", False), ("train", True)])
def test_the_body_keeps_rendezvous_ports_free(stage: Stage, allowed: bool, tmp_path: Path) -> None:
    asked, started = tmp_path / "asked", tmp_path / "started"
    sudo, python = f'echo "$*" >> {asked}; exit {int(not allowed)}', f'echo "$*" > {started}'
    for name, line in (("sudo", sudo), ("python", python)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    run, python = RunDir(tmp_path / "r1"), str(tmp_path / "python")
    script = render(stage, resolve("neox_20b"), run, 4, python)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], env={"PATH": path}, check=True, capture_output=True)
    assert "ip_local_reserved_ports=41000-41001,62182" in asked.read_text()
    assert f"supervise {tmp_path}/r1 --stage {stage}" in started.read_text()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("program", ["sudo", "python"])
def test_a_signal_reaches_a_supervisor_that_is_not_ready(
    stage: Stage, program: str, tmp_path: Path
) -> None:
    """It comes before the supervisor starts, or before it has a handler."""
    wait = f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    lines = {"sudo": "exit 0", "python": "sleep 1; trap 'exit 9' USR1; while sleep 0.1; do :; done"}
    for name, line in lines.items():
        line = f"{wait}; {line}" if name == program else line
        (tmp_path / name).write_text(f"#!/bin/dash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = render(stage, resolve("neox_20b"), RunDir(tmp_path / "r1"), 4, f"{tmp_path}/python")
    path = f"{tmp_path}:{os.environ['PATH']}"
    shell = subprocess.Popen(["bash", "-c", script], env={"PATH": path, "SLURM_JOB_ID": "7"})
    while not (tmp_path / "begun").exists():
        time.sleep(0.1)
    shell.send_signal(signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert shell.wait() == 9


def test_paths_are_quoted_or_refused() -> None:
    made = text("tiny_neox", "train", 1, run="/fsx/my runs/r%j")
    assert '#SBATCH --output="/fsx/my runs/r%%j/logs/train.log"' in made
    for bad in ("/fsx/a\nb/r1", '/fsx/a"b/r1', "/fsx/$HOME/r1"):
        with pytest.raises(ConfigError, match="--output"):
            text("tiny_neox", "train", 1, run=bad)


def test_spare_nodes_and_sites_without_requeues() -> None:
    lines = text("tiny_neox", "train", 4, "slurm.spare_nodes=2", "slurm.restart=chain").splitlines()
    assert {"#SBATCH --nodes=6", "#SBATCH --no-requeue"} <= set(lines)
    assert "#SBATCH --requeue" not in lines
    assert "#SBATCH --nodes=1" in text("tiny_neox", "precompile", 4, "slurm.spare_nodes=2")


def test_precompile_takes_as_many_nodes_as_the_model_fits_into() -> None:
    """One replica's workers share no optimizer state with the other nodes."""
    fsdp = [
        *("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=false", "parallel.zero=3"),
        *("train.micro_batch=1", "train.activation_checkpointing=full"),
    ]
    config = resolve("llama2_70b", "p5", fsdp)
    few = precompile_nodes(config, 16)
    assert load_environment("native").precompile_nodes(config, 16) == 1 < few < 16
    # Twelve bytes a parameter of 80 GB: weights and both moments, in fp32.
    assert few * 8 * config.cluster.hardware.usable_bytes > 12 * 69e9
    large = change(config, None, ["cluster.hardware.memory_gib=4000"])
    assert precompile_nodes(large, 16) == 1
    assert precompile_nodes(change(config, None, ["cluster.hardware=null"]), 16) == 1
