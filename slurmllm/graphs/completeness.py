"""The completeness check: by default, no training on an archive that lacks graphs."""

from __future__ import annotations

from pathlib import Path

from slurmllm.errors import RunError
from slurmllm.records import GraphManifest
from slurmllm.rundir import RunDir

_MAX_GRAPHS = 4  # named in one message
_MAX_CHARACTERS = 200  # of a compiler's log in a message


class IncompleteGraphsError(RunError):
    """Graphs of the run are not compiled, and the recipe does not allow training without them."""


def faults(manifest: GraphManifest, run: RunDir) -> tuple[str, ...]:
    """Why an archive is incomplete, one line each; empty if it is complete."""
    if manifest.complete:
        return ()
    lines = []
    bad = [state for state in manifest.states if state.state != "compiled"]
    for state in bad[:_MAX_GRAPHS]:
        if state.log is not None:
            lines.append(f"{state.name} failed: {_last_line(run.path / state.log)}; {state.log}")
        else:
            lines.append(f"{state.name} {state.state}: the compiler left no artifact and no log")
    if len(bad) > _MAX_GRAPHS:
        names = ", ".join(state.name for state in bad[_MAX_GRAPHS:])
        lines.append(f"{len(bad) - _MAX_GRAPHS} more: {names}")
    if manifest.missing_nodes:
        lines.append(f"no graphs from {', '.join(manifest.missing_nodes)}")
    return tuple(lines) or ("the workers' steps left no compiled graph in the cache",)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "the log is gone"
    texts = [line.strip() for line in lines if line.strip()]
    return texts[-1][:_MAX_CHARACTERS] if texts else "the compiler wrote nothing"


def require_complete(manifest: GraphManifest, run: RunDir, incomplete_graphs: str) -> None:
    """Refuse to train on an incomplete archive.

    Args:
        manifest: Of the archive.
        run: The run.
        incomplete_graphs: The recipe's `train.incomplete_graphs`.

    Raises:
        IncompleteGraphsError: Names the graphs, their logs and the ways to continue.
    """
    if manifest.complete or incomplete_graphs == "compile":
        return
    lines = "\n  ".join(faults(manifest, run))
    raise IncompleteGraphsError(
        f"{run.name} cannot start: its graphs are not all compiled\n  {lines}\n"
        f"  `slurmllm resume {run.name}` compiles these again; to train all the same and compile "
        f"them in training, `slurmllm resume {run.name} --set train.incomplete_graphs=compile`"
    )
