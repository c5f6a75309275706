"""Small random models of every architecture that the catalogue names: loaded, sampled, trained and resumed.

Each trains for two steps on the byte-level vocabulary of `tiny`: all weights with GRPO, which also compares the sampler
with the trainer, and adapters with DPO, which also runs the model without them. One model each of the three structures
(dense, experts, linear attention) is trained with SFT, DPO and GRPO in both ways. The results of `verify_model` are
checked here; the same function writes the records of real models.
"""

import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from oxrl.diagnose.verify_model import ALGORITHMS, _problems, verify_entry, verify_model
from oxrl.models.builtin import TINY_VOCABULARY
from oxrl.models.catalog import catalog
from oxrl.models.load import load_model
from oxrl.models.lora import linear_layer_names

SMALL = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 259,
    "pad_token_id": 256,
}
WINDOW = 8  # shorter than every row
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 256,
}
SHAPES = {
    "llama": ("LlamaConfig", {}),  # and SmolLM, DeepSeek-R1-Distill-Llama
    "llama 3": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),  # and DeepSeek-R1-Distill-Qwen
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3 moe": ("Qwen3MoeConfig", {"head_dim": 8, **EXPERTS}),
    "qwen3 next": ("Qwen3NextConfig", {**LINEAR, **SHARED_EXPERT}),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR),
    "qwen3.5 moe": ("Qwen3_5MoeTextConfig", {**LINEAR, **SHARED_EXPERT}),
    "gemma 2": ("Gemma2Config", {**ALTERNATING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma 3": ("Gemma3TextConfig", ALTERNATING),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi 3": ("Phi3Config", {"original_max_position_embeddings": 256, "rope_parameters": LONG_ROPE}),
}
STATEFUL = {"qwen3 next", "qwen3.5", "qwen3.5 moe"}
WITH_EVERY_ALGORITHM = {"llama", "qwen3 moe", "qwen3.5"}
ONE_ALGORITHM = {"full": ("grpo",), "lora": ("dpo",)}


def build(folder, shape, tokenizer):
    torch.manual_seed(1)
    name, more = SHAPES[shape]
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SMALL, **more}))
    for weight in model.parameters():  # zero biases and unit gains would hide a forgotten one
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return type(model).__name__


@pytest.fixture(scope="module")
def folder_of(tiny, tmp_path_factory):
    home = tmp_path_factory.mktemp("architectures")
    return {
        shape: (home / shape.replace(" ", "-"), build(home / shape.replace(" ", "-"), shape, tiny[1]))
        for shape in SHAPES
    }


@pytest.mark.trains
@pytest.mark.parametrize("strategy", ["full", "lora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_architecture_learns_samples_and_resumes_from_its_checkpoint(folder_of, shape, strategy):
    folder, architecture = folder_of[shape]
    known = {entry.architecture: entry.lora_targets for entry in catalog().values()}
    algorithms = ALGORITHMS if shape in WITH_EVERY_ALGORITHM else ONE_ALGORITHM[strategy]
    record = verify_model(str(folder), strategy, known.get(architecture, ()), trials=algorithms)
    assert record["problems"] == []
    assert record["architecture"] == architecture
    for algorithm in algorithms:
        numbers = record[algorithm]
        assert len(numbers["loss"]) == 2
        assert torch.tensor(numbers["loss"]).isfinite().all()
        assert min(numbers["grad_norm"]) > 0
        assert numbers["logit_change"] > 1e-4
        assert numbers["resume_gap"] == 0
    if "grpo" in algorithms:
        assert max(record["grpo"]["logprob_gap"]) < 1e-4
    expected = ("padded", "padded waves") if shape in STATEFUL else ("shared", "slots")
    assert (record["layout"], record["generation"]) == expected


def test_every_trainable_architecture_of_the_catalogue_is_tested(folder_of):
    of_text = [entry for entry in catalog().values() if not {"vision", "audio"} & set(entry.tasks)]
    named = {entry.architecture for entry in of_text if entry.not_yet is None}
    assert named <= {architecture for _, architecture in folder_of.values()}


def test_the_lora_targets_of_the_catalogue_are_all_linear_layers(folder_of):
    """Except for the scalar gate of the shared expert, which is too small to need an adapter."""
    targets = {entry.architecture: set(entry.lora_targets) for entry in catalog().values()}
    for folder, architecture in folder_of.values():
        if architecture in targets:
            linear = set(linear_layer_names(load_model(str(folder))))
            assert targets[architecture] == linear - {"shared_expert_gate"}, architecture


@pytest.mark.trains
@pytest.mark.parametrize(
    ("config", "text", "experts"),
    [("Qwen3_5Config", "Qwen3_5ForCausalLM", {}), ("Qwen3_5MoeConfig", "Qwen3_5MoeForCausalLM", SHARED_EXPERT)],
)
def test_the_text_model_is_loaded_from_a_folder_with_a_vision_tower(tmp_path, tiny, config, text, experts):
    """Qwen3.5 is published with its vision tower; only the text model is trained, with all of its weights."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole_config = getattr(transformers, config)(text_config={**SMALL, **LINEAR, **experts}, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(whole_config).eval()
    whole.save_pretrained(tmp_path / "whole")
    tiny[1].save_pretrained(tmp_path / "whole")
    record = verify_model(str(tmp_path / "whole"), trials=["sft"])
    assert record["architecture"] == text
    assert record["problems"] == []
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits
        found = load_model(str(tmp_path / "whole"))(input_ids=tokens).logits
    torch.testing.assert_close(found, expected)


def test_a_broken_model_is_not_verified(folder_of, tmp_path):
    """One weight that is not a number, somewhere in the middle."""
    folder, _ = folder_of["llama"]
    broken = AutoModelForCausalLM.from_pretrained(folder)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    shutil.copytree(folder, tmp_path / "broken")
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="not finite"):
        verify_model(str(tmp_path / "broken"))


GOOD = {"loss": [1.0, 1.0], "grad_norm": [1.0, 1.0], "logit_change": 0.1, "resume_gap": 0.0, "logprob_gap": [1e-6]}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"loss": [1.0, float("nan")]}, "loss is not finite"),
        ({"grad_norm": [1.0, 0.0]}, "gradient is zero"),
        ({"grad_norm": [float("inf"), 1.0]}, "gradient is zero or not finite"),
        ({"logit_change": 0.0}, "did not change"),
        ({"logit_change": float("nan")}, "did not change"),
        ({"resume_gap": 1e-6}, "resumed run ended with different logits"),
        ({"logprob_gap": [1e-6, 0.01]}, "sampler and trainer disagree"),
    ],
)
def test_each_bad_number_is_reported_as_a_problem(changed, problem):
    assert _problems(GOOD, "float32", exact=True) == []
    (found,) = _problems({**GOOD, **changed}, "float32", exact=True)
    assert problem in found


def test_a_record_with_other_weights_is_refused(folder_of):
    for shape in ("llama", "qwen2"):
        with pytest.raises(ValueError, match="this is not tiny"):
            verify_entry(catalog()["tiny"], str(folder_of[shape][0]))
