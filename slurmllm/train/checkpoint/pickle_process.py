"""Reads DCP's `.metadata`, the files and entries that it lists, in a process of its own.

    python -I pickle_process.py PATH

It prints ["files", {name: [[offset, length], …]}], ["damaged", …] or ["unknown", …].
Nothing that the pickle names is imported or called, and the memory and time of the process are
limited. The unpickler in C is a hundred times as fast as that of `formats.pickles`, and a
`.metadata` may have hundreds of MB.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

Entries = dict[str, list[tuple[int, int]]]  # by file: offsets and lengths
_MEMORY_BYTES = 8 << 30


class _AnyObject:
    """An object of any class."""

    state: Any = None

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a container, or an empty class of that name."""
        containers = {"torch.Size": tuple, "collections.OrderedDict": OrderedDict}
        return containers.get(f"{module}.{name}") or type(name, (_AnyObject,), {})


def _read_entries(path: Path) -> Entries:
    with path.open("rb") as stream:
        metadata = _MetadataReader(stream).load()
    stored = metadata.state["storage_data"]
    if "StorageInfo" not in str([*stored.values()][:1]):  # torch's own class
        raise NotImplementedError("its structure is not torch's")
    files: Entries = {}
    for location in stored.values():
        info = location.state
        files.setdefault(info["relative_path"], []).append((info["offset"], info["length"]))
    for name in files:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"it names {name:.80}, outside its folder")
    listed = {(index.state["fqn"], index.state.get("offset")) for index in stored}
    for name, entry in metadata.state["state_dict_metadata"].items():
        chunks = (entry.state or {}).get("chunks")
        for corner in [chunk.state["offsets"] for chunk in chunks] if chunks else [None]:
            if (name, corner) not in listed:
                raise ValueError(f"{name} has no entry")
    return files


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answer: tuple[str, Any]
    try:
        answer = "files", _read_entries(Path(sys.argv[1]))
    except (OSError, MemoryError, NotImplementedError) as error:
        answer = "unknown", str(error) or "no memory was left"
    except Exception as error:  # damaged bytes may raise anything
        answer = "damaged", f"{error!r:.200}"
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
