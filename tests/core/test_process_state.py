"""What belongs to the whole process changes at the start of a process of ours, not beside threads.

A thread that reads a relative path while another one calls `os.chdir` reads another file; so it is
with the umask, the environment, signal handlers, the locale and the filters of warnings.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import slurmllm

ROOT = Path(slurmllm.__file__).parent
CHANGES = {
    *("os.chdir", "os.fchdir", "os.chroot", "os.umask", "os.putenv", "os.unsetenv", "os.nice"),
    *("os.setpriority", "os.environ.update", "os.environ.setdefault", "os.environ.pop"),
    *("os.environ.clear", "os.environ[]", "signal.signal", "signal.setitimer", "signal.alarm"),
    *("locale.setlocale", "time.tzset", "warnings.filterwarnings", "warnings.simplefilter"),
    *("warnings.catch_warnings", "resource.setrlimit", "socket.setdefaulttimeout"),
    *("sys.setrecursionlimit", "contextlib.redirect_stdout", "contextlib.redirect_stderr"),
    *("sys.stdout", "sys.stderr", "sys.stdin", "np.seterr", "random.seed", "logging.disable"),
}
ALLOWED = {  # file → what it changes, and why no thread of another caller sees it
    # A command of the terminal, or a process that only runs this module, before it starts threads
    "cli/main.py": {"os.environ.setdefault", "warnings.filterwarnings"},
    "cli/diagnose.py": {"os.environ.update"},
    "cli/drill.py": {"signal.signal"},
    "cli/track.py": {"signal.signal"},
    "analysis/track/sync.py": {"os.environ.update", "os.environ.setdefault"},
    "analysis/evaluate/harness.py": {"os.environ[]"},
    "analysis/evaluate/task_templates.py": {
        *("signal.signal", "signal.setitimer", "resource.setrlimit")
    },
    "core/slurm/arrays.py": {"os.environ[]"},  # submitit passes this process's variables on
    "core/slurm/processes.py": {"signal.signal"},
    "train/checkpoint/pickle_process.py": {"resource.setrlimit"},
    "train/plugins.py": {"sys.stdout"},
    # Supervisor, launcher and worker: their tasks get these variables, limits and signals
    "launch/supervise/allocation.py": {"os.environ[]", "os.environ.pop"},
    "launch/supervise/preflight.py": {"os.environ.update"},
    "launch/supervise/launcher.py": {"os.environ[]", "os.environ.update"},
    "launch/supervise/attempt_monitor.py": {"signal.signal"},
    "launch/supervise/workers.py": {"signal.signal"},
    "train/control/relay.py": {"resource.setrlimit"},
    "train/exits.py": {"signal.signal"},
    "train/backends/nxd/runtime.py": {"os.environ.pop"},
    # Of the calling thread, or of a child between fork and exec
    "train/backends/native/dcp.py": {"os.setpriority"},
    "train/checkpoint/replicas.py": {"os.setpriority"},
    "core/slurm/client.py": {"signal.signal"},
    "data/prefetch.py": {"signal.signal"},
    "launch/supervise/trainer.py": {"signal.signal"},
    # In the main thread only, restored at its end: an interrupted command must release its lock
    "launch/supervise/run_lock.py": {"signal.signal"},
    "launch/submit/launch.py": {"signal.signal"},
}


def changes(tree: ast.AST) -> Iterator[str]:
    """Yield what a module changes of the whole process."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Call):
            targets = [node.func]
        elif isinstance(node, ast.Assign | ast.Delete):
            lists = [t.elts if isinstance(t, ast.Tuple) else [t] for t in node.targets]
            targets = [target for elements in lists for target in elements]
        for target in targets:
            name = ast.unparse(target)
            if isinstance(target, ast.Subscript):
                name = f"{ast.unparse(target.value)}[]"
            if name in CHANGES:
                yield name


def test_nothing_of_the_whole_process_changes_beside_threads() -> None:
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for name in changes(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(name)
    assert found == ALLOWED
