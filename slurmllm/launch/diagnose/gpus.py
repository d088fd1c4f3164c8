"""NVIDIA GPUs before a start: what nvidia-smi, the kernel's log and DCGM say of them.

A fact fails the node if the driver or NVIDIA's documents say that no program should start on the
GPU, or if another job holds it; facts with which a run can start are warnings. A field that is
absent or has no number (`N/A`, MIG, other versions) has no finding. A check may have several.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from xml.etree import ElementTree  # of the driver's own program

import psutil

from slurmllm.core.errors import NodeError
from slurmllm.launch.diagnose import Findings, fail, ok, skipped, warn
from slurmllm.launch.diagnose.programs import UnknownStateError, output_of, run_program
from slurmllm.train.backends import environment

Gpu = ElementTree.Element
# `used` excludes the driver's own memory (before R510 it includes it, up to about 0.6 GB). A CUDA
# context takes about 0.5 GB, a worker far more.
MAX_USED_MIB = 1024
# Check, result, lines `path: text` of nvidia-smi that show a fault.
_RULES = (
    (
        "device errors",
        fail,
        r"ecc_errors/volatile/(\w*uncorrectable\w*|double_bit/total): [1-9]\d{0,9}"
        # NVIDIA, GPU Memory Error Management: RMA policy; if pending, "new workloads can be
        # launched".
        r"|.*(row_failure|threshold_exceeded|unrepairable_memory): Yes"
        # There, "Error Recovery and Response Flags": all but `None` ask for no new processes.
        r"|gpu_recovery_action: (GPU |Node )?(Reset|Reboot|Drain).*"
        r"|gpu_reset_status/reset_required: Yes"
        r"|.*: GPU (requires reset|is lost)",  # nvmlErrorString
    ),
    ("device errors", warn, r".*(row_pending|pending_retirement): Yes"),
    # nvidia-smi(1), "Clocks Event Reasons" (before R535, "Clocks Throttle Reasons").
    ("clocks", fail, r".*_reason_hw_\w*slowdown: Active"),
    ("clocks", warn, r".*_reason_sw_thermal_slowdown: Active"),
    # Fabric Manager has not set up NVLink's switches, or some links are down.
    (
        "NVLink",
        warn,
        r"fabric/(state: (Not Started|In Progress)|health/\w+: (Degraded|True|Unhealthy))",
    ),
)
_LOADED = "NVRM: loading NVIDIA"  # the driver's first line: earlier errors no longer count
# NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (R590): the immediate action is a reset, a
# reboot or a look at the machine. Without 109, 155 and 156, which programs or requests cause too.
_RESET = "46|48|54|62|64|74|79|95|110|119|120|136|140|143|158"
# Hardware errors whose action is "ignore" or "restart the application": remapped rows, contained
# errors, NVLink 5, retired resources. All others (13, 31, 43, 45, …) are of programs and drivers.
_USABLE = "63|92|94|121|14[4-9]|150|157|160|161|171|172"
# SXid: errors of NVSwitch; Fabric Manager's guide asks for a reset after fatal ones.
_XID = re.compile(
    rf"\bXid \([^)]*\): (?:(?P<reset>{_RESET})|{_USABLE})\b"
    r"|SXid \([^)]*\): (?P<fatal>\d+), Fatal"
)
DIAGNOSTIC_S = 30  # "normally lasting seconds" (dcgmi-diag(1)), more if all GPUs must wake up
# dcgm_errors.h, dcgmErrorSeverity_t: ISOLATE "cannot perform workload", RESET. Others (MONITOR,
# TRIAGE, CONFIG: such as persistence mode) do not keep a program from running.
_UNUSABLE = ("2", "6")
# Objects of DCGM 3 and 4, whose trees differ ("no published stable schema"); keys are sorted.
_DCGM_WARNING = re.compile(r'"error_severity" *: *(\d+)[^{}]*?"warning" *: *"((?:[^"\\]|\\.)*)"')


def read_gpus() -> tuple[str, list[Gpu]]:
    """Return the driver's version and all GPUs that this job may use."""
    output = output_of("nvidia-smi", "-q", "-x")
    with suppress(ElementTree.ParseError):
        log = ElementTree.fromstring(output)  # noqa: S314
        gpus = log.findall("gpu")
        if gpus or log.findtext("attached_gpus") == "0":
            return log.findtext("driver_version", ""), gpus
    raise UnknownStateError(f"nvidia-smi -q -x printed {output[:60]!r}")


def gpu_findings(gpus: Sequence[Gpu]) -> Findings:
    for number, gpu in enumerate(gpus):
        name = f"GPU {number}"
        lines = "\n".join(_lines(gpu, ""))
        for check, status, rule in _RULES:
            yield ok(check, 0, 0)
            for match in re.finditer(f"^(?:{rule})$", lines, re.MULTILINE):
                yield status(check, 1, 0, f"{check}: {name}: {match[0]}")
        now, slow, margin, offset = (
            _number(gpu, f"temperature/gpu_temp{field}")
            for field in ("", "_slow_threshold", "_tlimit", "_slow_tlimit_threshold")
        )
        if not slow > 0:
            slow = now + margin - offset  # since Hopper, nvidia-smi prints the margin to it
        if not math.isnan(now - slow):
            yield (fail if now >= slow else ok)(
                "temperature",
                now,
                slow,
                f"{name}: {now:g} °C at rest; it slows down at {slow:g} °C",
            )
        yield ok("GPU processes", 0, 0)
        processes = list(_process_findings(name, gpu))
        yield from processes
        used = _number(gpu, "fb_memory_usage/used")
        if used >= MAX_USED_MIB:
            # The processes have their own findings. With ATS, Linux may keep its own pages there.
            status = warn if processes or gpu.findtext("addressing_mode") == "ATS" else fail
            message = f"{used:g} MiB in use before the start; the limit is {MAX_USED_MIB} MiB"
            yield status("GPU memory", used, MAX_USED_MIB, f"{name}: {message}")
        elif used >= 0:
            yield ok("GPU memory", used, MAX_USED_MIB)


def _lines(element: Gpu, path: str) -> Iterator[str]:
    for child in element:
        yield f"{path}{child.tag}: {(child.text or '').strip()}"
        yield from _lines(child, f"{path}{child.tag}/")


def _number(gpu: Gpu, path: str) -> float:
    """Return the number of `27 C` and `50 MiB`; NaN for `N/A` and absent fields."""
    match = re.match(r"\s*(-?\d{1,9})( \w+)?\s*$", gpu.findtext(path, ""))
    return float(match[1]) if match else math.nan


def _process_findings(name: str, gpu: Gpu) -> Findings:
    """Check for compute processes of users; those of this job are left over from its last attempt.

    Processes of root belong to the site. Those of another PID namespace are not visible.
    """
    job, user = os.environ.get("SLURM_JOB_ID"), psutil.Process().username()
    for row in gpu.iterfind("processes/process_info"):
        with suppress(psutil.Error, ValueError):
            process = psutil.Process(int(row.findtext("pid", "")))
            owner = process.username()
            if "C" in row.findtext("type", "") and owner != "root":
                foreign = owner != user or process.environ().get("SLURM_JOB_ID") != job
                program = row.findtext("process_name", "")[:60]
                message = f"{name}: process {process.pid} of {owner}: {program}"
                yield (fail if foreign else warn)("GPU processes", 1, 0, message)


def xid_findings(gpus: Sequence[Gpu]) -> Findings:
    """Check for Xid errors that the driver has written into the kernel's log since it was loaded.

    They fail the node unless the driver (R565 and later) asks for no reset of any GPU.
    """
    # The kernel's buffer may be for root only, the journal for the groups adm and systemd-journal:
    # journalctl prints nothing without the right to read, and a kernel's log is never empty.
    log = environment.output_of("dmesg")
    log = log or environment.output_of("journalctl", "-kq", "--output=cat", "--no-pager")
    if not log:
        yield skipped(
            "Xid",
            "not readable",
            message="Xid: neither dmesg nor journalctl -k shows the kernel's log to this user",
        )
        return
    needs_no_reset = gpus and all(g.findtext("gpu_recovery_action") == "None" for g in gpus)
    over = "; the driver asks for no reset now" if needs_no_reset else ""
    events = list(_XID.finditer(log.rpartition(_LOADED)[2]))
    yield ok("Xid", 0, 0)
    for event in events:
        status = fail if not over and (event["reset"] or event["fatal"]) else warn
        yield status("Xid", len(events), 0, f"kernel log: {event[0]}{over}")


def dcgm_findings() -> Findings:
    """`dcgmi diag -r 1`, the quick diagnostic, if the Data Center GPU Manager is installed."""
    command = "dcgmi diag -r 1"
    try:
        # `timeout` sends SIGTERM, at which dcgmi stops the diagnostic in the host engine.
        done = run_program(
            "timeout", str(DIAGNOSTIC_S), *command.split(), "-j", limit_s=DIAGNOSTIC_S + 5
        )
        if '"status"' not in done.stdout:
            reason = (done.stdout + done.stderr).strip().rpartition("\n")[2]
            if done.returncode == 124:
                reason = f"no end within {DIAGNOSTIC_S} s"
            raise UnknownStateError(f"{command}: {reason}")
    except NodeError as error:
        yield skipped("DCGM", "not run", message=str(error))
        return
    yield ok("DCGM", 0, 0)
    for severity, message in _DCGM_WARNING.findall(done.stdout):
        yield (fail if severity in _UNUSABLE else warn)("DCGM", 1, 0, f"DCGM: {message}")
