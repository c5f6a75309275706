"""A reward model that was trained here scores rollouts as its trainer did, and so does any sequence classifier."""

from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch
from transformers import LlamaForSequenceClassification

from oxrl.algorithms import algorithm
from oxrl.backends.forward import HEADS as WRITTEN_HEADS
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.assemble import assemble
from oxrl.data.media_features import media_towers
from oxrl.data.pack import collate, count_units
from oxrl.data.processor import save_tokenizer
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora, save_adapter
from oxrl.models.reward_model import (
    HEADS,
    compute_reward_model_score,
    conversation_tokens,
    load_reward_model,
    reward_model_reward,
    rm_reward_func,
    score_tokens,
)
from oxrl.rewards import grade
from oxrl.types import Generation, Message, ModelConfig, Rollout, Sample, Turn
from tests.drawings import png

ROWS = [
    {"prompt": f"{i} or {i + 1}?", "chosen": f"yes {'x' * (i % 5)}", "rejected": f"no {'y' * (i % 3)}"}
    for i in range(8)
]


def rows_of(items):
    return [row for item in items for row in item]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def items(tokenizer):
    return assemble(load_samples(ROWS).samples, algorithm("rm"), Renderer(tokenizer)).items


async def _train(backend, items, steps):
    for _ in range(steps):
        await backend.forward_backward([collate(items)], algorithm("rm"), count_units(items))
        await backend.optim_step()


async def _scores(backend, items):
    return (await backend.logprobs([collate(items)]))[0].score.tolist()


@pytest.fixture(scope="module")
def trained(items, tmp_path_factory):
    """A reward model trained by `rm` for a few steps: its folder, and the scores of its trainer."""
    folder = tmp_path_factory.mktemp("rm")
    backend = create_pytorch_backend(load_model("tiny"), heads=("score",), lr=3e-3)
    anyio.run(_train, backend, items, 12)
    backend.save(folder)
    return folder, anyio.run(_scores, backend, items)


def rollout_of(tokenizer, prompt, text, index=0):
    messages = (Message("user", prompt),)
    ids = Renderer(tokenizer).prompt(messages)
    full = Renderer(tokenizer).conversation((*messages, Message("assistant", text)), id="x")[0].tokens
    generation = Generation(tuple(full[len(ids) :].tolist()), (0.0,) * (len(full) - len(ids)), "stop", text=text)
    turn = Turn(tuple(ids.tolist()), generation, (Message("assistant", text),))
    return Rollout(Sample("s", messages), (turn,), index=index)


def test_it_gives_the_scores_that_the_trainer_gives(trained, items):
    folder, expected = trained
    assert HEADS == WRITTEN_HEADS
    assert max(expected) - min(expected) > 0.5, "equal scores would make this test pass for any order"
    rows = [row.tokens.tolist() for row in rows_of(items)]
    model = load_reward_model(str(folder))
    assert score_tokens(model, rows) == pytest.approx(expected, abs=1e-5)
    assert score_tokens(model, rows, batch_size=1) == pytest.approx(expected, abs=1e-5)
    assert not any(parameter.requires_grad for parameter in model.model.parameters())


def test_a_reward_model_with_an_adapter_gives_the_scores_that_its_trainer_gives(items, tmp_path):
    backend = create_pytorch_backend(
        attach_lora(load_model("tiny"), LoraSettings(r=4)), heads=("score",), lr=1e-2, write_model=save_adapter
    )
    anyio.run(_train, backend, items, 6)
    backend.save(tmp_path)
    rows = [row.tokens.tolist() for row in rows_of(items)]
    expected = anyio.run(_scores, backend, items)
    assert max(expected) - min(expected) > 0.1
    assert score_tokens(load_reward_model(str(tmp_path)), rows) == pytest.approx(expected, abs=1e-5)


def test_rollouts_are_scored_at_their_last_token_and_the_better_answer_gets_more(trained, items, tokenizer):
    folder, expected = trained
    model = load_reward_model(str(folder))
    good = rollout_of(tokenizer, ROWS[0]["prompt"], ROWS[0]["chosen"])
    bad = rollout_of(tokenizer, ROWS[0]["prompt"], ROWS[0]["rejected"], index=1)
    failed = Rollout(good.sample, error="the engine died")
    graded = anyio.run(partial(grade, [good, failed, bad], reward_model_reward(model)))
    assert [graded[0].reward, graded[2].reward] == pytest.approx(expected[:2], abs=1e-5)
    assert graded[0].reward > graded[2].reward
    assert graded[1] is failed
    assert compute_reward_model_score(model, good) == pytest.approx(expected[0], abs=1e-5)


def test_scorer_and_rendering_can_be_replaced(trained, tokenizer):
    model = load_reward_model(str(trained[0]))
    rollout = rollout_of(tokenizer, "1 or 2?", "yes")
    assert compute_reward_model_score(model, rollout, scorer=lambda _, rows: [len(rows[0])]) == len(rollout.tokens)
    render = conversation_tokens(tokenizer)
    assert render(rollout) == rollout.tokens
    score = compute_reward_model_score(model, rollout, render=lambda each: [*render(each), 7])
    assert score == pytest.approx(score_tokens(model, [[*rollout.tokens, 7]])[0])


def test_a_rollout_without_tokens_is_not_graded(trained):
    graded = anyio.run(partial(grade, [Rollout(Sample("s"))], reward_model_reward(load_reward_model(str(trained[0])))))
    assert graded[0].score is None
    assert "no tokens" in graded[0].error


def a_classifier(folder, labels=1):
    config = load_model("tiny").config
    config.num_labels = labels
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


def test_a_sequence_classifier_is_a_reward_model(tmp_path):
    classifier = a_classifier(tmp_path)
    rows = [[5, 6, 7, 8], [5, 6], [9, 10, 11]]
    with torch.no_grad():
        expected = [float(classifier(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    assert len(set(expected)) == 3
    model = load_reward_model(str(tmp_path))
    assert score_tokens(model, rows) == pytest.approx(expected, abs=1e-6)


def test_other_models_are_refused_with_the_remedy(tmp_path, trained):
    with pytest.raises(ValueError, match="tiny is not a reward model.*algorithm rm"):
        load_reward_model("tiny")
    with pytest.raises(ValueError, match="is not a reward model"):
        load_reward_model(str(tmp_path))
    a_classifier(tmp_path, labels=3)
    with pytest.raises(ValueError, match="3 classes"):
        load_reward_model(str(tmp_path))
    load_model("tiny").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="is not a reward model"):
        load_reward_model(str(tmp_path / "plain"))


def test_a_folder_with_another_head_is_refused(tmp_path):
    backend = create_pytorch_backend(load_model("tiny"), heads=("value",))
    backend.save(tmp_path)
    with pytest.raises(ValueError, match=r"no score head \(it has value.weight\)"):
        load_reward_model(str(tmp_path))


@pytest.fixture(scope="module")
def trained_on_pictures(tmp_path_factory):
    """A reward model that prefers one answer to red pictures, and the other one to blue ones; rows and their scores."""
    config = ModelConfig("tiny-vlm", device="cpu", freeze="nothing")
    folder = tmp_path_factory.mktemp("rm of pictures")
    answers = ["red", "blue"]
    rows = [
        {"prompt": "?", "images": [png(colour, 56, 28 * size)], "chosen": colour, "rejected": other}
        for size in (1, 2)
        for colour, other in (answers, answers[::-1])
    ]
    tokenizer = load_tokenizer(config)
    items = assemble(load_samples(rows).samples, algorithm("rm"), Renderer(tokenizer)).items
    backend = create_pytorch_backend(load_model(config), heads=("score",), lr=3e-3)
    anyio.run(_train, backend, items, 25)
    backend.save(folder)
    save_tokenizer(tokenizer, folder)
    return folder, items, anyio.run(_scores, backend, items)


def test_answers_about_pictures_are_scored_with_the_pictures(trained_on_pictures):
    folder, items, expected = trained_on_pictures
    rows, model = rows_of(items), load_reward_model(str(folder))
    found = score_tokens(model, rows)
    assert found == pytest.approx(expected, abs=1e-5)
    assert all(chosen > rejected for chosen, rejected in zip(found[::2], found[1::2], strict=True))
    assert media_towers(model.model).passes == 4, "once for each picture"
    red, blue = rows[:2], rows[2:4]
    exchanged = [replace(own, media=other.media) for own, other in zip(red, blue, strict=True)]
    assert score_tokens(model, exchanged)[0] < score_tokens(model, exchanged)[1]
    with pytest.raises(ValueError, match="row to score has 2 image placeholders .* its 0 media have 0 features"):
        score_tokens(model, [rows[0].tokens.tolist()])


def test_rollouts_about_pictures_are_scored_like_rows(trained_on_pictures, tokenizer):
    folder, items, expected = trained_on_pictures
    (row, _), own = items[0], load_tokenizer(str(folder))
    start = int(row.mask.argmax())
    messages = (Message("user", [{"type": "image"}, {"type": "text", "text": "?"}]),)
    generation = Generation(tuple(row.tokens[start:].tolist()), (0.0,) * (len(row) - start), "stop", text="red")
    turn = Turn(tuple(row.tokens[:start].tolist()), generation, (Message("assistant", "red"),))
    rollout = Rollout(Sample("rows:1", messages, media=row.media), (turn,))
    model = load_reward_model(str(folder))
    for render in ({}, {"render": conversation_tokens(own)}):
        assert compute_reward_model_score(model, rollout, **render) == pytest.approx(expected[0], abs=1e-5)
    (graded,) = anyio.run(partial(grade, [rollout], rm_reward_func(model=str(folder), device="cpu")))
    assert graded.reward == pytest.approx(expected[0], abs=1e-5)
    rm_reward_func(model=str(folder)).check(rollout.sample)


def test_a_reward_model_of_text_refuses_rows_with_pictures(trained, trained_on_pictures):
    rows = rows_of(trained_on_pictures[1])
    with pytest.raises(ValueError, match=r"has media, and the reward model reads text only"):
        score_tokens(load_reward_model(str(trained[0])), rows)
    with pytest.raises(ValueError, match=r"rows:1 has images, and tiny, which grades the answers, reads text only"):
        rm_reward_func(model="tiny").check(Sample("rows:1", media=rows[0].media))
