"""How often nodes fail, by what others have published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmllm.simulate.failures import Kind


@dataclass(frozen=True)
class Published:
    """What somebody counted.

    Attributes:
        name: Short.
        source: Where it is written.
        counts: Kind → interruptions.
        hosts: Of the run.
        days: That it was watched.
        note: How the kinds were told apart.
    """

    name: str
    source: str
    counts: Mapping[Kind, int]
    hosts: int
    days: float
    note: str

    @property
    def node_hours(self) -> float:
        """Hours of one node in which all of these were seen."""
        return self.hosts * self.days * 24.0

    @property
    def per_node_hour(self) -> dict[Kind, float]:
        """Kind → failures of one node in an hour."""
        return {kind: count / self.node_hours for kind, count in self.counts.items()}

    @property
    def node_mtbf_hours(self) -> float:
        """Hours between two failures of one node."""
        return self.node_hours / sum(self.counts.values())


LLAMA3 = Published(
    name="llama3",
    source="Llama 3, arXiv 2407.21783, section 3.3.4 and table 5",
    counts={
        # Faulty GPU 148, HBM3 72, SRAM 19, system processor 17, silent data corruption 6, thermal
        # interface and sensor 6.
        "device": 268,
        # Unplanned host maintenance 32, SSD 3, power supply 3, chassis 2, I/O expansion board 2,
        # CPU 2, system memory 2.
        "node": 46,
        # Switch and cable 35, NIC 7.
        "network": 42,
        # NCCL watchdog time-outs.
        "hang": 7,
        # Software bug 54, dependency 2.
        "software": 56,
    },
    hosts=2048,
    days=54.0,
    note="419 unexpected interruptions on 16,384 H100; the 47 planned ones are left out",
)

LLAMA3_HARDWARE = Published(
    name="llama3-hardware",
    source=LLAMA3.source,
    counts={kind: count for kind, count in LLAMA3.counts.items() if kind != "software"},
    hosts=LLAMA3.hosts,
    days=LLAMA3.days,
    note="without the 56 bugs in software, which are of that software",
)

OPT = Published(
    name="opt",
    source="OPT-175B, arXiv 2205.01068, section 2.5",
    # "At least 35 manual restarts and the cycling of over 100 hosts over the course of 2 months",
    # from which its authors estimate 70 and more automatic restarts. A restart by hand is one that
    # their job's own checks had not seen: taken for a hang on a node.
    counts={"device": 70, "hang": 35},
    hosts=124,
    days=60.0,
    note="hardware alone, 992 A100; restarts by hand taken for hangs",
)

META_RSC1 = Published(
    name="meta-rsc1",
    source="Kokolis et al., arXiv 2410.21680: 6.50 failures in 1,000 node days of cluster RSC-1",
    counts={"device": 650},
    hosts=1000,
    days=100.0,
    note="jobs of many users; causes not told apart here: all taken for broken devices",
)

PUBLISHED: Mapping[str, Published] = {
    one.name: one for one in (LLAMA3, LLAMA3_HARDWARE, META_RSC1, OPT)
}
