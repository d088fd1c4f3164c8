"""On PYTHONPATH: neuronx-distributed on a CPU, in any Python that comes to import our NxD backend.

Nothing happens before a module of it that imports NxD is imported: processes that do not train
start as ever.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from typing import Any

_USERS = {
    f"slurmllm.train.backends.nxd.{name}"
    for name in ("gradients", "model", "runtime", "saving", "shards")
}


class _Prepare(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _USERS:
            sys.meta_path.remove(self)
            import nxd_on_cpu

            nxd_on_cpu.prepare()


if os.environ.get("NXD_CPU_MODE") == "1":
    sys.meta_path.insert(0, _Prepare())
