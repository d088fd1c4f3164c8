#!/usr/bin/env python3
"""Open a PagerDuty incident when a run stops or diverges; resolve it when it starts or is done.

slurm.notify.command=[/path/of/pagerduty.py, /home/me/.pagerduty_key]

The key file has the integration key of a service ("Events API v2"). No dependencies.
"""

import json
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

URL = "https://events.pagerduty.com/v2/enqueue"  # https://service.eu.pagerduty.com/… in the EU


def event_of(message: dict, key: str) -> dict | None:
    """Return the event for a notification; None if nobody must act, as after a restart."""
    broken = message["event"] in ("failure", "divergence")
    if not broken and message["event"] not in ("start", "end"):
        return None
    event = {
        "routing_key": key,
        "event_action": "trigger" if broken else "resolve",
        "dedup_key": message["run_dir"][-255:],
    }
    if broken:
        event["payload"] = {
            "summary": message["text"][:1024],
            "source": (message.get("nodes") or [message["run"]])[0],
            # A divergence that was rolled back has an action that continues the run.
            "severity": "critical" if message.get("action") == "stop" else "warning",
            "timestamp": datetime.fromtimestamp(message["time"], UTC).isoformat(),
            "custom_details": message,
        }
    return event


def main() -> None:
    key_file, url = [*sys.argv[1:], URL][:2]
    event = event_of(json.load(sys.stdin), Path(key_file).read_text(encoding="utf-8").strip())
    if event is not None:
        body = json.dumps(event).encode()
        headers = {"Content-Type": "application/json"}
        # S310: the address is the user's own.
        request = urllib.request.Request(url, body, headers)  # noqa: S310
        urllib.request.urlopen(request, timeout=8).close()  # noqa: S310


if __name__ == "__main__":
    main()
