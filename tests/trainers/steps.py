"""A trainer without torch: a line a step, JSON checkpoints, and ways to end badly.

Faults are of one rank (--rank) at one step (--at) of the first attempt.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--fault", default="none")
parser.add_argument("--at", type=int, default=8)
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--number", type=int, default=0)  # of this attempt
parser.add_argument("--save-on")  # a signal
args = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
args.out.mkdir(parents=True, exist_ok=True)
asked: list[int] = []
if args.save_on:
    signal.signal(signal.Signals[f"SIG{args.save_on}"], lambda number, _: asked.append(number))
(args.out / f"ready-{rank}").touch()  # a signal ends it no more


def save(step: int, state: float) -> None:
    folder = args.out / f"step-{step}"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "state": state}))
    (folder / "done").write_text("")


def fault(name: str) -> None:
    if name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if name == "half":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (args.out / "child").write_text(str(child.pid))
        (args.out / f"step-{args.at}").mkdir()
        (args.out / f"step-{args.at}" / "state.json").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)


state, step = 1.0, 0
saved = [path for path in args.out.glob("step-*") if (path / "done").exists()]
if args.fault != "none" and args.number == 0:
    saved = []  # those of a rank that started earlier
if saved:
    newest = max(saved, key=lambda path: int(path.name[5:]))
    content = json.loads((newest / "state.json").read_text())
    step, state = content["step"], content["state"]
    print(f"resumed from {newest}", flush=True)
while step < args.steps:
    step += 1
    state = 0.9 * state + 0.001 * (step % 7)
    time.sleep(args.step_s)
    if rank == args.rank and step == args.at and args.number == 0:
        fault(args.fault)
    if rank == 0:
        print(f"step {step} loss {state:.6f}", flush=True)
        if step % args.save_every == 0 or asked:
            save(step, state)
    if asked:
        sys.exit(0)
