"""Short runs over one backend: SFT, DPO, and GRPO with one of its engines. In each rank, where there are several."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path

from oxrl.config import check_config
from oxrl.diagnose.verify_model import any_difference
from oxrl.run.launch import join, leave
from oxrl.run.train import train_run
from oxrl.types import Score
from tests.rows import sums, write_jsonl
from tests.waiting import HANG

RANKS = {"local": 1, "fsdp": 2, "deepspeed": 2, "ray": 2}
ENGINES = {  # embedded: not under Ray, where the trainer is another process
    "local": ("embedded", "vllm adapter", "http"),
    "fsdp": ("embedded", "vllm", "http gloo"),
    "deepspeed": ("embedded", "http"),  # with its own vLLM: under Ray
    "ray": ("vllm adapter colocated",),
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
        config["reward"] = {"reward_func": "oxrl.diagnose.verify_model:any_difference"}
        config["rollout"] = {"n_samples": 4, "max_tokens": 8}
        engine, *switches = engine.split()
        config["inference_engine"] = {"name": engine, **(VLLM if engine == "vllm" else {})}
        config["inference_engine"] |= {"transfer": "gloo"} if switches == ["gloo"] else dict.fromkeys(switches, True)
        if "adapter" in switches:
            config["lora"] = {"enabled": True, "r": 4}
            config["train"]["lr"] = 1e-2
        if "colocated" in switches:
            config["inference_engine"]["replicas"] = 1
            config["reward"] = {"reward_func": "tests.contracts.pairs:reward_and_free_bundles"}
        if engine == "http":
            config["inference_engine"]["urls"] = [url]
    return check_config(config)


OTHER_GROUPS: set[str] = set()  # placement groups of the cluster before the run


def reward_and_free_bundles(rollout):
    """The reward of `any_difference`, and the free share of each bundle of the run's placement group."""
    import ray

    (group, *others) = [
        name for name, each in groups().items() if each["state"] == "CREATED" and name not in OTHER_GROUPS
    ]
    free = ray.available_resources()
    seen = {f"free_{index}": free.get(f"CPU_group_{index}_{group}", 0.0) for index in range(2)}
    return Score(any_difference(rollout), {"other_groups": float(len(others)), **seen})


def groups() -> dict[str, dict]:
    from ray.util import placement_group_table

    return placement_group_table()


def run(backend: str, name: str, folder: Path, url: str) -> list[dict[str, float]]:
    """Return what a run logged: `run("fsdp", "grpo embedded", ...)`, `run("local", "sft", ...)`."""
    algorithm, _, engine = name.partition(" ")
    return train_run(config_of(backend, folder, algorithm, engine or "embedded", url), folder / "run").history


def run_on_ray(name: str, folder: Path) -> list[dict[str, float]]:
    """On the cluster that this process has started."""
    OTHER_GROUPS.update(groups())
    return run("ray", name, folder, "")


def first(_connection: Connection, backend: str, name: str, folder: Path, url: str) -> None:
    """The only process, or rank 0: what its run logged goes to `FOLDER/logged.json`."""
    if RANKS[backend] > 1:
        another(0)
    (folder / "logged.json").write_text(json.dumps(run(backend, name, folder, url)))
    leave(0)


def another(rank: int) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    join(time_limit=HANG)
