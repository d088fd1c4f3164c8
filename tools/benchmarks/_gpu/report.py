"""The report of `gpu.py`, Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _gpu.task import AIMS, Measured
from slurmllm.core.display.tables import markdown_table

NAMES = {
    "ours": "slurmllm, native backend",
    "torch_adamw": "native backend, torch's AdamW",
    "loop": "compiled loop, transformers",
    "torchtitan": "torchtitan",
}


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
            return " ".join(f"not run: {self.result['missing']}".split())
        return str(self.result.get("summary", "done"))


def report(facts: Mapping[str, str], parts: Sequence[Part], forecasts: Mapping[str, Any]) -> str:
    """Return the report.

    A forecast is of `task.forecast`; `known` says whether the profile has the device's figures.
    """
    lines = [f"# One GPU: {facts['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    trained = [part for part in parts if part.trainer and "step_s" in part.result]
    lines += ["", "## Training", "", _training(trained, forecasts), _AIMS_NOTE, ""]
    lines += ["## Logits at a time in the head", "", _head(trained)]
    lines += ["## Where a step's time goes, ms", "", _profile(trained)]
    rows = [(p.name, "yes" if p.required else "no", f"{p.seconds:.0f}", p.outcome) for p in parts]
    lines += ["## Parts", "", markdown_table(("part", "required", "seconds", "result"), rows)]
    return "\n".join(lines)


_AIMS_NOTE = (
    "MFU is of the bf16 peak, with FP8 too. The compiled loops' first steps ran beside the tests."
)


def _training(parts: Sequence[Part], forecasts: Mapping[str, Any]) -> str:
    rows = []
    ours = {part.model: part.result["loss"] for part in parts if part.trainer == "ours"}
    loops = {part.model: part.result["step_s"] for part in parts if part.trainer == "loop"}
    for part in parts:
        forecast, result = forecasts[part.model], part.result
        row = [part.model, NAMES[part.trainer], *_measured(result, forecast)]
        # Equal weights and batches differ by rounding, far below a hundredth.
        if (loss := ours.get(part.model)) is None or abs(result["loss"] - loss) > 0.01:
            row[-1] += ", not comparable: other initial weights"
        planned = [f"{forecast['step_s'] * 1e3:.0f}", f"{forecast['memory_bytes'] / 1e9:.1f}"]
        row += planned if part.trainer == "ours" else ["", ""]
        loop_s = loops.get(part.model.partition(",")[0])  # variants are named after their model
        ratio = f"{result['step_s'] / loop_s:.3f}" if loop_s else ""
        rows.append([*row, aim_of(part) if part.trainer == "ours" else "", ratio])
    speed = ("tokens/s", "step, ms", "MFU", "peak memory, GB", "held by the allocator, GB")
    plan = ("step of `slurmllm plan`, ms", "memory of `slurmllm plan`, GB")
    more = ("first step, s", "loss", *plan, "aim", "step / loop's")
    return markdown_table(("model", "trainer", *speed, *more), rows)


def aim_of(part: Part) -> str:
    if (aim := AIMS.get(part.model)) is None:
        return ""
    excess = part.result["step_s"] * 1e3 - aim
    return f"≤ {aim}: " + ("reached" if excess <= 0 else f"missed by {excess:.1f} ms")


def _head(parts: Sequence[Part]) -> str:
    rows = [
        (part.model, size, f"{one['step_s'] * 1e3:.1f}", f"{one['peak_bytes'] / 1e9:.2f}")
        for part in parts
        for size, one in part.result.get("head", {}).items()
    ]
    return markdown_table(("model", "logits at a time", "step, ms", "peak memory, GB"), rows)


def _profile(parts: Sequence[Part]) -> str:
    """Return a column for each model, and its slowest kernels."""
    profiles = {part.model: part.result["profile"] for part in parts if "profile" in part.result}
    names = dict.fromkeys(name for one in profiles.values() for name in one["classes"])
    rows = [
        (name, *(f"{one['classes'].get(name, 0.0):.1f}" for one in profiles.values()))
        for name in names
        if any(one["classes"].get(name, 0.0) >= 0.05 for one in profiles.values())
    ]
    idle = [one["idle"] for one in profiles.values()]
    rows.append(("idle", *("" if ms is None else f"{ms:.1f}" for ms in idle)))
    kernels = [
        (model, kernel["class"], f"{kernel['ms']:.1f}", f"`{kernel['name']}`")
        for model, one in profiles.items()
        for kernel in one["kernels"]
    ]
    slowest = markdown_table(("model", "class", "ms", "kernel"), kernels)
    return markdown_table(("class", *profiles), rows) + "\n" + slowest


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
