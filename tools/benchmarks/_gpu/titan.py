"""torchtitan's debug model under the supervisor: killed, resumed, compared, in one JSON line.

    python -m _gpu.titan FOLDER [--script FILE]

FILE is a script such as tests/trainers/ddp_script.py that is drilled in place of torchtitan, whose
flex attention has no backward pass on CPUs.
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
# One step's loss needs as many digits as bits to be compared: torchtitan prints five decimals.
_TITAN = (
    "{python} -m torchtitan.train --module llama3 --config llama3_debugmodel"
    " --dump_folder {{run}}/outputs --checkpoint.enable --checkpoint.interval {interval}"
    " --training.steps {steps} --training.seq_len 512 --debug.seed 1 --debug.deterministic"
)
_SCRIPT = "{python} {script} --out {{run}}/outputs --steps {steps} --save-every {interval}"


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--script", type=Path)
    args = parser.parse_args()
    values = {"python": sys.executable, "steps": STEPS, "interval": INTERVAL, "script": args.script}
    command = {"run": (_SCRIPT if args.script else _TITAN).format(**values)}
    if args.script:
        command["checkpoints"] = "{run}/outputs/step_{step}.pt"
    else:
        write_assets(args.folder)
    recipe = {
        "name": "torchtitan",
        "extends": "trainers/plain" if args.script else "trainers/torchtitan",
        "command": {**command, "folder": str(args.folder), "steps": STEPS},
    }
    (args.folder / "titan.yaml").write_text(json.dumps(recipe))
    drill = [sys.executable, "-m", "slurmllm", "drill", str(args.folder / "titan.yaml"), "--local"]
    options = ["--nodes=1", "--kinds=worker", "--json", f"--runs-dir={args.folder / 'runs'}"]
    done = subprocess.run([*drill, *options], stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():  # its reason is in the standard error
        return done.returncode
    (result,) = json.loads(done.stdout)["drills"]
    faults = "; ".join(result["faults"])
    resume, recovery = result["resume"] or {}, result["recovery"] or {}
    version = "script" if args.script else importlib.metadata.version("torchtitan")
    parts = ", ".join(f"{name.removesuffix('_s')} {value}" for name, value in recovery.items())
    text = resume.get("text") or faults
    summary = f"torchtitan {version}, killed at step {result['at_step']}: {text}; s: {parts}"
    print(json.dumps({"version": version, "summary": summary, "drill": result}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
