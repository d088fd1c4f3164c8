"""A trainer's command line and environment in one attempt, and what its output says of its end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from slurmllm.core.config.command import CommandConfig, fill
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import EXIT_OUT_OF_MEMORY, EXIT_REQUEUE
from slurmllm.core.format import Json
from slurmllm.core.run.error_patterns import Meaning, cause_line, meaning_of
from slurmllm.core.run.records import AttemptRecord, FailureRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import Names
from slurmllm.core.slurm.setup import Variables
from slurmllm.launch.supervise.classify import CRASHES, KILLED, how_ended
from slurmllm.launch.supervise.started_processes import ProcessEnd, first_end, signal_code
from slurmllm.train.checkpoint.selection import select_checkpoint

_UNUSABLE = {127: "command not found", 126: "not executable"}  # exit codes of bash
_OF_OUR_WORKERS = {4, 71, EXIT_OUT_OF_MEMORY, EXIT_REQUEUE}  # errors.py
_FOREIGN = 256
# Of Python and bash, and of argparse, without a traceback
_REFUSED = re.compile(r"\S{0,200}python[\d.]*: (?:No module named |can't open file )|bash: ")
_REFUSAL = re.compile(r"\bNo module named\b|: can't open file |^\S{1,80}: error: ")
_NAMED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): \S")
_UNFOUND = re.compile(r"not found|No such file|denied|Is a directory|cannot execute|format error")
# `[rank3]:`, `[default0]:`, `3: ` of torch, torchrun and srun before a line
_LABEL = re.compile(r"^(?:\[(?:rank|default)?\d+\]:\s?|\d+: )+")
_RANK = re.compile(r"\[rank(\d+)\]:")
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above", "The above exception was the")
_MORE = re.compile(r"\s+\S|nccl\w+: |Last error:|NET/")  # of an exception's message
# Exceptions of programs that start workers: they tell of a worker's end, not why.
_WRAPPERS = (
    *("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException"),
    *("SystemExit", "SignalException"),
)
# Exceptions that only tell that a process was ended
_NO_REASON = re.compile(
    r"^KeyboardInterrupt$|exited unexpectedly|terminated abruptly|abruptly died"
)
_ECHOES = ("lost_peer", "connection")


class OutputLine(NamedTuple):
    """A line that a worker printed, and the Unix time at which it came."""

    time: float
    text: str


def command_values(
    run: RunDir, config: RunConfig, attempt: int, nodes: int, record: AttemptRecord | None = None
) -> Json:
    """Return what is filled into a command's texts in an attempt; of one to come without record."""
    command = config.recipe.command
    assert command is not None
    step, path = (record.checkpoint_before, record.checkpoint_path) if record else (None, None)
    if record is None and (newest := select_checkpoint(run, command)[0]):
        step = newest.step
        path = str(newest.path)
    return {
        "run": run.path,
        "attempt": attempt,
        "step": step or 0,
        "checkpoint": path or "",
        "nodes": nodes,
        "devices": config.cluster.devices_per_node,
    }


def command_line(command: CommandConfig, values: Json) -> str:
    """Return the text for bash, with the arguments for resuming from the second attempt on.

    These need a complete checkpoint if they name it.
    """
    shell_line = command.run
    resume = command.resume
    named = resume is not None and ("{checkpoint}" in resume or "{step}" in resume)
    if resume is not None and values["attempt"] and (values["checkpoint"] or not named):
        shell_line = f"{shell_line} {resume}"
    return fill(shell_line, values, quote=True)


def peer_variables(config: RunConfig, record: AttemptRecord, node_rank: int) -> Variables:
    """Return variables that tell a trainer about its peers, besides those of `control.rendezvous`.

    torchrun reads PET_*; the other names are those that scripts for `accelerate launch` and mpirun
    use. https://github.com/pytorch/pytorch torch/distributed/argparse_util.py, `env`.
    """
    nodes = len(record.nodes)
    # torchrun's sign, by which Lightning prefers $RANK to Slurm's variables.
    endpoint = f"{record.master_addr}:{record.master_port}"
    elastic = {"TORCHELASTIC_RUN_ID": endpoint}
    sizes = {
        "NNODES": str(nodes),
        "NODE_RANK": str(node_rank),
        "NPROC_PER_NODE": str(config.cluster.devices_per_node),
    }
    return {
        **({} if config.recipe.worker.one_per_node else elastic),
        **sizes,
        **{f"PET_{name}": value for name, value in sizes.items()},
        "PET_MASTER_ADDR": record.master_addr,
        "PET_MASTER_PORT": str(record.master_port),
        # torchrun's own value; `tune run` without it is alone on each node.
        **({"PET_RDZV_ENDPOINT": endpoint} if nodes > 1 else {}),
    }


def slurm_variables(record: AttemptRecord, rank: int, local_rank: int) -> Variables:
    """Return Slurm's variables as if srun had started each worker; empty without a job.

    Lightning's SLURMEnvironment and `submitit.JobEnvironment` read them.
    """
    if record.job_id is None:
        return {}
    nodes = len(record.nodes)
    size = record.world_size
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
    """Return a worker's exit code; -N for that by which a shell or a launcher reports signal N.

    Codes with a meaning in our own workers get 256 added: from a foreign command they have none.
    """
    return code + _FOREIGN if code in _OF_OUR_WORKERS else signal_code(code)


class _Cause(NamedTuple):
    """Why a worker failed, as a line of its output says."""

    line: OutputLine
    error: str
    message: str
    rank: int | None = None  # of the process that it is about, if known
    code: int | None = None  # by which that process ended, if a launcher says so

    @property
    def meaning(self) -> Meaning | None:
        return meaning_of(f"{self.error} {self.message}")

    @property
    def is_echo(self) -> bool:
        return self.meaning in _ECHOES


def failure_of(
    rank: int,
    node: str,
    code: int,
    lines: Sequence[OutputLine],
    step: int | None,
    ended_at: float,
    nodes: Names = (),
    one_per_node: bool = False,
) -> FailureRecord | None:
    """Return why a worker failed, from its last output; None if only its signal is known.

    Args:
        nodes: Of the run: the one that a launcher names is the failure's, in place of `node`.
        one_per_node: Whether the worker starts the others of its node.
    """
    # An exception that was logged earlier did not end the trainer.
    recent = [line for line in lines if line.time >= ended_at - 120.0]
    last = next((line for line in reversed(lines) if re.search(r"\w", line.text)), None)
    last = last or OutputLine(ended_at, "it printed nothing")
    end = first_end(line.text for line in recent)
    if end is None and one_per_node and code < 0:
        end = ProcessEnd(-1, code)
    cause = _cause(code, end, recent or [last], last)
    if cause is None:
        return None
    if end is not None and end.node is not None:
        short = end.node.partition(".")[0]
        node = next((name for name in nodes if name.partition(".")[0] == short), node)
    by_shell = code in _UNUSABLE or cause.message.startswith("bash: ")
    blame = "user" if by_shell else "code"
    from_outside = cause.error == KILLED and -(cause.code or 0) not in CRASHES
    if cause.meaning == "node" or from_outside:
        blame = "infrastructure"
    process = "the command" if one_per_node else ""
    return FailureRecord(
        rank=rank,
        node=node,
        error=cause.error.rpartition(".")[2],
        message=cause.message[:600],
        blame=blame,
        exit_code=code if cause.code is None else cause.code,
        step=step,
        time=cause.line.time,
        process=process if cause.rank is None else f"rank {cause.rank}",
    )


def _cause(
    code: int, end: ProcessEnd | None, recent: Sequence[OutputLine], last: OutputLine
) -> _Cause | None:
    """Return the cause of a worker's end, `end` being that of the first process; None: a signal."""
    status = f"exit code {code % _FOREIGN}"
    if code in _UNUSABLE:
        return _Cause(
            last,
            _UNUSABLE[code] if _UNFOUND.search(last.text) else status,
            re.sub(r"^bash: line \d+: ", "", last.text.strip()),
        )
    raised = _first_raised(_exceptions(recent), end)
    named = None
    if (cause := cause_line(line.text for line in recent)) is not None:
        line = next(line for line in recent if line.text == cause[0])
        named = _Cause(line, status, line.text.strip())
    # By SIGTERM a launcher ends the others, or was ended itself.
    by_exception = raised is not None and (
        not raised.is_echo or (end is not None and end.code == -signal.SIGTERM)
    )
    if end is not None and end.code < 0 and not by_exception:
        how = how_ended(end.code)
        # A process that lost its peers may abort itself.
        if named is not None and (not named.is_echo or end.code == -signal.SIGABRT):
            return named._replace(error=how, rank=end.rank, code=end.code)
        return _Cause(recent[end.line], KILLED, how, end.rank, end.code)
    no_line = named is None or named.is_echo
    if raised is not None and (no_line or not _NO_REASON.search(raised.message or raised.error)):
        return raised
    if code < 0:
        return None
    return named or _by_last_line(status, recent, last)


def _first_raised(raised: Sequence[_Cause], end: ProcessEnd | None) -> _Cause | None:
    """Return the exception that explains the end: no echo, and of the rank that ended first."""
    causes = [cause for cause in raised if not cause.is_echo] or raised
    if end is not None:
        if len(raised) == 1 and raised[0].rank is None:
            return raised[0]._replace(rank=end.rank)
        causes = [cause for cause in causes if cause.rank in (None, end.rank)] or causes
    return next(iter(causes), None)


def _by_last_line(status: str, recent: Sequence[OutputLine], last: OutputLine) -> _Cause:
    """Return a refusal of Python's or bash's own, else the last line that gives a reason."""
    reasons = [line for line in recent if _REFUSED.match(line.text)]
    reasons += [last] if _REFUSAL.search(last.text) else []
    reasons += [line for line in reversed(recent) if _NAMED.match(line.text)]
    if reasons:
        return _Cause(reasons[0], status, reasons[0].text.strip())
    return _Cause(last, status, f"its last line: {last.text.strip()}")


def _exceptions(lines: Sequence[OutputLine]) -> list[_Cause]:
    """Return the exceptions at the ends of tracebacks, without those of `_WRAPPERS`.

    Of exceptions that were raised while others were handled, the last one counts: it ended them.
    """
    by_rank: dict[int | None, list[tuple[OutputLine, str]]] = {}
    for line in lines:
        label = match[0] if (match := _LABEL.match(line.text)) else ""
        rank = int(match[1]) if (match := _RANK.search(label)) else None
        by_rank.setdefault(rank, []).append((line, line.text[len(label) :]))
    raised = (cause for rank, group in by_rank.items() for cause in _raised(rank, group))
    return sorted(raised, key=lambda cause: lines.index(cause.line))


def _raised(rank: int | None, lines: Iterable[tuple[OutputLine, str]]) -> Iterator[_Cause]:
    """Yield the exceptions of one process, with all lines of their messages."""
    inside = following = False
    pending = None
    handled = ""
    for line, content in lines:
        if content.startswith(_TRACEBACK):
            inside = True
        elif content.startswith(_CHAINED):
            if pending is not None and pending.meaning not in (None, *_ECHOES):
                handled = f"; raised after {pending.error}: {pending.message}"
            pending = None
        elif inside and content.strip() and not content[0].isspace():
            inside = False
            match = _EXCEPTION.fullmatch(content.rstrip())
            if match is None or match["name"].rpartition(".")[2] in _WRAPPERS:
                continue
            if pending is not None:
                yield pending
            pending = _Cause(line, match["name"], (match["message"] or "") + handled, rank)
            following = True
            handled = ""
        elif pending is not None and content.strip():
            following &= rank is not None or _MORE.match(content) is not None
            if following and not inside:
                pending = pending._replace(message=f"{pending.message}; {content.strip()}")
    if pending is not None:
        yield pending
