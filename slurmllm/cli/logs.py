"""`slurmllm logs RUN [-f]`: what a run printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from slurmllm.rundir import RunDir


@click.command()
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the run ends.")
@click.option("--stage", type=click.Choice(["precompile", "train"]), help="One stage alone.")
@click.option("--rank", type=click.IntRange(min=0), help="One worker's log of the last attempt.")
@click.option("--stacks", is_flag=True, help="Where the workers stood when the run last hung.")
@click.option("-n", "--lines", type=click.IntRange(min=1), help="Only the last LINES lines so far.")
@options.runs_dir
def logs(
    run: str,
    follow: bool,
    stage: str | None,
    rank: int | None,
    stacks: bool,
    lines: int | None,
    runs_dir: str | None,
) -> None:
    """Print the logs of RUN: the precompile stage's, then the train stage's."""
    from slurmllm.errors import RunError
    from slurmllm.rundir import Stage, find_run, runs_root

    found = find_run(run, runs_root(runs_dir))
    if stacks:
        click.echo(_stacks(found, rank), nl=False)
        return
    stages: tuple[Stage, ...] = ("precompile", "train")
    if stage is not None:
        stages = ("train",) if stage == "train" else ("precompile",)
    paths = [found.stage_log(name) for name in stages]
    if rank is not None:
        attempts = found.attempts(stages[-1])
        if rank != 0 and attempts:
            paths = [found.worker_log(stages[-1], attempts[-1].number, rank)]
        if rank != 0 and not (attempts and paths[0].is_file()):
            raise RunError(f"rank {rank}: no worker of {found.name} wrote a log; see {found.logs}")
    if not follow and not any(path.is_file() for path in paths):
        raise RunError(f"{found.name} has no logs yet: its jobs wait; see `slurmllm status {run}`")
    _Printer(found, paths, lines).run(follow)


def _stacks(run: RunDir, rank: int | None) -> str:
    """The stacks of the last attempt that hung: those of workers that stand apart come first."""
    from slurmllm.errors import RunError
    from slurmllm.supervise.stacks import read_places, standing_apart

    hung = [attempt for attempt in run.attempts("train") if attempt.stacks(0).parent.is_dir()]
    if not hung:
        raise RunError(f"{run.name} has no stacks: no attempt of it has hung")
    attempt = hung[-1]
    places = read_places(attempt)
    if rank is not None and rank not in places:
        known = ", ".join(map(str, sorted(places)))
        raise RunError(f"rank {rank}: no stacks in attempt {attempt.number}; there are {known}")
    apart = standing_apart(places)
    ranks = [rank] if rank is not None else [*apart, *sorted(set(places) - set(apart))]
    parts = []
    for shown in ranks:
        mark = ", apart from the others" if shown in apart else ""
        dump = attempt.stacks(shown).read_text(encoding="utf-8", errors="replace")
        parts.append(f"attempt {attempt.number}, rank {shown}{mark}\n{dump.rstrip()}\n")
    return "\n".join(parts)


class _Printer:
    """Prints files one after the other and, when following, what is added to them."""

    def __init__(self, run: RunDir, paths: list[Path], lines: int | None) -> None:
        self.run_dir, self.paths, self.lines = run, paths, lines
        self.position = dict.fromkeys(paths, 0)

    def run(self, follow: bool) -> None:
        import time

        for path in self.paths:
            self._print_new(path, self.lines)
        while follow:
            ended = not self._active()  # asked first: what was written until then is printed below
            for path in self.paths:
                self._print_new(path, None)
            if ended:
                return
            time.sleep(1.0)

    def _print_new(self, path: Path, lines: int | None) -> None:
        if not path.is_file():
            return
        with path.open("rb") as stream:
            stream.seek(self.position[path])
            data = stream.read()
            self.position[path] = stream.tell()
        text = data.decode("utf-8", errors="replace")
        if lines is not None:
            text = "".join(text.splitlines(keepends=True)[-lines:])
        click.echo(text, nl=False)

    def _active(self) -> bool:
        from slurmllm.slurm.client import SlurmCommands
        from slurmllm.supervise.state import is_active

        return is_active(self.run_dir, SlurmCommands())
