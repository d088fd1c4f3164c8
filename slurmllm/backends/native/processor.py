"""The processor that compiled graphs are made for, found without torch.

Inductor vectorizes for ATen's CPU capability and compiles with `-march=native`; its cache keys hold
neither. A graph of another capability would be compiled for a vector length that its loops were not
written for, and compute garbage. The name of a GPU is in the keys.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from slurmllm.backends.environment import output_of

CPUINFO = Path("/proc/cpuinfo")
_UNKNOWN = "unknown"
# The flags of x86-64 that name instructions which a compiler emits by itself.
_INSTRUCTIONS = re.compile(r"s?sse|avx|amx|fma|bmi|f16c|gfni|vaes|vpclmul|xop|tbm|abm|popcnt|movbe")
output = functools.cache(output_of)  # `submit --local` asks once for each earlier run


def processor(device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what this node's graphs are made for; `variables` are those of the workers."""
    if device == "cuda":
        gpus = output("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
        names = {line.replace(",", "") for line in (gpus or _UNKNOWN).splitlines()}
        return {"gpu": ", ".join(sorted(names))}
    fields, compiler = cpu_fields(), variables.get("CXX") or "g++"
    flags = set(fields.get("flags") or fields.get("Features") or [])  # x86-64, Arm
    x86 = platform.machine() == "x86_64"
    features = filter(_INSTRUCTIONS.match, flags) if x86 else flags
    version = output(compiler, "-dumpfullversion", "-dumpversion") or _UNKNOWN
    return {
        "cpu_capability": cpu_capability(flags, variables.get("ATEN_CPU_CAPABILITY")),
        "cpu_features": " ".join(sorted(features)),
        # Inductor takes a smaller capability if this one cannot compile for the processor's.
        "compiler": f"{Path(compiler).name} {version}",
    }


def cpu_capability(flags: set[str], requested: str | None) -> str:
    """Return torch.backends.cpu.get_cpu_capability() of an x86-64 with these flags.

    `requested` is $ATEN_CPU_CAPABILITY. On other architectures return it, or `native`.
    """
    if platform.machine() != "x86_64":
        return requested or "native"
    if requested in ("default", "avx2", "avx512"):  # others are ignored
        return requested.upper()
    # ATen's DispatchStub.cpp
    if {"avx512vl", "avx512bw", "avx512dq", "fma"} <= flags:
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= flags else "DEFAULT"


def cpu_fields(cpuinfo: Path = CPUINFO) -> dict[str, list[str]]:
    """Return the fields of /proc/cpuinfo's last processor, split at spaces; none without it."""
    if not cpuinfo.is_file():
        return {}
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    return {key.strip(): value.split() for key, _, value in lines}
