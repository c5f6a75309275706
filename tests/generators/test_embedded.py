"""The embedded generator against the trainer's own arithmetic, in both modes."""

import numpy as np
import pytest
import torch

from oxrl.backends.local import create_pytorch_backend
from oxrl.data.pack import collate
from oxrl.generators.embedded.captured import Capture
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import Generation, GenerationConfig, Request, Row, Weights

PROMPTS = [[1, 20, 30], [5], [9, 8, 7, 6, 5, 4, 3, 2], [40, 41], list(range(100, 180))]
MODES = ["shrinking", "fixed"]
WAYS = {"shrinking": {}, "fixed": {"mode": "fixed"}, "spans": {"capture": Capture(capture=True, span=5)}}


@pytest.fixture(scope="module", params=WAYS)
def generator(request):
    return EmbeddedGenerator(load_model("tiny"), load_tokenizer("tiny"), slots=4, **WAYS[request.param])


def naive_logprobs(model, prompt, generation, temperature=1.0):
    """A full forward pass over prompt and answer, in the obvious way."""
    tokens = torch.tensor([*prompt, *generation.token_ids])
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / temperature
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[len(prompt) - 1 :, 0].tolist()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_log_probs_of_what_was_sampled_are_the_trainers(generator, anyio_backend):
    backend = create_pytorch_backend(generator.model)  # it changes the model's attention, as in training
    sampled = generator.complete(PROMPTS, GenerationConfig(max_new_tokens=12, seed=3))
    rows = [
        Row(str(i), [*prompt, *one.token_ids], np.arange(len(prompt) + len(one.token_ids)) >= len(prompt))
        for i, (prompt, one) in enumerate(zip(PROMPTS, sampled, strict=True))
    ]
    (outputs,) = await backend.logprobs([collate([(row,) for row in rows])])
    assert generator.model.config._attn_implementation == "oxrl_sdpa"
    ours = outputs.logprob[outputs.logprob != 0].tolist()
    assert [value for one in sampled for value in one.logprobs] == pytest.approx(ours, abs=2e-5)


ALLOWED = (65, 90, 91, 200, 257)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", MODES)
async def test_with_allowed_tokens_sampler_and_trainer_normalise_over_the_same_set(mode, anyio_backend):
    generator = EmbeddedGenerator(load_model("tiny"), load_tokenizer("tiny"), slots=4, mode=mode)
    with torch.no_grad():
        generator.model.lm_head.weight *= 3  # far from uniform
    backend = create_pytorch_backend(generator.model, temperature=0.7)
    sampling = GenerationConfig(max_new_tokens=12, temperature=0.7, seed=3, allowed_tokens=ALLOWED)
    free = GenerationConfig(max_new_tokens=12, temperature=0.7, seed=3)
    requests = [Request(tuple(prompt), seed) for seed, prompt in enumerate(PROMPTS)]
    restricted, others = await generator.generate(requests, sampling), await generator.generate(requests, free)
    assert {token for one in restricted for token in one.token_ids} <= set(ALLOWED)
    rows = [
        Row(
            f"{i} {one.allowed_tokens}",
            [*prompt, *one.token_ids],
            np.arange(len(prompt) + len(one.token_ids)) >= len(prompt),
            allowed_tokens=one.allowed_tokens,
        )
        for each in (restricted, others)
        for i, (prompt, one) in enumerate(zip(PROMPTS, each, strict=True))
    ]
    batch = collate([(row,) for row in rows])
    (outputs,) = await backend.logprobs([batch])
    ours = outputs.logprob[batch.mask].tolist()
    sampled = [value for one in (*restricted, *others) for value in one.logprobs]
    assert sampled == pytest.approx(ours, abs=1e-5)
    assert min(one.cut_mass for one in restricted) == 0


@pytest.mark.parametrize(("allowed", "message"), [((5, 600), "has 600"), ((-1,), "has -1")])
def test_allowed_tokens_that_cannot_be_sampled_are_refused(allowed, message):
    generator = EmbeddedGenerator(load_model("tiny"), load_tokenizer("tiny"))
    with pytest.raises(ValueError, match=message):
        generator.complete([[1]], GenerationConfig(allowed_tokens=allowed))


def test_placeholders_of_media_are_no_allowed_tokens(tiny_vlm):
    config, tokenizer = tiny_vlm
    generator = EmbeddedGenerator(load_model(config), tokenizer)
    with pytest.raises(ValueError, match="without the placeholders of media"):
        generator.complete([[1]], GenerationConfig(allowed_tokens=(65, int(generator._engine.never[0]))))


def test_captured_graphs_refuse_allowed_tokens_in_words():
    generator = EmbeddedGenerator(load_model("tiny"), load_tokenizer("tiny"), capture=Capture(capture=True, span=5))
    with pytest.raises(ValueError, match="with allowed_tokens, set auto or false"):
        generator.complete([[1]], GenerationConfig(allowed_tokens=ALLOWED))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_those_of_a_full_forward_pass(generator, temperature):
    sampling = GenerationConfig(max_new_tokens=70, temperature=temperature, seed=5)
    for prompt, one in zip(PROMPTS, generator.complete(PROMPTS, sampling), strict=True):
        assert one.logprobs == pytest.approx(naive_logprobs(generator.model, prompt, one, temperature or 1.0), abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_the_real_models_log_probs_are_those_of_a_full_forward_pass(smollm2, mode):
    config, tokenizer = smollm2
    generator = EmbeddedGenerator(load_model(config), tokenizer, slots=3, mode=mode)
    prompts = [tokenizer.encode(text) for text in ("The capital of Peru is", "One, two, three,")]
    prompts = [*prompts, prompts[0]]
    generations = generator.complete(prompts, GenerationConfig(max_new_tokens=6, seed=1))
    assert generations[0].token_ids != generations[2].token_ids
    for prompt, one in zip(prompts, generations, strict=True):
        assert one.logprobs == pytest.approx(naive_logprobs(generator.model, prompt, one), abs=1e-4)


def test_greedy_answers_do_not_depend_on_the_batch(generator):
    greedy = GenerationConfig(max_new_tokens=8, temperature=0)
    together = [one.token_ids for one in generator.complete(PROMPTS, greedy)]
    assert together == [generator.complete([prompt], greedy)[0].token_ids for prompt in PROMPTS]


def test_equal_prompts_get_different_answers_and_the_same_seed_the_same(generator):
    sampling = GenerationConfig(max_new_tokens=8, seed=1)
    first = generator.complete([PROMPTS[0]] * 6, sampling)
    assert len({one.token_ids for one in first}) == 6
    assert [one.token_ids for one in generator.complete([PROMPTS[0]] * 6, sampling)] == [one.token_ids for one in first]
    other = generator.complete([PROMPTS[0]] * 6, sampling._replace(seed=2))
    assert not {one.token_ids for one in first} & {one.token_ids for one in other}


def test_generation_ends_at_the_end_token_with_a_finish_reason(generator):
    greedy = GenerationConfig(max_new_tokens=6, temperature=0)
    (free,) = generator.complete([PROMPTS[0]], greedy)
    assert (free.finish_reason, len(free.token_ids)) == ("length", 6)
    (stopped,) = generator.complete([PROMPTS[0]], greedy._replace(stop_token_ids=(free.token_ids[2],)))
    first = free.token_ids.index(free.token_ids[2])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[: first + 1])


def test_the_tokenizers_end_token_ends_generation_too(tiny_model, tiny):
    end = tiny[1].eos_token_id
    with torch.no_grad():
        tiny_model.lm_head.weight[end] = 0.0
        tiny_model.lm_head.weight *= 1e-3  # all tokens are about as likely
    generator = EmbeddedGenerator(tiny_model, tiny[1])
    generations = generator.complete([PROMPTS[0]] * 40, GenerationConfig(max_new_tokens=200))
    ended = [one for one in generations if one.finish_reason == "stop"]
    assert ended and all(one.token_ids.index(end) == len(one.token_ids) - 1 for one in ended)
    assert all(end not in one.token_ids for one in generations if one.finish_reason == "length")


def test_a_stop_text_ends_generation_at_its_last_token(generator):
    sampling = GenerationConfig(max_new_tokens=60, temperature=1.0, seed=1)
    (free,) = generator.complete([PROMPTS[0]], sampling)
    start = next(i for i in range(5, 50) if free.text[i : i + 2].isascii() and free.text[i : i + 2].strip())
    text = free.text[start : start + 2]
    (stopped,) = generator.complete([PROMPTS[0]], sampling._replace(stop=("never generated", text)))
    assert stopped.finish_reason == "stop"
    assert text in stopped.text
    assert text not in generator.tokenizer.decode(stopped.token_ids[:-1], skip_special_tokens=True)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_more_requests_than_slots_are_all_served(generator):
    sampling = GenerationConfig(max_new_tokens=5, seed=4)
    generations = generator.complete([[index, 7] for index in range(11)], sampling)
    assert [len(one.token_ids) for one in generations] == [5] * 11
    assert generations[9].token_ids == generator.complete([[index, 7] for index in range(10)], sampling)[9].token_ids


def test_the_cut_off_mass_is_reported(generator):
    sampling = GenerationConfig(max_new_tokens=5, seed=4)
    assert generator.complete([PROMPTS[0]], sampling)[0].cut_mass == 0.0
    (cut,) = generator.complete([PROMPTS[0]], sampling._replace(top_k=1))
    assert cut.cut_mass == pytest.approx(np.mean([1 - np.exp(value) for value in cut.logprobs]), abs=1e-6)


def test_the_callback_gets_each_token_as_it_is_sampled(generator):
    seen = {0: [], 1: []}
    generations = generator.complete(
        PROMPTS[:2], GenerationConfig(max_new_tokens=4), on_token=lambda prompt, token: seen[prompt].append(token)
    )
    assert [tuple(seen[0]), tuple(seen[1])] == [one.token_ids for one in generations]


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_gradients_and_dropout_change_nothing_and_the_mode_is_restored(tiny_model, tiny, mode):
    sampling = GenerationConfig(max_new_tokens=6, seed=2)
    expected = EmbeddedGenerator(tiny_model.eval(), tiny[1], slots=4, mode=mode).complete(PROMPTS, sampling)
    adapted = attach_lora(tiny_model, LoraSettings(r=2, dropout=0.9))
    adapted.train()
    adapted.gradient_checkpointing_enable()
    frozen_part = adapted.get_base_model().model.norm.eval()
    training = {name for name, module in adapted.named_modules() if module.training}
    generations = EmbeddedGenerator(adapted, tiny[1], slots=4, mode=mode).complete(PROMPTS, sampling)
    assert [one.token_ids for one in generations] == [one.token_ids for one in expected]
    assert {name for name, module in adapted.named_modules() if module.training} == training
    assert not frozen_part.training


@pytest.mark.parametrize("mode", MODES)
def test_a_lora_adapter_is_applied(tiny_model, tiny, mode):
    adapted = attach_lora(tiny_model, LoraSettings(r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    (one,) = EmbeddedGenerator(adapted, tiny[1], slots=2, mode=mode).complete([[1, 2, 3]], GenerationConfig(6))
    assert one.logprobs == pytest.approx(naive_logprobs(adapted, [1, 2, 3], one), abs=1e-4)
    with adapted.disable_adapter():
        assert one.logprobs != pytest.approx(naive_logprobs(adapted, [1, 2, 3], one), abs=1e-2)


def test_it_uses_the_trainers_own_weights(tiny_model, tiny):
    generator = EmbeddedGenerator(tiny_model, tiny[1])
    greedy = GenerationConfig(max_new_tokens=3, temperature=0)
    generator.complete([[1, 2]], greedy)
    with torch.no_grad():
        tiny_model.lm_head.weight.zero_()
    (one,) = generator.complete([[1, 2]], greedy)
    assert one.logprobs == pytest.approx([-np.log(tiny_model.config.vocab_size)] * 3, abs=1e-5)


def test_memory_is_freed_when_nothing_is_in_flight(generator):
    generator.complete(PROMPTS, GenerationConfig(max_new_tokens=3))
    decoder = generator._engine._decoder
    assert decoder.cache.keys == decoder.cache.values == []


def test_logits_that_are_not_numbers_stop_generation(tiny_model, tiny):
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        EmbeddedGenerator(tiny_model, tiny[1]).complete([[1, 2]], GenerationConfig())


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "at least one token"),
        ([1, 320], {}, "vocabulary of 320"),
        ([1, -1], {}, "vocabulary"),
        ([1] * 2048, {}, "may have 2048"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"temperature": -0.1}, "temperature is -0.1"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"min_p": 1.5}, "min_p is 1.5"),
        ([1], {"stop": ("",)}, "at least one character"),
    ],
)
def test_invalid_requests_are_rejected_and_leave_nothing_behind(generator, prompt, sampling, message):
    with pytest.raises(ValueError, match=message):
        generator.complete([[1, 2], prompt], GenerationConfig(**sampling))
    assert not generator._engine.arrived and not generator._engine.waiting


def test_answers_end_where_the_models_positions_end(generator):
    (one,) = generator.complete([[7] * 2045], GenerationConfig(max_new_tokens=50, temperature=0))
    assert (len(one.token_ids), one.finish_reason) == (3, "length")


@pytest.mark.parametrize("bad", [{"slots": 0}, {"mode": "wide"}])
def test_invalid_options_are_rejected(tiny_model, tiny, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        EmbeddedGenerator(tiny_model, tiny[1], **bad)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_another_modules_weights_are_rejected(tiny_model, tiny, anyio_backend):
    generator = EmbeddedGenerator(tiny_model, tiny[1])
    with pytest.raises(ValueError, match="module it was built with"):
        await generator.update_weights(Weights(torch.nn.Linear(1, 1), 3))
    await generator.update_weights(Weights(tiny_model, 3))
    (one,) = await generator.generate([Request((1, 2))], GenerationConfig(max_new_tokens=2))
    assert generator.version == one.version == 3


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_only_an_aborted_generation_is_resumed(tiny_model, tiny, anyio_backend):
    generator, sampling = EmbeddedGenerator(tiny_model, tiny[1]), GenerationConfig(max_new_tokens=3)
    with pytest.raises(ValueError, match="aborted .* stop"):
        await generator.generate([Request((1, 2), partial=Generation((3,), (-1.0,), "stop"))], sampling)
    full = Generation((3, 4, 5), (-1.0, -2.0, -3.0), "aborted", version=7, cut_mass=0.25)
    (one,) = await generator.generate([Request((1, 2), partial=full)], sampling)
    assert one == full._replace(finish_reason="length", text=one.text)


def run_out_of_memory(model, most, *, after=0):
    """Raise torch's error in passes of more than `most` rows, from the pass with the number `after` on."""
    passes, failures = [], []

    def check(_, arguments):
        passes.append(arguments[0].shape)
        if len(passes) > after and arguments[0].shape[0] > most:
            failures.append(arguments[0].shape)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a cache")

    model.get_input_embeddings().register_forward_pre_hook(check)
    return failures


@pytest.mark.parametrize("after", [0, 12])
@pytest.mark.parametrize("mode", MODES)
def test_if_memory_runs_out_fewer_sequences_run_and_the_completions_are_the_same(mode, after, caplog):
    def completed(most):
        model, tokens = load_model("tiny"), []
        failures = run_out_of_memory(model, most, after=after)
        generator = EmbeddedGenerator(model, load_tokenizer("tiny"), slots=8, mode=mode)
        sampling = GenerationConfig(max_new_tokens=12, seed=7)
        done = generator.complete(PROMPTS * 2, sampling, lambda prompt, token: tokens.append((prompt, token)))
        return done, sorted(tokens), len(failures), generator.slots

    found, tokens, failures, slots = completed(3)
    expected, all_tokens, _, _ = completed(8)
    assert failures and slots == 2
    assert "At most 2 sequences run concurrently from now on" in caplog.text and "rollout.slots: 2" in caplog.text
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert tokens == all_tokens, "no token is sampled twice"
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_single_sequence_that_does_not_fit_is_an_error(mode):
    model = load_model("tiny")
    run_out_of_memory(model, 0)
    with pytest.raises(torch.OutOfMemoryError):
        EmbeddedGenerator(model, load_tokenizer("tiny"), slots=4, mode=mode).complete(PROMPTS, GenerationConfig())


def test_slots_that_no_sequence_uses_are_not_halved_one_by_one():
    model = load_model("tiny")
    failures = run_out_of_memory(model, 2)
    generator = EmbeddedGenerator(model, load_tokenizer("tiny"), slots=64)
    generator.complete(PROMPTS[:3], GenerationConfig(max_new_tokens=3))
    assert (len(failures), generator.slots) == (1, 2)
