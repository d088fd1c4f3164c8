"""Every verb with a run of another project's trainer: what it shows, changes and refuses."""

import json
import os
import shutil
from pathlib import Path

import pytest
from command_line import call, call_json, fails
from fake_slurm import FakeSlurm
from made_records import save_attempt
from training_rows import write_rows

from slurmllm.core.config.command import STEPS_NOT_PASSED
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.rundir import RunDir

COMMAND = ("--", "python", "train.py", "--out", "{run}/outputs")
SETTINGS = ("command.steps=40", "command.checkpoints={run}/outputs/step-{step}")
OF_TRAININGS = "needs a model section, and train has a command in its place"


@pytest.fixture
def run(fake: FakeSlurm) -> RunDir:
    """A cancelled run of 40 steps, with two checkpoints, of which one is half-written."""
    answer = call("submit", "--nodes", "2", "--name", "r", *SETTINGS, *COMMAND)
    assert answer.exit_code == 0, answer.output
    assert call("cancel", "r").exit_code == 0
    run = RunDir(Path("runs/r").absolute())
    save_attempt(run, nodes=("n1", "n2"), ended_at=40.0, ending="cancelled", action="stop")
    rows = [{"step": n, "attempt": 0, "loss": 3.0 - n / 100, "time": 1.0 * n} for n in range(1, 30)]
    write_rows(run.metrics(0), rows)
    for step, changed_at, size in ((10, 5.0, 1000), (20, 39.0, 500)):
        folder = run.path / f"outputs/step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(size))
        for path in (folder / "weights", folder):
            os.utime(path, (changed_at, changed_at))
    (run.path / "outputs/samples.txt").write_text("kept")
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "r", "--prediction"), OF_TRAININGS),
        (("evaluate", "r", "--task", "validation"), "its checkpoints are its trainer's"),
        (("checkpoint", "export", "r@10", "--out", "x"), "its checkpoints are its trainer's"),
        (("submit", "tiny_neox", "train.init_from=r"), "its checkpoints are its trainer's"),
        (("resume", "r", "--from-scratch"), "remove them, or start another run"),
        (("resume", "r", "optim.lr=1"), "has no optim (--set optim.lr=1); leave these out"),
        (("spikes", "r", "--window", "40"), "29 steps logged are too few"),
    ],
)
def test_what_is_of_trainings_is_refused(
    run: RunDir, arguments: tuple[str, ...], message: str
) -> None:
    assert message in fails(2, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--smoke",), "shorten it by its own arguments"),
        (("--fetch",), "--fetch needs a model section"),
        (("--data", "builtin"), "has no data (--data builtin); leave"),
        (("backend=nxd", "checkpoint.replica=/x"), "no backend (--set backend=nxd), checkpoint"),
        (("command.stps=3",), "did you mean 'steps'?"),
        (("command=null",), "model: missing"),
    ],
)
def test_what_a_recipe_with_a_command_does_not_take(
    fake: FakeSlurm, options: tuple[str, ...], message: str
) -> None:
    Path("mine.yaml").write_text("name: mine\ncommand: {run: python train.py}\n")
    refused = fails(2, "submit", "mine.yaml", *options)
    assert message in refused
    assert len(refused) < 400
    assert not Path("runs").exists()
    for verb in (("plan", "mine.yaml", "--nodes=2"), ("data", "inspect", "--recipe", "mine.yaml")):
        assert "needs a model section, and mine has a command" in fails(2, *verb)


def test_a_dry_run_shows_the_command(fake: FakeSlurm) -> None:
    command = ("--", "python", "a b.py", "{run}/out", "{nodes}x{devices}", "{other}")
    shown = call("submit", "--nodes=3", "--name=r", "--dry-run", *command).stdout
    line = f"python 'a b.py' {Path.cwd()}/runs/r/out 3x1 '{{other}}'"
    assert shown.startswith(f"# ── the command, 1 on each node\n{line}\n")
    options = ("--nodes=3", "--name=r", "--dry-run", "--json")
    dry = json.loads(call("submit", *options, *SETTINGS, *COMMAND).stdout)
    printed = call("submit", "--nodes=3", "--name=s", *SETTINGS, *COMMAND).stdout
    assert f"command    python train.py --out {Path.cwd()}/runs/s/outputs\n" in printed
    assert "tensor" not in printed
    assert dry["command"] == f"python train.py --out {Path.cwd()}/runs/r/outputs"
    assert dry["mesh"] == {"nodes": 3, "devices_per_node": 1, "world_size": 3}
    trn1 = call("submit", *options, "--cluster=trn1", "--", "torchrun", "train.py").stdout
    assert json.loads(trn1)["mesh"]["world_size"] == 3 * 32


def test_its_folder_is_mounted_in_a_container(fake: FakeSlurm, tmp_path: Path) -> None:
    container = "cluster.container={runtime: pyxis, image: foo}"
    options = (f"--set={container}", f"--set=command.folder={tmp_path / 'trainer'}")
    (tmp_path / "trainer").mkdir()
    shown = call("submit", "--nodes=2", "--dry-run", *options, "--", "python", "x.py")
    assert shown.exit_code == 0, shown.output
    assert f"{tmp_path / 'trainer'}:{tmp_path / 'trainer'}" in shown.stdout


def test_resume_changes_the_command_and_the_nodes(run: RunDir, fake: FakeSlurm) -> None:
    new = "command.run=python train.py --more {checkpoint}"
    dry = call_json("resume", "r", "--nodes=3", "command.steps=60", new, "--dry-run")
    assert dry["command"] == f"python train.py --more {run.path}/outputs/step-10"
    assert (dry["from_step"], dry["mesh"]["nodes"]) == (10, 3)
    assert dry["changes"]["command.steps"] == [40, 60]
    save_attempt(run, nodes=("n1", "n2"), ended_at=40.0, ending="done", action="finish")
    assert "its command ended with exit code 0; change it with --set" in fails(2, "resume", "r")
    assert call("resume", "r", "command.steps=60", "--dry-run").exit_code == 0
    write_rows(run.metrics(0), [{"step": 60, "attempt": 0, "loss": 2.0, "time": 60.0}])
    refusal = "command.steps 60 is not above step 60, which r has reached"
    assert refusal in fails(2, "resume", "r", "command.steps=60")
    assert call("resume", "r", "command.steps=70").exit_code == 0


def test_what_recipes_prints_removes_no_checkpoints(fake: FakeSlurm) -> None:
    Path("mine.yaml").write_text("name: mine\ncommand: {run: python train.py}\n")
    for text in ("", "checkpoint: {keep: 2}\n"):
        Path("again.yaml").write_text(text + call("recipes", "mine.yaml").stdout)
        assert resolve("again.yaml").is_set("checkpoint.keep") == bool(text)
        assert call("submit", "again.yaml", "--name", f"r{len(text)}").exit_code == 0
    assert load(Path("runs/r22/config.yaml").absolute()).recipe.checkpoint.keep == 2


def test_what_is_known_of_it(run: RunDir) -> None:
    status = call_json("status", "r")
    assert status["mesh"] == {"nodes": 2, "devices_per_node": 1, "world_size": 2}
    assert (status["step"], status["steps"], status["last_checkpoint"]["step"]) == (29, 40, 10)
    listed = call_json("checkpoint", "list", "r")["checkpoints"]
    folders = [str(run.path / f"outputs/step-{step}") for step in (10, 20)]
    shown = [(c["step"], c["path"], c["complete"]) for c in listed]
    assert shown == [(10, folders[0], True), (20, folders[1], False)]
    assert "half-written" in call("checkpoint", "list", "r").stdout
    assert "complete, not verified: no file has a known" in call("checkpoint", "verify", "r").stdout
    broken = run.path / "outputs/step-10/model.safetensors"
    broken.write_bytes(b"")
    for path in (broken, broken.parent):
        os.utime(path, (5.0, 5.0))
    verified = call("checkpoint", "verify", "r", "--json")
    assert verified.exit_code == 4
    assert json.loads(verified.stdout)["checkpoints"][0]["verified"] is False
    assert "`slurmllm checkpoint verify r`" in fails(2, "checkpoint", "verify", "r@10")
    assert call("compare", "r", "r", "--no-plot").stdout.count("bit-identical at all 29 steps") == 1


def test_compare_names_the_arguments_that_differ(run: RunDir) -> None:
    other = RunDir(run.path.with_name("s"))
    shutil.copytree(run.path, other.path)
    text = run.config.read_text()
    other.config.write_text(text.replace("python train.py", "python train.py --lr 1e-3"))
    run.config.write_text(text.replace("python train.py", "python train.py --lr 1e-4"))
    (difference,) = call_json("compare", "r", "s", "--no-plot")["settings"]
    assert difference == "the commands differ: --lr 1e-4 and --lr 1e-3"
    assert f"warning: {difference}" in call("compare", "r", "s", "--no-plot").output


def test_a_report_has_no_figures_of_a_model(run: RunDir) -> None:
    (facts,) = call_json("report", "r")["runs"]
    assert (facts["steps"], facts["planned_steps"], facts["loss"]) == (29, 40, 2.71)
    unknown = ("parameters", "mesh", "mfu", "tokens_per_s", "seq_per_s", "tokens")
    assert {facts[name] for name in unknown} == {None}
    states = {c["step"]: c["state"] for c in facts["checkpoints"]}
    assert states == {10: "kept", 20: "damaged"}
    page = (run.path / "reports/report.html").read_text()
    assert "<td>command</td><td>python train.py" in page
    assert "tensor" not in page
    fields = {"ended_at": 40.0, "ending": "done", "action": "finish", "done_early": (29, 40)}
    save_attempt(run, **fields)
    assert "r: done early: 29 of 40 steps" in call("report", "r").stdout
    assert f"done early, 29 of 40  ({STEPS_NOT_PASSED})" in call("status", "r").stdout


@pytest.mark.parametrize("is_damaged", [False, True])
def test_delete_keeps_what_the_trainer_has_written(run: RunDir, is_damaged: bool) -> None:
    outputs = {path: path.read_bytes() for path in run.path.glob("outputs/*/*")}
    if is_damaged:  # it is not known whose the files are
        run.config.write_text("[" * 9)
        assert "the trainer's outputs" in call("delete", "r").output
    (deleted,) = call_json("delete", "r", "--yes")["deleted"]
    assert deleted["checkpoints"] == (0 if is_damaged else 2)
    assert not deleted["checkpoints_deleted"]
    assert [path.name for path in run.path.iterdir()] == ["outputs"]
    assert {path: path.read_bytes() for path in run.path.glob("outputs/*/*")} == outputs


def test_delete_with_checkpoints_leaves_what_is_outside(run: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "scratch"
    (run.path / "outputs").rename(outside)
    (run.path / "outputs").symlink_to(outside)
    assert call("delete", "r", "--checkpoints", "--yes").exit_code == 0
    assert not run.path.exists()
    assert (outside / "step-10/weights").read_bytes() == bytes(1000)


def test_a_sweep_of_commands(fake: FakeSlurm) -> None:
    Path("cases.yaml").write_text(
        "slow: {command.run: 'python train.py --lr 1e-4 --out {run}/out'}\n"
        "fast: {command.run: 'python train.py --lr 1e-3 --out {run}/out'}\n"
    )
    Path("mine.yaml").write_text("name: mine\ncommand: {run: python train.py}\n")
    for options in (("--sweep", "command.steps=5,7"), ("--sweep-file", "cases.yaml")):
        answer = call("submit", "mine.yaml", "--name", f"s{len(options[0])}", "--yes", *options)
        assert answer.exit_code == 0, answer.output
    states = call_json("status", "s7")
    assert [run["steps"] for run in states["runs"]] == [5, 7]
    runs = call_json("status", "s12")["runs"]
    assert [Path(run["run_dir"]).name for run in runs] == ["s12-slow", "s12-fast"]
