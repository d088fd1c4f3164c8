"""Everything that needs one GPU, in under nine minutes, as one Markdown report.

    python tools/benchmarks/gpu.py [--out build/gpu.md] [--minutes 9] [--device cpu --tiny]

Parts, each in a process of its own and with a limit of time; one that fails leaves the others:

1. The device and torch's attention kernels.
2. The tests with the marker `gpu`.
3. Training of gpt3_1.3b and a Llama of 1.1 B at sequence 2,048 in bf16 by the native backend, and
   by a compiled plain loop over transformers' model, if that is installed. Tokens/s, model-FLOPs
   utilization, memory, and what `slurmllm plan` predicts for this GPU. By the native backend also
   stochastic rounding, sequences of 8,192 tokens with and without four documents, and saves.
4. torchtitan's debug model under the supervisor, if torchtitan is installed: its worker killed, the
   resumed curve compared with an unbroken one, seconds from the kill to the next step in parts.

`--device cpu --tiny` runs the same code on tiny models, to check it where no GPU is; its figures
mean nothing. It needs torch, pytest and the packages that slurmllm imports; no network.

Exit codes: 0: all required parts succeeded (1, 2 and the native backend's trainings); 1: one
failed; 2: nothing was run: no GPU, a package is missing, or invalid options.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # an interpreter without slurmllm installed

try:
    from _gpu.report import Part, report
    from _gpu.task import MODELS, TINY, TINY_VARIANTS, VARIANTS, Task, forecast, profile_of

    from slurmllm.train.backends.native.environment import variables
except ImportError as error:
    print(f"nothing was run: {error}; install slurmllm's dependencies", file=sys.stderr)
    sys.exit(2)

_STEPS = {"cuda": 20, "cpu": 3}
_RESERVE_S = 10.0  # of the whole time, for ends of processes and the report


class _Runner:
    """Runs processes within the time that is left, their output in files of `folder`."""

    def __init__(self, folder: Path, device: str, minutes: float) -> None:
        self.folder, self.device = folder, device
        # On a CPU, where other programs may be busy, only the whole time is limited.
        self.parts_are_limited = device == "cuda"
        self.ends_at = time.monotonic() + minutes * 60 - _RESERVE_S
        paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # Empty at the start: first steps compile.
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, part: Part, command: Sequence[str]) -> str:
        """Run a part; return its standard output, and set its time and failure."""
        limit = self.ends_at - time.monotonic()
        if self.parts_are_limited:
            limit = min(limit, part.budget_s)
        if limit <= 0:
            part.failure = "no time left"
            return ""
        print(f"{part.name}, at most {limit:.0f} s", file=sys.stderr, flush=True)
        log = self.folder / f"{part.name.replace(' ', '_')}.log"
        began = time.monotonic()
        with log.open("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self.env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                part.failure = f"not done within {limit:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)  # compilers are processes of it
                output, _ = process.communicate()
            part.seconds = time.monotonic() - began
        if process.returncode and part.failure is None:
            lines = (log.read_text(encoding="utf-8", errors="replace") + output).split("\n")
            texts = [line.strip() for line in lines if line.strip()]
            part.failure = f"exit code {process.returncode}: {(texts or ['no output'])[-1]}"
            print("\n".join(texts[-20:]), file=sys.stderr, flush=True)
        return output

    def child(self, part: Part, *arguments: str) -> None:
        output = self.run(part, ["-m", "_gpu.child", *arguments])
        if part.failure is None:
            part.result = json.loads(output.strip().splitlines()[-1])


def run_tests(runner: _Runner) -> Part:
    """Run the tests that need a GPU; without one they are skipped, with a reason."""
    part = Part("tests", required=True, budget_s=200)
    marked = "pytest.mark.gpu"
    # By name: other tests may import what is not installed on a machine with a GPU.
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if marked in p.read_text("utf-8")]
    # Warnings of other torch versions than the one developed with are no failures here.
    options = ["-m", "gpu", "-rs", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    output = runner.run(part, ["-m", "pytest", *options, *map(str, sorted(files))])
    lines = output.strip().splitlines()
    part.result = {"summary": lines[-1].strip("= ") if lines else "", "output": lines[-40:]}
    if part.failure is not None:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        part.failure += "".join(f"; {line}" for line in failed[:5])
    return part


def run_training(
    runner: _Runner, model: str, trainer: str, device: dict[str, Any], profile: str, tiny: bool
) -> Part:
    task = Task(
        model=model,
        device=runner.device,
        profile=profile,
        memory_bytes=device["memory_bytes"],
        steps=_STEPS[runner.device],
        compiled=not tiny,
    )
    ours = trainer == "ours"
    part = Part(f"{model} {trainer}", ours, 75 if ours else 100, model=model, trainer=trainer)
    # The allocator's settings of our workers, for all of them.
    runner.env.update({name: of.value for name, of in variables(task.config()).items()})
    runner.child(part, "train", trainer, json.dumps(asdict(task)))
    return part


def run_torchtitan(runner: _Runner, tiny: bool) -> Part:
    """Drill torchtitan, or with `tiny` a script that runs on CPUs."""
    part = Part("torchtitan", required=tiny, budget_s=300)
    script = ["--script", str(ROOT / "tests" / "trainers" / "ddp_script.py")] if tiny else []
    if not tiny and find_spec("torchtitan") is None:
        part.result = {"missing": "torchtitan is not installed"}
        return part
    folder = runner.folder / "torchtitan"
    folder.mkdir()
    output = runner.run(part, ["-m", "_gpu.titan", str(folder), *script])
    if part.failure is None:
        part.result = json.loads(output.strip().splitlines()[-1])
    return part


def no_gpu() -> str | None:
    """Return why no GPU can be used here; None if one can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no CUDA device"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.md")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts (default 9)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, without Inductor")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the models are too large for a CPU")
    if options.device == "cuda" and (reason := no_gpu()):
        print(
            f"nothing was run: no GPU here ({reason}); see docs/developing/benchmarks.md",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    parts: list[Part] = []
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(Path(folder), options.device, options.minutes)
        describing = Part("device", required=True, budget_s=60)
        runner.child(describing, "describe", options.device)
        parts.append(describing)
        device = {"name": "unknown", "torch": "unknown", "memory_bytes": None, **describing.result}
        device_profile = "local" if options.device == "cpu" else profile_of(device["name"])
        profile = device_profile or "p5"
        parts.append(run_tests(runner))
        models, variants = (TINY, TINY_VARIANTS) if options.tiny else (MODELS, VARIANTS)
        forecasts = {}
        # Ours first: if the time is short, the peers are left out.
        trainings = [(name, "ours") for name in (*models, *variants)]
        for name, trainer in [*trainings, *((name, "loop") for name in models)]:
            parts.append(run_training(runner, name, trainer, device, profile, options.tiny))
        for model in (*models, *variants):
            task = Task(model, options.device, profile, device["memory_bytes"], 1, not options.tiny)
            forecasts[model] = {**forecast(task), "known": device_profile is not None}
        parts.append(run_torchtitan(runner, options.tiny))
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    facts = {
        "device": device["name"],
        "torch": device["torch"],
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "figures of the planner": f"profile {profile}"
        + ("" if device_profile else "; no shipped profile has this device's figures"),
        "time": f"{time.monotonic() - began:.0f} of {options.minutes * 60:.0f} s",
    }
    text = report(facts, parts, forecasts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    options.out.with_suffix(".json").write_text(
        json.dumps({"facts": facts, "forecasts": forecasts, "parts": [vars(p) for p in parts]}),
        encoding="utf-8",
    )
    print(text)
    if failed := [part.name for part in parts if part.required and part.failure is not None]:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
