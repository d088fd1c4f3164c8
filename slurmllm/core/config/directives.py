"""Options of sbatch and srun that a user adds: which are refused, and how they are written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slurmllm.core.errors import UserError

# Options for which a user's SBATCH_ACCOUNT, … count; no other variable is an option.
USER_DEFAULTS = ("account", "partition", "qos", "reservation")
Options = dict[str, str | bool]  # option → value; True for one without a value

# Options of sbatch and srun that contradict what slurmllm generates, and what does it instead.
_REFUSED = {
    "nodes": "--nodes of slurmllm sets the number of nodes",
    "ntasks ntasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu tasks-per-node array "
    "multi-prog relative distribution pack het-group": "slurmllm starts one task a node, which "
    "starts the workers (cluster.devices_per_node)",
    "output error input open-mode label pty": "the logs are files of the run's directory, which "
    "`slurmllm logs` reads",
    "requeue no-requeue no-kill": "slurm.restart (requeue, chain, none) and slurm.spare_nodes "
    "decide it",
    "help usage version test-only parsable wait wrap": "it ends the command before a job exists",
    "job-name": "jobs are named by the run; --name sets its name",
    "signal": "slurm.signal_lead_s sets how long before the time limit the run saves",
    "time": "slurm.time (--time) and slurm.precompile_time set it",
    "exclude": "slurm.exclude (--exclude) sets it, and restarts add failed nodes to it",
    "dependency": "--dependency of `submit` and `resume` sets it for the first job",
    "kill-on-invalid-dep": "a train job ends with its precompile job",
    "export export-file get-user-env": "jobs need the whole environment; --set env.NAME=VALUE sets "
    "a variable",
    "chdir": "jobs start in the run's directory",
    "jobid overlap exact cpu-bind kill-on-bad-exit": "slurmllm sets it for srun",
}
# Short and long names: sbatch(1), srun(1).
_SHORT = dict(
    re.findall(
        r"(\w):(\S+)",
        """
        A:account a:array b:begin B:extra-node-info c:cpus-per-task C:constraint d:dependency
        D:chdir e:error F:nodefile G:gpus h:help H:hold i:input J:job-name k:no-kill
        K:kill-on-bad-exit l:label L:licenses m:distribution M:clusters n:ntasks N:nodes o:output
        O:overcommit p:partition q:qos Q:quiet r:relative s:oversubscribe S:core-spec t:time
        u:usage v:verbose V:version w:nodelist W:wait x:exclude
        """,
    )
)
# What a recipe's file may ask for: resources, and nothing that runs a program or reads a file.
_FROM_FILE = """
    account acctg-freq begin cluster-constraint comment constraint contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot exclusive
    extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
    gres-flags hint hold licenses mail-type mem mem-bind mem-per-cpu mem-per-gpu mincpus
    network nice nodelist overcommit oversubscribe partition power prefer priority profile
    qos reservation segment sockets-per-node spread-job switches thread-spec threads-per-core
    time-min tmp tres-bind tres-per-task use-min-nodes wait-all-nodes wckey
"""
FROM_FILE = _FROM_FILE.split()


def parse_nodes(nodes: str, name: str = "--nodes") -> tuple[int | None, int]:
    """Parse `4`, or `2-4` → (2, 4): the fewest nodes, None without a range, and the most."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})", nodes.strip())
    low, high = map(int, (match[1] or match[2], match[2])) if match else (0, 0)
    if match is None or not 1 <= low <= high:
        raise UserError(
            f"{name} {nodes!r} is neither a number of nodes, 1 or more, nor a range, such as 2-4"
        )
    return low if match[1] else None, high


def user_defaults() -> dict[str, str]:
    """Return the user's SBATCH_ACCOUNT, … by option, for options that nothing else sets."""
    return {
        name: value for name in USER_DEFAULTS if (value := os.environ.get(f"SBATCH_{name.upper()}"))
    }


def refuse_generated(name: str) -> None:
    """Raise ValueError if slurmllm itself sets an option; sbatch takes abbreviations too."""
    for options, reason in _REFUSED.items():
        for refused in options.split():
            if refused.startswith(name):
                whole = "" if name == refused else f" (short for --{refused})"
                raise ValueError(f"--{name}{whole} is not possible: {reason}")


def check_options(values: Any) -> Any:
    """Return options as a recipe has them, without null and false; ValueError for a refused one."""
    if not isinstance(values, Mapping):
        raise ValueError("must be options without their dashes, such as {constraint: a100}")
    options = {}
    for name, value in values.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z-]+", name):
            raise ValueError(f"{name!r} is no long option without its dashes, such as constraint")
        refuse_generated(name)
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        if value is None or value is False:
            continue
        if not isinstance(value, str | int | float) or value == "":
            raise ValueError(f"{name}: must be a text, a number, or true for a bare --{name}")
        if value is not True and not str(value).isprintable():
            raise ValueError(f"{name}: {value!r} has a line break or a control character")
        options[name] = value if value is True else str(value)
    return options


def parse_options(arguments: Sequence[str]) -> Options:
    """Return options as sbatch reads them: `--name=value`, `-C value`; raises ValueError."""
    options: Options = {}
    waiting = ""  # for its value
    for argument in arguments:
        if match := re.fullmatch(r"--([a-z][a-z-]+)(?:=(.*))?", argument, re.DOTALL):
            name = match[1]
            value = match[2]
        elif match := re.fullmatch(r"-([A-Za-z])=?(.*)", argument, re.DOTALL):
            if match[1] not in _SHORT:
                raise ValueError(f"-{match[1]}: no option of sbatch; write its long form")
            name = _SHORT[match[1]]
            value = match[2] or None
        elif waiting:
            options[waiting] = argument
            waiting = ""
            continue
        else:
            raise ValueError(
                f"unexpected argument {argument!r}: put options of sbatch, or a command, after "
                "`--`: `slurmllm submit --nodes N -- torchrun train.py`"
            )
        options[name] = True if value is None else value
        waiting = name if value is None else ""
    return dict(check_options(options))


def as_arguments(options: Options) -> list[str]:
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]


def quoted(value: str) -> str:
    """Return a value as sbatch reads it in a #SBATCH line: plain, or in double quotes."""
    if re.fullmatch(r"[A-Za-z0-9_+.,:=@/%\[\]()|&*-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
