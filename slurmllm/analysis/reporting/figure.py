"""A plot as data, as `report.js` takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]

# Okabe and Ito's, without black and yellow: told apart by most eyes.
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        name: Of the plot, within the page.
        title: For people.
        section: That it stands in.
        content: What `report.js` draws.
        note: Below it.
    """

    name: str
    title: str
    section: Literal["curves", "throughput", "utilization", "evaluation"]
    content: Json
    note: str = ""
