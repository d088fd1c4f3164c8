"""A trainer that prints a real log again, line by line: its form, without its framework."""

import argparse
import os
import signal
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("log", type=Path)
parser.add_argument("--line-s", type=float, default=0.02)
parser.add_argument("--lines", type=int, default=1_000_000)  # that are printed
parser.add_argument("--then", default="leave")
parser.add_argument("--attempt", type=int, default=0)
args = parser.parse_args()

with args.log.open(errors="replace") as stream:
    for number, line in enumerate(stream, start=1):
        if number > args.lines and args.attempt == 0:
            break
        time.sleep(args.line_s)
        print(line, end="", flush=True)
if args.attempt == 0 and args.then != "leave":
    os.kill(os.getpid(), signal.Signals[f"SIG{args.then}"])
