"""Known departures, made by small trainings, and what `slurmllm compare` answers to them.

    python tools/benchmarks/departures --data DIR [--kinds NAME,…] [--seeds 5] [--jobs 2] [--json]
    python tools/benchmarks/departures --noise 300 [--json]
    python tools/benchmarks/departures --submitted DIR [--json]
    python tools/benchmarks/departures [--golden DIR] [--pythia DIR] [--json]

The first trains more than 100 kinds of departure, each from the start and from a step in the
middle, with a transformer of two layers in a loop of its own, and compares their logs as foreign
ones: no setting is recorded in them. DIR keeps the trainings; comparing again trains nothing. The
second counts false alarms and what is found in simulated noise. The third makes small runs by
`slurmllm submit --local` and compares them with all their records. The last compares published
curves that the user fetched: golden values of Megatron-LM's tests, and runs that differ in the
seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

# One thread a process, before torch or a BLAS starts its own
os.environ.setdefault("OMP_NUM_THREADS", "1")
if __package__ in (None, ""):
    # Modules of this folder have names, such as `model`, that must not hide others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from departures import noise, published, store, submitted, tables
from departures.kinds import Kind, all_kinds
from departures.scoring import score_all


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(
        prog="departures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder that keeps trainings and logs")
    parser.add_argument("--kinds", default="", help="names or groups, comma-separated; else all")
    parser.add_argument("--half", choices=("rules", "held_out"), help="kinds of one half only")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--noise", type=int, metavar="SEEDS", help="simulations a row")
    parser.add_argument("--submitted", type=Path, metavar="DIR", help="runs directory")
    parser.add_argument("--as-is", action="store_true", help="submit nothing that is missing")
    parser.add_argument("--golden", type=Path, metavar="DIR", help="see published.py")
    parser.add_argument("--pythia", type=Path, metavar="DIR", help="likewise")
    parser.add_argument("--list", action="store_true", help="print the kinds and stop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    given = (options.data, options.noise, options.submitted, options.golden, options.pythia)
    if not (any(given) or options.list):
        parser.error("give --data, --noise, --submitted, --golden, --pythia or --list")
    if options.as_is and not options.submitted:
        parser.error("--as-is goes with --submitted")
    if (options.kinds or options.half) and not (options.data or options.list):
        parser.error("--kinds and --half go with --data or --list")
    found: dict[str, object] = {}
    texts = []
    kinds = _choose(parser, options.kinds, options.half)
    if options.list:
        for kind in kinds:
            starts = ", ".join(map(str, kind.starts))
            print(f"{kind.half:9} {kind.group:10} {kind.name:32} from {starts}")
        return
    if options.data:
        wanted = store.cases(kinds, options.seeds)
        begun = time.monotonic()
        trained = store.train_missing(options.data / "trainings", wanted, options.jobs)
        compared = time.monotonic()
        scores = score_all(options.data, wanted, options.jobs)
        figures = tables.figures(scores)
        found |= {"figures": figures, "scores": [asdict(score) for score in scores]}
        texts.append(tables.show(figures))
        texts.append(
            f"{len(kinds)} kinds; {trained} trainings in {compared - begun:.0f} s, {len(scores)} "
            f"comparisons in {time.monotonic() - compared:.0f} s"
        )
    if options.noise:
        rates = noise.measure(options.noise)
        found["noise"] = rates
        texts.append(noise.show(rates, options.noise))
    if options.submitted:
        answers = submitted.measure(options.submitted, train_missing=not options.as_is)
        found["submitted"] = [asdict(one) for one in answers]
        texts.append(submitted.show(answers))
    if options.golden:
        golden = published.compare_golden(options.golden)
        found["golden"] = [asdict(one) for one in golden]
        texts.append(published.show("A100 and H100", golden))
    if options.pythia:
        seeds = published.compare_seeds(options.pythia)
        found["pythia"] = [asdict(one) for one in seeds]
        texts.append(published.show("seeds", seeds))
    print(json.dumps(found, indent=1) if options.json else "\n\n".join(texts))


def _choose(parser: argparse.ArgumentParser, names: str, half: str | None) -> list[Kind]:
    kinds = all_kinds()
    wanted = [name for name in names.split(",") if name]
    known = {*kinds, *(kind.group for kind in kinds.values())}
    for name in wanted:
        if name not in known:
            parser.error(f"no kind or group {name!r}; --list prints them")
    chosen = [k for k in kinds.values() if not wanted or {k.name, k.group} & set(wanted)]
    return [kind for kind in chosen if half in (None, kind.half)]


if __name__ == "__main__":
    main()
