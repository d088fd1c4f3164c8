"""The environment of Slurm's commands, without the options that a shell or another job has set.

sbatch, srun and salloc read over a hundred variables as options, which override a script's lines
("INPUT ENVIRONMENT VARIABLES" of their manual pages). An allocation, a module or a batch job sets
many of them, and sbatch hands all on to the job. So a command gets those on a list, and no other.
"""

from __future__ import annotations

import os
import re

from slurmllm.config.directives import USER_DEFAULTS

# What Slurm's commands read or set. PMI_*: srun reads three of them.
_SLURM = re.compile(
    r"(SLURM(D|STEPD|CTLD|DBD)?|SRUN|SBATCH|SALLOC|SBCAST|SCANCEL|SCONTROL|SQUEUE|SINFO|SACCT|PMI)_"
)
# Which cluster, and who asks: auth/jwt, auth/slurm. Not SLURM_CLUSTERS: jobs of another cluster
# than that of SLURM_CONF could be neither shown nor cancelled.
_SITE = frozenset({"SLURM_CONF", "SLURM_JWT", "SLURM_SACK_SOCKET"})
# Inside a job. Memory, GPUs and the like come from slurmctld, which copies what the job has to a
# step that asks for none (step_mgr.c, _copy_job_tres_to_step). All but the id are information.
_OF_THE_JOB = _SITE | {"SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT"}
PREDECESSOR = "SLURMLLM_PREDECESSOR"  # in a successor job: the job whose end it waited for


def slurm_environment(*, in_job: bool = False, salloc: bool = False) -> dict[str, str]:
    """Return this process's environment for a command of Slurm.

    Args:
        in_job: Whether the command is part of the job that this process runs in: srun, sbcast.
        salloc: Whether it is salloc, which reads the user's account, partition, qos, reservation.
    """
    allowed = _OF_THE_JOB if in_job else _SITE
    if salloc:
        allowed |= {f"SALLOC_{name.upper()}" for name in USER_DEFAULTS}
    refused = {n for n in os.environ if _SLURM.match(n) or n == PREDECESSOR} - allowed
    return {n: value for n, value in os.environ.items() if n not in refused} | python_path()


def python_path() -> dict[str, str]:
    """Return PYTHONPATH, if set, with absolute folders: a job starts in its run's directory."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} if paths else {}


def remove_slurm_variables() -> None:
    """Remove them from this process, for a package that calls Slurm's commands itself."""
    for name in os.environ.keys() - slurm_environment().keys():
        del os.environ[name]
