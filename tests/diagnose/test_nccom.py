"""nccom-test's output, as the Neuron SDK's documentation prints it, and its call.

The samples are of the "NCCOM-TEST User Guide" (awsdocs-neuron, tools/neuron-sys-tools/nccom-test).
"""

from __future__ import annotations

import pytest

from slurmllm.diagnose.bandwidth import bus_bandwidth, nccom_command
from slurmllm.errors import NodeError

ONE = """
    size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
   33554432        33554432    uint8         768          40.69          40.69
Avg bus bandwidth:      40.6901GB/s
"""
SEVERAL = """
       size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)    algorithm
             4               1    fp32          299.91           0.00           0.00         mesh
       2097152          524288    fp32          686.32           3.06           5.73          rdh
     536870912       134217728    fp32         9689.51          55.41         103.89    kangaring
Avg bus bandwidth:	16.6181GB/s
"""
FAILED = """
     size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)
    33554432    Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log
1 errors found - test failed
"""
NO_DRIVER = "Neuron DKMS Driver is not running! Read the troubleshooting guide at: https://…\n"


@pytest.mark.parametrize(("text", "gb_s"), [(ONE, 40.69), (SEVERAL, 103.89)])
def test_the_largest_size_counts(text: str, gb_s: float) -> None:
    assert bus_bandwidth(text) == gb_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FAILED, "Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log"),
        (NO_DRIVER, "Neuron DKMS Driver is not running"),
        ("", "no output"),
    ],
)
def test_no_measurement_quotes_the_output(text: str, message: str) -> None:
    with pytest.raises(NodeError, match=message):
        bus_bandwidth(text)


def test_the_call() -> None:
    alone, several = nccom_command(1, 32, None), nccom_command(4, 32, "77")
    assert "--slurm-mode" not in alone
    assert several[:3] == ["nccom-test", "--nworkers", "128"]
    assert several[several.index("--slurm-job-id") + 1] == "77"
    assert alone[-1] == several[-1] == "allr"
