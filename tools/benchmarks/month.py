"""A month on 128 nodes at published failure rates, under the supervisor's own policy.

    python tools/benchmarks/month.py [--nodes 128] [--days 30] [--seeds 20] [--model llama2_70b]
        [--rates llama3,llama3-hardware,meta-rsc1,opt] [--start-up S] [--time-limit H] [--json FILE]

Simulated by `_month` here: a minute or two for the whole table. Each row is the mean over the
seeds; the seeds of all rows are the same. `effective` is productive / bought node hours, `of wall`
productive / wall time, which counts the queue and the engineer as well: what reserved nodes cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _month.scenario import DAY_S, RandomFailures, Scenario
from _month.simulation import simulate

from slurmllm.config.resolve import resolve
from slurmllm.errors import SlurmllmError
from slurmllm.plan.lost_time import HOUR_S, Durations, Published, SaveCost, published_failures
from slurmllm.run.records import TIME_PARTS as PARTS
from slurmllm.status.utilization import Utilization, account_node_hours

TARGET = 0.9881  # HLAT with automatic recovery (arXiv 2404.10630)
BY_HAND = 0.7783  # HLAT without


@dataclass(frozen=True)
class Preset:
    """What a model takes on 128 trn1.32xlarge nodes.

    Throughputs are AWS's (aws-neuron-sdk, training_data_decoder.csv) times 128 / its nodes.
    Everything else nobody has published: assumptions, on the careful side.
    """

    step_s: float
    durations: Durations
    asynchronous: SaveCost
    blocking: SaveCost


# Requeue: Slurm lets a requeued job wait until its last credential has expired (cred_expire, 120 s
# by default), and its scheduler looks every few seconds.
_REQUEUE = (125.0,)
PRESETS = {
    # 17.86 seq/s on 32 nodes, 1024 sequences a step. State 14 bytes a parameter, 970 GB: 7.5 GB a
    # node, copied to host memory at 4 GB/s and written at 16 GB/s in all.
    "llama2_70b": Preset(
        14.3,
        Durations(_REQUEUE, (15.0,), (10.0,), (450.0,), (60.0,), (10.0,)),
        SaveCost(2.0, 60.0),
        SaveCost(60.0, 60.0),
    ),
    # 95.14 seq/s on 16 nodes. State 14 bytes a parameter, 94 GB.
    "llama2_7b": Preset(
        1.35,
        Durations(_REQUEUE, (15.0,), (5.0,), (180.0,), (30.0,), (10.0,)),
        SaveCost(0.5, 10.0),
        SaveCost(10.0, 10.0),
    ),
}


def main() -> None:
    """The command line."""
    options = _options()
    try:
        rows = _months(options)
    except SlurmllmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _months(options: argparse.Namespace) -> list[dict[str, Any]]:
    preset = PRESETS[options.model]
    if options.start_up is not None:
        durations = replace(preset.durations, start_up=(options.start_up,))
        preset = replace(preset, durations=durations)
    print(
        f"{options.nodes} nodes, {options.days:g} days, {options.seeds} seeds; {options.model}: "
        f"step {preset.step_s:g} s, {preset.durations.describe()}, time limit "
        f"{options.time_limit:g} h, engineer "
        f"{options.engineer:g} h after a stop, {options.by_hand:g} h by hand"
    )
    print(
        f"\n{'rates':<16}{'recovery':<10}{'interval':<10}{'saves':<10}{'failures':>9}"
        f"{'effective':>11}{'± sd':>7}{'of wall':>9}   lost, % of the node hours"
    )
    rows = []
    for name in options.rates.split(","):
        published = published_failures()[name]
        for variant, scenario in _variants(published, preset, options):
            row = _row(scenario, options.seeds)
            rows.append({"rates": name, **variant, **row})
            _print(rows[-1])
        rows.append({"rates": name, **_hand_made(published, preset, options)})
    for name, delay_h in ((row["rates"], row["by_hand_h"]) for row in rows if "by_hand_h" in row):
        print(f"{name}: by hand it is {BY_HAND:.2%} of wall time with an engineer after {delay_h}")
    _judge(rows)
    return rows


def _variants(
    published: Published, preset: Preset, options: argparse.Namespace
) -> Iterator[tuple[dict[str, str], Scenario]]:
    """Recovery × interval × kind of save, the best first."""
    table = (
        ("auto", "auto", "async"),
        ("auto", "auto", "blocking"),
        ("auto", "200", "async"),
        ("auto", "1000", "async"),
        ("by_hand", "auto", "async"),
        ("by_hand", "1000", "async"),
    )
    for recovery, every, saves in table:
        named = {"recovery": recovery, "interval": every, "saves": saves}
        yield named, _scenario(published, preset, options, recovery, every, saves)


def _scenario(
    published: Published,
    preset: Preset,
    options: argparse.Namespace,
    recovery: str,
    every: str,
    saves: str,
    by_hand_h: float | None = None,
) -> Scenario:
    delay_h = options.engineer if recovery == "auto" else (by_hand_h or options.by_hand)
    config = resolve(options.model, "trn1", [f"checkpoint.every_steps={every}"])
    return Scenario(
        recipe=config.recipe,
        nodes=options.nodes,
        step_s=preset.step_s,
        horizon_s=options.days * DAY_S,
        durations=preset.durations,
        save=preset.asynchronous if saves == "async" else preset.blocking,
        failures=RandomFailures(published.per_node_hour),
        node_mtbf_hours=config.cluster.node_mtbf_hours,
        time_limit_s=options.time_limit * HOUR_S if recovery == "auto" else None,
        recovery="auto" if recovery == "auto" else "by_hand",
        engineer_s=delay_h * HOUR_S,
    )


def _row(scenario: Scenario, seeds: int) -> dict[str, Any]:
    used: list[Utilization] = []
    failures = []
    for seed in range(seeds):
        history = simulate(scenario, seed)
        used.append(account_node_hours(history))
        failures.append(sum(a.ending not in ("done", "advance_signal") for a in history.attempts))
    effective = [one.effective or 0.0 for one in used]
    return {
        "failures": statistics.mean(failures),
        "effective": statistics.mean(effective),
        "effective_sd": statistics.stdev(effective) if seeds > 1 else 0.0,
        "of_wall": statistics.mean(one.goodput or 0.0 for one in used),
        "uptime": statistics.mean(one.uptime or 0.0 for one in used),
        "parts": {part: statistics.mean(one.shares[part] for one in used) for part in PARTS},
    }


def _hand_made(published: Published, preset: Preset, options: argparse.Namespace) -> dict[str, Any]:
    """Return how late an engineer comes if HLAT's value by hand is right, by bisection."""
    low, high = 0.0, 48.0
    for _ in range(8):
        middle = (low + high) / 2
        scenario = _scenario(published, preset, options, "by_hand", "1000", "async", middle)
        if _row(scenario, max(2, options.seeds // 4))["of_wall"] > BY_HAND:
            low = middle
        else:
            high = middle
    return {"by_hand_h": f"{(low + high) / 2:.1f} h"}


def _print(row: dict[str, Any]) -> None:
    lost = sorted(((share, part) for part, share in row["parts"].items()), reverse=True)
    words = ", ".join(
        f"{part.replace('_', ' ')} {share:.2%}"
        for share, part in lost
        if part != "productive" and share >= 0.0001
    )
    print(
        f"{row['rates']:<16}{row['recovery']:<10}{row['interval']:<10}{row['saves']:<10}"
        f"{row['failures']:>9.1f}{row['effective']:>11.2%}{row['effective_sd']:>7.2%}"
        f"{row['of_wall']:>9.2%}   {words}"
    )


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    best = ("auto", "auto", "async")
    for row in rows:
        if tuple(row.get(key) for key in ("recovery", "interval", "saves")) == best:
            word = "reaches" if row["effective"] >= TARGET else "misses"
            print(f"{row['rates']}: {row['effective']:.2%} {word} {TARGET:.2%}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--model", choices=sorted(PRESETS), default="llama2_70b")
    parser.add_argument("--rates", default=",".join(published_failures()))
    parser.add_argument("--time-limit", type=float, default=48.0, help="of the job, hours")
    parser.add_argument("--start-up", type=float, help="seconds, resume included")
    parser.add_argument("--engineer", type=float, default=1.0, help="hours to a resume")
    parser.add_argument("--by-hand", type=float, default=3.0, help="likewise, without recovery")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
