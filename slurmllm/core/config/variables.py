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
# What a recipe's file may set: variables that tune speed, memory and communication.
_TUNING = """
    NCCL_* TORCH_NCCL_* OFI_NCCL_* FI_* EFA_* NEURON_RT_* NEURON_CC_FLAGS
    NEURON_FUSE_SOFTMAX NEURON_EXPERIMENTAL_COMPRESS_RG NEURON_LOGICAL_NC_CONFIG
    XLA_* PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUBLAS_WORKSPACE_CONFIG OMP_NUM_THREADS
    OMP_PROC_BIND OMP_PLACES KMP_AFFINITY KMP_BLOCKTIME MKL_NUM_THREADS
    GLOO_SOCKET_IFNAME UCX_TLS UCX_NET_DEVICES RDMAV_FORK_SAFE MALLOC_ARENA_MAX
    NVIDIA_TF32_OVERRIDE TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL
    TOKENIZERS_PARALLELISM HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    OLMO_SHARED_FS
"""
TUNING = _TUNING.split()
_TUNES = re.compile("|".join(TUNING).replace("*", r"\w+"))
# Of the families and of their flags, those that name a file, folder, library, address or plugin,
# or write to a file that they do not name: NCCL_TOPO_FILE, NCCL_COMM_ID, FI_PROVIDER_PATH,
# NEURON_RT_INSPECT_OUTPUT_DIR, NCCL_PROXY_PROFILE, --xla_dump_to, --cache_dir. Sources: torch
# 2.13's ProcessGroupNCCL.hpp, libfabric's fabric(7) and fi_ucx(7), the Neuron runtime's
# configuration guide; not all providers of libfabric, nor undocumented variables.
_NAMES_FILE = re.compile(
    r"FILE|PATH|PLUGIN|DUMP|LIBRAR|PROFIL|INSPECT|HOSTID|TEMPLATE|OUTPUT|LOCATION|URL|SAVE|TRACK"
    r"|DIR(?![A-Z])|_CONF(IG)?(?![A-Z])|(?<![A-Z])(ID|LIB|ADDR|PIPE|FROM|EXTRA|O)(?![A-Z0-9])",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[\w.,:;=^+\[\]> -]*")  # no slash, at sign, quote or variable
_SECRET = re.compile(
    r"TOKEN(?![A-Z])|SECRET|PASSW(OR)?D|PASSPHRASE|PASS(?![A-Z])|_PWD$|CREDENTIAL|API_?KEY|WEBHOOK"
    r"|(^|_)(KEY|AUTH|PAT)(_|$)",
    re.IGNORECASE,
)
# Not git's user of ssh, nor the container in an Azure address, abfs://CONTAINER@ACCOUNT
_URL_WITH_PASSWORD = re.compile(r"(?<!ssh)(?<!abfs)(?<!abfss)://[^/\s?#\"']+@")


def refuse_reserved(name: str) -> str:
    """Return a name that may be set; raises ValueError for others."""
    if _RESERVED.fullmatch(name) and name not in SETTABLE:
        raise ValueError(
            "reserved: slurmllm, Slurm or the launcher set it in every job; remove it (of these "
            f"names, {', '.join(SETTABLE)} may be set)"
        )
    return name


def may_be_in_file(name: str, value: object) -> bool:
    """Whether a recipe's file, which may be another user's, may set a variable to this value."""
    if _RESERVED.fullmatch(name):  # `refuse_reserved` judges it, wherever it is set
        return True
    word = str(value)
    if _TUNES.fullmatch(name) is None or _PLAIN.fullmatch(word) is None:
        return False
    if name.endswith("_FLAGS"):  # XLA reads a file of flags if the first character is no dash
        return not _NAMES_FILE.search(word) and word.startswith("-")
    return name in TUNING or not _NAMES_FILE.search(name)


def is_secret(name: str, value: object = "") -> bool:
    """Whether a variable holds a secret, by its name, or by a URL with a password."""
    return _SECRET.search(name) is not None or value == MASK or has_password(value)


def has_password(value: object) -> bool:
    return _URL_WITH_PASSWORD.search(str(value)) is not None


def hide_passwords(message: str) -> str:
    return _URL_WITH_PASSWORD.sub(f"://{MASK}@", message)


def is_secret_at(path: str, value: object) -> bool:
    section, _, name = path.rpartition(".")
    return is_secret(name, value) if section in ("env", "cluster.env") else has_password(value)


def is_secret_option(option: str) -> bool:
    path, _, value = option.removeprefix("--set=").partition("=")
    return is_secret_at(path.strip(), value)


def mask(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: MASK if is_secret(name, v) else v for name, v in variables.items()}
