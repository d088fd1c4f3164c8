"""The processor that compiled graphs are made for, found without torch.

Inductor vectorizes for ATen's CPU capability ($ATEN_CPU_CAPABILITY, else the best of the
processor), and the compiler then uses all instructions of the machine (`-march=native`). Inductor's
cache keys hold neither: a graph of another capability is found, compiled for a vector length that
its loops were not written for, and computes garbage. The name of a GPU is in the keys.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_SVE_BYTES = Path("/proc/sys/abi/sve_default_vector_length")
# The flags of x86-64 that name instructions which a compiler emits by itself.
_INSTRUCTIONS = re.compile(r"s?sse|avx|amx|fma|bmi|f16c|gfni|vaes|vpclmul|xop|tbm|abm|popcnt|movbe")
# ATen's DispatchStub.cpp: value of $ATEN_CPU_CAPABILITY, name, and the flags needed without it.
_CAPABILITIES = (
    ("avx512", "AVX512", {"avx512vl", "avx512bw", "avx512dq", "fma"}),
    ("avx2", "AVX2", {"avx2", "fma"}),
    ("default", "DEFAULT", set[str]()),
)
_TIMEOUT_S = 20.0  # nvidia-smi takes some seconds if the driver has to wake the GPUs up


def processor(device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what this node's graphs are made for; `variables` are those of the workers."""
    if device == "cuda":
        gpus = _output("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
        return {"gpu": ", ".join(sorted({line.replace(",", "") for line in gpus.splitlines()}))}
    fields, compiler = cpu_fields(), variables.get("CXX") or "g++"
    flags = set(fields.get("flags") or fields.get("Features", ()))
    features = flags
    if platform.machine() == "x86_64":
        features = {flag for flag in flags if _INSTRUCTIONS.match(flag)}
    elif _SVE_BYTES.is_file():
        features |= {f"sve_bytes={_SVE_BYTES.read_text().strip()}"}
    version = _output(compiler, "-dumpfullversion", "-dumpversion")
    return {
        "cpu_capability": cpu_capability(flags, variables.get("ATEN_CPU_CAPABILITY")),
        "cpu_features": " ".join(sorted(features)),
        # Inductor takes a smaller capability if this one cannot compile for the processor's.
        "compiler": f"{Path(compiler).name} {version}".rstrip(),
    }


def cpu_capability(flags: set[str], requested: str | None) -> str:
    """Return torch.backends.cpu.get_cpu_capability() of a processor with these flags.

    On other architectures than x86-64: the requested capability, or `native`.
    """
    if platform.machine() != "x86_64":
        return requested or "native"
    names = {value: name for value, name, _ in _CAPABILITIES}
    if requested in names:  # others are ignored
        return names[requested]
    return next(name for _, name, needed in _CAPABILITIES if needed <= flags)


def cpu_fields(cpuinfo: Path = CPUINFO) -> dict[str, list[str]]:
    """Return the words of each field of the last processor; empty if there is no such file."""
    if not cpuinfo.is_file():
        return {}
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    return {key.strip(): value.split() for key, _, value in lines}


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
