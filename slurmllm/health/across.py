"""What only the nodes beside each other show: who is silent, whose clock or versions differ."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping

from slurmllm.config.cluster import HealthChecks
from slurmllm.health.answer import Answer
from slurmllm.health.findings import fail, ok, warn
from slurmllm.records import HealthFinding, NodeHealth


def with_comparison(answers: Mapping[str, Answer], limits: HealthChecks) -> dict[str, NodeHealth]:
    """The nodes' own findings and those that follow from all of them."""
    ahead_s = [a.ahead_s for a in answers.values() if a.ahead_s is not None]
    usual_s = statistics.median(ahead_s or [0.0])
    # Where nobody answers, Slurm started nothing at all, because of the nodes that it names.
    led_astray = not ahead_s and any(answer.aside for answer in answers.values())
    versions = {name: _versions(answer.health) for name, answer in answers.items()}
    found = {}
    for name, answer in answers.items():
        more = [_answered(answer, limits, told=warn if led_astray and not answer.aside else fail)]
        if answer.ahead_s is not None and len(answers) > 1:
            more.append(_clock(answer.ahead_s - usual_s, limits))
        if versions[name]:
            more.append(_same(versions[name], _usual(versions), limits))
        findings = (*answer.health.findings, *(finding for finding in more if finding))
        found[name] = answer.health.model_copy(update={"findings": findings})
    return found


def _answered(
    answer: Answer, limits: HealthChecks, told: Callable[[str, str, str, str], HealthFinding]
) -> HealthFinding | None:
    """What is told of a node that did not see its checks through."""
    if answer.health.checks_s is not None:
        return None
    done = answer.health.findings
    words = f"no more word after the check of {done[-1].check}" if done else "no answer"
    said = f": {answer.aside}" if answer.aside else f" within {limits.timeout_s:g} s"
    return told("answer", "none", "", words + said)


def _clock(ahead_s: float, limits: HealthChecks) -> HealthFinding:
    """A node's clock against the median of all nodes'."""
    # 0.0 is added because -0.0 looks odd.
    ahead, limit = round(ahead_s, 2) + 0.0, limits.max_clock_skew_s
    if abs(ahead) > limit:
        words = f"the clock is {ahead:+g} s off those of the other nodes, at most {limit:g} may be"
        return fail("clock", ahead, limit, words)
    return ok("clock", ahead, limit)


def _versions(health: NodeHealth) -> dict[str, str]:
    driver = next((str(f.value) for f in health.findings if f.check == "driver"), None)
    return health.versions | ({"driver": driver} if driver else {})


def _usual(versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The version that more than half of the nodes have, of all that have one."""
    usual = {}
    for what in {what for of_node in versions.values() for what in of_node}:
        counts = Counter(of_node.get(what, "none") for of_node in versions.values() if of_node)
        (version, count), *_ = counts.most_common(1)
        usual[what] = version if 2 * count > counts.total() else ""
    return usual


def _same(own: Mapping[str, str], usual: Mapping[str, str], limits: HealthChecks) -> HealthFinding:
    """A node's versions against those of most."""
    odd = sorted(what for what, version in usual.items() if own.get(what, "none") != version)
    if not odd:
        return ok("versions", f"{len(own)} the same")
    words = ", ".join(
        f"{what} {own.get(what, 'none')} here, {usual[what] or 'several'} on the others"
        for what in odd
    )
    # Where no version is most nodes', nobody can say which of them are wrong.
    told = fail if limits.unequal_versions == "fail" and any(usual[w] for w in odd) else warn
    return told("versions", f"{len(odd)} other", "as on most nodes", words)
