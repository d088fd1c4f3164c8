"""A trainer without torch: a line a step, JSON checkpoints, and every way to end badly.

Faults are of one rank (--rank) at one step (--at) of one attempt (--attempt).
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
parser.add_argument("--form", default="step {step} loss {loss:.6f}")
parser.add_argument("--fault", default="none")
parser.add_argument("--at", type=int, default=8)
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--attempt", type=int, default=0)
parser.add_argument("--number", type=int, default=0)  # of this attempt
parser.add_argument("--save-on")  # a signal
parser.add_argument("--forget", action="store_true")  # the state is not all in the checkpoint
args = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
args.out.mkdir(parents=True, exist_ok=True)
asked: list[int] = []
if args.save_on:
    signal.signal(signal.Signals[f"SIG{args.save_on}"], lambda number, _: asked.append(number))


def save(step: int, state: float) -> None:
    folder = args.out / f"step-{step}"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "state": state}))
    (folder / "done").write_text("")


def flood() -> None:
    line = b"x" * 199 + b"\n"
    for _ in range(600_000):  # 120 MB
        os.write(1, line)


def leave_a_child() -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (args.out / "child").write_text(str(child.pid))


def fault(name: str) -> None:
    if name == "raise":
        raise ValueError("the answer is not 42")
    if name == "peer":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]")
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if name == "sleep":
        time.sleep(3600)
    if name in ("exit", "leave"):
        sys.exit(3 if name == "exit" else 0)
    if name == "memory":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
        sys.exit(1)
    if name == "half":
        leave_a_child()
        (args.out / f"step-{args.at}").mkdir()
        (args.out / f"step-{args.at}" / "state.json").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "flood":
        flood()


state, step = 1.0, 0
saved = [path for path in args.out.glob("step-*") if (path / "done").exists()]
if args.fault != "none" and args.number == args.attempt == 0:
    saved = []  # those of a rank that started earlier
if saved:
    newest = max(saved, key=lambda path: int(path.name[5:]))
    content = json.loads((newest / "state.json").read_text())
    step, state = content["step"], content["state"]
    print(f"resumed from {newest}", flush=True)
    state += 0.5 if args.forget else 0.0
while step < args.steps:
    step += 1
    state = 0.9 * state + 0.001 * (step % 7)
    time.sleep(args.step_s)
    if rank == args.rank and step == args.at and args.number == args.attempt:
        fault(args.fault)
    if rank == 0:
        print(args.form.format(step=step, loss=state), flush=True)
        if step % args.save_every == 0 or asked:
            save(step, state)
    if asked:
        sys.exit(0)
