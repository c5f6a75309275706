"""Memory against model size, and speed against the number of ranks.

    python benchmarks/scaling.py [--shapes tiny 9m 135m 0.5b] [--ranks 1 2] [--tokens 512] [--steps 3] [--json FILE]

Real runs of SFT (config, data, loading, training, checkpoint) on models with random weights, so that no hub is needed.
Beside the measured peak is what `oxrl plan` predicts: of a process on a CPU (resident memory, of the largest rank), of
tensors on a GPU. Speed is that of the steps after the first; efficiency is the speed per rank relative to one rank. All
ranks have the same number of rows, and on a CPU one thread each; there they are FSDP2 over gloo. With a GPU the larger
shapes are measured too, in bf16, on 1, 2, 4, ... devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
GIB = 2**30
SENTENCE = "the ox pulls a cart over hills of red clay while rain falls on old stone roads"
TOKENS_PER_ROW = 110
STEP = 2  # micro-batches of each rank


class Shape(NamedTuple):
    """`Shape("llama", 8192, 256, 768, 6, 4, 2)`; "tiny" is the built-in model."""

    kind: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    gpu: bool = False


SHAPES: dict[str, Shape | None] = {
    "tiny": None,
    "9m": Shape("llama", 16384, 256, 768, 6, 4, 2),
    "35m": Shape("llama", 32768, 384, 1024, 14, 6, 2),
    "135m": Shape("llama", 49152, 576, 1536, 30, 9, 3),  # SmolLM2-135M
    "0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, gpu=True),  # Qwen2.5-0.5B
    "1.5b": Shape("qwen2", 151936, 1536, 8960, 28, 12, 2, gpu=True),  # Qwen2.5-1.5B
}


def write_model(name: str, folder: Path) -> str:
    """Random weights of a shape and the tokenizer of `tiny`, as a folder that transformers loads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from oxrl.models.load import load_tokenizer

    shape = SHAPES[name]
    if shape is None:
        return name
    config = AutoConfig.for_model(
        shape.kind, vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
        tie_word_embeddings=True,
    )  # fmt: skip
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if shape.gpu else torch.float32)
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return str(folder)


def make_config(model: str, folder: Path, ranks: int, tokens: int, steps: int) -> dict[str, Any]:
    """A run whose steps fill `STEP` micro-batches of each rank."""
    rows = max(2, STEP * tokens // TOKENS_PER_ROW)
    lines = [{"prompt": f"{n % 10}?", "response": f"{n % 7} {SENTENCE}"} for n in range(rows * ranks * steps)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "model": {"name": model},
        "data": {"train_files_path": str(data)},
        "train": {
            "alg_name": "sft",
            "train_steps_per_epoch": steps,
            "train_batch_size_per_gpu": rows,
            "micro_batch_tokens": tokens,
        },
        "run": {"training_gpus": ranks, "backend": "local" if ranks == 1 else "fsdp"},
    }


def plan(config: dict[str, Any], folder: Path) -> dict[str, float]:
    import torch

    from oxrl.config import check_config
    from oxrl.diagnose.plan import plan_run

    planned = plan_run(check_config(config), folder / "run")
    outside = planned.memory.framework if torch.cuda.is_available() else 0  # a GPU's context is not in torch's numbers
    return {"parameters": planned.facts.parameters, "planned": planned.memory.peak - outside}


def train(config: dict[str, Any], folder: Path) -> dict[str, float]:
    import torch

    from oxrl.config import check_config
    from oxrl.run.train import train_run

    train_run(check_config(config), folder / "run")
    return {"allocated": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {}


def in_own_process(command: list[str], gpu: bool) -> tuple[str, int]:
    """Run a command; return its output and the largest resident memory of one of its processes, in bytes."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if not gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{text[-3000:]}")
    return text, usage.ru_maxrss * 1024


def alone(what: str, file: str) -> None:
    folder = Path(file).parent
    print(json.dumps({"plan": plan, "train": train}[what](json.loads(Path(file).read_text()), folder)))


def measure(name: str, ranks: int, tokens: int, steps: int) -> dict[str, Any]:
    shape = SHAPES[name]
    gpu = shape is not None and shape.gpu
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        config = make_config(write_model(name, folder / "model"), folder, ranks, tokens, steps)
        file = folder / "config.json"
        file.write_text(json.dumps(config))
        text, _ = in_own_process([__file__, "--alone", "plan", str(file)], gpu)
        facts = json.loads(text.splitlines()[-1])
        if ranks == 1:
            text, resident = in_own_process([__file__, "--alone", "train", str(file)], gpu)
            peak = json.loads(text.splitlines()[-1]).get("allocated", resident)
        else:
            _, resident = in_own_process(["-m", "oxrl", "train", str(file), "--output", str(folder / "run")], gpu)
            peak = None if gpu else resident
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "step_seconds" in line][1:]
    speed = sum(line["tokens"] for line in timed) / sum(line["step_seconds"] for line in timed)
    return {"shape": name, "device": "gpu" if gpu else "cpu", "ranks": ranks, **facts, "peak": peak, "speed": speed}


def table_row(found: dict[str, Any], one: float | None) -> str:
    peak, planned = found["peak"], found["planned"] / GIB
    memory = f"{planned:.2f} | {peak / GIB:.2f} | {planned * GIB / peak - 1:+.0%}" if peak else f"{planned:.2f} | |"
    efficiency = f"{found['speed'] / (one * found['ranks']):.2f}" if one and found["ranks"] > 1 else ""
    size = f"{found['parameters'] / 1e6:,.1f}M"
    return (
        f"| {found['shape']} | {size} | {found['device']} | {found['ranks']} | {memory} | "
        f"{found['speed']:,.0f} | {efficiency} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all that this machine can train")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 1 and 2; on GPUs 1, 2, 4, ... devices")
    parser.add_argument("--tokens", type=int, help="per micro-batch; default 512, on a GPU 8192")
    parser.add_argument("--steps", type=int, default=3, help="of each run; the first is not timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to a file")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if chosen.alone:
        alone(*chosen.alone)
        return
    import torch

    devices = torch.cuda.device_count()
    print("| shape | parameters | device | ranks | planned GiB | measured GiB | error | tokens/s | efficiency |")
    print("|---|---|---|---|---|---|---|---|---|")
    results: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        gpu = shape is not None and shape.gpu
        if name not in (chosen.shapes or SHAPES) or (gpu and not devices):
            continue
        counts = chosen.ranks or ([2**n for n in range(devices.bit_length())] if gpu else [1, 2])
        one = None
        for ranks in sorted(ranks for ranks in counts if not gpu or ranks <= devices):
            found = measure(name, ranks, chosen.tokens or (8192 if gpu else 512), chosen.steps)
            one = found["speed"] if ranks == 1 else one
            results.append(found)
            print(table_row(found, one), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
