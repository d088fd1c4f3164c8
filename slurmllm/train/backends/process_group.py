"""torch's default process group, authenticated by a secret that is new for each attempt.

torch does not authenticate its peers. Any program that can connect to the port of its TCPStore can
set values, and torch's object collectives (used by DCP's plans and by NxD's pipelines) unpickle
what they receive, which can run code. Here the values of the store and the pickles carry
an HMAC made with the workers' secret, and one without it raises an error. Another program can still
delete values or increment the store's counters: the attempt then fails. A version of torch whose
pickles cannot be signed trains with a warning.
"""

from __future__ import annotations

import hmac
import io
import logging
import os
import pickle
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # torch.distributed's, typed
from torch.distributed import distributed_c10d

from slurmllm.core.errors import NodeError
from slurmllm.core.run.flight_recorder import dump_prefixes
from slurmllm.core.run.safe_files import write_whole
from slurmllm.train.control.rendezvous import listen, own_secret
from slurmllm.train.model.private_names import FLIGHT_RECORDER, SIGNED_OBJECTS

log = logging.getLogger(__name__)

_PROOF = 32  # bytes of an HMAC by SHA-256
# torch does not keep the Python part of a store alive, and new groups need it.
_stores: list[Store] = []


def init_process_group(
    backend: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device | None = None,
) -> None:
    """Start torch's default process group at $MASTER_ADDR:$MASTER_PORT (collective).

    A single worker opens no port and needs no secret. `timeout` is of the rendezvous and of each
    collective. Raises a NodeError if a stranger set a value, an OSError if the port is in use.
    """
    secret: bytes | None = None
    store: Store = HashStore()
    if world_size > 1:
        secret = own_secret()
        address = os.environ["MASTER_ADDR"]
        port = os.environ["MASTER_PORT"]
        # torch's own socket would listen on all interfaces; the store closes this one.
        listener = None if rank else listen(address, int(port)).detach()
        options: dict[str, Any] = {"timeout": timeout, "master_listen_fd": listener}
        store = TCPStore(address, int(port), world_size, rank == 0, **options)
        # NCCL's threads use the store at any time, also while Python ends, so that it must not be
        # one of Python's. Its connections are open to those who reach them in any case.
        if backend != "nccl":
            store = SignedStore(store, secret)
    _stores[:] = [store]
    answer_requests(rank)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
    )
    # Its check needs the group: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch asks for its backend.
    if secret is not None and (reason := sign_objects(secret)) and rank == 0:
        log.warning("torch %s: %s", torch.__version__, reason)


class SignedStore(Store):
    """A store of values with an HMAC by the secret; any other value raises an error.

    torch's C++ code calls the methods by name, so names and signatures are those of `Store`.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        super().__init__()
        self._store = store
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        # Typed as str, but its C++ code takes bytes.
        self._store.set(key, _proof(self._secret, key, data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return _verify(self._secret, key, self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


@dataclass(repr=False)
class _SignedPickles:
    """The methods of pickle.Pickler and pickle.Unpickler that torch's object collectives call."""

    file: io.BytesIO
    secret: bytes

    def dump(self, value: Any) -> None:
        data = pickle.dumps(value)
        self.file.write(_proof(self.secret, "pickle", data) + data)

    def load(self) -> Any:
        data = _verify(self.secret, "pickle", self.file.read())
        return pickle.loads(data)  # noqa: S301 (signed by a worker of this attempt)


def sign_objects(secret: bytes) -> str | None:
    """Have torch's object collectives sign their pickles, and verify them before they unpickle.

    Returns why this version of torch cannot; None if it does.
    """
    if reason := SIGNED_OBJECTS.missing():
        return reason
    module: Any = distributed_c10d
    torch_s = module._pickler, module._unpickler
    module._pickler = module._unpickler = partial(_SignedPickles, secret=secret)
    # Private names: another version may have them and not use them.
    unsigned = torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)
    try:
        module._tensor_to_object(unsigned, len(unsigned), None)
    except NodeError:
        return None
    except (AttributeError, TypeError):
        pass
    module._pickler, module._unpickler = torch_s
    return f"{SIGNED_OBJECTS.module} pickles otherwise: {SIGNED_OBJECTS.without}"


def _verify(secret: bytes, key: str, signed: bytes) -> bytes:
    proof = signed[:_PROOF]
    value = signed[_PROOF:]
    if not hmac.compare_digest(proof, _proof(secret, key, value)):
        raise NodeError(
            f"invalid signature of {key!r}: not written by a worker of this attempt; another "
            "program may be connected: close the nodes' ports to other machines"
        )
    return value


def _proof(secret: bytes, key: str, value: bytes) -> bytes:
    name = key.encode()
    return hmac.digest(secret, len(name).to_bytes(8, "big") + name + value, "sha256")


def answer_requests(rank: int) -> None:
    """Start a thread that dumps torch's Flight Recorder when it reads something from a pipe.

    For process groups without NCCL. With NCCL, torch's monitor thread answers the requests itself,
    on a pipe that replaces this one.
    """
    pipe, dump = dump_prefixes(os.environ)
    if not pipe or not dump or FLIGHT_RECORDER.missing():
        return
    (dump_trace,) = FLIGHT_RECORDER.get()
    path = Path(f"{pipe}{rank}.pipe")

    def answer() -> None:
        while os.read(descriptor, 64):
            # Torch names the lines of code by its compiler, whose import may take longer than
            # launchers wait.
            trace = dump_trace(includeStackTraces="torch._inductor.codecache" in sys.modules)
            with suppress(OSError):
                write_whole(Path(f"{dump}{rank}"), trace, 0o600, durable=False)

    with suppress(OSError):  # a file system without pipes: no reason to end the training
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDWR)  # also for writing: it is open at any time
        threading.Thread(target=answer, name="flight recorder", daemon=True).start()
