"""Stands in for Neuron's runtime and compiler, as far as their compile cache goes.

A worker under test asks for a graph by a name. As with libneuronxla's cache, a graph is a folder
`<cache>/neuronxcc-<version>/MODULE_<hash of the graph>+<hash of the flags>`; the layout is
described in `slurmllm/train/backends/nxd/environment.py`. The compiler reads its behaviour from the
JSON file $STANDIN_CONTROL: {"fail": […], "drop": […], "hang": […], "exit_code": n}, the lists with
names of graphs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

VERSION = "2.0.0.0+standin"
counts = {"hits": 0, "compiled": 0, "extracted": 0}


def cache() -> Path:
    """The cache of this compiler's version."""
    version = os.environ.get("STANDIN_COMPILER_VERSION", VERSION)
    return Path(os.environ["NEURON_COMPILE_CACHE_URL"]) / f"neuronxcc-{version}"


def control() -> dict[str, Any]:
    """What the test wants to go wrong."""
    path = os.environ.get("STANDIN_CONTROL")
    return dict(json.loads(Path(path).read_text())) if path and Path(path).is_file() else {}


def module_name(name: str) -> str:
    """The name that a graph has in the cache."""
    flags = os.environ.get("NEURON_CC_FLAGS", "").replace("--retry_failed_compilation", "").split()
    graph = hashlib.sha256(name.encode()).hexdigest()[:20]
    return f"MODULE_{graph}+{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:8]}"


def load_graph(name: str) -> str:
    """Ask for a graph as a worker does when it meets it.

    Returns:
        `extracted` in a trial run, `hit` where the cache has it, `compiled` where it was compiled
        now.

    Raises:
        RuntimeError: it does not compile, or did not before.
    """
    module = cache() / module_name(name)
    module.mkdir(parents=True, exist_ok=True)
    pb = module / "model.hlo_module.pb"
    if not pb.exists():
        pb.write_text(name)
        (module / "compile_flags.json").write_text(
            json.dumps(os.environ.get("NEURON_CC_FLAGS", "").split())
        )
    if (module / "model.done").exists():
        counts["hits"] += 1
        return "hit"
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"):
        print(f"Extracting graphs ({pb}) for ahead-of-time parallel compilation.", flush=True)
        counts["extracted"] += 1
        return "extracted"
    retries = "--retry_failed_compilation" in os.environ.get("NEURON_CC_FLAGS", "")
    if (module / "model.log").exists() and not retries:
        raise RuntimeError(
            f"Got a cached failed neff at {module / 'model.neff'}. Will skip compilation, please "
            "set --retry_failed_compilation for recompilation."
        )
    lock = module / "model.hlo_module.pb.lock"
    with lock.open("w") as stream:
        # The workers of one disk compile a graph once: the others wait for it.
        fcntl.flock(stream, fcntl.LOCK_EX)
        there = (module / "model.done").exists()
        well = there or compile_module(module)
        lock.unlink(missing_ok=True)
    if not well:
        raise RuntimeError(f"neuronx-cc failed with exit code 70 on {module}")
    counts["hits" if there else "compiled"] += 1
    return "hit" if there else "compiled"


def compile_module(module: Path) -> bool:
    """Do as the compiler does with one graph; returns whether it says that it went well."""
    name, wishes = (module / "model.hlo_module.pb").read_text(), control()
    lock = module / "model.hlo_module.pb.lock"
    lock.touch()  # stays where the compiler is ended
    if name in wishes.get("hang", ()):
        time.sleep(600)
    if name in wishes.get("fail", ()):
        message = f"[NCC_EBVF030] {name}: instructions 5001 exceed the limit of 5000"
        (module / "model.log").write_text(f"compiling\n{message}\n\n")
        lock.unlink(missing_ok=True)
        return False
    if name not in wishes.get("drop", ()):
        (module / "model.log").unlink(missing_ok=True)
        (module / "model.neff").write_bytes(b"NEFF " + name.encode() * 50)
        (module / "model.done").touch()
    lock.unlink(missing_ok=True)
    return True
