"""Everything that needs one GPU, in under nine minutes, as one Markdown report.

    python tools/benchmarks/gpu.py [--out build/gpu.md] [--minutes 9] [--device cpu --tiny]

Parts, each in a process of its own and with a limit of time; one that fails leaves the others. The
most important come first, so that what the time does not reach is the rest:

1. The device and torch's attention kernels.
2. gpt3_1.3b and a Llama of 1.1 B, 8 × 2,048 tokens in bf16, by the native backend: the first step,
   tokens/s, MFU, memory, the aim, what `slurmllm plan` predicts; sizes of the head's chunks, and
   where a step's time goes by classes of kernels.
3. Side by side: the tests with the marker `gpu`; tiny_neox killed, resumed, compared with an
   unbroken run; and the compilation of 4, whose caches are then full.
4. The same models by a compiled plain loop over transformers' model and by torchtitan 0.2.
5. FP8, torch's AdamW in place of the one-pass update, `calibrate`, Muon, stochastic rounding.
6. torchtitan's debug model killed under the supervisor, and the resumed curve compared.

What is not installed (transformers, torchtitan, torchao for FP8) is not run; the report says so.

`--device cpu --tiny` runs the same code on tiny models, to check it where no GPU is; its figures
mean nothing. It needs torch, pytest and the packages that slurmllm imports; no network.

Exit codes: 0: all required parts succeeded (1, 2, of 3 tests and resume, FP8, `calibrate`); 1: one
failed; 2: nothing was run: no GPU, a package is missing, or invalid options.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # an interpreter without slurmllm installed

try:
    from _gpu.report import Part, report
    from _gpu.task import MODELS, TINY, TINY_VARIANTS, VARIANTS, Task, forecast, profile_of

    from slurmllm.core.errors import ConfigError
    from slurmllm.train.backends.native.environment import variables
except ImportError as error:
    print(f"nothing was run: {error}; install slurmllm's dependencies", file=sys.stderr)
    sys.exit(2)

_STEPS = {"cuda": 20, "cpu": 3}
# Seconds that parts are expected to take on one H200, and at most. A process is up after 8; first
# steps are ours 11, compiled loops 43 and 53, torchtitan 11; a step is 0.27 (gpt3_1.3b, 26 November
# 2026). The others are estimates. Expected together: 510 with the tests, 530 with Muon.
_LIMITS = {
    "device": 60,  # 10
    "ours": 90,  # 55 and 50 with chunks and profile
    "tests": 200,  # 130, side by side with the next two
    "resume": 200,  # 80
    "compile": 110,  # 55 and 65
    "loop": 100,  # 30: its caches are full
    "torchtitan": 60,  # 25
    "variant": 75,  # 30; torch's AdamW 20
    "calibrate": 75,  # 50: calibrate's own limit is 45
    "drill of torchtitan": 200,
}
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
            # Threads that wait for one another are slow where other programs are busy.
            **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
        }

    def run(self, part: Part, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
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
                env={**self.env, **(env or {})},
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

    def results(
        self, part: Part, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Part:
        """Run a part whose output's last line is its result, also if it fails later."""
        lines = self.run(part, ["-m", *command], env).strip().splitlines()
        with suppress(ValueError):  # what a part that was killed did not end
            part.result = json.loads(lines[-1] if lines else "")
        if part.failure is not None and "summary" in part.result:
            part.failure = part.result["summary"]
        return part


def run_tests(runner: _Runner) -> Part:
    """Run the tests that need a GPU; without one they are skipped, with a reason."""
    part = Part("tests", required=True, budget_s=_LIMITS["tests"])
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


class _Trainings:
    """Runs trainings on the described device, with the forecasts of their models."""

    def __init__(self, runner: _Runner, device: Mapping[str, Any], profile: str, tiny: bool):
        self._runner, self._profile, self._tiny = runner, profile, tiny
        self._memory_bytes = device["memory_bytes"]
        self.forecasts: dict[str, dict[str, float]] = {}

    def run(
        self, model: str, trainer: str, *extras: str, limit: str = "variant", required: bool = False
    ) -> Part:
        """Train, with `limit` "compile" one step only."""
        device = self._runner.device
        name, steps = f"{model} {trainer}", _STEPS[device]
        if limit == "compile":
            name, steps = f"{name}, compilation", 0
        part = Part(name, required, _LIMITS[limit], model=model, trainer=trainer)
        memory_bytes, compiled = self._memory_bytes, not self._tiny
        task = Task(model, device, self._profile, memory_bytes, steps, compiled, extras)
        try:
            config = task.config()
            self.forecasts[model] = forecast(task)
        except ConfigError as error:  # a setting that this version lacks
            part.result = {"missing": str(error)}
            return part
        # The allocator's settings of our workers, for all of them.
        env = {name: of.value for name, of in variables(config).items()}
        command = ["_gpu.child", "train", trainer, json.dumps(asdict(task))]
        return self._runner.results(part, command, env)


def run_drill(runner: _Runner, trainer: str, limit: str, *, required: bool) -> Part:
    """Kill a run, or torchtitan's, and compare the resumed curve with that of an unbroken one."""
    part = Part(limit, required, _LIMITS[limit])
    if trainer == "torchtitan" and not version_of("torchtitan").startswith("0.3"):
        part.result = {"missing": "torchtitan 0.3 is not installed"}
        return part
    folder = str(runner.folder / part.name.replace(" ", "_"))
    return runner.results(part, ["_gpu.drills", folder, trainer, runner.device])


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run_all(runner: _Runner, trainings: _Trainings, *, tiny: bool) -> list[Part]:
    models, variants = (TINY, TINY_VARIANTS) if tiny else (MODELS, VARIANTS)
    _, llama = models
    train = trainings.run
    measured = ("head", "profile")
    parts = [train(name, "ours", *measured, limit="ours", required=True) for name in models]
    with ThreadPoolExecutor() as pool:
        tests = pool.submit(run_tests, runner)
        resume = pool.submit(run_drill, runner, "ours", "resume", required=True)
        # One after the other: together they have 91 GB of the device.
        compiling = [train(name, "loop", limit="compile") for name in models]
        parts += [tests.result(), resume.result(), *compiling]
    for first in compiling:
        loop = train(first.model, "loop", limit="loop")
        loop.result |= first.result  # of both without caches
        parts.append(loop)
    parts.append(train(llama, "torchtitan", limit="torchtitan"))  # it has no GPT-3
    fp8 = [name for name in variants if name.endswith("fp8")]
    parts += [train(name, "ours", "profile", required=True) for name in fp8]
    parts += [train(name, "torch_adamw") for name in models]
    calibrate = Part("calibrate", required=True, budget_s=_LIMITS["calibrate"])
    quick = "quick" if tiny else "whole"
    parts.append(runner.results(calibrate, ["_gpu.child", "calibrate", runner.device, quick]))
    rest = [name for name in variants if name not in fp8]
    parts += [train(name, "ours", *["profile"] * name.endswith("muon")) for name in rest]
    script = str(ROOT / "tests" / "trainers" / "ddp_script.py")
    trainer = script if tiny else "torchtitan"
    return [*parts, run_drill(runner, trainer, "drill of torchtitan", required=tiny)]


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
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(Path(folder), options.device, options.minutes)
        describing = Part("device", required=True, budget_s=_LIMITS["device"])
        runner.results(describing, ["_gpu.child", "describe", options.device])
        device = {"name": "unknown", "torch": "unknown", "memory_bytes": None, **describing.result}
        device_profile = "local" if options.device == "cpu" else profile_of(device["name"])
        profile = device_profile or "p5"
        trainings = _Trainings(runner, device, profile, options.tiny)
        parts = [describing, *run_all(runner, trainings, tiny=options.tiny)]
    forecasts = {
        model: {**values, "known": device_profile is not None}
        for model, values in trainings.forecasts.items()
    }
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    facts = {
        "device": device["name"],
        "torch": device["torch"],
        **{name: version_of(name) for name in ("transformers", "torchao", "torchtitan")},
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
