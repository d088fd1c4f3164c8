"""`dcgmi diag -r 1`, NVIDIA's quick diagnostic, if the Data Center GPU Manager is installed."""

from __future__ import annotations

import re

from slurmllm.core.errors import NodeError
from slurmllm.launch.diagnose import Findings, fail, ok, skipped, warn
from slurmllm.launch.diagnose.gpus import worst
from slurmllm.launch.diagnose.programs import run_program

LIMIT_S = 30  # "normally lasting seconds" (dcgmi-diag(1)), more if all GPUs must wake up
# dcgm_errors.h, dcgmErrorSeverity_t: ISOLATE "cannot perform workload", RESET. Others (MONITOR,
# TRIAGE, CONFIG: such as persistence mode) do not keep a program from running.
_UNUSABLE = ("2", "6")
# Objects of DCGM 3 and 4, whose trees differ ("no published stable schema"); keys are sorted.
_WARNING = re.compile(r'"error_severity" *: *(\d+)[^{}]*?"warning" *: *"((?:[^"\\]|\\.)*)"')


def dcgm_findings() -> Findings:
    """The worst failure of the diagnostic."""
    # By SIGTERM: dcgmi then stops the diagnostic, which the host engine runs.
    limited = ("timeout", str(LIMIT_S), "dcgmi", "diag", "-r", "1", "-j")
    try:
        done = run_program(*limited, limit_s=LIMIT_S + 5)
    except NodeError as error:
        yield skipped("DCGM", "not run", message=str(error))
        return
    if '"status"' not in done.stdout:
        lines = (done.stdout + done.stderr).strip().splitlines()
        reason = f"no end within {LIMIT_S} s" if done.returncode == 124 else "; ".join(lines[-1:])
        yield skipped("DCGM", "not run", message=f"dcgmi diag -r 1: {reason}")
        return
    findings = [ok("DCGM", 0, 0)]
    for severity, message in _WARNING.findall(done.stdout):
        status = fail if severity in _UNUSABLE else warn
        findings.append(status("DCGM", 1, 0, f"DCGM: {message}"))
    yield worst(findings)
