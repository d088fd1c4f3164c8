"""Trainers of other projects on this machine: what their ranks print."""

from __future__ import annotations

import json
import signal
import sys

from end_to_end.bench import PATIENCE_S, Bench

# Line of NVIDIA/Megatron-LM megatron/training/training.py (training_log), by print_rank_last
MEGATRON = (
    "for i in 1 2 3; do [ $RANK = 0 ] || "
    "printf ' iteration %8d/ 3 | learning rate: 9.1E-06 | lm loss: 2.%d04220E+00 |\\n' $i $i; "
    "sleep 0.3; done"
)

SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
for step in range(1, 1000):
    print("step", step, "loss", 1 / step, flush=True)
    time.sleep(0.1)
"""


def test_megatrons_steps_are_those_of_the_last_rank(bench: Bench) -> None:
    file = bench.runs / "megatron.yaml"
    file.write_text(json.dumps({"extends": "trainers/megatron", "command": {"run": MEGATRON}}))
    bench.call("submit", str(file), "--local", "--nodes=2", "--name=last-rank")
    state = bench.status("last-rank")
    assert (state["state"], state["step"], state["loss"]) == ("done", 3, 2.30422)
    assert state["trainer"]["missing"] == ""


def test_the_signal_to_save_goes_to_what_torchrun_started(bench: Bench) -> None:
    """torchrun itself would end at SIGUSR1."""
    script = bench.runs / "saves.py"
    script.write_text(SAVES)
    run = f"{sys.executable} -m torch.distributed.run --nproc-per-node 1 {script}"
    progress = r"step (?P<step>\d+) loss (?P<loss>\S+)"
    command = {"run": run, "save_signal": "USR1", "progress": progress}
    file = bench.runs / "saves.yaml"
    file.write_text(json.dumps({"extends": "trainers/plain", "command": command}))
    process = bench.start("submit", str(file), "--local", "--name=saves")
    bench.until((bench.runs / "saves/metrics/attempt_000.jsonl").is_file, "no step", 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert "saved" in (bench.runs / "saves/logs/train.log").read_text(), output
    assert bench.attempt("saves", 0)["class"] == "advance_signal"
