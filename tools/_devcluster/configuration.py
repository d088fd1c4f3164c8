"""What a cluster is started with, and every file of its state directory."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from _devcluster.errors import Fault

# A cluster takes one block of consecutive ports. The blocks lie below the range from which the
# kernel serves outgoing connections (32768 and up), so that nobody takes a failed node's port.
PORT_BLOCK = 256
PORT_BLOCKS = range(10240, 28160, PORT_BLOCK)

NODE_LOCAL = "/var/tmp"  # noqa: S108 - the path at which a node sees its own disk

SLURM_CONF = """\
ClusterName=devcluster
SlurmctldHost={host}({controller})
SlurmctldPort={slurmctld_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its last credential has expired: two minutes by default.
AuthInfo=socket={munge_socket},cred_expire={cred_expire_s}

StateSaveLocation={root}/slurmctld
SlurmctldPidFile={root}/slurmctld.pid
SlurmdSpoolDir={root}/nodes/%n/spool
SlurmdPidFile={root}/nodes/%n/slurmd.pid
SlurmdLogFile={root}/log/%n.slurmd.log
MailProg=/bin/true

# A node claims more than its share of this machine.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none

# A node that refuses connections is tried for MessageTimeout before it counts as silent; many
# nodes on one machine answer late when they all start something.
MessageTimeout={message_timeout_s}
SlurmdTimeout={slurmd_timeout_s}
KillWait={kill_wait_s}
ReturnToService=1
JobRequeue=1

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
# The scheduler's rounds: every minute and every half minute by default.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={controller}
AccountingStoragePort={slurmdbd_port}
AccountingStoragePass={munge_socket}

{conf}
NodeName=DEFAULT RealMemory={memory_mb}
{node_lines}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost=localhost
DbdAddr={controller}
DbdPort={slurmdbd_port}
SlurmUser=root
PidFile={root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


@dataclass(frozen=True)
class Settings:
    """What a cluster is started with; kept in its `cluster.json`."""

    num_nodes: int
    cpus: str  # of every node, or one number a node: `4,4,2`
    slurmd_timeout_s: int
    kill_wait_s: int
    cred_expire_s: int
    shared: str = ""  # where a file system of its own is mounted that all nodes share
    shared_mb: int = 0
    node_disk_mb: int = 0  # of each node's own disk, a file system of its own; 0: a directory
    network: bool = False  # between the nodes; else all share the machine's
    clock: bool = False  # of each node its own
    conf: str = ""  # further lines of slurm.conf
    slurm: str = ""  # the prefix of another Slurm than that of the PATH
    root: str = ""  # the root that it runs in, if that is another than the machine's
    first_port: int = 0  # slurmctld's; then come slurmdbd's and the nodes'

    @property
    def nodes(self) -> list[str]:
        return [f"n{k}" for k in range(1, self.num_nodes + 1)]

    def lines(self) -> tuple[str, str, dict[str, str]]:
        """Split `conf`: lines of slurm.conf and gres.conf, and options by node."""
        slurm, gres = list[str](), list[str]()
        nodes = dict[str, str]()
        for line in filter(None, map(str.strip, self.conf.splitlines())):
            key, _, options = line.partition(" ")
            if (node := key.removeprefix("NodeName=")) in self.nodes:
                nodes[node] = options
            else:
                (gres if key.startswith("Name=") else slurm).append(line)
        return "\n".join(slurm), "\n".join(gres), nodes

    @property
    def number(self) -> int:
        """Of the cluster among those of this machine."""
        return (self.first_port - PORT_BLOCKS[0]) // PORT_BLOCK

    @property
    def subnet(self) -> str:
        """The first three numbers of every node's address; nK's last is K."""
        return f"10.213.{self.number}" if self.network else "127.0.1"

    @property
    def controller(self) -> str:
        """The address of slurmctld and slurmdbd."""
        return f"{self.subnet}.254" if self.network else "127.0.0.1"


class StateDirectory:
    """Names every file of a cluster that more than one place of the code needs."""

    def __init__(self, root: Path):
        self.root = root
        self.settings_file = root / "cluster.json"
        self.slurm_conf = root / "slurm.conf"
        self.slurmdbd_conf = root / "slurmdbd.conf"  # slurmdbd finds it beside slurm.conf
        self.hosts = root / "hosts"
        self.munge_key = root / "munge.key"
        self.munge_socket = root / "munge.socket"
        self.mariadb = root / "mariadb"
        self.mariadb_socket = root / "mariadb.socket"
        # Its own: a database that starts empties its temporary directory of others' tables too.
        self.mariadb_temporary = root / "mariadb.tmp"
        self.clock = root / "clock.so"  # preloaded by processes that have their node's clock
        self.logs = root / "log"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def node(self, name: str) -> Path:
        """What a node keeps: its slurmd's spool and its disk."""
        return self.root / "nodes" / name

    def disk(self, node: str) -> Path:
        return self.node(node) / "disk"

    def slurmd_off(self, node: str) -> Path:
        """There while the node is to be without its slurmd."""
        return self.node(node) / "slurmd.off"

    def settings(self) -> Settings:
        try:
            values = json.loads(self.settings_file.read_text())
            # Without what only older versions have: `down` ends their clusters too.
            return Settings(**{k: v for k, v in values.items() if k in Settings.__match_args__})
        except FileNotFoundError:
            raise Fault(f"no cluster in {self.root}; `devcluster up` starts one", 3) from None

    def write(self, settings: Settings) -> None:
        for folder in (self.root, self.logs, self.root / "slurmctld"):
            folder.mkdir(parents=True, exist_ok=True)
        self.settings_file.write_text(json.dumps(asdict(settings)) + "\n")
        conf, gres_conf, of_nodes = settings.lines()
        counts = settings.cpus.split(",")
        node_lines = [
            f"NodeName={node} NodeAddr={settings.subnet}.{k} Port={settings.first_port + 1 + k} "
            + of_nodes.get(node, f"CPUs={counts[min(k, len(counts)) - 1]}")
            for k, node in enumerate(settings.nodes, 1)
        ]
        values = asdict(settings) | {
            "conf": conf,
            "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
            "node_lines": "\n".join(node_lines),
            "root": self.root,
            "subnet": settings.subnet,
            "controller": settings.controller,
            "host": socket.gethostname().partition(".")[0],
            "munge_socket": self.munge_socket,
            "slurmctld_port": settings.first_port,
            "slurmdbd_port": settings.first_port + 1,
            "message_timeout_s": 5 if settings.num_nodes <= 24 else 30,
        }
        if gres_conf:
            (self.root / "gres.conf").write_text(gres_conf + "\n")
        self.slurm_conf.write_text(SLURM_CONF.format_map(values))
        _write_private(self.slurmdbd_conf, SLURMDBD_CONF.format_map(values).encode())
        _write_private(self.munge_key, secrets.token_bytes(128))
        names = [f"{settings.subnet}.{k} {node}" for k, node in enumerate(settings.nodes, 1)]
        self.hosts.write_text("\n".join([Path("/etc/hosts").read_text().rstrip(), *names, ""]))


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
