"""What a site asks of a run: set-up, options of sbatch and srun, containers, ranges of nodes."""

from pathlib import Path

import pytest
import yaml
from command_line import call, call_json, fails
from fake_slurm import FakeSlurm
from launch.submit.commands import Inputs, submitted, submitted_run

from slurmllm.core.config.load import load


def test_setup_is_checked_shown_and_passed_on(fake: FakeSlurm, inputs: Inputs) -> None:
    faulty = '--set=cluster.setup=["true", "if true"]'
    message = fails(2, "submit", "tiny_neox", *inputs, "--name", "r", faulty)
    assert "cluster.setup: line 2: syntax error: unexpected end of file: if true" in message
    assert not Path("runs/r").exists()
    assert "whitespace" not in fails(2, "submit", "tiny_neox", "--set", r'cluster.setup=["a\nb"]')
    shown = call("submit", "tiny_neox", "--dry-run", '--set=cluster.setup=["module load cuda"]')
    assert shown.stdout.count("export SLURMLLM_SETUP='module load cuda'") == 2


def test_options_after_a_double_dash_are_of_both_jobs(fake: FakeSlurm, inputs: Inputs) -> None:
    options = ("--constraint=a100|h100", "--mail-type=END,FAIL", "--gres=gpu:8", "--")
    fake.gres = "gpu:8"
    submitted(inputs, "--name", "r", *options, "--comment=a b")
    call("cancel", "r")
    for job in fake.jobs.values():
        lines = ("constraint=a100|h100", "mail-type=END,FAIL", "gres=gpu:8", 'comment="a b"')
        assert [line for line in lines if f"#SBATCH --{line}\n" not in job.script] == []
    origin = yaml.safe_load(Path("runs/r/config.yaml").read_text())["origin"]
    assert origin["slurm.directives.train.comment"] == "--comment"
    resumed = call("resume", "r", "--time=90", "--partition", "big", "--", "-C", "h100", "--hold")
    assert resumed.exit_code == 0, resumed.output
    script = fake.jobs[max(fake.jobs, key=int)].script
    for line in ("time=90", "partition=big", "constraint=h100", "hold", 'comment="a b"'):
        assert f"#SBATCH --{line}\n" in script
    message = fails(2, "submit", "tiny_neox", *inputs, "--", "-N", "3")
    assert message.startswith("error: --nodes is not possible: --nodes of slurmllm sets")
    assert "unexpected argument 'more'" in fails(2, "submit", "tiny_neox", "more")


def test_options_of_a_stage_replace_generated_ones() -> None:
    options = '{"partition": "cpu", "exclusive": "user", "time-min": "10"}'
    more = ("--set", f"slurm.directives.precompile={options}", "--partition=gpu")
    srun = ("--set", 'slurm.directives.srun={"mpi": "none", "comment": "a b"}')
    shown = call_json("submit", "tiny_neox", "--dry-run", *more, *srun)
    precompile, train = shown["scripts"]["precompile"], shown["scripts"]["train"]
    assert "#SBATCH --partition=gpu\n" in train
    assert "#SBATCH --exclusive\n" in train
    assert precompile.count("--partition") == 1
    assert "#SBATCH --partition=cpu\n" in precompile
    assert "#SBATCH --exclusive\n" not in precompile
    assert "#SBATCH --exclusive=user\n" in precompile
    assert """export SLURMLLM_SRUN='--mpi=none '"'"'--comment=a b'"'"''""" in train


def test_what_srun_refuses_leaves_nothing(fake: FakeSlurm, inputs: Inputs) -> None:
    fake.refuse_srun = "srun: unrecognized option '--foo'"
    message = fails(3, "submit", "tiny_neox", "--name", "r", *inputs)
    assert "srun: unrecognized option '--foo'" in message
    assert not Path("runs/r").exists()
    assert fake.jobs == {}


def test_a_dependency(fake: FakeSlurm, inputs: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    submitted(inputs, "--name", "before")
    first, other = fake.jobs
    submitted(inputs, "--name", "r", f"--dependency=afterok:{other}")
    precompile = fake.jobs[max(fake.jobs, key=int)]
    assert f"#SBATCH --dependency=afterok:{other}\n" in precompile.script
    call("cancel", "r")
    assert call("resume", "r").exit_code == 0  # without it: the job may be long forgotten
    assert "--dependency" not in fake.jobs[max(fake.jobs, key=int)].script
    fake.finish(first, "FAILED")
    count = len(fake.jobs)
    submit = ("submit", "tiny_neox", "--name", "s", *inputs)
    message = fails(3, *submit, f"--dependency=afterok:{first}")
    assert f"can never be met: job {first} has ended as FAILED; leave it out" in message
    assert (len(fake.jobs), Path("runs/s").exists()) == (count, False)
    submitted(inputs, "--name", "s", "--dependency=afterany:999")
    assert "--dependency=afterany:999: Slurm knows no job 999" in caplog.text


def test_a_container_is_checked_before_a_job_is_submitted(fake: FakeSlurm, inputs: Inputs) -> None:
    options = (
        '--set=cluster.container={"runtime": "%s", "image": "/nosuch.sif", "mounts": ["/no:/x"]}'
    )
    message = fails(2, "submit", "tiny_neox", *inputs, "--name", "r", options % "apptainer")
    assert "cluster.container: /nosuch.sif does not exist; correct image and mounts" in message
    assert "cluster.container: /no does not exist" in message
    assert not Path("runs/r").exists()
    message = fails(2, "submit", "tiny_neox", *inputs, options % "pyxis", "--local")
    assert "pyxis needs srun; leave out --local" in message


def test_a_range_of_nodes(fake: FakeSlurm, inputs: Inputs) -> None:
    few = ("--set", "train.global_batch=8", *inputs)
    run = submitted_run(few, "--name", "r", "--nodes", "2-5")
    script = run.script("train").read_text()
    assert "#SBATCH --nodes=2-4\n" in script
    assert "#SBATCH --ntasks-per-node" not in script
    assert "#SBATCH --nodes=1\n" in run.script("precompile").read_text()
    assert load(run.config).recipe.slurm.min_nodes == 2
    neither = "is neither a number of nodes"
    for arguments, message in (
        (
            ("tiny_neox", "--nodes=3-8", *few),
            "is not possible with this mesh and global batch; 4 is",
        ),
        *((("tiny_neox", f"--nodes={wrong}", *inputs), neither) for wrong in ("4-2", "a-b", "2-")),
        (("tiny_neox", "--nodes=1-2", "--local", *inputs), "a range is for Slurm's jobs"),
        (("pythia_6.9b", "--nodes=2-4", *inputs), "graphs of backend nxd are for one node count"),
    ):
        assert message in fails(2, "submit", *arguments)
    fake.cancel(list(fake.jobs))
    call("resume", "r", "--nodes", "2")
    assert "#SBATCH --nodes=2\n" in run.script("train").read_text()
