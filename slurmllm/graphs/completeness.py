"""The gate of the train stage: no training on an archive that lacks graphs, unless it is wished."""

from __future__ import annotations

from pathlib import Path

from slurmllm.errors import RunError
from slurmllm.records import GraphManifest
from slurmllm.rundir import RunDir

_SHOWN = 4  # graphs named in one message
_LINE = 200  # characters of a compiler's log in a message


class IncompleteGraphsError(RunError):
    """Graphs of the run are not compiled, and the recipe does not say to go on without."""


def faults(manifest: GraphManifest, run: RunDir) -> tuple[str, ...]:
    """Why an archive is not complete, one line each; nothing where it is."""
    if manifest.complete:
        return ()
    lines = []
    bad = [state for state in manifest.states if state.state != "compiled"]
    for state in bad[:_SHOWN]:
        if state.log is not None:
            lines.append(f"{state.name} failed: {_last_line(run.path / state.log)}; {state.log}")
        else:
            lines.append(f"{state.name} {state.state}: the compiler left no artifact and no log")
    if len(bad) > _SHOWN:
        names = ", ".join(state.name for state in bad[_SHOWN:])
        lines.append(f"{len(bad) - _SHOWN} more: {names}")
    if manifest.absent_nodes:
        lines.append(f"no graphs from {', '.join(manifest.absent_nodes)}")
    return tuple(lines) or ("the workers' steps left no compiled graph in the cache",)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "the log is gone"
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:_LINE] if said else "the compiler wrote nothing"


def require_complete(manifest: GraphManifest, run: RunDir, wanted: str) -> None:
    """The gate of the train stage.

    Args:
        manifest: Of the archive.
        run: The run.
        wanted: The recipe's `train.incomplete_graphs`.

    Raises:
        IncompleteGraphsError: naming the graphs, their logs and the way past them.
    """
    if manifest.complete or wanted == "compile":
        return
    lines = "\n  ".join(faults(manifest, run))
    raise IncompleteGraphsError(
        f"{run.name} cannot start: its graphs are not all compiled\n  {lines}\n"
        f"  `slurmllm resume {run.name}` compiles these again; to train all the same and compile "
        f"them on the way, `slurmllm resume {run.name} --set train.incomplete_graphs=compile`"
    )
