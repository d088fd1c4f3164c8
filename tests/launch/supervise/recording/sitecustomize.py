"""On the path of a run: each process of slurmllm records whether it has the secret."""

import os
import sys
from pathlib import Path

if folder := os.environ.get("RECORDS"):
    argv = sys.orig_argv
    role = argv[argv.index("slurmllm") + 1] if "slurmllm" in argv else "other"
    has = os.environ.get("HF_TOKEN", "none")[:4]
    Path(folder, f"{role} {os.environ.get('RANK', '-')} {has}").touch()
    if secret := os.environ.get("SLURMLLM_SECRET"):
        Path(folder, f"secret {secret}").touch()
