"""Plain functions for scripts that use the same code as training."""

import anyio
import numpy as np
import pytest
import torch

from oxrl.data.media_features import MediaRow, own_inputs
from oxrl.data.render import Renderer
from oxrl.models.load import load_model
from oxrl.models.reference import create_reference_model
from oxrl.primitives.inference import (
    apply_chat_template,
    batch_generate,
    create_batch_rollouts,
    create_multiturn_rollout,
    create_rollout,
    generate,
    generate_conversation_turn,
    generate_with_logprobs,
)
from oxrl.rollouts.envs import dialogue
from oxrl.rollouts.tool_calls import parse_xml_tools
from oxrl.rollouts.tools import calculator, execute_functions, execute_tools, tool_schema
from oxrl.types import Conversation, GenerationConfig, Message, Request, Sample, Status
from tests.drawings import png
from tests.rollouts.scripted_text import ScriptedText

CONFIG = GenerationConfig(max_new_tokens=6, seed=5)
CHAT = Conversation((Message("user", "What is 12 * 12?"),))
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 12"}}</tool_call>'


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


def scripted(*texts):
    """A generate function that returns these texts in order."""
    left = list(texts)

    def generator(model, tokenizer, prompts, config):
        inner = ScriptedText(tokenizer, [left.pop(0) for _ in prompts])
        return anyio.run(inner.generate, [Request(tuple(prompt)) for prompt in prompts], config)

    return generator


def test_a_text_a_chat_and_ids_are_all_prompts(model, tiny):
    tokenizer = tiny[1]
    written = apply_chat_template(tokenizer, CHAT)
    ids = Renderer(tokenizer).prompt(CHAT.messages)
    dicts = [message.to_dict() for message in CHAT.messages]
    answers = batch_generate(model, tokenizer, [written, CHAT, dicts, ids], CONFIG._replace(temperature=0))
    assert len({answer.token_ids for answer in answers}) == 1
    assert generate(model, tokenizer, CHAT, CONFIG).token_ids == generate(model, tokenizer, written, CONFIG).token_ids
    assert generate(model, tokenizer, "12", CONFIG).token_ids != generate(model, tokenizer, "13", CONFIG).token_ids


def test_generator_template_and_extractor_are_replaceable(model, tiny):
    seen = []

    def generator(model, tokenizer, prompts, config):
        seen.extend(tokenizer.decode(prompt) for prompt in prompts)
        return scripted("hi")(model, tokenizer, prompts, config)

    def template(tokenizer, chat, tools, add_generation_prompt):
        return "|".join(message["content"] for message in chat) + ("?" if add_generation_prompt else "")

    assert generate(model, tiny[1], CHAT, CONFIG, generator=generator, template_fn=template).text == "hi"
    assert seen == ["What is 12 * 12??"]
    assert apply_chat_template(tiny[1], CHAT, template_fn=template, add_generation_prompt=False) == "What is 12 * 12?"
    _, logprobs = generate_with_logprobs(
        model, tiny[1], CHAT, CONFIG, logprob_extractor=lambda model, prompt_ids, generation: [float(len(prompt_ids))]
    )
    assert logprobs == [len(Renderer(tiny[1]).prompt(CHAT.messages))]


def test_log_probs_are_those_of_the_sampled_tokens(model, tiny):
    generation, logprobs = generate_with_logprobs(model, tiny[1], CHAT, CONFIG)
    ids = [*Renderer(tiny[1]).prompt(CHAT.messages).tolist(), *generation.token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -len(logprobs) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    assert logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def test_a_turn_is_added_to_the_conversation(model, tiny):
    longer, generation = generate_conversation_turn(
        model, tiny[1], CHAT, CONFIG, tools=[tool_schema(calculator)], generator=scripted("So: " + CALL)
    )
    message = longer.messages[-1]
    assert longer.messages[:-1] == CHAT.messages
    assert message.content == "So:"
    assert message.extra["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "12 * 12"}}
    assert CALL in generation.text


def test_a_rollout_is_sampled_graded_and_compared(model, tiny):
    tokenizer = tiny[1]
    sample = Sample("sum", messages=CHAT.messages, answer="144")

    def correct(rollout):
        return float(rollout.response == rollout.sample.answer)

    assert create_rollout(model, tokenizer, sample, CONFIG, reward_fn=correct, generator=scripted("144")).reward == 1.0
    failed = create_rollout(model, tokenizer, sample, CONFIG, reward_fn=lambda rollout: 1 / 0)
    assert failed.reward is None and "ZeroDivisionError" in failed.error
    plain = create_rollout(model, tokenizer, "What is 12 * 12?", CONFIG)
    assert list(plain.turns[0].prompt_ids) == Renderer(tokenizer).prompt(CHAT.messages).tolist()
    assert plain.kl_divergence is None and plain.reward is None and plain.prompt == "What is 12 * 12?"


def test_the_divergence_is_the_mean_over_sampled_tokens(tiny):
    tokenizer, model = tiny[1], load_model("tiny").train()
    ref = create_reference_model(model)
    same = create_rollout(model, tokenizer, CHAT, CONFIG, ref_model=ref)
    assert same.kl_divergence == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3)
    other = create_rollout(model, tokenizer, CHAT, CONFIG, ref_model=ref, kl_fn=lambda own, ref: own - ref)
    ids = torch.tensor([other.tokens])
    count = len(other.generation.token_ids)
    with torch.no_grad():
        logprobs = [each(input_ids=ids).logits[0, -count - 1 : -1].log_softmax(-1) for each in (model, ref)]
    own, theirs = (each.gather(1, ids[0, -count:, None]).mean().item() for each in logprobs)
    assert abs(own - theirs) > 1e-4
    assert other.kl_divergence == pytest.approx(own - theirs, abs=1e-5)
    assert model.training and not ref.training


def test_a_batch_has_n_answers_to_each_prompt(model, tiny):
    def best_first(rollouts):
        return [float(rollout.index == 0) for rollout in rollouts]

    rollouts = create_batch_rollouts(
        model, tiny[1], ["one", "two"], CONFIG, n_samples_per_prompt=3, reward_fn=best_first
    )
    assert [(rollout.group, rollout.index, rollout.reward) for rollout in rollouts] == [
        (group, index, float(index == 0)) for group in range(2) for index in range(3)
    ]
    assert len({rollout.generation.token_ids for rollout in rollouts}) == 6
    again = create_batch_rollouts(model, tiny[1], ["one", "two"], CONFIG, n_samples_per_prompt=3)
    assert [each.tokens for each in again] == [each.tokens for each in rollouts]


@pytest.mark.parametrize("executor", [None, execute_functions, execute_tools])
def test_tools_are_called_until_the_model_is_done(model, tiny, executor):
    rollout = create_multiturn_rollout(
        model,
        tiny[1],
        CHAT,
        CONFIG,
        tools=[calculator],
        tool_parser=parse_xml_tools,
        tool_executor=executor,
        generator=scripted(CALL, "144"),
        reward_fn=lambda rollout: rollout.metadata["tool_calls"],
    )
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert (rollout.reward, rollout.status, rollout.metadata["ended"]) == (1.0, Status.COMPLETED, "answered")
    same = create_rollout(model, tiny[1], CHAT, CONFIG, tools=[calculator], generator=scripted(CALL, "144"))
    assert same.tokens == rollout.tokens


def test_a_parser_alone_parses_calls_and_executes_none(model, tiny):
    rollout = create_rollout(model, tiny[1], CHAT, CONFIG, tool_parser=parse_xml_tools, generator=scripted(CALL))
    assert len(rollout.turns) == 1
    assert rollout.messages[-1].extra["tool_calls"]


def test_a_stop_condition_ends_it_and_any_environment_will_do(model, tiny):
    stopped = create_multiturn_rollout(
        model,
        tiny[1],
        CHAT,
        CONFIG,
        tools=[calculator],
        stop_condition=lambda conversation: "DONE" in conversation.messages[-1].content,
        generator=scripted(CALL, "DONE " + CALL, "x"),
    )
    assert stopped.metadata["ended"] == "stop_condition" and len(stopped.turns) == 2
    talked = create_multiturn_rollout(
        model,
        tiny[1],
        CHAT,
        CONFIG,
        env=dialogue(lambda conversation: "Why?", max_turns=2),
        generator=scripted("a", "b"),
    )
    assert talked.response == "a\nb"


def test_turns_of_the_real_model_have_their_own_seeds(model, tiny):
    env = dialogue(lambda conversation: "Go on.", max_turns=3)
    config = CONFIG._replace(stop_token_ids=tuple(range(256)), max_new_tokens=4)  # any byte ends a turn
    rollout = create_multiturn_rollout(model, tiny[1], CHAT, config, env=env)
    again = create_multiturn_rollout(model, tiny[1], CHAT, config, env=env)
    assert len(rollout.turns) == 3 and rollout.tokens == again.tokens
    assert sum(rollout.loss_mask) == sum(len(turn.generation.token_ids) for turn in rollout.turns)
    other = create_multiturn_rollout(model, tiny[1], CHAT, config._replace(seed=6), env=env)
    assert other.tokens != rollout.tokens


RED, BLUE = png("red"), png("blue", 84, 56)
SEEN = Conversation((Message("user", [{"type": "image", "image": RED}, {"type": "text", "text": "Which colour?"}]),))
IMAGE = 262  # <|image_pad|>


@pytest.fixture(scope="module")
def seeing(tiny_vlm):
    return load_model(tiny_vlm[0])


def own_logprobs(model, ids, answer, medium):
    """By the model's own forward pass."""
    inputs = own_inputs(model, MediaRow("", np.array([*ids, *answer.token_ids]), (medium,)))
    with torch.no_grad():
        p = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
    return [float(p[len(ids) - 1 + i, token]) for i, token in enumerate(answer.token_ids)]


def test_prompts_may_have_images_in_their_parts_or_beside_them(seeing, tiny_vlm):
    tokenizer = tiny_vlm[1]
    beside = Sample("s", (Message("user", "Which colour?"),), answer="red", media=(RED,))
    seen, shown = (
        create_rollout(seeing, tokenizer, prompt, CONFIG, reward_fn=lambda rollout: len(rollout.sample.media))
        for prompt in (SEEN, beside)
    )
    assert seen.generation.token_ids == shown.generation.token_ids and shown.reward == 1.0
    assert seen.turns[0].prompt_ids.count(IMAGE) == 4 and seen.sample.media == (RED,)
    expected = own_logprobs(seeing, seen.turns[0].prompt_ids, seen.generation, RED)
    assert seen.generation.logprobs == pytest.approx(expected, abs=1e-5)
    assert generate(seeing, tokenizer, SEEN, CONFIG).token_ids == seen.generation.token_ids
    longer, answer = generate_conversation_turn(seeing, tokenizer, SEEN, CONFIG)
    assert answer.token_ids == seen.generation.token_ids
    again = generate(seeing, tokenizer, (*longer.messages, Message("user", "Sure?")), CONFIG)
    assert len(longer.messages) == 2 and again.token_ids


def test_a_group_and_a_dialogue_with_an_image_are_compared_with_it(seeing, tiny_vlm):
    reference = create_reference_model(seeing)
    with torch.no_grad():
        next(reference.model.visual.parameters()).mul_(3)  # what the image is worth differs, and nothing else
    sample = Sample("s", (Message("user", "Which colour?"),), media=(BLUE,))
    both = create_batch_rollouts(seeing, tiny_vlm[1], [CHAT, sample], CONFIG, ref_model=reference)
    assert both[0].kl_divergence == pytest.approx(0, abs=1e-9) and both[1].kl_divergence > 1e-7
    answers = scripted("Red.", "Blue.")

    def generator(model, tokenizer, prompts, config, media):
        assert media == [(BLUE,)]
        return answers(model, tokenizer, prompts, config)

    rollout = create_multiturn_rollout(
        *(seeing, tiny_vlm[1], sample, CONFIG),
        env=dialogue(lambda messages: "Sure?", max_turns=2),
        ref_model=reference,
        generator=generator,
    )
    assert len(rollout.turns) == 2 and rollout.kl_divergence > 1e-7
    assert [turn.prompt_ids.count(IMAGE) for turn in rollout.turns] == [6, 6]


def test_a_generate_function_gets_media_if_it_takes_them(seeing, tiny_vlm, model, tiny):
    given = []

    def generator(model, tokenizer, prompts, config, media):
        given.append(media)
        return scripted("red")(model, tokenizer, prompts, config)

    assert create_rollout(seeing, tiny_vlm[1], SEEN, CONFIG, generator=generator).response == "red"
    dialogued = create_multiturn_rollout(
        seeing, tiny_vlm[1], SEEN, CONFIG, generator=generator, env=dialogue(lambda messages: None)
    )
    assert dialogued.response == "red" and given == [[(RED,)], [(RED,)]]
    with pytest.raises(ValueError, match=r"generator generator\(model, .*\) has no argument media"):
        generate(seeing, tiny_vlm[1], SEEN, CONFIG, generator=scripted("red"))
    with pytest.raises(ValueError, match="the prompt: the row has images or audio, but the model reads text only"):
        generate(model, tiny[1], SEEN, CONFIG)
