"""Look up every installed package in a database of known vulnerabilities, by pip-audit.

    make audit
    PIP_AUDIT_VULNERABILITY_SERVICE=osv make audit    # OSV's database instead of PyPI's

pip-audit itself ends with 0 where the database knows no package at all. Here:

    0  every package was looked up; none has a known vulnerability
    1  a package has one
    2  the database cannot be reached, or packages are not in it: these are named
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SERVICES = {"pypi": "pypi.org", "osv": "api.osv.dev"}


def main() -> int:
    service = os.environ.get("PIP_AUDIT_VULNERABILITY_SERVICE", "pypi")
    database = f"{service}'s database ({_SERVICES.get(service, 'see pip-audit --help')})"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "found.json"
        audit = [sys.executable, "-m", "pip_audit", "--skip-editable", "--format", "json"]
        done = subprocess.run(
            [*audit, "--progress-spinner", "off", "--output", str(report)],
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.is_file():
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            print(f"audit: not done: {database} cannot be reached: {reason:.300}", file=sys.stderr)
            return 2
        packages = json.loads(report.read_text())["dependencies"]
    text, code = summarize(packages, database)
    print(text)
    return code


def summarize(packages: list[dict[str, Any]], database: str) -> tuple[str, int]:
    skipped = [
        package["name"]
        for package in packages
        if "skip_reason" in package and "editable" not in package["skip_reason"]
    ]
    audited = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"{package['name']} {package['version']}: {fault['id']}; fixed in "
        + (", ".join(fault["fix_versions"]) or "no version")
        for package in audited
        for fault in package["vulns"]
    ]
    code = 1 if lines else 2 if skipped or not audited else 0
    counts = f"{len(audited)} packages looked up in {database}, {len(lines)} known vulnerabilities"
    lines.append(f"audit: {counts}")
    if skipped:
        lines.append(
            f"audit: not complete: {len(skipped)} packages are not in {database}, or it cannot be "
            f"reached: {', '.join(skipped)}"
        )
    return "\n".join(lines), code


if __name__ == "__main__":
    sys.exit(main())
