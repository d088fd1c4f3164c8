"""`slurmllm doctor`: look at this installation and this cluster before the first job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurmllm.diagnose.finding import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "bright_black"}


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
    """Check this installation, Slurm and the runs folder from here; changes nothing.

    Each check is ok, warn (a run can start), fail (no run can) or skipped, and says what helps.
    Exit codes: 0 without a fail; 2 a fault of this installation; 3 one of Slurm or a node.
    """
    from slurmllm.config.resolve import resolve
    from slurmllm.diagnose.cluster import slurm_findings
    from slurmllm.diagnose.finding import exit_code
    from slurmllm.diagnose.installation import installation_findings
    from slurmllm.diagnose.storage import storage_findings
    from slurmllm.rundir import runs_root
    from slurmllm.slurm.client import COMMANDS, SlurmCommands

    # Profiles are read beside a recipe; of this one, nothing else is looked at.
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
        _print_json(profile.name, findings, code)
    else:
        _print_findings(profile.name, findings)
    ctx.exit(code)


def _print_json(cluster: str, findings: Sequence[Finding], code: int) -> None:
    import json

    checks = [finding.to_json() for finding in findings]
    click.echo(json.dumps({"cluster": cluster, "exit_code": code, "checks": checks}, indent=2))


def _print_findings(cluster: str, findings: Sequence[Finding]) -> None:
    from slurmllm.tables import print_table

    click.echo(f"cluster profile {cluster}")
    rows = ((finding.state, finding.name, finding.found) for finding in findings)
    print_table(("state", "check", "found"), rows, fold="found")
    alike: dict[tuple[str, str], list[str]] = {}  # (state, remedy) → checks
    for finding in findings:
        if finding.remedy:
            alike.setdefault((finding.state, finding.remedy), []).append(finding.name)
    for (state, remedy), names in alike.items():
        mark = click.style(f"{state}:", fg=_COLOURS[state], bold=True)
        click.echo(f"{mark} {', '.join(names)}: {remedy}")
    count = {state: sum(f.state == state for f in findings) for state in _COLOURS}
    click.echo(", ".join(f"{number} {state}" for state, number in count.items()))
