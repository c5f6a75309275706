"""Packed, shuffled and single rows say the same, for the model shapes in use and with their traps switched on."""

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from oxrl.backends._forward import LanguageModel, prepare_layout
from oxrl.data.pack import collate
from oxrl.types import Row

SMALL = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOW = 5  # shorter than most rows below
SHAPES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma2 with soft caps": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "head_dim": 12,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 12,
        },
    ),
    "cohere with scaled logits": ("CohereConfig", {"logit_scale": 0.25}),
    "granite with divided logits": ("GraniteConfig", {"logits_scaling": 4.0}),
    "phi with a biased head": ("PhiConfig", {}),
}


def build(shape, attention="sdpa"):
    torch.manual_seed(1)
    name, more = SHAPES[shape]
    config = getattr(transformers, name)(**SMALL, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # zero biases and unit gains would hide a forgotten one
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def some_rows(lengths=(9, 2, 17, 5, 12), vocabulary=120):
    random = np.random.default_rng(3)
    return [Row(str(i), random.integers(0, vocabulary, n), np.arange(n) > 0) for i, n in enumerate(lengths)]


def naive_logprobs(model, row):
    """The row alone, by the model's own forward, in the obvious way."""
    tokens = torch.tensor(row.tokens)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def by_row(module, rows):
    batch = collate([(row,) for row in rows])
    values = module(batch).logprob
    return {id: values[a + 1 : b] for id, a, b in zip(batch.ids, batch.borders[:-1], batch.borders[1:], strict=True)}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_and_shuffled_rows_equal_single_ones_in_value_and_gradient(shape, attention, checkpointing):
    model = build(shape, attention)
    if "soft caps" in shape:  # transformers' sdpa leaves the cap out, so only eager is the truth
        model.set_attn_implementation("eager")
    rows = some_rows()
    alone = {row.id: naive_logprobs(model, row) for row in rows}
    sum(value.sum() for value in alone.values()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(attention)
    module = LanguageModel(model)
    assert prepare_layout(module).layout == "packed"
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    packed = by_row(module, rows)
    sum(value.sum() for value in packed.values()).backward()
    shuffled = by_row(module, rows[::-1])
    for row in rows:
        torch.testing.assert_close(packed[row.id], alone[row.id], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(shuffled[row.id], alone[row.id], atol=2e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max().clamp_min(1e-3)
        assert (parameter.grad - gradients[name]).abs().max() < 2e-4 * scale, name


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
        (
            "Qwen3NextConfig",
            {
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "num_experts": 0,
                "head_dim": 12,
            },
        ),
        ("MambaConfig", {}),
    ],
    ids=["convolution", "linear attention", "state space"],
)
def test_a_model_with_state_in_its_layers_runs_padded_and_says_so(config, more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL, **more)).eval()
    module = LanguageModel(model)
    probed = prepare_layout(module)
    assert probed.layout == "padded"
    assert "padding" in probed.reason
    rows = some_rows()
    values = by_row(module, rows)
    for row in rows:
        torch.testing.assert_close(values[row.id], naive_logprobs(model, row), atol=3e-5, rtol=1e-4)


def test_generation_through_transformers_still_works_after_packing():
    model = build("gemma3")
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    prepare_layout(LanguageModel(model))
    assert model.config._attn_implementation == "oxrl_sdpa"
    assert model.generate(prompt, max_new_tokens=8, do_sample=False).tolist() == before.tolist()


def test_preparing_twice_changes_nothing():
    model = build("llama")
    assert [prepare_layout(LanguageModel(model)).layout for _ in range(2)] == ["packed", "packed"]


def test_a_head_that_does_something_unknown_is_refused():
    model = build("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden).sin()
    with pytest.raises(ValueError, match="not known here"):
        prepare_layout(LanguageModel(model))
