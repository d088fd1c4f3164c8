"""Trainers of other projects on this machine: what their ranks print."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from end_to_end.bench import PATIENCE_S, Bench

# Line of NVIDIA/Megatron-LM megatron/training/training.py (training_log), by print_rank_last
MEGATRON = (
    "for i in 1 2 3; do [ $RANK = 0 ] || "
    "printf ' iteration %8d/ 3 | learning rate: 9.1E-06 | lm loss: 2.%d04220E+00 |\\n' $i $i; "
    "sleep 0.3; done"
)

SCRIPT = """
import signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
device, first, steps = "cpu", 1, 1000
def train(step):
    print("step", step, "loss", 1 / step, flush=True)
    time.sleep(0.1)
save = lambda step: print("saved", flush=True)
"""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "any_trainer.md"


def test_megatrons_steps_are_those_of_the_last_rank(bench: Bench) -> None:
    file = bench.runs / "megatron.yaml"
    file.write_text(json.dumps({"extends": "trainers/megatron", "command": {"run": MEGATRON}}))
    bench.call("submit", str(file), "--local", "--nodes=2", "--name=last-rank")
    state = bench.status("last-rank")
    assert (state["state"], state["step"], state["loss"]) == ("done", 3, 2.30422)
    assert state["trainer"]["missing"] == ""


def test_the_signal_to_save_goes_to_what_torchrun_started(bench: Bench) -> None:
    script = bench.runs / "saves.py"
    example = PAGE.read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    script.write_text(SCRIPT + example)
    run = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 {script}"
    file = bench.runs / "saves.yaml"
    command = {"run": run, "save_signal": "USR1"}
    file.write_text(json.dumps({"extends": "trainers/plain", "command": command}))
    process = bench.start("submit", str(file), "--local", "--name=saves")
    bench.until((bench.runs / "saves/metrics/attempt_000.jsonl").is_file, "no step", 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert "saved" in (bench.runs / "saves/logs/train.log").read_text(), output
    assert bench.attempt("saves", 0)["class"] == "advance_signal"
