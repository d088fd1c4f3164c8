"""Trainers of other projects on this machine: what their ranks print."""

from __future__ import annotations

import json

from end_to_end.bench import Bench

# Line of NVIDIA/Megatron-LM megatron/training/training.py (training_log), by print_rank_last
MEGATRON = (
    "for i in 1 2 3; do [ $RANK = 0 ] || "
    "printf ' iteration %8d/ 3 | learning rate: 9.1E-06 | lm loss: 2.%d04220E+00 |\\n' $i $i; "
    "sleep 0.3; done"
)


def test_megatrons_steps_are_those_of_the_last_rank(bench: Bench) -> None:
    file = bench.runs / "megatron.yaml"
    file.write_text(json.dumps({"extends": "trainers/megatron", "command": {"run": MEGATRON}}))
    bench.call("submit", str(file), "--local", "--nodes=2", "--name=last-rank")
    state = bench.status("last-rank")
    assert (state["state"], state["step"], state["loss"]) == ("done", 3, 2.30422)
    assert state["trainer"]["missing"] == ""
