"""The embedded generator against the trainer's own arithmetic."""

import numpy as np
import pytest
import torch

from oxrl.backends.local import create_pytorch_backend
from oxrl.data.pack import collate
from oxrl.generators.embedded import EmbeddedGenerator, draw
from oxrl.models.load import load_model, load_tokenizer
from oxrl.types import GenerationConfig, Row

PROMPTS = [[1, 20, 30], [5], [9, 8, 7, 6, 5, 4, 3, 2], [40, 41]]


@pytest.fixture(scope="module")
def speaker():
    return EmbeddedGenerator(load_model("tiny"), load_tokenizer("tiny"))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_of_what_was_sampled_are_the_trainers(speaker, temperature, anyio_backend):
    sampled = speaker.generate(PROMPTS, GenerationConfig(max_new_tokens=12, temperature=temperature, seed=3))
    rows = [
        Row(str(i), [*prompt, *one.token_ids], np.arange(len(prompt) + len(one.token_ids)) >= len(prompt))
        for i, (prompt, one) in enumerate(zip(PROMPTS, sampled, strict=True))
    ]
    if temperature == 1.0:
        (outputs,) = await create_pytorch_backend(speaker.model).logprobs([collate([(row,) for row in rows])])
        ours = outputs.logprob[outputs.logprob != 0].tolist()
    else:
        ours = []
        for row in rows:
            logits = speaker.model(input_ids=torch.tensor(row.tokens)[None], use_cache=False).logits[0] / temperature
            chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(row.tokens)[1:, None])[:, 0]
            ours += chosen[torch.tensor(row.mask)[1:]].tolist()
    theirs = [value for one in sampled for value in one.logprobs]
    assert theirs == pytest.approx(ours, abs=2e-5)


def test_greedy_answers_do_not_depend_on_companions(speaker):
    greedy = GenerationConfig(max_new_tokens=8, temperature=0)
    together = [one.token_ids for one in speaker.generate(PROMPTS, greedy)]
    assert together == [speaker.generate([prompt], greedy)[0].token_ids for prompt in PROMPTS]


def test_generation_ends_at_the_end_token_and_says_why(speaker):
    greedy = GenerationConfig(max_new_tokens=6, temperature=0)
    (free,) = speaker.generate([PROMPTS[0]], greedy)
    assert (free.finish_reason, len(free.token_ids)) == ("length", 6)
    (stopped,) = speaker.generate([PROMPTS[0]], greedy._replace(stop_token_ids=(free.token_ids[2],)))
    first = free.token_ids.index(free.token_ids[2])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[: first + 1])


def test_a_stop_text_ends_generation(speaker):
    sampling = GenerationConfig(max_new_tokens=40, temperature=1.0, seed=1)
    (free,) = speaker.generate([PROMPTS[0]], sampling)
    letter = next(char for char in free.text[1:] if char.isascii())
    (stopped,) = speaker.generate([PROMPTS[0]], sampling._replace(stop=(letter,)))
    assert stopped.finish_reason == "stop"
    assert letter in stopped.text
    assert len(stopped.token_ids) < len(free.token_ids)


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0]).expand(20_000, 4)
    choice, logprob = draw(logits, GenerationConfig(), torch.Generator().manual_seed(0))
    expected = logits[0].softmax(-1)
    np.testing.assert_allclose(torch.bincount(choice, minlength=4) / 20_000, expected, atol=0.015)
    torch.testing.assert_close(logprob, expected.log()[choice])


@pytest.mark.parametrize(
    ("sampling", "allowed"), [({"top_k": 2}, {1, 2}), ({"top_p": 0.6}, {2}), ({"top_p": 0.8}, {1, 2})]
)
def test_cut_off_tokens_are_never_drawn(sampling, allowed):
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0]).expand(2_000, 4)
    choice, _ = draw(logits, GenerationConfig(**sampling), torch.Generator().manual_seed(0))
    assert set(choice.tolist()) == allowed


def test_an_empty_prompt_is_refused(speaker):
    with pytest.raises(ValueError, match="at least one token"):
        speaker.generate([[]], GenerationConfig())
