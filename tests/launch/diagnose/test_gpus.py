"""GPUs, kernel log, DCGM and ports, by recorded output of nvidia-smi, dmesg, dcgmi and /sys.

Sources: nvidia-smi, in the files; DCGM 4.2.3 on a GB10 (Glimmer's test data); DCGM 3.1.0 (NVIDIA's
own tests, shortened); messages of the kernel log from NVIDIA's documents, as is SXid.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch.diagnose.conftest import Profile, Program

from slurmllm.core.run.records import Finding
from slurmllm.launch.diagnose import gpus
from slurmllm.launch.diagnose.node import device_findings, node_findings, port_findings
from slurmllm.launch.diagnose.programs import run_program
from slurmllm.train.backends import environment

RECORDED = Path(__file__).parent / "recorded"
Checks = Callable[..., dict[str, Finding]]
ROOT = "[    0.000000] Linux version 6.8.0"


@pytest.fixture
def checks(
    program: Program, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Checks:
    """(output of nvidia-smi, of dmesg, overrides…) → findings by check, in a job with one GPU."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program("journalctl", "exit 1")
    marker = tmp_path / "run" / ".health-marker-1"
    marker.parent.mkdir()
    marker.touch()

    def check(smi: str, log: str = ROOT, *overrides: str) -> dict[str, Finding]:
        for name, text in (("nvidia-smi", smi), ("dmesg", log)):
            (tmp_path / name).write_text(text)
            program(name, f"cat {tmp_path / name}")
        cluster = profile(
            "p4d", "cluster.devices_per_node=1", "cluster.health.efa_interfaces=0", *overrides
        )
        return {f.check: f for f in node_findings("n1", cluster, marker)}

    return check


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


@pytest.mark.parametrize(
    ("name", "temperature", "limit"),
    [("a100", 27, 89), ("t4", 40, 93), ("l4", 45, 86), ("rtx_pro_6000", 24, 94)],
)
def test_recorded_gpus_are_healthy(checks: Checks, name: str, temperature: int, limit: int) -> None:
    found = checks(recorded(f"{name}.xml"))
    accused = {check for check, finding in found.items() if finding.status == "fail"}
    # Both hold memory; the process of one is of another PID namespace.
    assert accused == ({"GPU memory"} if name in ("t4", "rtx_pro_6000") else set())
    hottest = found["temperature"]
    assert (hottest.status, hottest.value, hottest.expected) == ("ok", temperature, limit)
    for check in ("device errors", "clocks", "NVLink", "GPU processes", "Xid"):
        assert (found[check].status, found[check].value) == ("ok", 0)
    assert (found["driver"].status, found["DCGM"].status) == ("ok", "skipped")


@pytest.mark.parametrize(
    ("name", "old", "new", "check", "status", "message"),
    [
        ("a100", "dram_uncorrectable>0", "dram_uncorrectable>2", "device errors", "fail", "le: 2"),
        ("l4", "secded>0", "secded>1", "device errors", "fail", "GPU 0: ecc_errors/volatile/sram"),
        ("l4", "exceeded>No", "exceeded>Yes", "device errors", "fail", "threshold_exceeded: Yes"),
        ("l4", "row_failure>No", "row_failure>Yes", "device errors", "fail", "row_failure: Yes"),
        ("l4", "row_pending>No", "row_pending>Yes", "device errors", "warn", "row_pending: Yes"),
        ("t4", "retirement>No", "retirement>Yes", "device errors", "warn", "retirement: Yes"),
        ("l4", "required>No", "required>Yes", "device errors", "fail", "reset_required: Yes"),
        ("rtx_pro_6000", "action>None", "action>Reset", "device errors", "fail", "action: Reset"),
        ("rtx_pro_6000", "action>None", "action>Drain and Reset", "device errors", "fail", "Drain"),
        ("rtx_pro_6000", "action>None", "action>Keine", "device errors", "ok", ""),
        ("l4", "45 C", "GPU requires reset", "device errors", "fail", "GPU requires reset"),
        ("a100", "27 C", "88 C", "temperature", "ok", ""),
        ("a100", "27 C", "89 C", "temperature", "fail", "89 °C at rest; it slows down at 89 °C"),
        ("l4", ">39 C", ">-1 C", "temperature", "ok", ""),
        ("l4", ">39 C", ">-2 C", "temperature", "fail", "45 °C at rest; it slows down at 45 °C"),
        ("t4", "hw_slowdown>Not ", "hw_slowdown>", "clocks", "fail", "hw_slowdown: Active"),
        ("l4", "hw_power_brake_slowdown>Not ", "hw_power_brake_slowdown>", "clocks", "fail", "bra"),
        ("l4", "sw_thermal_slowdown>Not ", "sw_thermal_slowdown>", "clocks", "warn", "sw_therm"),
        ("l4", "<state>N/A", "<state>In Progress", "NVLink", "warn", "fabric/state: In Progress"),
        ("a100", "50 MiB", "1023 MiB", "GPU memory", "ok", ""),
        ("a100", "50 MiB", "9000 MiB", "GPU memory", "fail", "9000 MiB in use before the start; "),
    ],
)
def test_a_fault_has_value_limit_and_gpu(
    checks: Checks, name: str, old: str, new: str, check: str, status: str, message: str
) -> None:
    text = recorded(f"{name}.xml")
    assert old in text
    finding = checks(text.replace(old, new))[check]
    assert (finding.status, message in finding.message) == (status, True)
    assert status == "ok" or "GPU 0" in finding.message


@pytest.mark.parametrize(
    ("owner", "job", "overrides", "status"),
    [
        ("ann", "6", (), "fail"),
        ("ann", "6", ("cluster.exclusive=false",), "warn"),
        ("ann", "6", ("cluster.health.warn_only=[GPU processes]",), "warn"),
        ("me", "6", (), "fail"),
        ("me", None, (), "fail"),
        ("me", "7", (), "warn"),  # of this job's last attempt
        ("root", None, (), "ok"),  # the site's
    ],
)
def test_compute_processes(
    checks: Checks,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    job: str | None,
    overrides: tuple[str, ...],
    status: str,
) -> None:
    def process(pid: int | None = None) -> object:
        user = owner if pid == 116860 else "me"
        return SimpleNamespace(
            pid=pid, username=lambda: user, environ=lambda: {"SLURM_JOB_ID": job} if job else {}
        )

    monkeypatch.setattr("psutil.Process", process)
    found = checks(recorded("rtx_pro_6000.xml"), ROOT, *overrides)
    assert found["GPU processes"].status == status
    if status != "ok":
        assert found["GPU processes"].message.startswith(f"GPU 0: process 116860 of {owner}: /root")
        assert found["GPU memory"].status == "warn"


def test_of_several_gpus_the_worst_is_named(checks: Checks) -> None:
    text = recorded("a100.xml")
    gpu = text[text.index("  <gpu ") : text.index("</nvidia_smi_log>")]
    hot = gpu.replace("27 C", "91 C")
    found = checks(text.replace(gpu, gpu + hot + hot), ROOT, "cluster.devices_per_node=3")
    assert (found["devices"].value, found["temperature"].value) == (3, 91)
    assert found["temperature"].message.startswith("GPU 1: 91 °C")
    assert found["temperature"].message.endswith("and 1 more")


@pytest.mark.parametrize("name", ["a100", "l4"])
def test_absent_or_unknown_fields_do_not_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = recorded(f"{name}.xml")
    leaves = sorted(set(re.findall(r"<(\w+)>[^<>]*</\1>", text)))
    assert len(leaves) > 20
    values = ("N/A", "", "[Unknown Error]", "nicht verfügbar", "3,5 °C", "99" * 99 + " C", "-1 MiB")
    for leaf, value in itertools.product(leaves, (None, *values)):
        replacement = "" if value is None else f"<{leaf}>{value}</{leaf}>"
        changed = re.sub(rf"<{leaf}>[^<>]*</{leaf}>", replacement, text)
        monkeypatch.setattr(gpus, "output_of", lambda *_, changed=changed: changed)
        accused = [f for f in gpus.gpu_findings(gpus.read_gpus()[1]) if f.status == "fail"]
        assert accused == [], (leaf, value)


@pytest.mark.parametrize(
    "output",
    ["", "Kein Gerät gefunden", "<html/>", "<nvidia_smi_log></nvidia_smi_log>", "\0\x1b", "<a"],
)
def test_output_that_cannot_be_read_is_no_failure(checks: Checks, output: str) -> None:
    found = checks(output)
    assert {check for check, finding in found.items() if finding.status == "fail"} == set()
    assert found["devices"].status == "warn"
    assert "not checked: nvidia-smi -q -x printed" in found["devices"].message


def test_a_program_that_does_not_end(
    program: Program, monkeypatch: pytest.MonkeyPatch, profile: Profile
) -> None:
    monkeypatch.setattr(run_program, "__kwdefaults__", {"limit_s": 0.3})
    monkeypatch.setattr(environment, "_OUTPUT_S", 0.3)
    monkeypatch.setattr(gpus, "DIAGNOSTIC_S", 1)
    program("nvidia-smi", "exec sleep 60")
    program("dmesg", "exec sleep 60")
    program("dcgmi", "exec sleep 60")
    *_, found = gpus.dcgm_findings()
    assert (found.status, found.message) == ("skipped", "dcgmi diag -r 1: no end within 1 s")
    by_check = {f.check: f for f in device_findings(profile("p4d"))}
    assert by_check["devices"].message == "not checked: nvidia-smi did not end within 0 s"
    assert {finding.status for finding in by_check.values()} <= {"ok", "warn", "skipped"}


XID = "[ 9.1] NVRM: Xid (PCI:0000:83:00): {}, pid=2710030, name=python, Ch 00000008\n"


@pytest.mark.parametrize(
    ("log", "status", "value"),
    [
        ("".join(map(XID.format, (13, 31, 43, 45, 8, 109, 137))), "ok", 0),
        (XID.format(79), "fail", 1),
        (XID.format(119).replace("PCI:", ""), "fail", 1),
        (XID.format(95).replace("00)", "00 GPU-I:05)"), "fail", 1),
        (XID.format(63) + XID.format(94) + XID.format(31), "warn", 2),
        (XID.format(48) + "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15\n", "ok", 0),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM", "fail", 1),
        ("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX", "ok", 0),
    ],
)
def test_xid(checks: Checks, log: str, status: str, value: int) -> None:
    finding = checks(recorded("a100.xml"), ROOT + log)["Xid"]
    assert (finding.status, finding.value, finding.expected) == (status, value, 0)
    # The driver's word about now; a100's version does not print it.
    now = checks(recorded("rtx_pro_6000.xml"), ROOT + log)["Xid"]
    assert (now.status, now.value) == ("warn" if value else "ok", value)


def test_a_kernel_log_that_may_not_be_read(checks: Checks, program: Program) -> None:
    checks(recorded("a100.xml"))
    program("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    *_, found = gpus.xid_findings([])
    assert (found.status, found.value) == ("skipped", "not readable")
    program("journalctl", "echo 'NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus'")
    *_, found = gpus.xid_findings([])
    assert "Xid (PCI:0000:41:00): 79" in found.message


SEVERE = recorded("dcgm_4.2.3.txt").replace('"error_severity" : 5', '"error_severity" : 2')
UNREACHABLE = "Error: unable to establish a connection to the specified host: localhost"


@pytest.mark.parametrize(
    ("output", "status", "message"),
    [
        (recorded("dcgm_3.1.0.txt"), "ok", ""),
        (recorded("dcgm_4.2.3.txt"), "warn", "Persistence mode for GPU 0 is disabled"),
        (SEVERE, "fail", "Persistence mode for GPU 0"),
        (UNREACHABLE, "skipped", UNREACHABLE),
        ("", "skipped", "dcgmi diag -r 1: "),
        ("{" * 5000, "skipped", ""),
    ],
)
def test_dcgm(program: Program, tmp_path: Path, output: str, status: str, message: str) -> None:
    (tmp_path / "output").write_text(output)
    program("dcgmi", f"cat {tmp_path}/output; exit 226")
    *_, found = gpus.dcgm_findings()
    assert (found.status, message in found.message) == (status, True)


def test_ports(profile: Profile, tmp_path: Path) -> None:
    assert list(port_findings(profile("p4d"), tmp_path)) == []
    for number in range(9):
        port = tmp_path / f"sys/class/infiniband/mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n" if number < 8 else "1: DOWN\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n" if number else "200 Gb/sec (4X HDR)\n")
    (found,) = port_findings(profile("p4d"), tmp_path)
    assert (found.status, found.value) == ("ok", "1 × 200 Gb/sec, 7 × 400 Gb/sec, 1 × down")
    (found,) = port_findings(profile("p4d", "cluster.health.network_gb_s=375"), tmp_path)
    assert (found.status, found.expected) == ("ok", 375)
    (found,) = port_findings(profile("p4d", "cluster.health.network_gb_s=400"), tmp_path)
    assert found.message.endswith("1 × down: 375 GB/s; profile p4d requires 400")
