"""Xid errors: what the NVIDIA driver has written into the kernel's log since it was loaded."""

from __future__ import annotations

import re

from slurmllm.core.errors import NodeError
from slurmllm.launch.diagnose import Findings, fail, ok, skipped, warn
from slurmllm.launch.diagnose.gpus import worst
from slurmllm.launch.diagnose.programs import output_of

# The kernel's buffer may be for root only, the journal for the groups adm and systemd-journal.
_READERS = (("dmesg",), ("journalctl", "-k", "-b", "-q", "-o", "cat", "--no-pager"))
_LOADED = "NVRM: loading NVIDIA"  # the driver's first line: what is before it is over
# NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (R590): the immediate action is a reset, a
# reboot or a look at the machine. Without 109, 155 and 156, which programs or requests cause too.
_RESET = "46|48|54|62|64|74|79|95|110|119|120|136|140|143|158"
# Of the hardware too, but "ignore" or "restart the application": remapped rows, contained errors,
# NVLink 5, retired resources. All others (13, 31, 43, 45, …) are of programs and drivers.
_USABLE = "63|92|94|121|14[4-9]|150|157|160|161|171|172"
# SXid: of NVLink's switches; Fabric Manager's guide asks for a reset after the fatal ones.
_EVENT = re.compile(
    rf"\bXid \([^)]*\): (?:(?P<reset>{_RESET})|{_USABLE})\b"
    r"|SXid \([^)]*\): (?P<fatal>\d+), Fatal"
)


def xid_findings(needs_no_reset: bool) -> Findings:
    """Hardware errors in the log; they fail the node unless the driver says that they are over.

    The driver says so of every GPU (`needs_no_reset`) since R565.
    """
    log = ""
    reason = "no log"
    for command in _READERS:
        try:
            log = log or output_of(*command)
        except NodeError as error:
            reason = str(error)
    if not log:  # journalctl prints nothing without the right to read; no kernel's log is empty
        yield skipped("Xid", "not readable", message=f"Xid: {reason}")
        return
    events = list(_EVENT.finditer(log.rpartition(_LOADED)[2]))
    over = "; the driver asks for no reset now" if needs_no_reset else ""
    findings = [ok("Xid", 0, 0)]
    for event in events:
        status = fail if not over and (event["reset"] or event["fatal"]) else warn
        findings.append(status("Xid", len(events), 0, f"kernel log: {event[0]}{over}"))
    yield worst(findings)
