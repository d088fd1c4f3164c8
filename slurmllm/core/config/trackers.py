"""What the trackers of a run need on this machine: their packages, a server, a key."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from slurmllm.core.config.recipe import TrackerName
from slurmllm.core.config.resolve import RunConfig

PACKAGES: Mapping[TrackerName, str] = {"wandb": "wandb", "mlflow": "mlflow"}
_SAAS = "https://api.wandb.ai"


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
