"""Verbs, options and fields that were removed before 0.2, and what to use instead.

An old script gets one error that names the replacement. The table goes with 0.2.
"""

from __future__ import annotations

# Verb, with its group → the replacement
VERBS: dict[str, str] = {
    "checkpoint convert": "resume reads both formats on any mesh; export writes Hugging Face's",
    "profile": "set profile.steps and open the traces in runs/NAME/profiles with Perfetto or "
    "HolisticTraceAnalysis (docs/train.md)",
    "run-stage": "`slurmllm resume RUN --in-allocation` or `--local` runs its stages here",
    "shell": "use `srun --overlap --jobid=JOB --nodelist=NODE --pty bash` (docs/watch.md)",
}
# Verb and option → the replacement
OPTIONS: dict[tuple[str, str], str] = {
    ("data build", "--messages-key"): "build prompts and completions, or train chats with TRL",
    **dict.fromkeys(
        (("plan", "--budget"), ("plan", "--deadline")),
        "`--nodes 4,8,16 --price USD` prints time and cost of each node count",
    ),
    ("plan", "--prices"): "give the price of a node hour with --price USD",
    **dict.fromkeys(
        (("compare", "--decimal"), ("report", "--decimal"), ("spikes", "--decimal")),
        "write numbers with decimal points, such as by sed -E 's/([0-9]),([0-9])/\\1.\\2/g'",
    ),
    ("report", "--no-html"): "the page is the only file; --no-files writes none",
    ("report", "--plot"): "the page shows the node hours; its camera button saves a picture",
}
# Dotted path of a recipe's or profile's field, or of a section → the replacement
FIELDS: dict[str, str] = {
    "cluster.price.reserved": "give the price of a node hour with --price USD",
    "cluster.stage_environment": "set cluster.container, or lines of cluster.setup (docs/site.md)",
    "slurm.notify.webhook": "let slurm.notify.command call curl (docs/supervise.md)",
}
# Fields of which a run that an older version wrote does not depend: it resumes without them.
UNUSED_BY_RUNS = frozenset({"cluster.price.reserved"})


def verb_message(verb: str) -> str | None:
    if verb not in VERBS:
        return None
    return f"slurmllm {verb} was removed; {VERBS[verb]}"


def option_message(verb: str, option: str) -> str | None:
    if (verb, option) not in OPTIONS:
        return None
    return f"{option} of slurmllm {verb} was removed; {OPTIONS[verb, option]}"


def field_message(path: str) -> str | None:
    """Return the error for a removed field, or for a field of a removed section, or None."""
    names = path.split(".")
    for length in range(len(names), 0, -1):
        section = ".".join(names[:length])
        if section in FIELDS:
            return f"{path} was removed; {FIELDS[section]}"
    return None
