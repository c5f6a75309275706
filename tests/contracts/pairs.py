"""SFT, DPO and GRPO over one backend, GRPO with each engine; in each of the ranks where there are several."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path

from oxrl.config import check_config
from oxrl.launch import join, leave
from oxrl.types import Score
from oxrl.verify import any_difference
from oxrl.wiring import train_run
from tests.rows import sums, write_jsonl
from tests.waiting import HANG

RANKS = {"local": 1, "fsdp": 2, "deepspeed": 2, "ray": 2}
ENGINES = {  # embedded: not under Ray, where the trainer is elsewhere
    "local": ("embedded", "vllm adapter", "http"),
    "fsdp": ("embedded", "vllm", "http gloo"),
    "deepspeed": ("embedded", "http"),  # with vLLM of its own under Ray
    "ray": ("vllm", "http gloo", "vllm adapter colocated"),
}
ROWS = 4  # of a step, over all ranks
VLLM = {"max_num_seqs": 16}


def config_of(backend: str, folder: Path, algorithm: str, engine: str = "embedded", url: str = ""):
    rows = sums(8)
    if algorithm == "dpo":
        rows = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "I do not know."} for row in rows]
    elif algorithm == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["response"]} for row in rows]
    ranks = RANKS[backend]
    config = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"train_files_path": str(write_jsonl(folder / f"{algorithm}.jsonl", rows))},
        "train": {
            "alg_name": algorithm,
            "train_batch_size_per_gpu": ROWS // ranks,
            "train_steps_per_epoch": 2,
            "lr": 1e-3,
        },
        "run": {"backend": backend, "training_gpus": ranks if ranks > 1 else None, "rank_time_limit": HANG},
    }
    if algorithm == "grpo":
        config["reward"] = {"reward_func": "oxrl.verify:any_difference"}
        config["rollout"] = {"n_samples": 4, "max_tokens": 8}
        engine, *switches = engine.split()
        config["inference_engine"] = {"name": engine, **(VLLM if engine == "vllm" else {})}
        config["inference_engine"] |= {"transfer": "gloo"} if switches == ["gloo"] else dict.fromkeys(switches, True)
        if "adapter" in switches:
            config["lora"] = {"enabled": True, "r": 4}
            config["train"]["lr"] = 1e-2
        if "colocated" in switches:
            config["inference_engine"]["replicas"] = 1
            config["reward"] = {"reward_func": "tests.contracts.pairs:looks_around"}
        if engine == "http":
            config["inference_engine"]["urls"] = [url]
    return check_config(config)


def looks_around(rollout):
    """What `any_difference` says, and how much of the cluster's places is free meanwhile."""
    import ray
    from ray.util import placement_group_table

    (group, *others) = [each for each in placement_group_table().values() if each["state"] == "CREATED"]
    free = ray.available_resources()
    seen = {f"free_{index}": free.get(f"CPU_group_{index}_{group['placement_group_id']}", 0.0) for index in range(2)}
    return Score(any_difference(rollout), {"other_places": float(len(others)), **seen})


def run_all(backend: str, folder: Path, url: str) -> dict[str, list[dict[str, float]]]:
    """What each run logged, by algorithm and engine."""
    wanted = [("sft", ""), ("dpo", ""), *(("grpo", engine) for engine in ENGINES[backend])]
    logged = {}
    for algorithm, engine in wanted:
        name = f"{algorithm} {engine}".strip()
        config = config_of(backend, folder, algorithm, engine or "embedded", url)
        result = train_run(config, folder / backend / name.replace(" ", "-"))
        logged[name] = result.history
    return logged


def first(_connection: Connection, backend: str, folder: Path, url: str) -> None:
    """The driver, or rank 0: what its runs logged goes to `FOLDER/BACKEND.json`."""
    if backend != "ray":
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
        join(time_limit=HANG)
    logged = run_all(backend, folder, url)
    (folder / f"{backend}.json").write_text(json.dumps(logged))
    leave(0)


def another(rank: int) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    join(time_limit=HANG)
