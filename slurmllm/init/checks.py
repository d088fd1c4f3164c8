"""The check of `doctor` on the profile: what `init` would change in it."""

from __future__ import annotations

from collections.abc import Iterator

from slurmllm.config.cluster import Cluster
from slurmllm.config.directives import parse_options
from slurmllm.diagnose.finding import fail, ok, warn
from slurmllm.errors import SlurmError
from slurmllm.init.draft import Draft, draft_profile
from slurmllm.init.survey import survey
from slurmllm.run.records import Finding
from slurmllm.slurm.client import SlurmClient
from slurmllm.slurm.setup import setup_faults

_REQUESTS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
_SAME_PEAK = 0.9  # boards of one GPU differ in their clocks


def profile_finding(
    client: SlurmClient, cluster: Cluster, source: str, partition: str | None = None
) -> Finding:
    """Compare a profile with what `init` would write for the partition that jobs are submitted to.

    Args:
        source: What chose the profile.
        partition: In place of the profile's.
    """
    state = f"{cluster.name}, by {source}"
    if faults := setup_faults(cluster.setup):
        return fail("profile", "; ".join(faults), fix="correct the profile", blame="user")
    if cluster.planning_only:
        text = f"{state}: for planning only: {cluster.planning_only}"
        return fail("profile", text, fix="another --cluster", blame="user")
    try:
        site = survey(client)
    except SlurmError:  # other checks report it
        return ok("profile", state)
    default = next((p.name for p in site.partitions.values() if p.default), "")
    name = partition or cluster.partition or default
    if name not in site.partitions:
        return ok("profile", state)
    draft = draft_profile(site, site.partitions[name])
    if not (changes := list(_changes(cluster, draft))):
        return ok("profile", f"{state}; as `init` would write it for partition {name}")
    fix = f"`slurmllm init --partition {name}` writes a profile; --dry-run shows it"
    return warn("profile", f"{state}; `init` would change {', '.join(changes)}", fix=fix)


def _changes(cluster: Cluster, draft: Draft) -> Iterator[str]:
    """Yield what differs of the fields that Slurm knows better."""
    new = draft.cluster()
    for name in ("device", "devices_per_node", "cpus_per_node"):
        before, after = getattr(cluster, name), getattr(new, name)
        if before != after and (name, before) != ("cpus_per_node", None):
            yield f"{name} {before} to {after}"
    options, new_options = (parse_options(profile.directives) for profile in (cluster, new))
    gpus = new_options.get("gpus-per-node", new.devices_per_node)
    if new.device == "cuda" and not options.keys() & {*_REQUESTS}:
        yield f"directives to request GPUs (--gpus-per-node={gpus})"
    if "mem" in new_options and not any(option.startswith("mem") for option in options):
        yield "directives to request all memory (--mem=0)"
    hardware, nearest = cluster.hardware, new.hardware
    if hardware and nearest and draft.figures.confidence != "guess":
        peaks = sorted((hardware.bf16_tflops, nearest.bf16_tflops))
        if peaks[0] < peaks[1] * _SAME_PEAK:
            figures = f"{hardware.bf16_tflops:g} to {nearest.bf16_tflops:g} TFLOP/s"
            yield f"hardware figures to those of {draft.figures.profile} ({figures})"
