"""`data.template_kwargs` reach the chat template in sampling, in training, and when the run is evaluated."""

from __future__ import annotations

import json

import pytest

from oxrl.config import check_config
from oxrl.evaluation.evaluate import EvalModel
from oxrl.run.train import open_model, train_run
from oxrl.types import Message, Sample
from tests.rows import write_jsonl

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if effort is defined %}[{{ effort }}] {% endif %}"
    "{% endif %}"
)


@pytest.mark.trains
def test_template_variables_of_a_run_are_those_of_its_prompts_and_of_its_evaluation(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Why?"}])
    (tmp_path / "rewards.py").write_text("def length(rollout):\n    return float(len(rollout.response))\n")
    config = {
        "model": {"name": "tiny", "dtype": "float32", "chat_template": TEMPLATE},
        "data": {
            "train_files_path": str(tmp_path / "rows.jsonl"),
            "template_kwargs": {"effort": "low"},
        },
        "train": {"alg_name": "grpo", "train_steps_per_epoch": 1, "train_batch_size_per_gpu": 1},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "reward": {"reward_func": f"{tmp_path / 'rewards.py'}:length"},
    }
    run = train_run(check_config(config), tmp_path / "run")
    _, render = open_model(str(run.folder))
    recorded = next((run.folder / "record").glob("step_*")).read_text().splitlines()
    tokens = next(line["tokens"] for line in map(json.loads, recorded) if line.get("kind") == "answer")
    sampled = [token for token, on in zip(tokens["ids"], tokens["mask"], strict=True) if not on]
    assert render.tokenizer.decode(sampled) == "<|im_start|>user\nWhy?<|im_end|><|im_start|>assistant\n[low] "
    sample = Sample("s", (Message("user", "Why?"),))
    for renderer in (render, EvalModel.find(str(run.folder), [sample]).render):
        assert renderer.prompt(sample.messages).tolist() == sampled
