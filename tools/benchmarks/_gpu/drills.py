"""Runs killed, resumed and compared with unbroken ones under the supervisor, in one JSON line.

    python -m _gpu.drills FOLDER ours DEVICE | torchtitan | FILE

`ours` is tiny_neox in compiled bf16_mixed, as the timed models are trained. FILE is a script such
as tests/trainers/ddp_script.py that is drilled in place of torchtitan's debug model, whose flex
attention has no backward pass on CPUs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[3]
STEPS, INTERVAL = 40, 10
_SLURMLLM = (sys.executable, "-m", "slurmllm")
# One step's loss needs as many digits as bits to be compared: torchtitan prints five decimals.
_TITAN = (
    "{python} -m torchtitan.train --module llama3 --config llama3_debugmodel"
    " --dump_folder {{run}}/outputs --checkpoint.enable --checkpoint.interval {interval}"
    " --training.steps {steps} --training.seq_len 512 --debug.seed 1 --debug.deterministic"
)
_SCRIPT = (
    "{python} {script} --out {{run}}/outputs --steps {steps} --save-every {interval} --step-s 0.2"
)


def write_assets(folder: Path) -> None:
    """Write the tokenizer and the text that the debug model reads from the working directory."""
    texts = [page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    )
    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": special[0], "eos_token": special[1]}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (assets / "c4_test" / "data.json").write_text(lines, "utf-8")


def write_recipe(folder: Path, script: str | None) -> Path:
    """Write the recipe of torchtitan's debug model, or of a script."""
    values = {"python": sys.executable, "steps": STEPS, "interval": INTERVAL, "script": script}
    command = {"run": (_SCRIPT if script else _TITAN).format(**values)}
    if script:
        command["checkpoints"] = "{run}/outputs/step_{step}.pt"
    else:
        write_assets(folder)
    recipe = {
        "name": "torchtitan",
        "extends": "trainers/plain" if script else "trainers/torchtitan",
        "command": {**command, "folder": str(folder), "steps": STEPS},
    }
    path = folder / "titan.yaml"
    path.write_text(json.dumps(recipe))
    return path


def submit_ours(folder: Path, device: str) -> str:
    """Train tiny_neox without a fault, its 120 steps; returns the run's name."""
    settings = [f"cluster.device={device}", "cluster.devices_per_node=1"]
    settings.append("train.precision=bf16_mixed")
    tiny = ("train.compile=false", "model.num_layers=1", "cluster.cpus_per_node=1")
    settings += ["train.compile=true"] if device == "cuda" else tiny
    submit = [*_SLURMLLM, "submit", "tiny_neox", "--name=unbroken", "--local", "--nodes=1"]
    submit += [f"--set={setting}" for setting in settings]
    subprocess.run([*submit, f"--runs-dir={folder / 'runs'}"], stdout=sys.stderr, check=True)
    return "unbroken"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("trainer")
    parser.add_argument("device", nargs="?", default="cuda")
    args = parser.parse_args()
    args.folder.mkdir()
    titan = args.trainer == "torchtitan"
    if args.trainer == "ours":
        drilled = submit_ours(args.folder, args.device)
    else:
        drilled = str(write_recipe(args.folder, None if titan else args.trainer))
    drill = [*_SLURMLLM, "drill", drilled, "--local", "--nodes=1", "--kinds=worker", "--json"]
    # As many steps as the run has, which then is the reference.
    drill += [f"--runs-dir={args.folder / 'runs'}"] + ["--steps=120"] * (args.trainer == "ours")
    done = subprocess.run(drill, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():  # its reason is in the standard error
        return done.returncode
    report = json.loads(done.stdout)
    (result,) = report["drills"]
    resume, recovery = result["resume"] or {}, result["recovery"] or {}
    version = importlib.metadata.version("torchtitan") if titan else ""
    parts = ", ".join(f"{name.removesuffix('_s')} {value}" for name, value in recovery.items())
    exact = f"all {report['steps']} steps bit-identical" if result["passed"] else "not the same"
    outcome = resume.get("text") or "; ".join(result["faults"]) or exact
    name = f"{Path(args.trainer).stem} {version}".strip()
    summary = f"{name}, killed at step {result['at_step']}: {outcome}; s: {parts}"
    print(json.dumps({"version": version, "summary": summary, "drill": result}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
