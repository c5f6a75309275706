"""Small random models of the architectures that read images or audio: packed, shared, padded, sampled, saved, trained.

The reference is transformers' own forward of each row alone, with the media themselves. Every batch has rows with two
media of different sizes, rows with one, rows without any, and rows of a group with equal and with different media.
"""

import anyio
import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.forward import PACKED, LanguageModel, set_attention
from oxrl.backends.layout import prepare_layout
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.media_features import MediaRow, body_of, never_sampled, own_inputs, towers_of
from oxrl.data.pack import collate
from oxrl.generators.embedded.decoders import PaddedDecoder
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.step import count_units
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import Generation, GenerationConfig, Media, Request, Row
from tests.models.media_architectures import END, PLACEHOLDER, SHAPES, START, build, medium

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=SHAPES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return build(name)


def write_rows(model, kind):
    towers = model.media_towers
    media = [medium(kind, 50, 1), medium(kind, 90, 2), medium(kind, 50, 3)]

    def row(id, before, own, after, trained):
        tokens = [*before]
        for index in own:
            tokens += [START, *towers.placeholders(model, media[index]), END]
        mask = np.arange(len(tokens) + len(after)) >= len(tokens) + len(after) - trained
        return Row(id, np.array([*tokens, *after]), mask, media=tuple(media[index] for index in own))

    prompt = [5, 6, 7, 8]
    return [
        row("first", prompt, (0, 1), [9, 10, 11], 2),
        row("second", prompt, (0, 1), [9, 12, 13, 14], 3),
        row("other medium", prompt, (2, 1), [9, 10, 11], 2),
        row("text", range(20, 32), (), [9, 10], 2),
        row("one medium", [], (1,), [40, 41, 42], 2),
        row("third", prompt, (0, 1), [9, 12, 15], 2),
    ]


def own_logprobs(model, row):
    """By the model's own forward."""
    logits = model(**own_inputs(model, MediaRow(row.id, row.tokens, row.media)), use_cache=False).logits[0].float()
    logprobs = logits[:-1].log_softmax(-1).gather(1, torch.from_numpy(row.tokens)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs]) * torch.from_numpy(row.mask)


def gradient(model, logprobs):
    model.zero_grad()
    logprobs.sum().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def test_every_layout_has_the_log_probs_and_gradients_of_the_models_own_forward(name, model):
    module = LanguageModel(model)
    probed = prepare_layout(module)
    assert probed.layout == ("padded" if SHAPES[name].padded else "shared"), probed.reason
    rows = write_rows(model, SHAPES[name].kind)
    set_attention(model, "sdpa")
    expected = torch.cat([own_logprobs(model, row) for row in rows])
    expected_gradient = gradient(model, expected)
    for layout in ("padded",) if SHAPES[name].padded else ("shared", "packed", "padded"):
        set_attention(model, "sdpa" if layout == "padded" else PACKED["sdpa"])
        module.layout, before = layout, model.media_towers.passes
        logprobs = module(collate([(row,) for row in rows])).logprob
        found = gradient(model, logprobs)
        torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=TOLERANCE)
        assert float((found - expected_gradient).norm() / expected_gradient.norm()) < TOLERANCE, layout
        assert model.media_towers.passes == before + 1  # over three media, of which rows have ten in all


def test_sampler_and_trainer_agree_and_a_resumed_generation_is_the_same(name, tiny):
    model = build(name)
    for tower in towers_of(body_of(model)):
        tower.requires_grad_(False)
    rows = write_rows(model, SHAPES[name].kind)
    requests = [
        Request(tuple(row.tokens[~row.mask].tolist()), seed=index, media=row.media) for index, row in enumerate(rows)
    ]
    # The placeholder would be sampled nearly always.
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight[PLACEHOLDER] = 0.5 * head.weight.mean(0) + head.weight[9]
    module = LanguageModel(model).eval()
    prepare_layout(module)
    sampling = GenerationConfig(max_new_tokens=8)
    for mode in ("shrinking", "fixed"):
        generator = EmbeddedGenerator(model, tiny[1], slots=4, mode=mode)
        sampled = anyio.run(generator.generate, requests, sampling)
        assert isinstance(generator._engine._decoder, PaddedDecoder) == SHAPES[name].padded
        assert not {token for one in sampled for token in one.token_ids} & set(never_sampled(model))
        assert min(one.cut_mass for one in sampled) > 0
        tokens = [np.array([*request.tokens, *one.token_ids]) for request, one in zip(requests, sampled, strict=True)]
        trained = [
            Row(str(i), own, np.arange(len(own)) >= len(requests[i].tokens), media=requests[i].media)
            for i, own in enumerate(tokens)
        ]
        with torch.no_grad():
            logprobs = module(collate([(row,) for row in trained])).logprob
        given = [[0.0] * len(request.tokens) for request in requests]
        theirs = [number for before, one in zip(given, sampled, strict=True) for number in (*before, *one.logprobs)]
        torch.testing.assert_close(logprobs, torch.tensor(theirs), rtol=0, atol=1e-4)
        half = Generation(sampled[0].token_ids[:3], sampled[0].logprobs[:3], "aborted")
        (resumed,) = anyio.run(generator.generate, [requests[0]._replace(partial=half)], sampling)
        assert resumed.token_ids == sampled[0].token_ids


def backend_of(model):
    return create_pytorch_backend(model, lr=1e-2)


def step(backend, rows):
    sft = algorithm("sft")
    items = [(row,) for row in rows]
    backend.forward_backward([collate(items[:3]), collate(items[3:])], sft, count_units(items))
    backend.optim_step()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_is_saved_and_training_resumes_with_the_same_bits(name, adapted, tmp_path):
    def load():
        model = build(name)
        for tower in towers_of(body_of(model)):
            tower.requires_grad_(False)
        return attach_lora(model, LoraSettings(r=2)) if adapted else model

    backend = backend_of(load())
    rows = write_rows(backend.module.inner, SHAPES[name].kind)
    before = {key: weight.clone() for key, weight in backend.model.named_parameters()}
    step(backend, rows)
    backend.save(tmp_path)
    step(backend, rows)
    after = dict(backend.model.named_parameters())
    changed = {key for key, weight in after.items() if not torch.equal(weight, before[key])}
    assert changed
    assert all(after[key].requires_grad for key in changed)
    assert not adapted or all("lora_" in key for key in changed)
    resumed = backend_of(load())
    resumed.load(tmp_path)
    step(resumed, rows)
    for key, weight in resumed.model.named_parameters():
        assert torch.equal(weight, after[key]), key


def test_features_of_frozen_towers_are_kept_until_their_weights_change(model, name):
    kept = build(name)
    for tower in towers_of(body_of(kept)):
        tower.requires_grad_(False)
    rows = write_rows(kept, SHAPES[name].kind)
    towers, module = kept.media_towers, LanguageModel(kept)
    batch = collate([(row,) for row in rows])
    with torch.no_grad():
        first = module(batch).logprob
        passes = towers.passes
        assert torch.equal(module(batch).logprob, first)
        assert towers.passes == passes == 3
        next(iter(towers_of(body_of(kept))[0].parameters())).add_(0.5)
        assert not torch.equal(module(batch).logprob, first)
    assert towers.passes == 6


def test_a_wrong_number_of_placeholders_is_reported_with_the_row(model, name):
    kind = SHAPES[name].kind
    row = write_rows(model, kind)[0]
    module = LanguageModel(model)
    for media, tokens in (
        (row.media[:1], row.tokens),
        (row.media * 2, row.tokens),
        ((), row.tokens),
        (row.media, row.tokens[: list(row.tokens).index(PLACEHOLDER) + 1]),
    ):
        wrong = Row("row 7", tokens, np.arange(len(tokens)) == len(tokens) - 1, media=media)
        with pytest.raises(ValueError, match=rf"row row 7 has \d+ {kind} placeholders"):
            module(collate([(wrong,)]))


def test_different_media_at_equal_placeholders_give_different_log_probs(model, name):
    rows = {row.id: row for row in write_rows(model, SHAPES[name].kind)}
    assert np.array_equal(rows["first"].tokens, rows["other medium"].tokens)
    with torch.no_grad():
        gap = own_logprobs(model, rows["first"]) - own_logprobs(model, rows["other medium"])
    # Rounding gives 1e-6. The images give 0.03 or more, the sounds, both noise of one loudness, 6e-4.
    assert float(gap.abs().max()) > 1e-4


def test_a_medium_of_another_kind_is_refused(model, name):
    other = Media("image" if SHAPES[name].kind == "audio" else "audio", b"")
    wrong = Row("row 7", np.array([1, 2]), np.array([False, True]), media=(other,))
    with pytest.raises(ValueError, match=rf"row row 7 has media, but \w+ does not read {other.kind}"):
        LanguageModel(model)(collate([(wrong,)]))
