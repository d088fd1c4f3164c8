"""Environment variables in recipes and profiles: which may be set, and which hold secrets.

A secret is stored in `secrets.json` of the run, which only its user can read, and reaches nothing
but the environment of the workers. Everywhere else it is shown as `***`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
SETTABLE = ("SLURMLLM_LOG", "SLURMLLM_REHEARSAL_BYTES", "SLURMLLM_REHEARSAL_STEP_S")
# What slurmllm's own processes, Slurm's commands and the rendezvous read.
_RESERVED = re.compile(
    r"(SLURMLLM|SLURM|SLURMD|SBATCH|SALLOC|TORCHELASTIC)_.*"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)
# Variables that make a program run a file's code, look for code in a folder, write to a file that
# they name, or send tokens to another host.
_LOADS_CODE = re.compile(
    r"LD_.*|PYTHON.*|(BASH_)?ENV|SHELLOPTS|PS4|CC|CXX|CUDAHOSTCXX|GCC_EXEC_PREFIX"
    r"|.*(PATH|HOME|DIR|URL|FILE|ENDPOINT)|.*_PLUGIN(_.*)?|(OPENSSL|KRB5|GIT|COVERAGE|NVCC)_.*"
    r"|TORCH_(LOGS_OUT|TRACE|FORCE_NO_WEIGHTS_ONLY_LOAD)|HF_.*_CODE(_.*)?"
    r"|TRITON_(CACHE_MANAGER|REMOTE_CACHE_BACKEND)"
)
_SECRET = re.compile(
    r"TOKEN(?![A-Z])|SECRET|PASSW(OR)?D|PASSPHRASE|PASS(?![A-Z])|_PWD$|CREDENTIAL|API_?KEY|WEBHOOK"
    r"|(^|_)(KEY|AUTH|PAT)(_|$)",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s@]+@")


def refuse_reserved(name: str) -> str:
    """Return a name that may be set; raises ValueError for others."""
    if _RESERVED.fullmatch(name) and name not in SETTABLE:
        raise ValueError(
            "reserved: slurmllm, Slurm or the launcher set it in every job; remove it (of these "
            f"names, {', '.join(SETTABLE)} may be set)"
        )
    return name


def loads_code(name: str) -> bool:
    """Whether a variable may run code, so that a recipe's file, often another's, may not set it."""
    return _LOADS_CODE.fullmatch(name) is not None


def is_secret(name: str, value: object = "") -> bool:
    """Whether a variable holds a secret, by its name, or by a URL with a password."""
    named = _SECRET.search(name) is not None
    return named or value == MASK or _URL_WITH_PASSWORD.search(str(value)) is not None


def is_secret_at(path: str, value: object = "") -> bool:
    """Whether the value at a dotted path of a configuration is a secret."""
    section, _, name = path.rpartition(".")
    if path.startswith("slurm.notify"):  # a webhook's URL, which is refused there
        return "://" in str(value)
    if path.startswith("cluster.trackers"):  # an address with a password, likewise
        return _URL_WITH_PASSWORD.search(str(value)) is not None
    return section in ("env", "cluster.env") and is_secret(name, value)


def is_secret_option(option: str) -> bool:
    """Whether `--set=PATH=VALUE` sets a secret."""
    path, _, value = option.removeprefix("--set=").partition("=")
    return is_secret_at(path.strip(), value)


def mask(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables, with `***` for secrets."""
    return {name: MASK if is_secret(name, v) else v for name, v in variables.items()}
