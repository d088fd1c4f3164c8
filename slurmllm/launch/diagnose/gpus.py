"""NVIDIA GPUs at rest: `nvidia-smi -q -x` of each is compared with the limits that it prints.

A fact fails the node if the driver or NVIDIA's documents say that no program should start on the
GPU, or if another job holds it; facts with which a run can start are warnings. A field that is
absent or has no number (`N/A`, MIG, other versions) has no finding.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from xml.etree import ElementTree  # of the driver's own program

import psutil

from slurmllm.core.run.records import Finding
from slurmllm.launch.diagnose import Findings, fail, ok, warn
from slurmllm.launch.diagnose.programs import UnknownStateError, output_of

Gpu = ElementTree.Element
# `used` is without what the driver reserves (before R510, with it: up to about 0.6 GB). A context
# of CUDA takes about 0.5 GB, a worker far more.
MAX_USED_MIB = 1024
# Lines `path: text` that are a fault.
_RULES = (
    (
        "device errors",
        fail,
        r"ecc_errors/volatile/(\w*uncorrectable\w*|double_bit/total): [1-9]\d{0,9}",
    ),
    # NVIDIA, GPU Memory Error Management: RMA policy; "new workloads can be launched" if pending.
    (
        "device errors",
        fail,
        r".*(row_failure|threshold_exceeded|unrepairable_memory): Yes",
    ),
    ("device errors", warn, r".*(row_pending|pending_retirement): Yes"),
    # There, "Error Recovery and Response Flags": all but `None` ask for no new processes.
    ("device errors", fail, r"gpu_recovery_action: (GPU |Node )?(Reset|Reboot|Drain).*"),
    ("device errors", fail, r"gpu_reset_status/reset_required: Yes"),
    ("device errors", fail, r".*: GPU (requires reset|is lost)"),  # nvmlErrorString
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


def read_gpus() -> tuple[str, list[Gpu]]:
    """Return the driver's version and all GPUs that this job may use."""
    output = output_of("nvidia-smi", "-q", "-x")
    try:
        log = ElementTree.fromstring(output)  # noqa: S314
    except ElementTree.ParseError as error:
        raise UnknownStateError(f"nvidia-smi -q -x printed {output[:60]!r}: {error}") from error
    gpus = log.findall("gpu")
    if not gpus and log.findtext("attached_gpus") != "0":
        raise UnknownStateError(f"nvidia-smi -q -x printed <{log.tag}> without <gpu>")
    return log.findtext("driver_version", ""), gpus


def needs_no_reset(gpus: Sequence[Gpu]) -> bool:
    """Whether the driver (R565 and later) says of every GPU that new processes may start."""
    return bool(gpus) and all(gpu.findtext("gpu_recovery_action") == "None" for gpu in gpus)


def gpu_findings(gpus: Sequence[Gpu]) -> Findings:
    """The worst of each check's findings."""
    findings = [f for number, gpu in enumerate(gpus) for f in _findings(f"GPU {number}", gpu)]
    for check in dict.fromkeys(finding.check for finding in findings):
        yield worst([finding for finding in findings if finding.check == check])


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the worst finding of a check, with the number of others."""
    order = ("ok", "warn", "fail")
    result = max(findings, key=lambda finding: (order.index(finding.status), float(finding.value)))
    num_more = sum(finding.status != "ok" for finding in findings) - 1
    more = f" and {num_more} more" if num_more > 0 else ""
    return result.model_copy(update={"message": f"{result.message}{more}"})


def _findings(name: str, gpu: Gpu) -> Findings:
    lines = "\n".join(_lines(gpu, ""))
    for check, status, rule in _RULES:
        yield ok(check, 0, 0)
        for match in re.finditer(f"^{rule}$", lines, re.MULTILINE):
            yield status(check, 1, 0, f"{check}: {name}: {match[0]}")
    fields = ("", "_slow_threshold", "_tlimit", "_slow_tlimit_threshold")
    now, slow, margin, offset = (_number(gpu, f"temperature/gpu_temp{field}") for field in fields)
    if not slow > 0:
        slow = now + margin - offset  # since Hopper, nvidia-smi prints the margin to the slowdown
    used = _number(gpu, "fb_memory_usage/used")
    processes = dict(_processes(gpu))
    # The processes have their own findings. With ATS, Linux may keep its own pages there.
    status = warn if processes or gpu.findtext("addressing_mode") == "ATS" else fail
    hot = f"{now:g} °C at rest; it slows down at {slow:g} °C"
    full = f"{used:g} MiB in use before the start; the limit is {MAX_USED_MIB} MiB"
    for check, value, limit, bad, message in (
        ("temperature", now, slow, fail, hot),
        ("GPU memory", used, MAX_USED_MIB, status, full),
    ):
        if value >= limit:
            yield bad(check, value, limit, f"{name}: {message}")
        elif value < limit:  # else one of them is not known
            yield ok(check, value, limit)
    yield ok("GPU processes", 0, 0)
    for process, foreign in processes.items():
        yield (fail if foreign else warn)("GPU processes", 1, 0, f"{name}: {process}")


def _lines(element: Gpu, path: str) -> Iterator[str]:
    for child in element:
        yield f"{path}{child.tag}: {(child.text or '').strip()}"
        yield from _lines(child, f"{path}{child.tag}/")


def _number(gpu: Gpu, path: str) -> float:
    """Return the number of `27 C` and `50 MiB`; NaN for `N/A` and absent fields."""
    match = re.match(r"\s*(-?\d{1,9})( \w+)?\s*$", gpu.findtext(path, ""))
    return float(match[1]) if match else math.nan


def _processes(gpu: Gpu) -> Iterator[tuple[str, bool]]:
    """Yield users' compute processes, and whether they are not of this job.

    Root's are the site's own. Those of another PID namespace, or gone, are not known.
    """
    for row in gpu.iterfind("processes/process_info"):
        with suppress(psutil.Error, ValueError, KeyError):
            process = psutil.Process(int(row.findtext("pid", "")))
            owner = process.username()
            if "C" in row.findtext("type", "") and owner != "root":
                mine = owner == psutil.Process().username()
                job = os.environ.get("SLURM_JOB_ID")
                mine = mine and process.environ().get("SLURM_JOB_ID") == job
                name = row.findtext("process_name", "")[:60]
                yield f"process {process.pid} of {owner}: {name}", not mine
