"""AWS's `nccom-test`: the all-reduce over the NeuronCores of all nodes.

Options and output after the Neuron SDK's "NCCOM-TEST User Guide". Its GB/s are GiB a second.
"""

from __future__ import annotations

from slurmllm.errors import NodeError

SIZE = "64MB"


def command(nodes: int, per_node: int, job_id: str | None) -> list[str]:
    """The call; over several nodes it starts its own Slurm step in the job that is there."""
    options = ["--minbytes", SIZE, "--maxbytes", SIZE, "--datatype", "bf16", "--non-interactive"]
    over = ["--nnodes", str(nodes), "--slurm-mode", "--slurm-job-id", job_id or "alloc"]
    return [
        "nccom-test", "--nworkers", str(nodes * per_node), *(over if nodes > 1 else []), *options,
        "allr",
    ]  # fmt: skip


def bus_bandwidth(output: str) -> float:
    """The bus bandwidth of the largest size, GiB/s, from what nccom-test prints.

    Raises:
        NodeError: it measured nothing; the message holds its own words.
    """
    place: int | None = None
    rows: list[tuple[int, float]] = []
    for line in output.splitlines():
        fields = line.split()
        if fields and fields[0] == "size(B)":
            place = next((n for n, name in enumerate(fields) if name.startswith("busbw")), None)
        elif place is not None and len(fields) > place and fields[0].isdigit():
            try:
                rows.append((int(fields[0]), float(fields[place])))
            except ValueError:  # "33554432  Failure running neuron-bench - log file …"
                continue
    if not rows:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        telling = [line for line in words if not line.startswith("size(B)")] or ["no output"]
        raise NodeError(f"nccom-test measured nothing: {telling[0]}")
    return max(rows)[1]
