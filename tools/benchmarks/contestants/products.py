"""No training: matrix products of 2048³, the yardstick; `steps` products in fp32 and in bf16."""

from __future__ import annotations

import time

import torch

from contestants.child import Turn
from contestants.task import Task

SIZE = 2048


def train(task: Task, turn: Turn) -> None:
    pairs = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left, right = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
        pairs[name] = left, right, torch.empty_like(left)
    while True:
        rates = {}
        for name, (left, right, out) in pairs.items():
            torch.mm(left, right, out=out)
            began = time.perf_counter()
            for _ in range(turn.steps):
                torch.mm(left, right, out=out)
            rates[name] = 2 * SIZE**3 * turn.steps / (time.perf_counter() - began) / 1e9
        turn.answer(rates)
        turn.begin()
