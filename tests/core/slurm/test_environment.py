"""No variable that a manual page of Slurm names as an option reaches one of Slurm's commands."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import call

from slurmllm.core.config.resolve import clusters_dir, resolve
from slurmllm.core.errors import SlurmError
from slurmllm.core.slurm import client, setup
from slurmllm.core.slurm.arrays import slurm_options
from slurmllm.core.slurm.client import SlurmClient, UnansweredError, step_options
from slurmllm.launch.supervise import allocation

SITE = {"SLURM_CONF", "SLURM_JWT", "SLURM_SACK_SOCKET"}
OF_SLURM = "^(SLURMD?|SRUN|SBATCH|SALLOC|SQUEUE|SCONTROL|SCANCEL|SINFO|SACCT|PMI)_"
DEFAULTS = ("ACCOUNT", "PARTITION", "QOS", "RESERVATION")


def input_variables(command: str) -> set[str]:
    """The variables that a command's manual page lists as its input, of whatever name."""
    prefix = Path(shutil.which(command) or "/usr/bin/none").parents[1]
    pages = [*prefix.glob(f"share/man/man1/{command}.1*")]
    if not pages:
        pytest.skip(f"no manual page of {command} here")
    text = pages[0].read_bytes()
    text = gzip.decompress(text) if pages[0].suffix == ".gz" else text
    _, _, section = text.decode().partition('.SH "INPUT ENVIRONMENT VARIABLES"')
    section, _, _ = section.partition('.SH "OUTPUT ENVIRONMENT VARIABLES"')
    headings = "\n".join(re.findall(r"^\.TP.*\n(.*)", section, re.MULTILINE))
    return set(re.findall(r"\\fB([A-Z][A-Z0-9_]+)", headings))


@pytest.mark.parametrize(
    ("command", "options", "allowed"),
    [
        ("sbatch", {}, SITE),
        ("srun", {"in_job": True}, SITE | {"SLURM_JOB_ID"}),
        ("salloc", {"salloc": True}, SITE | {f"SALLOC_{name}" for name in DEFAULTS}),
    ],
)
def test_every_input_variable_of_the_manual_pages(
    command: str, options: dict[str, bool], allowed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = input_variables(command)
    assert len(variables) > 40, variables
    for name in variables:
        monkeypatch.setenv(name, "harmful")
    assert variables & setup.slurm_environment(**options).keys() <= allowed


def test_jobs_get_the_rest_of_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"SLURM_CONF": "/c", "PYTHONPATH": "a::/b", "SLURMLLM_LOG": "debug", "X": "1"}
    plugin = "SLURM_SPANK__SLURM_SPANK_OPTION_auks_auks"  # steps inherit a plugin's option by it
    of_job = {"SLURM_RESTART_COUNT": "3", plugin: "yes"} | dict.fromkeys(setup.JOB_VARIABLES, "x")
    for name, value in {**variables, **of_job, setup.PREDECESSOR: "7"}.items():
        monkeypatch.setenv(name, value)
    environment = setup.slurm_environment()
    # A job starts in its run's directory, so a relative folder would be another one.
    variables["PYTHONPATH"] = f"{tmp_path}/a:/b"
    assert variables.items() <= environment.items()
    assert not {setup.PREDECESSOR, *of_job} & environment.keys()
    assert not of_job.keys() & setup.new_job_environment().keys() - {"SLURM_RESTART_COUNT", plugin}
    assert of_job.items() <= setup.slurm_environment(in_job=True).items()
    for options, step in {
        "": ["--mem=0"],
        "--mem-bind=local": ["--mem=0", "--mem-bind=local"],
        "--mem-per-cpu=1G": ["--mem-per-cpu=1G"],
    }.items():
        monkeypatch.setenv(setup.SRUN_OPTIONS, options)
        assert step_options() == step


def test_a_job_id_alone_is_no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "export_site", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="salloc is not on the PATH"):
        allocation.allocate_nodes(resolve("tiny_neox", "local"), [], "health")


Commands = Callable[[str, str], None]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    def add(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return add


def test_every_command_of_the_client_starts_without_them(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sinfo", "srun"):
        commands(name, f"env | grep -E '{OF_SLURM}' >> {tmp_path}/seen; pwd; echo 7")
        monkeypatch.setenv(f"{name.upper()}_FORMAT", "%x")
        monkeypatch.setenv(f"{name.upper()}_CLUSTERS", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc")
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    real = SlurmClient()
    assert real.submit("#!/bin/bash\n") == "7"
    real.cancel(["7"])
    real.requeue("7")
    real.queue(["7"])
    real.accounting("7")
    real.node_states()
    real.check_srun(["--mpi=none"])
    assert set((tmp_path / "seen").read_text().splitlines()) == {"SLURM_CONF=/etc"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("exec sleep 30", "sbatch gave no answer for 1 s"),
        ("echo 1,0047", r"sbatch printed '1,0047\\n' instead of a job id"),
        ("echo Submitted batch job 42", "instead of a job id"),
        ("true", "sbatch printed '' instead of a job id"),
    ],
)
@pytest.mark.parametrize("case", ["appears", "never", "unknown"])
def test_an_sbatch_without_an_answer(
    case: str,
    answer: str,
    message: str,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(client, "ADOPTION_S", 0.2)
    monkeypatch.setattr(client, "_RETRY_S", 0.05)
    defaults = {"through_sigterm": False, "timeout_s": 1.0}
    monkeypatch.setattr(client._run, "__kwdefaults__", defaults)
    commands("sbatch", f"cat > {tmp_path}/script; {answer}")
    answers = {"appears": "echo 41; echo 42", "never": "echo 41", "unknown": "exit 1"}
    commands("squeue", f'[[ "$*" == *--name=r1-train* ]] || exit 9; {answers[case]}')
    commands("scontrol", f'[ "$3" = 42 ] && cat {tmp_path}/script; exit 0')
    submit = lambda: SlurmClient().submit("#!/bin/bash\n#SBATCH --job-name=r1-train\ntrue\n")  # noqa: E731
    if case == "appears":
        assert submit() == "42"
        return
    with pytest.raises(SlurmError, match=message) as raised:
        submit()
    # The directory of a run that may have a job is kept.
    assert isinstance(raised.value, UnansweredError) == (case == "unknown")
    assert re.search("squeue --me --name=r1-train.*scancel ID", str(raised.value))


def test_limits_of_the_submitting_shell_are_undone() -> None:
    def run(before: str, after: str = "") -> subprocess.CompletedProcess[str]:
        script = "\n".join([before, *setup.limits_script(), after])
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True)

    shell = (f"ulimit -S -{limit}" for limit in ("t 60", "f 100", "u 900", "s 900", "c 9"))
    show = 'for l in t f u s c; do echo "$l $(ulimit -S -$l) $(ulimit -H -$l)"; done'
    done = run("; ".join(shell), show)
    limits = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name in "tfu":
        assert len(set(limits[name].split())) == 1, limits
    assert limits["s"].startswith(("8192 ", "unlimited "))
    assert limits["c"].startswith("0 ")
    done = run("ulimit -t 700")
    assert done.returncode == 2
    assert "CPU time of a process to 700 s (ulimit -t, RLIMIT_CPU)" in done.stderr


def dry_run(*arguments: str) -> dict[str, Any]:
    result = call("submit", "tiny_neox", "--dry-run", "--json", *arguments)
    return dict(json.loads(result.stdout)) if result.exit_code == 0 else {"error": result.output}


def test_defaults_of_the_user_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in DEFAULTS:
        monkeypatch.setenv(f"SBATCH_{name}", f"my{name.lower()}")
    shown = dry_run("--partition=p5")
    others = {f"SBATCH_{name}": name.lower() for name in DEFAULTS if name != "PARTITION"}
    assert shown["defaults"] == others
    for name in others.values():
        assert f"#SBATCH --{name}=my{name}\n" in shown["scripts"]["train"]
    assert "#SBATCH --partition=p5\n" in shown["scripts"]["train"]
    text = call("submit", "tiny_neox", "--dry-run").output
    assert "default of this shell, which nothing else sets: SBATCH_QOS is --qos" in text
    profile = tmp_path / "site.yaml"
    text = (clusters_dir() / "local.yaml").read_text()
    profile.write_text(f"{text}\ndirectives: [--account=ml]\n")
    assert "SBATCH_ACCOUNT" not in dry_run("--cluster", str(profile))["defaults"]
    arrays = slurm_options(None, {"partition": "p5"})
    assert (arrays.account, arrays.partition, arrays.qos) == ("myaccount", "p5", "myqos")
    assert arrays.directives == {"reservation": "myreservation"}
    arrays = slurm_options(str(profile), {"partition": None})
    assert (arrays.account, arrays.partition, arrays.qos) == (None, "mypartition", "myqos")
    assert arrays.directives == {"account": "ml", "reservation": "myreservation"}
