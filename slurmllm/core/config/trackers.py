"""What trackers and Prometheus need on this machine: packages, a server, a key, a token."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from slurmllm.core.config.recipe import TrackerName
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.safe_files import open_regular, os_error_text

PACKAGES: Mapping[TrackerName, str] = {"wandb": "wandb", "mlflow": "mlflow"}
_SAAS = "https://api.wandb.ai"
_LONGEST = 4096  # characters of a token


def tracking_uri(config: RunConfig) -> str | None:
    """Return MLflow's server, by the profile or by MLflow's own variable."""
    return config.cluster.trackers.tracking_uri or config.variable("MLFLOW_TRACKING_URI")


def missing_for_trackers(config: RunConfig, names: Sequence[TrackerName]) -> list[str]:
    """Return what these trackers need and this machine does not have, a line each with the fix."""
    faults = [
        f"trackers: {name}: its package is not installed here; `pip install 'slurmllm[{name}]'`"
        for name in names
        if importlib.util.find_spec(PACKAGES[name]) is None
    ]
    if "mlflow" in names and not tracking_uri(config):
        faults.append(
            "cluster.trackers.tracking_uri: not set; it names MLflow's server, such as "
            "http://mlflow.example.com:5000"
        )
    if "wandb" in names and not _has_wandb_key(config):
        faults.append(
            "trackers: wandb: no API key here; `wandb login`, or `export WANDB_API_KEY=…` and "
            "--set env.WANDB_API_KEY; without a network, --set env.WANDB_MODE=offline"
        )
    return faults


def _has_wandb_key(config: RunConfig) -> bool:
    if config.variable("WANDB_MODE") in ("offline", "disabled"):
        return True
    if any(config.variable(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(config.variable("WANDB_BASE_URL") or _SAAS).hostname
    named = os.environ.get("NETRC")
    files = [named] if named else ["~/.netrc", "~/_netrc"]
    # By path: of its default file, netrc refuses one that others may read; W&B does not.
    for path in map(os.path.expanduser, files):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            hosts = netrc.netrc(path).hosts
            # W&B's own settings file may name another host; its login is always "user".
            if host in hosts or any(login == "user" for login, _, _ in hosts.values()):
                return True
    return False


def read_token(config: RunConfig) -> str | None:
    """Return the token that requests must have; None if the profile names no file.

    Raises:
        ConfigError: The file is missing, readable by others, or has no token.
    """
    name = config.cluster.metrics.token_file
    if name is None:
        return None
    fault = "it has no token (16 characters or more, without blanks)"
    try:
        with open_regular(Path(name)) as stream:
            token = stream.read(_LONGEST).decode("ascii", "replace").strip()
            info = os.fstat(stream.fileno())
            if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o077:
                fault = f"others may read or write it; `chmod 600 {name}`"
            elif re.fullmatch(r"[!-~]{16,}", token):
                return token
    except OSError as error:
        fault = f"it cannot be read: {os_error_text(error)}"
    fault = (
        f"cluster.metrics.token_file: {name}: {fault}; `(umask 077; openssl rand -hex 32 > "
        f"{name})` creates one"
    )
    raise ConfigError("/metrics is not served", [fault])
