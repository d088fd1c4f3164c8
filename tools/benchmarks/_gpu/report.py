"""The report of `gpu.py`, Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _gpu.task import Measured

NAMES = {"ours": "slurmllm, native backend", "loop": "compiled loop, transformers"}


@dataclass
class Part:
    """One part of the benchmark and how it ended.

    Attributes:
        required: Whether the benchmark fails with it.
        budget_s: Most time that it may take, s.
        failure: Why it failed; None if it did not, or has not run.
        result: What it measured.
    """

    name: str
    required: bool
    budget_s: float
    model: str = ""
    trainer: str = ""
    seconds: float = 0.0
    failure: str | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """One line for the table of parts."""
        if self.failure is not None:
            return f"**failed**: {self.failure}"
        if "missing" in self.result:
            return f"not run: {self.result['missing']}"
        return str(self.result.get("summary", "done"))


def report(facts: Mapping[str, str], parts: Sequence[Part], forecasts: Mapping[str, Any]) -> str:
    """Return the report.

    Args:
        facts: What was measured where, by name.
        parts: In the order they ran.
        forecasts: Of each model, from `task.forecast`; `known` says whether the profile has the
            device's figures.
    """
    lines = [f"# One GPU: {facts['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    trained = [part for part in parts if part.trainer]
    lines += ["", "## Training in bf16", "", *_training(trained, forecasts)]
    lines += ["", "## A save during training", "", *_saves(trained)]
    for described in [part.result["attention"] for part in parts if "attention" in part.result]:
        lines += ["", "## Attention kernels that accept a case", ""]
        lines += _table(
            ["case", "kernels"],
            [[case, ", ".join(kernels) or "none"] for case, kernels in described.items()],
        )
    lines += ["", "## Parts", ""]
    lines += _table(
        ["part", "required", "seconds", "result"],
        [[p.name, "yes" if p.required else "no", f"{p.seconds:.0f}", p.outcome] for p in parts],
    )
    return "\n".join(lines) + "\n"


def _training(parts: Sequence[Part], forecasts: Mapping[str, Any]) -> list[str]:
    rows = []
    ours = {part.model: part.result.get("loss") for part in parts if part.trainer == "ours"}
    for part in parts:
        forecast, found = forecasts[part.model], part.result
        row = [part.model, NAMES[part.trainer]]
        if part.failure is not None or "missing" in found:
            rows.append([*row, part.outcome, *[""] * 8])
            continue
        row += _measured(found, forecast)
        # Equal weights and batches differ by rounding, far below a hundredth.
        if (loss := ours.get(part.model)) is None or abs(found["loss"] - loss) > 0.01:
            row[-1] += ", not comparable: other initial weights"
        planned = [forecast["step_s"], forecast["memory_bytes"]]
        row += (
            [f"{planned[0] * 1e3:.0f}", f"{planned[1] / 1e9:.1f}"]
            if part.trainer == "ours"
            else ["", ""]
        )
        rows.append(row)
    return _table(
        [
            "model",
            "trainer",
            "tokens/s",
            "step, ms",
            "MFU",
            "peak memory, GB",
            "held by the allocator, GB",
            "first step, s",
            "loss",
            "step of `slurmllm plan`, ms",
            "memory of `slurmllm plan`, GB",
        ],
        rows,
    )


def _measured(found: Measured, forecast: Mapping[str, Any]) -> list[str]:
    step_s = found["step_s"]
    mfu = forecast["model_flops"] / step_s / forecast["peak_flops"]
    return [
        f"{forecast['tokens'] / step_s:,.0f}",
        f"{step_s * 1e3:.1f}",
        f"{mfu:.1%}" if forecast["known"] else "unknown peak",
        f"{found['peak_bytes'] / 1e9:.2f}",
        f"{found['reserved_bytes'] / 1e9:.2f}",
        f"{found['first_step_s']:.1f}",
        f"{found['loss']:.3f}",
    ]


def _saves(parts: Sequence[Part]) -> list[str]:
    saves = {part.model: save for part in parts if (save := part.result.get("save"))}
    return _table(
        ["model", "GB", "training stops for, s", "the next step waits, s", "written after, s"],
        [
            [
                model,
                f"{save['bytes'] / 1e9:.2f}",
                *(f"{save[name]:.3f}" for name in ("begin_s", "waited_s", "written_s")),
            ]
            for model, save in saves.items()
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return [line(header), line(["---"] * len(header)), *map(line, rows)]
