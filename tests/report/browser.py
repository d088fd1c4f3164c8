"""A report opened in a real headless Chromium: what it drew, said and asked for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

# Counts what is drawn, works each control, and leaves what it saw in the page.
_PROBE = """
<script>
"use strict";
(async () => {
  const seen = {}, errors = [];
  window.addEventListener("error", (event) => errors.push(String(event.message)));
  document.addEventListener("securitypolicyviolation", (e) => errors.push(e.violatedDirective));
  const tick = () => new Promise((resolve) => setTimeout(resolve, 120));
  const plots = () => Array.from(document.querySelectorAll(".plot"));
  const lines = (plot) => Array.from(plot.querySelectorAll(".scatterlayer .js-line, .fills path"),
    (path) => path.getAttribute("d") || "").filter((d) => d.length > 4).length;
  const xs = (plot) => Array.from(plot.querySelectorAll(".xtick text"), (t) => t.textContent);
  const first = (id) => document.getElementById(id).querySelector(".js-line").getAttribute("d");
  try {
    for (let i = 0; i < 50 && !document.body.dataset.drawn; i += 1) await tick();
    seen.plots = Object.fromEntries(plots().map((plot) => [plot.id.replace("plot-", ""), {
      svg: plot.querySelectorAll("svg.main-svg").length,
      traces: plot.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length,
      lines: lines(plot), points: plot.querySelectorAll(".points path").length,
      range: plot.layout.yaxis.range, legend: plot.layout.legend?.orientation,
      ticks: Array.from(plot.querySelectorAll(".xtick text, .ytick text"), (t) => t.textContent),
      hover: (plot.data || []).flatMap((trace) => trace.text || []).join(" | "),
    }]));
    const curve = document.getElementById("plot-loss");
    if (curve) {
      Plotly.Fx.hover(curve, {xval: curve.data[0].x[1]}); await tick();
      seen.hovered = curve.querySelector(".hoverlayer").textContent;
    }
    seen.buttons = Array.from(new Set(Array.from(document.querySelectorAll(".modebar-btn"),
      (button) => button.dataset.title)));
    const log = document.querySelector("button[data-log=loss]");
    if (log) {
      const loss = document.getElementById("plot-loss"), before = first("plot-loss");
      log.click(); await tick();
      seen.log = loss.layout.yaxis.type; seen.log_moved = first("plot-loss") !== before;
      log.click(); await tick();
      const slider = document.getElementById("smoothing"), lines_before = lines(loss);
      slider.value = "0.9"; slider.dispatchEvent(new Event("input")); await tick();
      seen.smoothed_lines = lines(loss) - lines_before;
      seen.smoothing = document.getElementById("smoothing-value").textContent;
      slider.value = "0"; slider.dispatchEvent(new Event("input")); await tick();
      seen.axes = {};
      for (const radio of document.querySelectorAll("input[name=axis]")) {
        radio.click(); await tick();
        seen.axes[radio.value] = {
          title: loss.layout.xaxis.title.text, ticks: xs(loss), lines: lines(loss)};
      }
      await Plotly.relayout(loss, {"xaxis.range": [0, 1]}); await tick();
      seen.zoomed = loss.layout.xaxis.range;
    }
  } catch (error) { errors.push(String(error.stack || error)); }
  seen.errors = errors;
  seen.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  const place = document.createElement("pre");
  place.id = "seen"; place.textContent = JSON.stringify(seen);
  document.body.append(place);
})();
</script>
"""


@dataclass(frozen=True)
class Opened:
    """What a page did: what the probe saw, lines of the console, and its text as it was drawn."""

    seen: dict[str, Any]
    console: list[str]
    text: str


def require_chromium() -> str:
    """The browser's path; the test is skipped, or fails where one is required, without it."""
    for name in ("chromium", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    assert os.environ.get("SLURMLLM_REQUIRE_BROWSER") != "1", "a browser is required here"
    pytest.skip("no Chromium here: `make browser` installs one")


def open_report(page: Path, work: Path, width: int = 1400) -> Opened:
    """Open a copy of a page with a probe in it, and work its controls; a window of 500 or more."""
    chromium = require_chromium()
    copy = work / "probed.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{_PROBE}</body>"))
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={work / 'profile'}", f"--window-size={width},1800"),
        *("--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom"),
        copy.absolute().as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen, f"the probe left nothing: {done.stderr[-2000:]}"
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Opened(json.loads(unescape(seen[1])), console, done.stdout)


def require_sound(opened: Opened) -> None:
    """No error, no request, every plot drawn with data, every control at work."""
    seen = opened.seen
    assert seen["errors"] == []
    assert opened.console == []
    assert [name for name in seen["requests"] if not name.startswith("data:")] == []
    assert "Zoom" in seen["buttons"]
    assert not [title for title in seen["buttons"] if "Share" in title or "loud" in title]
    assert seen["plots"]
    for name, plot in seen["plots"].items():
        assert plot["svg"] > 0, name
        assert plot["traces"] > 0, name
        assert plot["lines"] + plot["points"] > 0, name
    if "log" in seen:
        assert seen["log"] == "log"
        assert seen["log_moved"]
        assert seen["smoothed_lines"] > 0
        assert seen["smoothing"] == "0.90"
        titles = {axis["title"] for axis in seen["axes"].values()}
        assert len(titles) == len(seen["axes"]) > 0
        assert all(axis["lines"] > 0 for axis in seen["axes"].values())
        assert seen["zoomed"] == [0, 1]
