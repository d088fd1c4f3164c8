"""The picture of where node hours went: a stacked bar a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from slurmllm.picture import write_picture
from slurmllm.status.time_breakdown import PARTS, Part
from slurmllm.status.utilization import Utilization

# The productive part recedes, so that what was lost is seen; neighbours differ in lightness.
COLORS: dict[Part, str] = {
    "productive": "#cfd8dc",
    "recomputation": "#7a1f5c",
    "saving": "#f2a65a",
    "first_step": "#2a8c6e",
    "start_up": "#12466b",
    "preflight": "#7fb3d5",
    "cache": "#a04000",
    "precompile": "#8e7cc3",
    "idle": "#333333",
}


def draw(runs: Mapping[str, Utilization], path: Path) -> None:
    """Draw the shares of each run's node hours, and beside them the lost ones alone, into a PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    picture = Figure(figsize=(11, 1.8 + 0.5 * len(runs)), dpi=120, layout="constrained")
    whole, lost = picture.subplots(1, 2, sharey=True)
    names = list(runs)
    for axes, parts in ((whole, PARTS), (lost, PARTS[1:])):
        left = [0.0] * len(names)
        for part in parts:
            widths = [100.0 * runs[name].shares[part] for name in names]
            label = part.replace("_", " ") if axes is whole else None
            axes.barh(range(len(names)), widths, left=left, color=COLORS[part], label=label)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    whole.set_xlabel("% of the node hours")
    lost.set_xlabel("% of the node hours, what was not productive")
    # A longer name leaves the bars no room.
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
    whole.set_yticks(range(len(names)), shown, parse_math=False)
    whole.invert_yaxis()
    picture.legend(loc="outside upper center", ncols=len(PARTS), frameon=False, fontsize=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a run's name may be in any script
        write_picture(picture, path, "name another file with --plot")
