"""Slots against the model's own forward pass, for the decoder shapes in use; batch-invariant results in fixed mode."""

import logging

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from oxrl.generators.embedded.cache import attention, length_buckets
from oxrl.generators.embedded.decoders import CHUNK, PaddedDecoder, SlotDecoder
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Request

SMALL = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
}
WINDOW = 5  # shorter than most prompts below
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SLOTTED = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "head_dim": 12, "layer_types": KINDS}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "head_dim": 12, "attn_logit_softcapping": 2.0}),
    "cohere": ("CohereConfig", {}),
    "phi": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {}),
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
    "head_dim": 12,
}
STATEFUL = {
    "convolution": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "linear attention": (
        "Qwen3NextConfig",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **LINEAR},
    ),
    "states only": ("MambaConfig", {"state_size": 8}),
    "chunked attention": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": 6,
            "head_dim": 12,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
        },
    ),
}
PROMPTS = [list(range(5, 14)), [3, 4], list(range(40, 40 + CHUNK + 3)), [3, 4], [77], list(range(50, 59))]


def build(name, more, attention="eager"):
    torch.manual_seed(1)
    config = getattr(transformers, name)(**{**SMALL, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # zero biases and unit gains would hide a forgotten one
        torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    return model.eval()


def largest_gap(model, generations, prompts=PROMPTS):
    """To a full forward pass over prompt and answer."""
    gap = 0.0
    for prompt, one in zip(prompts, generations, strict=True):
        tokens = torch.tensor([*prompt, *one.token_ids])
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        expected = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
        gap = max(gap, float((expected - torch.tensor(one.logprobs)).abs().max()))
    return gap


@pytest.mark.parametrize("mode", ["shrinking", "fixed"])
@pytest.mark.parametrize("shape", SLOTTED)
def test_every_decoder_shape_gives_its_own_log_probs_from_slots(tiny, shape, mode):
    model = build(*SLOTTED[shape])
    generator = EmbeddedGenerator(model, tiny[1], slots=3, mode=mode)
    generations = generator.complete(PROMPTS, GenerationConfig(max_new_tokens=12, seed=1))
    assert isinstance(generator._engine._decoder, SlotDecoder)
    assert largest_gap(model, generations) < 1e-4
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("shape", STATEFUL)
def test_models_with_other_layer_states_run_in_waves_with_a_warning(tiny, shape, caplog):
    model = build(*STATEFUL[shape])
    generator = EmbeddedGenerator(model, tiny[1], slots=3)
    with caplog.at_level(logging.WARNING, logger="oxrl.generators.embedded.decoders"):
        generations = generator.complete(PROMPTS, GenerationConfig(max_new_tokens=8, seed=1))
    assert isinstance(generator._engine._decoder, PaddedDecoder)
    assert "padded waves" in caplog.text
    assert largest_gap(model, generations) < 1e-4


@pytest.fixture(scope="module")
def fixed(tiny):
    return EmbeddedGenerator(load_model(tiny[0]), tiny[1], slots=5, mode="fixed")


SAMPLING = GenerationConfig(max_new_tokens=70, seed=9)
WATCHED = Request((9, 8, 7, 6), seed=1)


def run_engine(generator, schedule):
    """Submit requests by the step before which they arrive; return the generation of the watched one."""
    engine, jobs = generator._engine, []
    for step in range(400):
        jobs += [engine.submit(request, sampling) for request, sampling in schedule.get(step, [])]
        if step >= max(schedule) and all(job.result for job in jobs):
            break
        engine.step()
    (watched,) = {job.result for job in jobs if job.request == WATCHED}
    return watched


BATCHES = {
    "a crowd": {0: [(Request((5, index), seed=index), SAMPLING) for index in range(9)] + [(WATCHED, SAMPLING)]},
    "siblings": {0: [(WATCHED._replace(seed=seed), SAMPLING) for seed in range(4)]},
    "a late entry": {
        0: [(Request((1, 2, 3), seed=5), SAMPLING), (Request(tuple(range(150)), seed=6), SAMPLING)],
        13: [(WATCHED, SAMPLING)],
    },
    "another slot": {0: [(Request((index,)), SAMPLING) for index in range(4)], 1: [(WATCHED, SAMPLING)]},
    "others that leave": {
        0: [
            (WATCHED, SAMPLING),
            *((Request((1, index)), SAMPLING._replace(max_new_tokens=index)) for index in (1, 3, 9)),
        ]
    },
    "a much longer one": {0: [(WATCHED, SAMPLING), (Request((7,) * 700, seed=3), SAMPLING)]},
    "other rules": {
        0: [
            (WATCHED, SAMPLING),
            (Request((1,)), SAMPLING._replace(temperature=0)),
            (Request((2,)), SAMPLING._replace(top_p=0.5, temperature=0.3)),
        ]
    },
}


@pytest.fixture(scope="module")
def alone(fixed):
    return run_engine(fixed, {0: [(WATCHED, SAMPLING)]})


@pytest.mark.parametrize("batch", BATCHES)
def test_fixed_mode_is_invariant_to_batch_slot_and_entry_time(fixed, alone, batch):
    assert len(alone.token_ids) == 70
    assert run_engine(fixed, BATCHES[batch]) == alone


@pytest.mark.parametrize("rules", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.3, "temperature": 0.5}], ids=str)
def test_fixed_mode_is_batch_invariant_with_cut_offs(fixed, rules):
    mine = SAMPLING._replace(**rules)
    crowd = [(Request((5, index), seed=index), SAMPLING._replace(top_k=index)) for index in range(7)]
    assert run_engine(fixed, {0: [*crowd, (WATCHED, mine)]}) == run_engine(fixed, {0: [(WATCHED, mine)]})


def test_fixed_mode_is_batch_invariant_for_a_real_model(smollm2):
    config, tokenizer = smollm2
    generator = EmbeddedGenerator(load_model(config), tokenizer, slots=3, mode="fixed")
    short = SAMPLING._replace(max_new_tokens=4)
    crowd = {0: [(Request((500, 600)), short)], 2: [(WATCHED, short), (Request((7,) * 70, seed=3), short)]}
    assert run_engine(generator, crowd) == run_engine(generator, {0: [(WATCHED, short)]})


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_fixed_mode_does_not_depend_on_the_thread_of_a_slot(tiny, two_threads):
    """Of five rows, the second thread gets a single one, and sums in another order unless the batch is widened."""
    model = build(
        "LlamaConfig", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 1}
    )
    for parameter in model.parameters():  # attention to one token alone, or a nearly certain answer, would hide much
        torch.nn.init.normal_(parameter, std=0.04)
    generator = EmbeddedGenerator(model, tiny[1], slots=5, mode="fixed")
    short = SAMPLING._replace(max_new_tokens=6)
    alone = run_engine(generator, {0: [(WATCHED, short)]})
    crowd = [(Request((index,)), short) for index in range(4)]
    assert run_engine(generator, {0: [*crowd, (WATCHED, short)]}) == alone


@pytest.mark.parametrize(("heads", "shared"), [(9, 3), (4, 4), (4, 2), (7, 1)])
def test_exact_attention_gives_equal_rows_equal_bits_on_every_thread(two_threads, heads, shared):
    random = torch.Generator().manual_seed(0)
    mask = torch.zeros(4, 1, 1, 64).index_fill_(-1, torch.arange(40, 64), float("-inf"))
    for _ in range(5):
        query = torch.randn(1, heads, 1, 64, generator=random).repeat(4, 1, 1, 1)
        key, value = (torch.randn(1, shared, 64, 64, generator=random).repeat(4, 1, 1, 1) for _ in range(2))
        rows = attention(query, key, value, mask, {}, exact=True)
        assert torch.equal(rows, rows[:1].expand_as(rows))
        plain = attention(query, key, value, mask, {})
        torch.testing.assert_close(rows, plain, atol=1e-6, rtol=1e-5)


def test_shrinking_mode_log_probs_agree_in_any_batch(tiny):
    generator = EmbeddedGenerator(load_model(tiny[0]), tiny[1], slots=5)
    alone = run_engine(generator, {0: [(WATCHED, SAMPLING)]})
    for batch in BATCHES.values():
        other = run_engine(generator, batch)
        assert other.token_ids == alone.token_ids
        assert other.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_at_most_twice_the_length_of_a_row_is_read():
    ends = [70, 90, 128, 1000, 65, 64, 3]
    for exact in (False, True):
        runs = length_buckets(ends, exact=exact)
        assert [run.start for run in runs] == [0, 3, 4, 5]
        for run in runs:
            for end in ends[run.start : run.end]:
                assert end <= run.length <= max(64, 2 * end)
    assert [run.length for run in length_buckets(ends, exact=False)] == [128, 1000, 65, 64]


def test_equal_prompts_are_prefilled_once(tiny_model, tiny):
    seen = []
    tiny_model.model.embed_tokens.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].numel()))
    generator = EmbeddedGenerator(tiny_model, tiny[1], slots=8)
    generator.complete([[1, 2]], GenerationConfig(max_new_tokens=1))  # the probe is over
    seen.clear()
    generator.complete([list(range(30))] * 6 + [[5, 6]], GenerationConfig(max_new_tokens=3))
    assert seen == [32, 7, 7]


@pytest.mark.parametrize("mode", ["shrinking", "fixed"])
def test_a_step_that_fails_half_way_does_not_affect_the_others(tiny, mode):
    generator = EmbeddedGenerator(load_model(tiny[0]), tiny[1], slots=3, mode=mode)
    prompts = [[1, 2], [3, 4]]
    expected = generator.complete(prompts, SAMPLING)
    engine, drawn = generator._engine, []

    def fail_at_the_third(token):
        drawn.append(token)
        if len(drawn) == 3:
            raise KeyError("from the callback")

    failing = engine.submit(Request((0,)), SAMPLING, fail_at_the_third)  # the first to be served
    jobs = [engine.submit(Request(tuple(prompt), seed=seed), SAMPLING) for seed, prompt in enumerate(prompts)]
    engine.step()  # admits all of them, and samples two tokens for each
    with pytest.raises(KeyError, match="from the callback"):
        engine.step()
    engine.drop([failing])
    while not all(job.result for job in jobs):
        engine.step()
    assert [job.result.token_ids for job in jobs] == [one.token_ids for one in expected]


def test_many_long_prompts_are_prefilled_in_several_passes(tiny):
    model = load_model(tiny[0])
    prompts = [[index] * 900 for index in range(3)]
    generations = EmbeddedGenerator(model, tiny[1]).complete(prompts, GenerationConfig(max_new_tokens=2))
    assert largest_gap(model, generations, prompts) < 1e-4
