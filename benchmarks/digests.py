"""Digests of the weights after a few fixed steps on `tiny`: a refactoring must not change them.

    python benchmarks/digests.py > before.txt     # and again afterwards, on the same machine; then compare the files

Runs go through the command line, which a refactoring does not change. Bits depend on the machine, its libraries and
the number of threads, so the digests are not kept in the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = [{"prompt": f"{n} + {n % 7}?", "response": f"{n + n % 7}"} for n in range(16)]
PAIRS = [{"prompt": f"Say {n}.", "chosen": "yes " * (1 + n % 4), "rejected": "no"} for n in range(16)]
LABELLED = [{"prompt": f"Say {n}.", "response": "yes" if n % 2 else "no", "label": bool(n % 2)} for n in range(16)]
SAMPLED = [
    "rollout.n_samples=4",
    "rollout.max_tokens=12",
    "reward.reward_func=length_target",
    "reward.params={target: 6}",
]
RUNS = {
    "sft": (ROWS, []),
    "dpo": (PAIRS, []),
    "kto": (LABELLED, []),
    "grpo": (ROWS, SAMPLED),
    "ppo": (ROWS, SAMPLED),
}
BACKENDS = {"local": ["run.backend=local"], "fsdp": ["run.backend=fsdp", "run.training_gpus=2"]}
STEPS = 4


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted((folder / "checkpoints" / f"step_{STEPS:04}").glob("*.safetensors")):
        if file.name != "rng.safetensors":
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:32]


def train(algorithm: str, backend: str, lora: bool, home: Path) -> str:
    rows, settings = RUNS[algorithm]
    data, folder = home / "rows.jsonl", home / f"{algorithm}-{backend}-{lora}"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "model.name=tiny",
        f"data.train_files_path={data}",
        f"train.alg_name={algorithm}",
        f"train.train_steps_per_epoch={STEPS}",
        "train.train_batch_size_per_gpu=2",
        "train.lr=1e-3",
        f"lora.enabled={str(lora).lower()}",
        *BACKENDS[backend],
        *settings,
    ]
    command = [sys.executable, "-m", "oxrl", "train", "--output", str(folder)]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return digest(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for backend in BACKENDS:
        for algorithm in RUNS:
            for lora in (False, True):
                with tempfile.TemporaryDirectory() as home:
                    name = f"{algorithm}{' lora' if lora else ''} {backend}"
                    print(f"{name:<16} {train(algorithm, backend, lora, Path(home))}", flush=True)


if __name__ == "__main__":
    main()
