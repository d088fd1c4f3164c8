"""The report of `gpu.py`, Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _gpu.task import Measured
from slurmllm.core.display.tables import markdown_table

NAMES = {"ours": "slurmllm, native backend", "loop": "compiled loop, transformers"}


@dataclass
class Part:
    """One part of the benchmark and how it ended."""

    name: str
    required: bool  # whether the benchmark fails with it
    budget_s: float
    model: str = ""
    trainer: str = ""
    seconds: float = 0.0
    failure: str | None = None  # why it failed; None if it did not, or has not run
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        if self.failure is not None:
            return f"**failed**: {self.failure}"
        if "missing" in self.result:
            return f"not run: {self.result['missing']}"
        return str(self.result.get("summary", "done"))


def report(facts: Mapping[str, str], parts: Sequence[Part], forecasts: Mapping[str, Any]) -> str:
    """Return the report.

    A forecast is of `task.forecast`; `known` says whether the profile has the device's figures.
    """
    lines = [f"# One GPU: {facts['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    trained = [part for part in parts if part.trainer]
    lines += ["", "## Training in bf16", "", _training(trained, forecasts)]
    lines += ["## A save during training", "", _saves(trained)]
    for described in [part.result["attention"] for part in parts if "attention" in part.result]:
        kernels = [(case, ", ".join(names) or "none") for case, names in described.items()]
        lines += ["## Attention kernels that accept a case", ""]
        lines.append(markdown_table(("case", "kernels"), kernels))
    rows = [(p.name, "yes" if p.required else "no", f"{p.seconds:.0f}", p.outcome) for p in parts]
    lines += ["## Parts", "", markdown_table(("part", "required", "seconds", "result"), rows)]
    return "\n".join(lines)


def _training(parts: Sequence[Part], forecasts: Mapping[str, Any]) -> str:
    rows = []
    ours = {part.model: part.result.get("loss") for part in parts if part.trainer == "ours"}
    for part in parts:
        forecast, result = forecasts[part.model], part.result
        row = [part.model, NAMES[part.trainer]]
        if part.failure is not None or "missing" in result:
            rows.append([*row, part.outcome, *[""] * 8])
            continue
        row += _measured(result, forecast)
        # Equal weights and batches differ by rounding, far below a hundredth.
        if (loss := ours.get(part.model)) is None or abs(result["loss"] - loss) > 0.01:
            row[-1] += ", not comparable: other initial weights"
        planned = [f"{forecast['step_s'] * 1e3:.0f}", f"{forecast['memory_bytes'] / 1e9:.1f}"]
        rows.append([*row, *(planned if part.trainer == "ours" else ["", ""])])
    speed = ("tokens/s", "step, ms", "MFU", "peak memory, GB", "held by the allocator, GB")
    plan = ("step of `slurmllm plan`, ms", "memory of `slurmllm plan`, GB")
    return markdown_table(("model", "trainer", *speed, "first step, s", "loss", *plan), rows)


def _measured(result: Measured, forecast: Mapping[str, Any]) -> list[str]:
    step_s = result["step_s"]
    mfu = forecast["model_flops"] / step_s / forecast["peak_flops"]
    return [
        f"{forecast['tokens'] / step_s:,.0f}",
        f"{step_s * 1e3:.1f}",
        f"{mfu:.1%}" if forecast["known"] else "unknown peak",
        f"{result['peak_bytes'] / 1e9:.2f}",
        f"{result['reserved_bytes'] / 1e9:.2f}",
        f"{result['first_step_s']:.1f}",
        f"{result['loss']:.3f}",
    ]


def _saves(parts: Sequence[Part]) -> str:
    saves = {part.model: save for part in parts if (save := part.result.get("save"))}
    times = ("begin_s", "waited_s", "written_s")
    rows = [
        (model, f"{save['bytes'] / 1e9:.2f}", *(f"{save[name]:.3f}" for name in times))
        for model, save in saves.items()
    ]
    seconds = ("training stops for, s", "the next step waits, s", "written after, s")
    return markdown_table(("model", "GB", *seconds), rows)
