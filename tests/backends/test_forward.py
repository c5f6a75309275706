"""Packed, shuffled and single rows have equal log-probs, for the architectures in use with their special cases."""

import copy

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from oxrl import tensors as t
from oxrl.backends.forward import LanguageModel, _share, set_attention
from oxrl.backends.layout import prepare_layout
from oxrl.data.pack import collate, pack
from oxrl.models.lora import LoraSettings, attach_lora
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


def build(shape, attention="sdpa", **changed):
    torch.manual_seed(1)
    name, more = SHAPES[shape]
    config = getattr(transformers, name)(**{**SMALL, **more, **changed})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # zero biases and unit gains would hide a forgotten one
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def some_rows(lengths=(9, 2, 17, 5, 12), vocabulary=120):
    random = np.random.default_rng(3)
    return [Row(str(i), random.integers(0, vocabulary, n), np.arange(n) > 0) for i, n in enumerate(lengths)]


def naive_logprobs(model, row):
    """Return the log-probs of a single row by the model's own forward."""
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
    if "soft caps" in shape:  # transformers' sdpa ignores the cap, so eager is the reference
        model.set_attn_implementation("eager")
    rows = some_rows()
    alone = {row.id: naive_logprobs(model, row) for row in rows}
    sum(value.sum() for value in alone.values()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(attention)
    module = LanguageModel(model)
    assert prepare_layout(module).layout == "shared"
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
def test_a_model_with_state_in_its_layers_runs_padded_and_reports_it(config, more):
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
    assert [prepare_layout(LanguageModel(model)).layout for _ in range(2)] == ["shared", "shared"]


def test_an_unsupported_output_head_is_refused():
    model = build("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden).sin()
    with pytest.raises(ValueError, match="unsupported way.*head_of"):
        prepare_layout(LanguageModel(model))


def test_longrope_batches_with_rows_on_both_sides_of_the_limit_are_refused():
    """Phi-3.5: transformers uses the angles of the longest row for all rows."""
    angles = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 16,
    }
    rope = {"original_max_position_embeddings": 16, "rope_parameters": angles}
    config = transformers.Phi3Config(**SMALL, pad_token_id=0, eos_token_id=0, **rope)
    module = LanguageModel(AutoModelForCausalLM.from_config(config).eval())
    assert prepare_layout(module).layout == "shared"
    for lengths in ((9, 16), (17, 40)):
        rows = some_rows(lengths)
        values = by_row(module, rows)
        for row in rows:
            torch.testing.assert_close(values[row.id], naive_logprobs(module.inner, row), atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="max_seq_len to 16"):
        by_row(module, some_rows((9, 17)))


def test_non_finite_weights_are_reported():
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        prepare_layout(LanguageModel(model))


def families(vocabulary=120):
    """A group of four, two pairs of one prompt, single rows, a row that is a prefix of another, and a duplicate."""
    random = np.random.default_rng(5)

    def some(n):
        return random.integers(0, vocabulary, n)

    group, pairs, alone, whole = some(11), some(9), some(13), some(14)
    tokens = [np.concatenate([group, some(n)]) for n in (6, 6, 3, 6)]
    tokens += [np.concatenate([pairs, some(n)]) for n in (1, 4, 2, 2)]
    tokens += [alone, some(3), whole, np.concatenate([whole, some(5)]), np.concatenate([tokens[0], some(7)]), alone]
    order = random.permutation(len(tokens))
    return [Row(str(i), tokens[i], np.arange(len(tokens[i])) > 0) for i in order]


def run(module, rows, layout):
    """Log-probs, gradients, and how many tokens went through the model."""
    module.layout = layout
    counted = []
    hook = module.inner.get_input_embeddings().register_forward_hook(lambda *call: counted.append(call[1][0].numel()))
    module.zero_grad()
    batch = collate([(row,) for row in rows], module.inner.device)
    values = module(batch).logprob
    (values * torch.linspace(-1, 1, len(values), device=values.device)).sum().backward()
    hook.remove()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return values.detach(), gradients, counted[0]


def relative_gap(one, other):
    return float((one - other).norm() / other.norm().clamp_min(1e-6))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize(
    ("shape", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("mistral", "sdpa"),
        ("qwen2", "eager"),
        ("gemma3", "sdpa"),
        ("gemma2 with soft caps", "eager"),
    ],
)
def test_a_shared_prefix_is_computed_once_and_changes_nothing(shape, attention, checkpointing):
    module = LanguageModel(build(shape, attention))
    assert "a prompt that rows share is computed once" in prepare_layout(module).reason
    if checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()
    rows = families()
    values, gradients, computed = run(module, rows, "shared")
    expected, expected_gradients, all_tokens = run(module, rows, "packed")
    assert all_tokens == sum(map(len, rows))
    # Saved: the group's prompt 3 times and one of its rows, the pairs' prompt 3 times, a whole row, all but its last
    assert computed == all_tokens - 3 * 11 - 17 - 3 * 9 - 14 - 12
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    for name, gradient in expected_gradients.items():
        assert relative_gap(gradients[name], gradient) < 1e-4, name


def test_an_adapter_gets_equal_gradients_with_shared_prefixes(tiny_model):
    model = attach_lora(tiny_model, LoraSettings())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    module = LanguageModel(model)
    prepare_layout(module)
    values, gradients, computed = run(module, families(), "shared")
    expected, expected_gradients, all_tokens = run(module, families(), "packed")
    assert computed < all_tokens
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    assert gradients.keys() == expected_gradients.keys() != set()
    for name, gradient in expected_gradients.items():
        assert relative_gap(gradients[name], gradient) < 1e-4, name


def test_a_model_that_counts_positions_itself_computes_every_prompt_in_each_row():
    """Packed rows are correct with it, shared keys would not be."""

    def count(body, args, kwargs):
        borders = kwargs.get("cu_seq_lens_q")
        if borders is not None:
            positions = [torch.arange(length) for length in borders.diff().tolist()]
            kwargs["position_ids"] = torch.cat(positions)[None]
        return args, kwargs

    model = build("llama")
    model.model.register_forward_pre_hook(count, with_kwargs=True)
    module = LanguageModel(model)
    probed = prepare_layout(module)
    assert probed.layout == "packed"
    assert "in each of them: packed rows differ" in probed.reason
    rows = families()
    values = by_row(module, rows)
    for row in rows:
        torch.testing.assert_close(values[row.id], naive_logprobs(model, row), atol=2e-5, rtol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 4)), min_size=1), st.integers(30, 200))
def test_no_micro_batch_computes_more_than_its_budget(shapes, budget):
    """What `pack` counts is what a pass runs over, or more."""
    items = []
    for i, (prompt, length, reply) in enumerate(shapes):
        tokens = np.concatenate([np.full(length, prompt), np.arange(reply) % 2])
        items.append((Row(str(i), tokens, np.arange(length + reply) >= length),))
    for batch in pack(items, budget):
        assert len(_share(collate(batch)).tokens) <= budget or len(batch) == 1


@pytest.mark.parametrize(
    "shape", ["llama", "gemma2 with soft caps", "cohere with scaled logits", "granite with divided logits"]
)
def test_a_temperature_divides_the_logits_that_are_sampled_from(shape):
    model = build(shape, "eager")
    module = LanguageModel(model, temperature=0.7)
    prepare_layout(module)
    rows = some_rows()
    values = by_row(module, rows)
    for row in rows:
        tokens = torch.tensor(row.tokens)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / 0.7
        expected = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(values[row.id], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", ["llama", "gemma2 with soft caps", "phi with a biased head"])
def test_rows_with_allowed_tokens_have_the_values_and_gradients_of_a_softmax_over_these(shape):
    """In float64, by slicing the logits of a plain pass: log-probs, entropy and the KL to another model."""
    model, other = build(shape, "eager"), build(shape, "eager")
    for weight in other.parameters():
        weight.data = weight.data + 0.05
    sets = [(), (3, 7, 50, 119), (0, 1), (3, 7, 50, 119), ()]
    rows = [
        row if not allowed else Row(row.id, np.resize(allowed, len(row)), row.mask, allowed_tokens=allowed)
        for row, allowed in zip(some_rows(), sets, strict=True)
    ]
    weights = torch.from_numpy(np.random.default_rng(5).normal(size=(3, sum(map(len, rows)))))
    modules = [LanguageModel(each, temperature=0.7) for each in (model, other)]
    prepare_layout(modules[0])
    batch = collate([(row,) for row in rows])
    outputs = modules[0](batch, {"entropy": t.entropy, "kl": t.reverse_kl}, modules[1].as_other(batch))
    ours = torch.stack([outputs.logprob, outputs.statistics["entropy"], outputs.statistics["kl"]])
    (ours * weights).sum().backward()
    exact, exact_other = copy.deepcopy(model).double(), copy.deepcopy(other).double()
    exact.zero_grad()
    set_attention(exact, "eager")
    parts = []
    for row in rows:
        tokens = torch.tensor(row.tokens)
        allowed = torch.tensor(row.allowed_tokens or range(120))
        log_p, log_q = (
            (each(input_ids=tokens[None], use_cache=False).logits[0, :-1, allowed] / 0.7).log_softmax(-1)
            for each in (exact, exact_other)
        )
        own = log_p.gather(1, torch.searchsorted(allowed, tokens[1:])[:, None])[:, 0]
        entropy, kl = -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_q.detach())).sum(-1)
        parts.append(torch.nn.functional.pad(torch.stack([own, entropy, kl]), (1, 0)))
    expected = torch.cat(parts, dim=1)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    (expected * weights).sum().backward()
    for (name, weight), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert relative_gap(weight.grad.double(), theirs.grad) < 1e-5, name


def test_a_temperature_of_zero_has_no_log_probs():
    with pytest.raises(ValueError, match="positive temperature"):
        LanguageModel(build("llama"), temperature=0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel runs on a GPU only")
@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_the_gpu_kernel_supports_shared_prefixes(shape):
    """bf16: both layouts are compared with single rows in float32, and sharing may not be less accurate."""
    exact = build(shape, hidden_size=64).cuda()  # the kernel wants head sizes that are multiples of 8
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    module = LanguageModel(build(shape, hidden_size=64).bfloat16().cuda())
    probed = prepare_layout(module)
    assert "a prompt that rows share is computed once" in probed.reason, probed.reason
    rows = families()
    reference = LanguageModel(exact)  # padded, float32, transformers' own attention
    expected, expected_gradients, _ = run(reference, rows, "padded")
    values, gradients, computed = run(module, rows, "shared")
    unshared, unshared_gradients, all_tokens = run(module, rows, "packed")
    assert computed < all_tokens
    assert relative_gap(values, expected) < 1.5 * relative_gap(unshared, expected) + 1e-3
    for name, gradient in expected_gradients.items():
        gap, usual = (relative_gap(g[name].float(), gradient) for g in (gradients, unshared_gradients))
        assert gap < 1.5 * usual + 1e-2, name
