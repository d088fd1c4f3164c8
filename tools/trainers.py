"""Run trainers of other projects under slurmllm: kill a worker, resume, compare, drill.

    .venv/bin/python tools/trainers.py [NAME…] [--no-page | --table]

Each has an environment of its own in build/trainers, without slurmllm. Writes the table of
docs/any_trainer.md (rows of trainers that are not run stay) and build/trainers.json. Exit code 1:
a trainer did not do what its file in tools/_trainers/catalog expects.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from _trainers.catalog import BUILD, ROOT, load_trainers
from _trainers.commands import say
from _trainers.stages import Outcome, run_trainer
from _trainers.table import row_of, update_table

from slurmllm.core.run.rundir import write_atomic

PAGE = ROOT / "docs" / "any_trainer.md"
RESULTS = BUILD.with_suffix(".json")


def record(outcome: Outcome, page: Path | None) -> None:
    """Write an outcome next to those of other trainers, which another call may write now."""
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
        results[outcome.name] = {**asdict(outcome), "verdict": outcome.verdict}
        write_atomic(RESULTS, json.dumps(results, indent=1) + "\n")
        if page is not None:
            update_table(page, [outcome])


def recorded() -> list[Outcome]:
    """Return the outcomes that were written, of trainers that there still are."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    outcomes = []
    for trainer in load_trainers():
        if (result := results.get(trainer.name)) is not None:
            del result["verdict"]
            texts = {"title": trainer.title, "reason": trainer.reason}
            outcomes.append(Outcome(**{**result, **texts}))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="trainers; by default all")
    parser.add_argument("--no-page", action="store_true", help="leave docs/any_trainer.md as it is")
    parser.add_argument(
        "--table", action="store_true", help="run nothing; write the rows of build/trainers.json"
    )
    args = parser.parse_args()
    if args.table:
        update_table(PAGE, recorded())
        return 0
    trainers = load_trainers(args.names)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the stage's run
    BUILD.mkdir(parents=True, exist_ok=True)
    unexpected = []
    for number, trainer in enumerate(trainers, 1):
        say(f"{number} of {len(trainers)}: {trainer.title}")
        outcome = run_trainer(trainer)
        record(outcome, None if args.no_page else PAGE)
        print(row_of(outcome), flush=True)
        if outcome.verdict != trainer.expected:
            unexpected.append(trainer.name)
            say(f"{trainer.name}: {outcome.verdict}, expected: {trainer.expected}")
    if unexpected:
        say(f"not as expected: {', '.join(unexpected)}; see {RESULTS} and {BUILD}/logs")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
