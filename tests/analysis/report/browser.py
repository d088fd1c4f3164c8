"""A report opened in a real headless Chromium: what it drew, said and asked for."""

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

# Counts what is drawn, presses the buttons of the loss, and leaves what it saw in the page.
_PROBE = """
<script>
"use strict";
(async () => {
  const seen = {}, errors = [];
  window.addEventListener("error", (event) => errors.push(String(event.message)));
  document.addEventListener("securitypolicyviolation", (e) => errors.push(e.violatedDirective));
  const tick = () => new Promise((resolve) => setTimeout(resolve, 120));
  const lines = (plot) => Array.from(plot.querySelectorAll(".scatterlayer .js-line, .fills path"),
    (path) => path.getAttribute("d") || "").filter((d) => d.length > 4).length;
  try {
    await tick();
    seen.plots = Object.fromEntries(Array.from(document.querySelectorAll(".plotly-graph-div"),
      (plot) => [plot.id.replace("plot-", ""), {
        traces: plot.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length,
        lines: lines(plot), points: plot.querySelectorAll(".points path").length,
        range: plot.layout.yaxis.range, right: plot.getBoundingClientRect().right,
        ticks: Array.from(plot.querySelectorAll(".xtick text, .ytick text"), (t) => t.textContent),
        hover: (plot.data || []).flatMap((trace) => trace.text || []).join(" | "),
      }]));
    seen.width = document.documentElement.clientWidth;
    const loss = document.getElementById("plot-loss");
    seen.axes = {};
    for (const menu of loss ? loss.layout.updatemenus : []) {
      for (const button of menu.buttons) {
        await Plotly[button.method](loss, ...button.args); await tick();
        seen.axes[button.label] = {title: loss.layout.xaxis.title.text, lines: lines(loss),
          type: loss.layout.yaxis.type};
      }
    }
    seen.buttons = Array.from(new Set(Array.from(document.querySelectorAll(".modebar-btn"),
      (button) => button.dataset.title)));
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
    copy = page.with_name("probed.html")  # next to the script of its plots
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
    """No error, no request but for the script, every plot drawn with data, every button at work."""
    seen = opened.seen
    assert seen["errors"] == []
    assert opened.console == []
    requests = {name for name in seen["requests"] if not name.startswith("data:")}
    assert {name.rpartition("/")[2] for name in requests} <= {"plotly.min.js"}
    assert all(name.startswith("file:") for name in requests)
    assert "Zoom" in seen["buttons"]
    assert not [title for title in seen["buttons"] if "Share" in title or "loud" in title]
    assert seen["plots"]
    for name, plot in seen["plots"].items():
        assert plot["traces"] > 0, name
        assert plot["lines"] + plot["points"] > 0, name
        assert plot["right"] <= seen["width"], name
    if seen["axes"]:
        log = seen["axes"].pop("log")
        assert (seen["axes"].pop("linear")["type"], log["type"]) == ("linear", "log")
        titles = {axis["title"] for axis in seen["axes"].values()}
        assert len(titles) == len(seen["axes"]) > 0
        assert all(axis["lines"] > 0 for axis in seen["axes"].values())
