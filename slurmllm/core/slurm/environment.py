"""The environment of Slurm's commands, without the options that a shell or another job has set.

sbatch, srun and salloc read over a hundred variables as options, which override a script's lines
("INPUT ENVIRONMENT VARIABLES" of their manual pages). An allocation, a module or a batch job sets
many of them, and sbatch hands all on to the job. So a command gets those on a list, and no other.
"""

from __future__ import annotations

import os
import re

from slurmllm.core.config.directives import USER_DEFAULTS

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


def slurm_environment(*, in_job: bool = False, salloc: bool = False) -> dict[str, str]:
    """Return this process's environment for a command of Slurm.

    `in_job`: a part of the job that this process runs in (srun, sbcast); `salloc` reads the user's
    account, partition, qos and reservation.
    """
    allowed = re.compile(_OF_THE_JOB if in_job else _SALLOC if salloc else _SITE)
    return {
        name: value
        for name, value in os.environ.items()
        if not _SLURM.match(name) or allowed.fullmatch(name)
    } | python_path()


def python_path() -> dict[str, str]:
    """Return PYTHONPATH, if set, with absolute folders: a job starts in its run's directory."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} if paths else {}
