"""`cluster.setup`: lines of shell that make a site's software available, before ours.

The batch script runs them first. So does every task of srun, on its own node: functions such as
`module` and an activated environment may depend on the node. They are passed as an environment
variable, not as a file that somebody could replace.

Also the environment of Slurm's commands, without the options that a shell or another job has set.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from slurmllm.core.config.directives import USER_DEFAULTS
from slurmllm.core.config.profiles import shipped_dir
from slurmllm.core.errors import ConfigError
from slurmllm.core.slurm.container import CONTAINER, CONTAINER_PYTHON

Variables = dict[str, str]  # of an environment
SETUP = "SLURMLLM_SETUP"  # the lines
SETUP_ERROR = "SLURMLLM_SETUP_ERROR"  # the line that failed in the batch script, with its exit code
VERSION = "SLURMLLM_VERSION"  # of slurmllm where the job was submitted
SRUN_OPTIONS = "SLURMLLM_SRUN"  # further options of each srun in a job, quoted for a shell
# What a batch script sets for its job; a new job has its own.
JOB_VARIABLES = (SETUP, SETUP_ERROR, VERSION, CONTAINER, CONTAINER_PYTHON, SRUN_OPTIONS)

# Not under `set -e`: `module` and conda's functions fail inside as a matter of course. File
# descriptor 9: a line may read the standard input. The trap is for a line that exits.
_RUN = f"""\
slurmllm_number=0
slurmllm_failed() {{
  {SETUP_ERROR}="cluster.setup: line $slurmllm_number failed with exit code $1: $slurmllm_line"
  export {SETUP_ERROR}
  echo "${{SLURMD_NODENAME:-$(uname -n)}}: ${SETUP_ERROR}" >&2
}}
trap 'slurmllm_failed $?; exit 2' EXIT
while IFS= read -r -u 9 slurmllm_line; do
  slurmllm_number=$((slurmllm_number + 1))
  eval "$slurmllm_line" || {{ slurmllm_failed $?; break; }}
done 9<<<"${SETUP}"
trap - EXIT
"""
_TASK = f'{_RUN}[ -z "${{{SETUP_ERROR}:-}}" ] || exit 2\nexec "$@"\n'


def limits_script() -> list[str]:
    """Return the part of a batch script that undoes the limits of the submitting shell."""
    return (shipped_dir() / "sbatch" / "limits.sbatch").read_text("utf-8").splitlines()


def setup_script(lines: Sequence[str], *, stop: bool) -> list[str]:
    """Return the part of a batch script that runs the lines; `stop`: a failure ends the script."""
    if not lines:
        return []
    script = [
        "# cluster.setup: here, and by each task of srun on its node.",
        f"unset {SETUP_ERROR}",
        f"export {SETUP}={shlex.quote(chr(10).join(lines))}",
        *_RUN.splitlines(),
    ]
    return [*script, f'[ -z "${{{SETUP_ERROR}:-}}" ] || exit 2'] if stop else script


def in_setup(command: Sequence[str]) -> list[str]:
    """Return the command of a task of srun, after the lines in this process's environment."""
    return ["bash", "-c", _TASK, "slurmllm", *command] if os.environ.get(SETUP) else list(command)


def check_setup_ran(version: str) -> None:
    """Raise ConfigError if the batch script's lines failed, or `version` is not the submitter's."""
    if error := os.environ.get(SETUP_ERROR):
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        raise ConfigError(
            f"{node}: {error}; correct the profile, then resume the run with --cluster"
        )
    submitted_by = os.environ.get(VERSION, version)
    if submitted_by != version:
        raise ConfigError(
            f"cluster.python: {sys.executable} has slurmllm {version}, and the run was submitted "
            f"with {submitted_by}; install that there, or set another interpreter"
        )


def setup_faults(lines: Sequence[str]) -> list[str]:
    """Return why bash cannot read the lines, each with its number."""
    faults = []
    for number, line in enumerate(lines, 1):
        done = subprocess.run(["bash", "-n"], input=line, capture_output=True, text=True)
        if done.returncode:
            message = re.sub(r"^.*?line \d+: ", "", done.stderr.strip().partition("\n")[0])
            faults.append(f"cluster.setup: line {number}: {message}: {line}")
    return faults


# The environment of Slurm's commands, without the options that a shell or another job has set.
#
# sbatch, srun and salloc read over a hundred variables as options, which override a script's lines
# ("INPUT ENVIRONMENT VARIABLES" of their manual pages). An allocation, a module or a batch job sets
# many of them, and sbatch hands all on to the job. So a command gets those on a list, and no other.

# What Slurm's commands read or set. PMI_*: srun reads three of them.
PREDECESSOR = "SLURMLLM_PREDECESSOR"  # in a successor job: the job whose end it waited for
_SLURM = re.compile(
    r"(SLURM(D|STEPD|CTLD|DBD)?|SRUN|SBATCH|SALLOC|SBCAST|SCANCEL|SCONTROL|SQUEUE|SINFO|SACCT|PMI)_"
    rf"|{PREDECESSOR}"
)
# Which cluster, and who asks: auth/jwt, auth/slurm. Not SLURM_CLUSTERS: jobs of another cluster
# than that of SLURM_CONF could be neither shown nor cancelled.
_SITE = r"SLURM_(CONF|JWT|SACK_SOCKET)"
# Inside a job. Memory, GPUs and the like come from slurmctld, which copies what the job has to a
# step that asks for none (step_mgr.c, _copy_job_tres_to_step). SLURM_SPANK_*: the job's options of
# SPANK plugins, which its steps inherit by them only (spank.c, spank_process_env_options).
_OF_THE_JOB = rf"{_SITE}|SLURM_(JOB_ID|JOB_PARTITION|RESTART_COUNT|SPANK_\w+)"
_SALLOC = rf"{_SITE}|SALLOC_({'|'.join(USER_DEFAULTS).upper()})"


def slurm_environment(*, in_job: bool = False, salloc: bool = False) -> Variables:
    """Return this process's environment for a command of Slurm.

    `in_job`: a part of the job that this process runs in (srun, sbcast); `salloc` reads the user's
    account, partition, qos and reservation.
    """
    allowed = re.compile(_OF_THE_JOB if in_job else _SALLOC if salloc else _SITE)
    variables = dict(os.environ) if in_job or salloc else new_job_environment()
    return {
        name: value
        for name, value in variables.items()
        if not _SLURM.match(name) or allowed.fullmatch(name)
    } | python_path()


def new_job_environment() -> Variables:
    """Return this process's environment without what its own job's script has set."""
    return {
        name: value for name, value in os.environ.items() if name not in JOB_VARIABLES
    } | python_path()


def python_path() -> Variables:
    """Return PYTHONPATH, if set, with absolute folders: a job starts in its run's directory."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} if paths else {}
