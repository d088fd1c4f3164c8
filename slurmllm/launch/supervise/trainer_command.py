"""A trainer's command line and environment in one attempt, and what its output says of its end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slurmllm.core.config.command import CommandConfig, fill
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import EXIT_OUT_OF_MEMORY, EXIT_REQUEUE
from slurmllm.core.run.error_patterns import cause_line, meaning_of
from slurmllm.core.run.records import AttemptRecord, FailureRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.classify import CRASHES
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, newest_complete

_UNUSABLE = {127: "command not found", 126: "not executable"}  # exit codes of bash
_OF_OUR_WORKERS = {4, 71, EXIT_OUT_OF_MEMORY, EXIT_REQUEUE}  # errors.py
_FOREIGN = 256
_RECENT_S = 120.0  # before the end: an exception that was logged earlier did not end the trainer
# Of Python and of argparse, without a traceback
_REFUSAL = re.compile(r"\bNo module named\b|: can't open file |^\S{1,80}: error: ")
# `[rank3]:`, `[default0]:`, `3: ` of torch, torchrun and srun before a line
_LABEL = re.compile(r"^(?:\[(?:rank|default)?\d+\]:\s?|\d+: )+")
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last):"
# Exceptions of programs that start workers: they tell of a worker's end, not why.
_WRAPPERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "SystemExit")
# torch.distributed.elastic's summary of a worker that was killed
_KILLED = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID|exitcode\s*: -(\d+)\b")


class OutputLine(NamedTuple):
    """A line that a worker printed, and the Unix time at which it came."""

    time: float
    text: str


def command_values(
    run: RunDir, config: RunConfig, attempt: int, nodes: int, record: AttemptRecord | None = None
) -> dict[str, object]:
    """Return what is filled into a command's texts in an attempt; of one to come without record."""
    command = config.recipe.command
    assert command is not None
    step, path = (record.checkpoint_before, record.checkpoint_path) if record else (None, None)
    if record is None and (newest := newest_complete(list_trainer_checkpoints(run, command))):
        step, path = newest.step, str(newest.path)
    return {
        "run": run.path,
        "attempt": attempt,
        "step": step or 0,
        "checkpoint": path or "",
        "nodes": nodes,
        "devices": config.cluster.devices_per_node,
    }


def command_line(command: CommandConfig, values: dict[str, object]) -> str:
    """Return the text for bash, with the arguments for resuming from the second attempt on.

    These need a complete checkpoint if they name it.
    """
    shell_line, resume = command.run, command.resume
    named = resume is not None and ("{checkpoint}" in resume or "{step}" in resume)
    if resume is not None and values["attempt"] and (values["checkpoint"] or not named):
        shell_line = f"{shell_line} {resume}"
    return fill(shell_line, values, quote=True)


def peer_variables(config: RunConfig, record: AttemptRecord, node_rank: int) -> dict[str, str]:
    """Return variables that tell a trainer about its peers, besides those of `control.rendezvous`.

    torchrun reads PET_*; the other names are those that scripts for `accelerate launch` and mpirun
    use. https://github.com/pytorch/pytorch torch/distributed/argparse_util.py, `env`.
    """
    nodes, devices = len(record.nodes), config.cluster.devices_per_node
    # torchrun's sign, by which Lightning prefers $RANK to Slurm's variables.
    elastic = {"TORCHELASTIC_RUN_ID": f"{record.master_addr}:{record.master_port}"}
    sizes = {"NNODES": str(nodes), "NODE_RANK": str(node_rank), "NPROC_PER_NODE": str(devices)}
    return {
        **({} if config.recipe.worker.one_per_node else elastic),
        **sizes,
        **{f"PET_{name}": value for name, value in sizes.items()},
        "PET_MASTER_ADDR": record.master_addr,
        "PET_MASTER_PORT": str(record.master_port),
    }


def slurm_variables(record: AttemptRecord, rank: int, local_rank: int) -> dict[str, str]:
    """Return Slurm's variables as if srun had started each worker; empty without a job.

    Lightning's SLURMEnvironment and `submitit.JobEnvironment` read them.
    """
    if record.job_id is None:
        return {}
    nodes, size = len(record.nodes), record.world_size
    per_node = str(size // nodes)
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(rank // (size // nodes)),
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node if nodes == 1 else f"{per_node}(x{nodes})",
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(size)),
        **dict.fromkeys(
            ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), str(nodes)
        ),
        **dict.fromkeys(
            ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), ",".join(record.nodes)
        ),
    }


def exit_code_of(code: int) -> int:
    """Return a worker's exit code; -N for the 128 + N by which a shell reports signal N.

    Codes with a meaning in our own workers get 256 added: from a foreign command they have none.
    """
    numbers = {number.value for number in signal.Signals}
    if code in _OF_OUR_WORKERS:
        return code + _FOREIGN
    return 128 - code if code > 128 and code - 128 in numbers else code


def failure_of(
    rank: int, node: str, code: int, lines: Sequence[OutputLine], step: int | None, ended_at: float
) -> FailureRecord | None:
    """Return why a worker failed, from its last output; None if only a signal is known."""
    recent = [line for line in lines if line.time >= ended_at - _RECENT_S]

    def record(line: OutputLine, error: str, message: str, **fields: object) -> FailureRecord:
        return FailureRecord.model_validate(
            {
                **{"rank": rank, "node": node, "error": error, "message": message[:400]},
                **{"blame": "code", "exit_code": code, "step": step, "time": line.time, **fields},
            }
        )

    last = next((line for line in reversed(lines) if re.search(r"\w", line.text)), None)
    last = last or OutputLine(ended_at, "it printed nothing")
    if code in _UNUSABLE:
        line_text = re.sub(r"^bash: line \d+: ", "", last.text.strip())
        return record(last, _UNUSABLE[code], line_text, blame="user")
    exceptions = list(_exceptions(recent))
    causes = [item for item in exceptions if meaning_of(f"{item[1]} {item[2]}") != "lost_peer"]
    if chosen := next(iter(causes or exceptions), None):
        line, name, message = chosen
        blame = "infrastructure" if meaning_of(f"{name} {message}") == "node" else "code"
        return record(line, name.rpartition(".")[2], message, blame=blame)
    if code < 0:
        return None
    if (cause := cause_line(line.text for line in recent)) is not None:
        line_text, meaning = cause
        line = next(line for line in recent if line.text == line_text)
        blame = "infrastructure" if meaning == "node" else "code"
        return record(line, f"exit code {code % _FOREIGN}", line_text.strip(), blame=blame)
    for line in recent:
        if match := _KILLED.search(line.text):
            number = int(match[1] or match[2])
            message = f"a process of the trainer was killed by signal {number}"
            blame = "code" if number in CRASHES else "infrastructure"
            return record(line, "killed", message, blame=blame)
    for line in recent:
        if _REFUSAL.search(line.text):
            return record(line, f"exit code {code % _FOREIGN}", line.text.strip())
    return record(last, f"exit code {code % _FOREIGN}", f"its last line: {last.text.strip()}")


def _exceptions(lines: Iterable[OutputLine]) -> Iterable[tuple[OutputLine, str, str]]:
    """Yield the exceptions at the ends of tracebacks, without those of programs that start workers.

    Of exceptions that were raised while others were handled, the last one counts: it ended them.
    """
    inside = False
    pending: tuple[OutputLine, str, str] | None = None
    for line in lines:
        line_text = _LABEL.sub("", line.text)
        if line_text.startswith(_TRACEBACK):
            inside = True
        elif line_text.startswith(("During handling of the above", "The above exception was the")):
            pending = None
        elif inside and line_text.strip() and not line_text[0].isspace():
            inside = False
            match = _EXCEPTION.fullmatch(line_text.rstrip())
            if match is None or match["name"].rpartition(".")[2] in _WRAPPERS:
                continue
            if pending is not None:
                yield pending
            pending = line, match["name"], match["message"] or ""
    if pending is not None:
        yield pending
