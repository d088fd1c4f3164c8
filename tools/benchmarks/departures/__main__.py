"""How right the verdicts and causes of `slurmllm compare` are.

    python tools/benchmarks/departures --noise 300
    python tools/benchmarks/departures --golden DIR

The first counts false alarms and what is found in simulated noise. The second compares golden
values of Megatron-LM's tests, in a folder that the user fetched.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# One thread a process, before a BLAS starts its own
os.environ.setdefault("OMP_NUM_THREADS", "1")
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from departures import noise, published, trainings


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="departures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=int, metavar="SEEDS", help="simulations a row")
    parser.add_argument("--golden", type=Path, metavar="DIR", help="see published.py")
    parser.add_argument("--trainings", action="store_true", help="see trainings.py")
    options = parser.parse_args()
    if not (options.noise or options.golden or options.trainings):
        parser.error("give --noise, --golden or --trainings")
    if options.noise:
        print(noise.show(noise.measure(options.noise), options.noise))
    if options.trainings:
        print(trainings.show(trainings.measure()))
    if options.golden:
        print(published.show(published.compare_golden(options.golden)))


if __name__ == "__main__":
    main()
