"""The error messages of runtimes and libraries, and their meaning for a run.

One table: a pattern, its meaning, the source of the message, and an example. The failing worker and
the supervisor that classifies the attempt both use it; the tests check every row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from slurmllm.records import EndingClass

Meaning = Literal[
    "memory",  # of the device or the host
    "device",  # an accelerator is broken: its node is excluded
    "code",  # an invalid request of the program, on any node
    "compiler",  # a graph that does not compile
    "storage",  # the shared file system; may be transient
    "storage_lasting",  # likewise, until the user acts
    "node",  # this node: its driver, its network adapter, an installation
    "port",  # taken by another process; no node is to blame
    "lost_peer",  # another worker is gone: an echo, never the cause
]
# The class of an ending with such a message, and whether the node of the worker is blamed.
ENDINGS: Mapping[Meaning, tuple[EndingClass, bool]] = {
    "memory": ("out_of_memory", False),
    "device": ("node_failure", True),
    "code": ("code_error", False),
    "compiler": ("compile_failure", False),
    "storage": ("storage_failure", False),
    "storage_lasting": ("storage_failure", False),
    "node": ("node_failure", True),
    "port": ("node_failure", False),
    "lost_peer": ("node_failure", False),
}


class Row(NamedTuple):
    """One row of the table; the pattern matches the `example`."""

    pattern: str
    meaning: Meaning
    source: str
    example: str


# torch-neuronx prints NRT_STATUS as `nrt_execute status=5 message="…"` (vllm issue 12443), the
# SDK documentation as `Failed to execute the model status=1003 message=…`.
def _status(codes: str) -> str:
    return rf"(?:\bnrt_\w+|[Ff]ailed to|Could not)\b[^\n]*?\bstatus[= ](?:{codes})\b"


_NRT = "aws-neuron-sdk 81ce03a, neuron-runtime/nrt-troubleshoot.rst"
_NRT_STATUS = "aws-neuron-sdk 81ce03a, neuron-runtime/api/nrt_status.rst"
_NRT_MEMORY = "aws-neuron-sdk 81ce03a, neuron-runtime/explore/device-memory.rst"
_NRT_CORE_DUMP = "aws-neuron-sdk 81ce03a, neuron-runtime/explore/core-dump.rst"
_NCC = "aws-neuron-sdk 81ce03a, compiler/error-codes"
_EFA = "libfabric, prov/efa/src/efa_errno.h"
_OFI = "aws-ofi-nccl 2daf7d30, src/"
_NCCL = "NCCL 5067397c, src/init.cc, ncclGetErrorString"
_NCCL_SOCKET = "NCCL 5067397c, src/misc/socket.cc"
_NCCL_IB = "NCCL 5067397c, src/transport/net_ib"
_NCCL_SHM = "NCCL 5067397c, src/misc/shmutils.cc"
_C10D_NCCL = "PyTorch 2.13, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, NCCLUtils.cpp"
_C10D = "PyTorch 2.13, torch/csrc/distributed/c10d/socket.cpp, TCPStore.cpp, FileStore.cpp"
_GLOO = "gloo, gloo/transport/tcp/pair.cc, buffer.cc, unbound_buffer.cc"
_CUDA = "CUDA runtime API, cudaError (cudaGetErrorString)"
_XID = "NVIDIA, Xid catalog, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
_TORCH = "PyTorch 2.13"
_ERRNO = "Linux, errno(3), strerror"
_LUSTRE = "Lustre operations manual, Client Eviction; errno(3)"

TABLE: tuple[Row, ...] = (
    # Neuron runtime: memory of device and host.
    Row(r"NRT_RESOURCE", "memory", _NRT_STATUS, "Failure: NRT_RESOURCE in nrt_load()"),
    Row(r"NRT_FAIL_HOST_MEM_ALLOC", "memory", _NRT_STATUS, "NRT_FAIL_HOST_MEM_ALLOC"),
    Row(
        r"Failed to allocate [^\n]* on ND \d", "memory", _NRT_MEMORY,
        "Failed to allocate 4.000GB (alignment: none, usage: tensors) on ND 0:NC 4",
    ),
    Row(
        _status("4|11"), "memory", "vllm issue 12443; aws-neuron-samples issue 96",
        'nrt_tensor_allocate status=4 message="Allocation Failure"',
    ),
    Row(
        r"neuron:mc_alloc: device mempool", "memory", f"{_NRT}, Insufficient Memory",
        "kernel: [1.2] neuron:mc_alloc: device mempool [0:0] total 1073741568 occupied 960539030",
    ),
    # Neuron runtime: the device.
    Row(
        r"Uncorrectable (?:HBM |SRAM )?memory error|encountered uncorrectable memory error",
        "device", f"{_NRT}, Hardware Errors",
        "(FATAL-RT-UNDEFINED-STATE) Uncorrectable HBM memory error is detected. Execution results",
    ),
    Row(
        r"NEURON_HW_ERR=", "device", f"{_NRT}, Hardware Errors",
        "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-05 hostname=ip-172-31-61-252",
    ),
    Row(
        r"NRT_EXEC_HW_ERR_(?:HBM_UE|REPAIRABLE_HBM_UE)", "device", _NRT_STATUS,
        "Failure: NRT_EXEC_HW_ERR_HBM_UE in nrt_execute()",
    ),
    Row(r"NRT_EXEC_HW_ERR_NC_UE", "device", _NRT_STATUS, "NRT_EXEC_HW_ERR_NC_UE"),
    Row(r"NRT_EXEC_HW_ERR_DMA_ABORT", "device", _NRT_STATUS, "NRT_EXEC_HW_ERR_DMA_ABORT"),
    Row(r"NRT_HW_ERROR", "device", _NRT_STATUS, "NRT_HW_ERROR"),
    Row(r"NRT_EXEC_UNIT_UNRECOVERABLE", "device", _NRT_STATUS, "NRT_EXEC_UNIT_UNRECOVERABLE"),
    Row(  # SRAM parity
        r"NRT_EXEC_COMPLETED_WITH_ERR", "device", _NRT_STATUS, "NRT_EXEC_COMPLETED_WITH_ERR",
    ),
    Row(
        r"DMA [TR]X engine \d+ is in an abort state", "device", f"{_NRT}, Hardware Errors",
        "[MLA 0][NC 0] DMA TX engine 0 is in an abort state",
    ),
    Row(  # a hang on compute
        r"execution timeout .*waiting for execution completion notification", "device",
        f"{_NRT}, Hardware Errors",
        "execution timeout (30000 ms) on Neuron Device 0 NC 0, model xxx.neff, waiting for "
        "execution completion notification",
    ),
    Row(
        _status("6|101|1004|1201|1202|1203|1205"), "device", _NRT_STATUS,
        'nrt_execute status=1201 message="HBM UE"',
    ),
    # Neuron runtime: what the program asked for.
    Row(
        r"NRT_EXEC_SW_NQ_OVERFLOW|potentially caused by DGE notifications", "code",
        f"{_NRT}, Neuron DGE notification queue overflow",
        "execution timeout (30000 ms) on model x.neff, potentially caused by DGE notifications",
    ),
    Row(
        r"NRT_(?:EXEC_)?OOB|due to out-of-bound access", "code", f"{_NRT}, out-of-bound access",
        "failed to run scatter/gather (indirect memory copy), due to out-of-bound access.",
    ),
    Row(
        r"NRT_LOAD_NOT_ENOUGH_NC|Could not find VNC id", "code",
        f"{_NRT}, Insufficient number of NeuronCores", "TDRV:db_vtpb_get_mla_and_tpb "
        "Could not find VNC id n",
    ),
    Row(
        r"NRT_UNSUPPORTED_NEFF_VERSION|NEFF version mismatch|Unsupported hardware operator code",
        "code", f"{_NRT}, Unsupported NEFF Version", "NEFF version mismatch supported: 1.1",
    ),
    Row(
        _status("2|3|9|10|1002|1003|1006|1204"), "code", _NRT_STATUS,
        "Failed to execute the model status=1003 message=Numerical Error",
    ),
    # Neuron's compiler, and Inductor.
    Row(
        r"\[F137\]|forcibly killed[^\n]*insufficient system memory", "memory",
        "aws-neuron-sdk 81ce03a, compiler/neuronx-cc faq; issue 737",
        "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient",
    ),
    Row(r"neuronx-cc.*(failed|error)", "compiler", _NCC, "neuronx-cc failed with exit code 70"),
    Row(
        r"[Ff]ailed compilation|cached failed neff", "compiler",
        "libneuronxla 2.2, neuron_cc_wrapper, neuron_cc_cache",
        "Got a cached failed neff at /x/model.neff",
    ),
    Row(
        r"^(InductorError|BackendCompilerFailed|CppCompileError|CompilationError)\b", "compiler",
        f"{_TORCH}, torch/_inductor/exc.py, torch/_dynamo/exc.py",
        "InductorError CppCompileError: C++ compile error",
    ),
    # Neuron: driver, device files and cores of a node.
    Row(
        r"No neuron device available", "node", "aws-neuron-samples issue 44",
        "ERROR  TDRV:tdrv_get_dev_info   No neuron device available",
    ),
    Row(
        r"Could not open the nd\d", "node", f"{_NRT}; aws-neuron-sdk issue 851",
        "58100:58100 ERROR  TDRV:tdrv_init_mla_phase1    Could not open the nd3",
    ),
    Row(
        r"Neuron runtime cannot be initialized", "node", "aws-neuron-samples issue 44",
        "Neuron runtime cannot be initialized; cannot determine the number of available",
    ),
    Row(
        r"Unable to determine Neuron Driver version|requires Neuron Driver version", "node",
        f"{_NRT}, Application fails to start",
        "NRT:nrt_init      Unable to determine Neuron Driver version. Please check aws-neuron-dkms",
    ),
    Row(
        r"not compatible with the installed aws-neuron", "node", _NRT,
        "This Neuron Runtime (compatibility id: 4) is not compatible with the installed "
        "aws-neuronx-dkms package",
    ),
    Row(  # a process of an earlier attempt still holds them
        r"NeuronCore\(s\) not available|NRT_EXEC_NC_BUSY", "node",
        f"{_NRT}, Neuron Core is in use",
        "NRT:nrt_allocate_neuron_cores  NeuronCore(s) not available - Requested:nc1-nc1",
    ),
    Row(
        r"Timestamp program stop timeout|Failed to stop neuron core|failed programming the engine",
        "node", f"{_NRT}, Failure to initialize Neuron",
        "nd0 nc0 Timestamp program stop timeout (1000 ms)",
    ),
    Row(
        r"OFI plugin initNet\(\) failed|Ofi plugin is not installed or EFA is not enabled", "node",
        f"{_NRT}, EFA is not enabled", "OFI plugin initNet() failed is EFA enabled?",
    ),
    Row(
        r"Error opening libnccom\.so", "node", f"{_NRT}, Missing aws-neuronx-collectives package",
        "NCCL init error: Error opening libnccom.so, cannot use collective operations!",
    ),
    # Neuron: a collective that waits for another worker.
    Row(r"NRT_TIMEOUT", "lost_peer", _NRT_STATUS, "Failure: NRT_TIMEOUT in nrt_execute()"),
    Row(
        r"NRT_EXEC_HW_ERR_COLLECTIVES|[Ss]uspected hang (?:in|between)", "lost_peer",
        f"{_NRT}, Hang on Collectives",
        "missing collectives status on Neuron Device 0 NC 0, model 0 - suspected hang in",
    ),
    Row(
        r"execution timeout \(\d+ ms\)(?!.*DGE notifications)", "lost_peer", _NRT,
        "[ND 1][NC 0] execution timeout (30000 ms) on model x.neff",
    ),
    Row(
        r"NRT_NETWORK_PROXY_FAILURE|RX, connection closed by remote peer", "lost_peer",
        _NRT_STATUS, "RX, connection closed by remote peer",
    ),
    Row(
        _status("5|1200|1206"), "lost_peer", _NRT_CORE_DUMP,
        "Failed to execute the model status=5 message=Timeout",
    ),
    # EFA: libfabric's provider.
    Row(
        r"Unresponsive re(?:ceiver|mote)", "lost_peer", _EFA,
        "Unresponsive receiver (reachable by EFA device but handshake failed)",
    ),
    Row(r"Unreachable remote", "lost_peer", _EFA, "Unreachable remote (never received a response)"),
    Row(
        r"Connection was reset by remote peer", "lost_peer", _EFA,
        "Connection was reset by remote peer",
    ),
    Row(
        r"Bad queue pair \(QP\) number|No valid address handle at remote side", "lost_peer", _EFA,
        "Bad queue pair (QP) number (QP does not exist or is in error state)",
    ),
    Row(
        r"Destination resource not ready|Unexpected status returned by responder", "lost_peer",
        _EFA, "Destination resource not ready (no work queue entries posted on receive queue)",
    ),
    Row(r"Internal queue pair error \(local\)", "node", _EFA, "Internal queue pair error (local)"),
    # EFA: NCCL's plugin, which the Neuron collectives use too.
    Row(
        r"NET/OFI.*completed with error", "lost_peer", f"{_OFI}nccl_ofi_rdma.cpp; issue 161",
        "NCCL WARN NET/OFI Request completed with error. RC: 21. Error: unknown error",
    ),
    Row(
        r"Unable to retrieve completion queue entries|Unable to read from fi_cq_readerr",
        "lost_peer", f"{_OFI}nccl_ofi_rdma.cpp",
        "NET/OFI Unable to retrieve completion queue entries. RC: -5, ERROR: Input/output error",
    ),
    Row(
        r"NET/OFI.*Insufficient Libfabric devices found|NET/OFI.*Unable to find a protocol that "
        r"worked", "node", f"{_OFI}nccl_ofi_net.cpp",
        "NCCL WARN NET/OFI Unable to find a protocol that worked.  Failing initialization.",
    ),
    Row(
        r"NET/OFI.*Couldn't open a fabric", "node", f"{_OFI}nccl_ofi_ofiutils.cpp",
        "NCCL WARN NET/OFI Couldn't open a fabric access domain. RC: -38, ERROR: Function not",
    ),
    Row(
        r"NET/OFI.*(?:Initializing plugin failed|Failed to initialize \w+ protocol)", "node",
        f"{_OFI}nccl_ofi_net.cpp", "NCCL WARN NET/OFI Failed to initialize rdma protocol",
    ),
    # NCCL.
    Row(
        r"ncclRemoteError|remote process exit", "lost_peer", _NCCL,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process",
    ),
    Row(
        r"unhandled system error", "lost_peer", _NCCL,
        "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error, NCCL version 2.18.6",
    ),
    Row(
        r"Net : Connection closed by remote peer|Connection closed by remote peer \S+<\d+>",
        "lost_peer", "NCCL issue 1514", "Net : Connection closed by remote peer user<50260>",
    ),
    Row(
        r"connect to \S+<\d+> (?:failed|returned)|Connect to \S+<\d+> failed", "lost_peer",
        f"{_NCCL_SOCKET}; pytorch issue 38702",
        "socketStartConnect: Connect to 192.168.19.14<52822> failed : Software caused abort",
    ),
    Row(
        r"NET/IB ?:? Got completion from peer", "lost_peer", _NCCL_IB,
        "NET/IB: Got completion from peer 10.0.0.2<41297> with status=12 opcode=0 len=0",
    ),
    Row(
        r"NET/IB : \S+ async fatal event|NET/IB : Unable to (?:open|query) device", "node",
        _NCCL_IB, "NET/IB : mlx5_3:1 async fatal event: local catastrophic error",
    ),
    Row(
        r"NET/(?:IB|Socket) : [Nn]o (?:IP )?interface found|Bootstrap : no socket interface found",
        "node", "NCCL 5067397c, src/bootstrap.cc, src/transport/net_socket.cc",
        "Bootstrap : no socket interface found",
    ),
    Row(
        r"Error while (?:creating|attaching to) shared memory segment|failed to extend \S*/dev/shm",
        "node", _NCCL_SHM, "Error while attaching to shared memory segment /dev/shm/nccl-x",
    ),
    # PyTorch: process groups.
    Row(
        r"NCCL.*(timeout|timed out)|Watchdog caught collective operation timeout", "lost_peer",
        _C10D_NCCL, "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1,",
    ),
    Row(
        r"NCCL communicator was aborted", "lost_peer", _C10D_NCCL,
        "NCCL communicator was aborted on rank 1.",
    ),
    Row(  # of its own watchdog thread, which waits for the others
        r"ProcessGroupNCCL's watchdog got stuck|heartbeat of the watchdog thread", "lost_peer",
        _C10D_NCCL, "[Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without",
    ),
    Row(
        r"EADDRINUSE|[Aa]ddress already in use|ADDRESS ALREADY IN USE", "port", _C10D,
        "The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    Row(
        r"DistNetworkError|The client socket has (?:timed out|failed to connect)", "lost_peer",
        _C10D, "The client socket has timed out after 60000ms while trying to connect to",
    ),
    Row(
        r"Failed to (?:recv|send), (?:got|sent) 0 bytes", "lost_peer", _C10D,
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server",
    ),
    Row(
        r"recvValue|recvVector|failed to recv", "lost_peer", _C10D,
        "recvValue failed on SocketImpl(fd=3)",
    ),
    Row(
        r"Socket Timeout|wait timeout|[Ww]ait timeout after", "lost_peer", _C10D,
        "wait timeout after 300000ms, keys: /default_pg/0//rank_1",
    ),
    Row(
        r"Timed out waiting", "lost_peer", _GLOO,
        "Timed out waiting 1800000ms for recv operation to complete",
    ),
    Row(
        r"Connection closed by peer|Application timeout caused pair closure", "lost_peer", _GLOO,
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:5",
    ),
    Row(
        r"Connection reset by peer|Connection refused|Broken pipe|Socket is not connected",
        "lost_peer", f"{_GLOO}; {_ERRNO}", "readBoundBuffer: Connection reset by peer",
    ),
    Row(
        r"No route to host|Network is unreachable|Host is down", "lost_peer", _ERRNO,
        "Gloo connectFullMesh failed with [10.0.0.3]:41 No route to host",
    ),
    Row(
        r"Gloo connectFullMesh failed|Connect timeout", "lost_peer", _GLOO,
        "Gloo connectFullMesh failed with Connect timeout [10.0.0.2]:32000",
    ),
    # CUDA and the GPU's driver.
    Row(
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", "memory",
        f"{_TORCH}, c10/cuda/CUDACachingAllocator.cpp",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    ),
    Row(
        r"uncorrectable ECC error encountered|uncorrectable NVLink error", "device", _CUDA,
        "CUDA error: uncorrectable ECC error encountered",
    ),
    Row(
        r"fallen off the bus|Xid \([^)]*\): 79\b", "device", f"{_XID}: 79",
        "NVRM: Xid (PCI:0000:41:00): 79, pid=12345, GPU has fallen off the bus",
    ),
    Row(  # double-bit ECC, retired pages, contained and uncontained memory errors, GSP
        r"Xid \([^)]*\): (?:46|48|62|63|64|74|92|94|95|119|120|140|143)\b", "device",
        f"{_XID}; https://docs.nvidia.com/deploy/dynamic-page-retirement/visibility.html",
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping",
    ),
    Row(
        r"CUDA error: (?:device not ready|no CUDA-capable device|system not yet initialized"
        r"|unknown error|initialization error)|CUDA driver initialization failed"
        r"|No CUDA GPUs are available", "node", _CUDA,
        "CUDA error: no CUDA-capable device is detected",
    ),
    Row(
        r"Driver/library version mismatch|driver version is insufficient", "node",
        f"{_CUDA}; NVML, nvmlErrorString", "Failed to initialize NVML: Driver/library version "
        "mismatch",
    ),
    Row(
        r"illegal memory access|misaligned address|illegal instruction was encountered", "code",
        _CUDA, "CUDA error: an illegal memory access was encountered",
    ),
    Row(
        r"device-side assert triggered|unspecified launch failure", "code", _CUDA,
        "CUDA error: device-side assert triggered",
    ),
    # The host: memory.
    Row(
        r"can't allocate memory|Cannot allocate memory|std::bad_alloc", "memory",
        f"{_TORCH}, c10/core/impl/alloc_cpu.cpp; {_ERRNO}",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ),
    Row(
        r"oom[-_]kill|[Oo]ut [Oo]f [Mm]emory: Killed process|OOM Killed", "memory",
        "Linux, mm/oom_kill.c; Slurm, slurmstepd",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have",
    ),
    Row(
        r"insufficient shared memory \(shm\)", "memory",
        f"{_TORCH}, torch/utils/data/_utils/signal_handling.py",
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared "
        "memory (shm).",
    ),
    # The shared file system: messages of the kernel and of torch.
    Row(r"No space left on device", "storage", _ERRNO, "[Errno 28] No space left on device: '/x'"),
    Row(r"Read-only file system", "storage", _ERRNO, "[Errno 30] Read-only file system: '/x'"),
    Row(r"Stale (?:NFS )?file handle", "storage", _ERRNO, "[Errno 116] Stale file handle: '/x'"),
    Row(
        r"^(?!.*NET/OFI).*(?:Input/output error|Remote I/O error)", "storage", _ERRNO,
        "[Errno 5] Input/output error",
    ),
    Row(
        r"Transport endpoint is not connected|Cannot send after transport endpoint shutdown",
        "storage", _LUSTRE, "[Errno 108] Cannot send after transport endpoint shutdown: '/fsx/x'",
    ),
    Row(
        r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+", "storage",
        f"{_TORCH}, caffe2/serialize/inline_container.cc",
        "[enforce fail at inline_container.cc:603] . unexpected pos 8960 vs 8850",
    ),
    Row(  # on all nodes before an attempt
        r"a fsynced write to \S+ takes", "storage", "slurmllm, diagnose/storage.py",
        "preflight: all nodes: a fsynced write to /fsx/r takes 3.20 s; profile trn1 allows 1",
    ),
    Row(  # a worker's exit code is storage's, and it could not write its failure record
        r"could not write why", "storage", "slurmllm, supervise/classify.py",
        "rank 0 on n1 ended with exit code 4 and could not write why",
    ),
    Row(r"Disk quota exceeded", "storage_lasting", _ERRNO, "[Errno 122] Disk quota exceeded: '/x'"),
    Row(r"File too large", "storage_lasting", _ERRNO, "[Errno 27] File too large: '/x'"),
)  # fmt: skip

# The order of the search in a message that matches several rows. The device's before the program's,
# because a broken device may cause both; echoes last.
_ORDER: tuple[Meaning, ...] = (
    "memory", "device", "code", "compiler", "storage_lasting", "storage", "node", "port",
    "lost_peer",
)  # fmt: skip


@cache
def pattern(*meanings: Meaning) -> re.Pattern[str]:
    """One pattern that matches all messages of some meanings."""
    return re.compile("|".join(f"(?:{row.pattern})" for row in TABLE if row.meaning in meanings))


MEMORY = pattern("memory")
DEVICE_FAULT = pattern("device")
COMPILER = pattern("compiler")
TAKEN_PORT = pattern("port")
STORAGE = pattern("storage", "storage_lasting")
PASSING_FAULT = pattern("storage")
LASTING_FAULT = pattern("storage_lasting")


def meaning_of(message: str) -> Meaning | None:
    """The meaning of a message; None if no row of the table matches."""
    return next((meaning for meaning in _ORDER if pattern(meaning).search(message)), None)


def telling_line(lines: Iterable[str]) -> tuple[str, Meaning] | None:
    """The first line of a log that names a cause, else the first that reports a lost peer."""
    echo: tuple[str, Meaning] | None = None
    for line in lines:
        meaning = meaning_of(line)
        if meaning == "lost_peer":
            echo = echo or (line, meaning)
        elif meaning is not None:
            return line, meaning
    return echo
