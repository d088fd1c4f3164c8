"""`slurmllm doctor`: check this installation and this cluster before the first job."""

from __future__ import annotations

import click

from slurmllm.cli import options
from slurmllm.cli.health import echo_by_message


@click.command()
@options.cluster
@click.option("--partition", help="Slurm partition.  [default: the profile's, else Slurm's]")
@options.runs_dir
@options.as_json
@click.pass_context
def doctor(
    ctx: click.Context,
    cluster: str | None,
    partition: str | None,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Check this installation, Slurm and the runs folder from this machine; changes nothing.

    Each check is ok, warn (a run can start), fail (no run can) or skipped, with a suggested fix.
    Exit codes: 0 no check failed; 2 a fault of this installation; 3 a fault of Slurm or a node.
    """
    import json

    from slurmllm.config.resolve import resolve
    from slurmllm.diagnose.finding import exit_code
    from slurmllm.diagnose.login_node import installation_findings, slurm_findings
    from slurmllm.diagnose.storage import storage_findings
    from slurmllm.rundir import runs_root
    from slurmllm.slurm.client import COMMANDS, SlurmCommands
    from slurmllm.tables import print_table

    # A profile is resolved together with a recipe, which is not used here.
    profile = resolve("tiny_neox", cluster).cluster
    client = SlurmCommands()
    with_slurm = len(client.missing_commands()) < len(COMMANDS)
    findings = [
        *installation_findings(profile),
        *slurm_findings(client, profile, partition),
        *storage_findings(runs_root(runs_dir), profile, with_slurm),
    ]
    code = exit_code(findings)
    if as_json:
        checks = [
            {"name": f.check, "state": f.status, "found": f.value, "remedy": f.fix,
             "blame": f.blame}
            for f in findings
        ]  # fmt: skip
        summary = {"cluster": profile.name, "exit_code": code, "checks": checks}
        click.echo(json.dumps(summary, indent=2))
    else:
        click.echo(f"cluster profile {profile.name}")
        rows = ((f.status, f.check, str(f.value)) for f in findings)
        print_table(("state", "check", "found"), rows, fold="found")
        echo_by_message((f.status, f.check, f.fix) for f in findings if f.fix)
        statuses = [finding.status for finding in findings]
        counts = (f"{statuses.count(s)} {s}" for s in ("ok", "warn", "fail", "skipped"))
        click.echo(", ".join(counts))
    ctx.exit(code)
