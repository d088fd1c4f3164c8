"""Print the job that this process runs in, and a step of it, as JSON: fields and environments.

step_probe.py NAME      # in the job of a run
step_probe.py salloc    # first gets a job, as the verbs that need nodes do
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

from slurmllm.slurm.environment import slurm_environment
from slurmllm.supervise import allocation

# What each task prints. scontrol would not find its step by the number alone.
TASK = 'umask; pwd; env; ulimit -a; scontrol -o show step "$SLURM_JOB_ID.$SLURM_STEP_ID"'
# What differs between two jobs of one script: ids, ports, times, priority, which nodes.
PLAIN = {
    r"\bn\[[\d,-]+\]|\bn\d\b": "NODE",
    r"\d{4}-\d\d-\d\dT[\d:]+|Unknown": "TIME",
    r"(?<=I[dD]=)\d+": "ID",
    r"(RunTime|Priority|Scheduler|PreemptEligibleTime|\w+:[SP]id)=\S+": "",
    r"(?m)^(SLURMLLM_|SLURM_\w*(PORT|PID|ADDR|TIME|KEY)|_=|SHLVL=).*": "",
}


def plain(text: str) -> list[str]:
    """Return the lines, or fields, of a text without what differs between jobs."""
    text = re.sub(rf"\b{sys.argv[-1]}\b", "NAME", text)
    for pattern, replacement in PLAIN.items():
        text = re.sub(pattern, replacement, text)
    return sorted({line.strip() for line in text.splitlines()} - {""})


def main() -> None:
    if sys.argv[1] == "salloc":
        from slurmllm.config.resolve import resolve

        allocation.SLURMLLM = (sys.executable, "-P", __file__)  # type: ignore[assignment]
        allocation.allocate_nodes(resolve("tiny_neox", "local"), ["inside"], "probe", nodes=2)
    job = allocation.SlurmAllocation()
    command = ["scontrol", "show", "job", job.job_id]
    shown = subprocess.run(command, env=slurm_environment(), capture_output=True, text=True)
    [step] = job.ask(["bash", "-c", TASK])
    output, _ = step.communicate()
    fields = re.sub(r"\s(?=\w+=)", "\n", shown.stdout)
    print(json.dumps({"job": plain(fields), "step": plain(output.decode())}))


if __name__ == "__main__":
    main()
