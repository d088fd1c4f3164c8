"""The file with the bearer token of `cluster.metrics.port`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.safe_files import open_regular, os_error_text

_LONGEST = 4096  # characters


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
    fix = f"`(umask 077; openssl rand -hex 32 > {name})` creates one"
    fault = f"cluster.metrics.token_file: {name}: {fault}; {fix}"
    raise ConfigError("/metrics is not served", [fault])
