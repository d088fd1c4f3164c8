"""A trainer that only waits: a TCP barrier each step, a checkpoint every tenth step.

    python trainer.py FOLDER STEPS STEP_S TIMEOUT_S

It fails as FOLDER/fault says, `KIND NODE`, at the node's next step, once; a node with a file in
FOLDER/bad ends with its text at each start. Rank 0 appends `time step start` to FOLDER/steps.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

EVERY = 10  # steps between checkpoints


def main() -> None:
    folder, steps, step_s, timeout_s = Path(sys.argv[1]), *map(float, sys.argv[2:])
    rank, world = (
        int(os.environ.get(a) or os.environ[b])
        for a, b in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"))
    )
    node = socket.gethostname()
    (folder / "started").mkdir(parents=True, exist_ok=True)
    (folder / "started" / f"{node}-{time.time():.0f}").touch()
    _end_on_bad_node(folder, node)
    peers = _connect(rank, world, timeout_s)
    checkpoints = sorted(int(path.stem[5:]) for path in folder.glob("step-*.ckpt"))
    began = checkpoints[-1] if checkpoints else 0
    start = f"{time.time():.3f}:{began}"
    for step in range(began + 1, int(steps) + 1):
        _fail(folder, node)
        time.sleep(step_s)
        _barrier(rank, peers)
        if rank:
            continue
        print(f"step {step} loss {4 - step * 1e-3:.7f}", flush=True)
        with (folder / "steps").open("a") as file:
            file.write(f"{time.time():.3f} {step} {start}\n")
        if step % EVERY == 0:
            temporary = folder / "saving"
            temporary.write_bytes(os.urandom(10_000))
            temporary.rename(folder / f"step-{step}.ckpt")


def _end_on_bad_node(folder: Path, node: str) -> None:
    bad = folder / "bad" / node
    if bad.exists():
        sys.exit(bad.read_text())


def _fail(folder: Path, node: str) -> None:
    fault = folder / "fault"
    try:
        kind, victim = fault.read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if victim != node:
        return
    fault.rename(folder / "fault.done")
    if kind == "hang":
        time.sleep(1e6)
    if kind == "bad":
        _end_on_bad_node(folder, node)
    os.kill(os.getpid(), signal.SIGKILL)


def _connect(rank: int, world: int, timeout_s: float) -> list[socket.socket]:
    """Return the connections: of rank 0 to all others, of each other rank to rank 0."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        with socket.create_server(("", address[1]), backlog=world) as server:
            server.settimeout(timeout_s)
            peers = [server.accept()[0] for _ in range(world - 1)]
    else:
        while True:
            try:
                peers = [socket.create_connection(address, 5)]
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
    for peer in peers:
        peer.settimeout(timeout_s)
    return peers


def _barrier(rank: int, peers: list[socket.socket]) -> None:
    try:
        if rank:
            peers[0].sendall(b"x")
        if not all(peer.recv(1) for peer in peers):
            raise ConnectionResetError
        if not rank:
            for peer in peers:
                peer.sendall(b"x")
    except TimeoutError as error:
        raise RuntimeError("Timed out waiting for recv operation to complete") from error
    except OSError as error:
        raise RuntimeError("Connection closed by peer") from error


if __name__ == "__main__":
    main()
