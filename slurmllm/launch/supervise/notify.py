"""Notifications of a run's events, by the user's command.

A command is called by a thread when an attempt starts and when it ends. Nothing waits for it while
the run has work to do; the supervisor's last act is to wait a few seconds for what is under way,
unless a notification took too long.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field

from slurmllm.core.config.operation import NotifyEvent
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import Json
from slurmllm.core.run.records import CONTINUES, AttemptRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.core.slurm.client import wait_for
from slurmllm.core.slurm.error_texts import Command
from slurmllm.launch.supervise.attempts import name_of

TIMEOUT_S = 10.0  # for a command to end
LAST_WAIT_S = 5.0  # for what is under way when the supervisor exits
_LONGEST = 1000  # characters of the text
NOTIFICATION = "SLURMLLM_NOTIFICATION"  # the text, in the command's environment
_FIELDS = {
    *("stage", "attempt", "job_id", "nodes", "started_at", "ended_at", "ending", "action"),
    *("evidence", "blamed_nodes", "first_step", "last_step", "checkpoint_after"),
}

log = logging.getLogger(__name__)


@dataclass
class Notifier:
    """Sends the notifications of one run that `slurm.notify` asks for."""

    run: RunDir
    config: RunConfig
    _sending: list[threading.Thread] = field(default_factory=list)
    _slow: bool = False  # whether a notification has taken too long

    def started(self, record: AttemptRecord) -> None:
        if record.stage == "train":
            self.send("start", record, f"started on {len(record.nodes)} node(s)")

    def closed(self, record: AttemptRecord) -> None:
        event = event_of(record)
        if event is not None:
            step = "" if record.last_step is None else f", after step {record.last_step}"
            self.send(
                event,
                record,
                f"{record.ending} → {record.action}{step}: {'; '.join(record.evidence)}",
            )

    def wait(self) -> None:
        """Wait for what is under way; not at all after a notification that took too long."""

        def is_under_way() -> bool:
            return any(thread.is_alive() for thread in self._sending)

        wait_for(lambda: self._slow or not is_under_way(), LAST_WAIT_S, 0.05)
        if is_under_way():
            log.warning("notification: not delivered before the end of the supervisor")

    def send(self, event: NotifyEvent, record: AttemptRecord, ending: str) -> None:
        notify = self.config.recipe.slurm.notify
        run = self.run
        if not notify.command or event not in notify.on:
            return
        line = f"{run.name}: {name_of(record)}: {ending}"
        message = {
            "text": line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…",
            "event": event,
            "run": run.name,
            "run_dir": str(run.path),
            "steps": self.config.recipe.steps,
            "time": time.time(),
            **record.model_dump(mode="json", by_alias=True, include=_FIELDS),
        }
        # A daemon: the interpreter does not wait for it at its exit.
        thread = threading.Thread(target=self._call, args=(notify.command, message), daemon=True)
        with diagnostic("notifications"):  # no more threads, for one
            thread.start()
            self._sending.append(thread)

    def _call(self, command: Command, message: Json) -> None:
        try:
            subprocess.run(
                command,
                input=json.dumps(message).encode(),
                env={**os.environ, NOTIFICATION: message["text"]},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=True,
            )
            return
        except subprocess.TimeoutExpired:
            self._slow = True
            fault = f"has not ended after {TIMEOUT_S:g} s"
        except subprocess.CalledProcessError as error:
            fault = f"ended with exit code {error.returncode}"
        except (OSError, ValueError) as error:
            fault = f"cannot be started: {getattr(error, 'strerror', None) or error}"
        log.warning("notification of %s not delivered: %s %s", message["event"], command[0], fault)


def event_of(record: AttemptRecord) -> NotifyEvent | None:
    """Return the event that a closed attempt is; None if there is nothing to announce."""
    if record.ending == "superseded" or (record.stage, record.action) == ("precompile", "finish"):
        return None
    if record.ending == "divergence":
        return "divergence"
    if record.action in CONTINUES:
        return "requeue"
    return "end" if record.action == "finish" or record.ending == "cancelled" else "failure"
