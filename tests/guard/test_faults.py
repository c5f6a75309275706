"""Planted faults: each is put into a run through a public interface, and the guard names it."""

import copy
from dataclasses import replace
from functools import partial

import anyio
import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.forward import LanguageModel
from oxrl.backends.local import PyTorchTrainingBackend, create_pytorch_backend
from oxrl.backends.optimizer import AdamW
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.guard.monitor import Guard
from oxrl.guard.rows import references_of_samples, wrong_advantages
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import (
    Episode,
    GenerationConfig,
    ImmediateTrainFuture,
    Losses,
    Message,
    Row,
    Sample,
    Term,
    Turn,
)
from tests.loops.test_online import FAST, Setting, small_letters

VARIED = GenerationConfig(max_new_tokens=12, stop_token_ids=tuple(range(64)))  # a fifth of all tokens ends a response


def ended_by_a_check(guard, run):
    """Run to the end, or to an error that the guard has recorded as a failed check."""
    try:
        run()
    except Exception:
        if not any(found.state == "failed" for found in guard.findings):
            raise


def online(setting, steps=1, *, guard=None, algorithm=None, **rest):
    """Run it, and return the guard's faults: `{name: message}`."""
    guard = guard or Guard()
    manager = setting.manager(**{"batch_size": 4, "n_samples_per_prompt": 4, **rest.pop("manager", {})})
    ended_by_a_check(guard, partial(setting.run, steps, manager, algorithm=algorithm, guard=guard, **rest))
    return {found.check: found.message for found in guard.findings}


def with_items(change):
    """GRPO with an own function from rollouts to rows."""
    grpo = algorithm("grpo")

    def items(rollouts, render):
        return [tuple(change(row) for row in item) for item in grpo.online.items(rollouts, render)]

    return replace(grpo, online=grpo.online._replace(items=items))


def without_end(mask):
    kept = mask.copy()
    kept[np.flatnonzero(mask)[-1]] = False
    return kept


def everything(mask):
    return np.arange(len(mask)) > 0


def moved(by):
    def move(mask):
        shifted = np.roll(mask, by)
        shifted[0] = False
        return shifted

    return move


MASKS = {
    "the mask is full": everything,
    "shifted by one token to the left": moved(-1),
    "shifted by one token to the right": moved(1),
    "the end of turn is outside of the loss": without_end,
}


@pytest.mark.parametrize("fault", MASKS)
def test_a_wrong_mask_of_sampled_rows(fault):
    found = online(Setting(), algorithm=with_items(lambda row: replace(row, mask=MASKS[fault](row.mask))))
    assert list(found) == ["mask"] and fault in found["mask"]


def test_an_empty_mask_of_sampled_rows():
    empty = with_items(lambda row: replace(row, mask=np.zeros(len(row), bool)))
    found = online(Setting(), algorithm=empty)
    assert list(found) == ["mask"] and "nothing to train on" in found["mask"]


CHATS = [
    Sample(f"s{number}", (Message("user", f"{number}?"), Message("assistant", f"It is {number}.")))
    for number in range(4)
]


def offline(name, *, change=lambda row: row, steps=1, guard=None, backend=None, **changes):
    own, render = replace(algorithm(name), **changes), Renderer(load_tokenizer("tiny"))
    guard = guard or Guard(references=references_of_samples(CHATS, render))
    items = [tuple(map(change, item)) for sample in CHATS for item in own.assemble(sample, render)]

    async def go():
        source, config = DataBuffer(items), OfflineConfig(num_steps=steps, batch_size=4)
        trainer = backend or create_pytorch_backend(load_model("tiny"), lr=1e-3)
        await run_offline(trainer, own, source, config, guard=guard, log=guard.logged)

    ended_by_a_check(guard, partial(anyio.run, go))
    return {found.check: found.message for found in guard.findings}


@pytest.mark.parametrize("fault", [*MASKS, "the mask is empty"])
def test_a_wrong_mask_of_dataset_rows(fault):
    of = MASKS.get(fault, np.zeros_like)
    found = offline("sft", change=lambda row: replace(row, mask=of(row.mask)))
    assert list(found) == ["mask"] and fault in found["mask"] and "row s" in found["mask"]


def test_rows_of_which_most_have_no_trained_token():
    """Of rows whose right mask is not known."""

    def first_only(row):
        return row if row.id.startswith("s0") else replace(row, mask=np.zeros_like(row.mask))

    found = offline("sft", change=first_only, guard=Guard())
    assert list(found) == ["mask"] and "the mask is empty in 3 of 4 rows" in found["mask"]


def test_text_that_is_tokenised_again():
    """Bytes that are no UTF-8 become the three bytes of U+FFFD."""
    setting = Setting(max_new_tokens=12)

    def retokenised(row):
        start = int(row.mask.argmax())
        text = setting.tokenizer.decode(row.tokens[start:].tolist())
        ids = [*row.tokens[:start], *setting.tokenizer.encode(text, add_special_tokens=False)]
        zeros = np.zeros(len(ids), np.float32)
        return replace(
            row, tokens=np.array(ids), mask=np.arange(len(ids)) >= start, streams=dict.fromkeys(row.streams, zeros)
        )

    found = online(setting, algorithm=with_items(retokenised))
    assert list(found) == ["tokens"] and "the text is the same, so it was re-tokenised" in found["tokens"]


def test_turns_that_are_tokenised_again():
    async def echo(sample, policy):
        first = tuple(policy.render.prompt(sample.messages).tolist())
        answer = await policy.generate(first)
        tokenizer = policy.render.tokenizer
        context = tokenizer.decode([*first, *answer.token_ids])
        second = tuple(tokenizer.encode(context + " And?", add_special_tokens=False))
        return Episode((Turn(first, answer), Turn(second, await policy.generate(second))))

    setting = Setting(max_new_tokens=12)
    setting.sampler.env = echo
    found = online(setting)
    assert list(found) == ["turns"] and "the prompt of turn 2" in found["turns"] and "re-tokenised" in found["turns"]


class Stale:
    """An engine with weights of its own that confirms every update and loads none."""

    def __init__(self, setting):
        self.inner = EmbeddedGenerator(copy.deepcopy(setting.model), setting.tokenizer)
        self.version = 0

    async def generate(self, requests, sampling):
        return [each._replace(version=self.version) for each in await self.inner.generate(requests, sampling)]

    async def update_weights(self, weights):
        self.version = weights.version

    async def abort(self):
        await self.inner.abort()

    async def close(self):
        await self.inner.close()


def sampling_from(setting, generator):
    setting.generator = setting.sampler.generator = setting.sampler._generator.generator = generator
    return setting


def test_weights_that_are_not_handed_to_the_sampler():
    setting = Setting(lr=1e-4)
    found = online(sampling_from(setting, Stale(setting)), 4)
    assert list(found) == ["sampler_weights"] and "it samples with old weights" in found["sampler_weights"]


def test_an_engine_that_does_not_confirm_a_version():
    setting = Setting(lr=1e-4)
    engine = Stale(setting)

    async def ignore(weights):
        """A sync that silently does nothing."""

    engine.update_weights = ignore
    found = online(sampling_from(setting, engine))
    assert list(found) == ["sampler_weights"] and "the engine has version 0" in found["sampler_weights"]


def with_lora(**options):
    setting = Setting(**options)
    base = copy.deepcopy(setting.model)
    setting.model = attach_lora(setting.model, LoraSettings(r=4, alpha=8))
    setting.backend = create_pytorch_backend(setting.model, lr=options["lr"])
    return setting, base


def test_an_adapter_that_is_missing_in_the_sampler():
    setting, base = with_lora(lr=1e-3)
    engine = Stale(setting)
    engine.inner = EmbeddedGenerator(base, setting.tokenizer)
    found = online(sampling_from(setting, engine), 4)
    assert list(found) == ["sampler_adapter"] and "without what the adapter has learned" in found["sampler_adapter"]


def with_credit(change):
    grpo = algorithm("grpo")

    def credit(items, memory):
        return [tuple(changed(row, change) for row in item) for item in grpo.credit(items, memory)]

    return replace(grpo, credit=credit)


def changed(row: Row, change):
    return replace(row, streams={**row.streams, "advantage": change(row)})


def test_advantages_that_are_lost():
    nothing = with_credit(lambda row: np.zeros(len(row), np.float32))
    found = online(Setting(), algorithm=nothing, manager={"n_samples_per_prompt": 8})
    assert list(found) == ["advantages"] and "advantages are lost" in found["advantages"]


@pytest.mark.parametrize(("difference", "found"), [(1e-6, False), (1.0, True)])
def test_rewards_that_are_equal_in_the_precision_of_advantages_do_not_differ(difference, found):
    tokens, mask, none = np.array([1, 2, 3]), np.array([False, False, True]), np.zeros(3, np.float32)
    streams = {"advantage": none}
    rewards = (5000.0, 5000.0 + difference)
    rows = [Row(f"r{each}", tokens, mask, streams=streams, scalars={"reward": each}) for each in rewards]
    assert bool(wrong_advantages([(row,) for row in rows])) == found


def test_groups_with_equal_prompts_are_judged_by_themselves():
    tokens, mask, none = np.array([1, 2, 3]), np.array([False, False, True]), np.zeros(3, np.float32)
    row = Row("", tokens, mask, streams={"advantage": none}, scalars={"reward": 0.0})
    items = [(replace(row, id=f"r{index}", scalars={"reward": float(index // 2)}),) for index in range(4)]
    assert not wrong_advantages(items, {f"r{index}": index // 2 for index in range(4)})
    assert "advantages are lost" in wrong_advantages(items, {f"r{index}": index % 2 for index in range(4)})


def test_advantages_on_the_last_token_only():
    def last(row):
        return row.streams["advantage"] * (np.arange(len(row)) == np.flatnonzero(row.mask)[-1])

    found = online(Setting(), algorithm=with_credit(last))
    assert list(found) == ["advantages"] and "on the last token only" in found["advantages"]


def mean_of_the_micro_batch(outputs, batch):
    advantage = batch.streams.get("advantage", torch.ones(len(batch.tokens)))
    return Losses({"policy": Term(-(outputs.logprob * advantage * batch.mask).sum() / batch.mask.sum(), "constant")})


def test_a_loss_that_depends_on_the_split():
    found = online(Setting(), algorithm=replace(algorithm("grpo"), loss=mean_of_the_micro_batch))
    assert list(found) == ["loss_split"] and "it depends on the split" in found["loss_split"]
    found = offline("sft", loss=mean_of_the_micro_batch)
    assert list(found) == ["loss_split"] and "of the loss of sft" in found["loss_split"]


class Backend(PyTorchTrainingBackend):
    """The backend of a user, with one method of its own."""


def own_backend(kind=Backend, model=None):
    module = LanguageModel(model or load_model("tiny"))
    return kind(module, AdamW(dict(module.named_parameters()), 0.0, lr=1e-3))


def test_rows_that_see_each_other():
    class Leaking(Backend):
        def outputs(self, batch, reads):
            joined = replace(
                batch,
                positions=torch.arange(batch.num_tokens),
                segments=torch.zeros_like(batch.segments),
                borders=(0, batch.num_tokens),
                ids=batch.ids[:1],
            )
            return super().outputs(joined, reads)

    found = offline("sft", backend=own_backend(Leaking))
    assert list(found) == ["packed_rows"] and "alone and packed with others" in found["packed_rows"]


def test_a_gradient_that_is_not_finite():
    def sharp(outputs, batch):
        return Losses({"nll": Term((outputs.logprob * 0).sqrt().sum(), "token")})

    found = offline("sft", loss=sharp, guard=Guard({"all": "off"}))
    assert list(found) == ["finite"] and "the gradient is not finite" in found["finite"]


def test_a_backend_that_steps_with_a_gradient_that_is_not_finite():
    class Careless(Backend):
        def optim_step(self):
            return ImmediateTrainFuture({"grad_norm": float("nan"), "lr": 1e-3})

    found = offline("sft", backend=own_backend(Careless))
    assert list(found) == ["finite"] and "grad_norm is not finite" in found["finite"]


def test_parameters_that_the_optimizer_does_not_have():
    module = LanguageModel(load_model("tiny"))
    known = {name: weight for name, weight in module.named_parameters() if "mlp" not in name}
    found = offline("sft", steps=4, backend=Backend(module, AdamW(known, 0.0, lr=1e-3)))
    assert list(found) == ["trained_parameters"] and "have not moved in 3 updates" in found["trained_parameters"]
    assert "mlp" in found["trained_parameters"]


def test_parameters_that_are_frozen_by_mistake():
    model = load_model("tiny")
    for name, weight in model.named_parameters():
        weight.requires_grad_("self_attn" not in name)
    backend = create_pytorch_backend(model, lr=1e-3)
    found = offline("sft", steps=4, backend=backend, guard=Guard(all_trained=True))
    assert list(found) == ["trained_parameters"] and "are frozen though all weights" in found["trained_parameters"]


def test_frozen_parameters_that_move():
    model = load_model("tiny")
    frozen = next(iter(model.parameters())).requires_grad_(False)

    class Careless(Backend):
        def optim_step(self):
            frozen.data.add_(1e-3)
            return super().optim_step()

    module = LanguageModel(model)
    known = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    found = offline("sft", steps=4, backend=Careless(module, AdamW(known, 0.0, lr=1e-3)))
    assert list(found) == ["frozen_parameters"] and "1 of 1 frozen tensors have moved" in found["frozen_parameters"]


def test_a_reward_that_raises_hangs_or_returns_nan():
    def raising(rollout):
        raise KeyError("answer")

    async def hanging(rollout):
        await anyio.sleep_forever()

    def of_nothing(rollout):
        return float("nan")

    reasons = {raising: "KeyError", hanging: "no result within 0.05 s", of_nothing: "the score is nan"}
    for reward, reason in reasons.items():
        found = online(Setting(), manager={"reward_fn": reward, "reward_time_limit": 0.05})
        assert list(found) == ["reward_errors"] and reason in found["reward_errors"], found


def test_a_reward_that_raises_for_some_responses():
    def sometimes(rollout):
        return small_letters(rollout) / (rollout.index % 2)

    found = online(Setting(), manager={"reward_fn": sometimes})
    assert list(found) == ["reward_errors"] and "8 of 16 responses could not be graded" in found["reward_errors"]
    assert "ZeroDivisionError" in found["reward_errors"]


def test_a_reward_that_is_constant():
    guard = Guard()
    found = online(Setting(), 5, guard=guard, log=guard.logged, manager={"reward_fn": lambda rollout: 0.5})
    assert {"constant_reward", "no_gradient"} <= set(found) and "every reward of 5 steps is 0.5" in str(found)


def pays_for_length(rollout):
    return len(rollout.generation.token_ids) / 12


def pays_for_long_ones(rollout):
    return float(len(rollout.generation.token_ids) > 4)


def pays_for_a_number(rollout):
    return float(any(letter in "0123456789" for letter in rollout.response))


REWARDS = {
    pays_for_length: ("reward_by_length", "longer responses to a prompt earn more"),
    pays_for_long_ones: ("reward_by_length", "longer responses to a prompt earn more"),
    pays_for_a_number: ("reward_by_format", "it has a number"),
}


@pytest.mark.parametrize("reward", REWARDS)
def test_a_reward_that_pays_for_length_or_format(reward):
    name, words = REWARDS[reward]
    setting = Setting(lr=1e-6)
    setting.sampler.sampling = VARIED
    found = online(setting, 4, manager={"reward_fn": reward, "n_samples_per_prompt": 14})
    assert list(found) == [name] and words in found[name] and "suspicion" in found[name]


def test_entropy_that_collapses():
    guard, setting = Guard(), Setting(lr=3e-2)

    def one_letter(rollout):
        return sum(token == 97 for token in rollout.generation.token_ids) / 4

    found = online(
        setting, 12, guard=guard, log=guard.logged, manager={"reward_fn": one_letter, "n_samples_per_prompt": 8}
    )
    assert "entropy" in found and "the policy has collapsed" in found["entropy"]


class Shortening(EmbeddedGenerator):
    """An engine that returns one token from its second version on."""

    async def generate(self, requests, sampling):
        limit = 1 if self.version > 1 else sampling.max_new_tokens
        return await super().generate(requests, sampling._replace(max_new_tokens=limit))


def test_length_that_collapses():
    guard, setting = Guard(), Setting(max_new_tokens=12, lr=1e-5)
    generator = Shortening(setting.model, setting.tokenizer)
    found = online(sampling_from(setting, generator), 8, guard=guard, log=guard.logged)
    assert "length" in found and "fell from 12 to 1 tokens" in found["length"]


def test_responses_that_become_repetitive():
    setting = Setting(max_new_tokens=24, lr=1e-5)

    def one_token_only(step, groups):
        setting.sampler.sampling = setting.sampler.sampling._replace(allowed_tokens=(97,))

    found = online(setting, 7, observe=one_token_only)
    assert list(found) == ["repetition"] and "repeated 4-grams in a response rose from 0.00" in found["repetition"]


def test_an_advantage_that_is_not_finite():
    infinite = with_credit(lambda row: np.where(row.mask, np.inf, 0.0).astype(np.float32))
    found = online(Setting(), algorithm=infinite)
    assert list(found) == ["advantages"] and "an advantage is not finite" in found["advantages"]


def test_a_reward_that_rises_while_held_out_answers_get_worse():
    guard, left = Guard(), iter([0.8, 0.7, 0.4, 0.2, 0.1])

    async def evaluate():
        mean = next(left)
        return {"eval_reward": mean, "eval_reward_low": mean - 0.1, "eval_reward_high": mean + 0.1}

    config = {"eval_every": 2, "eval_at_start": True}
    found = online(Setting(lr=FAST), 8, guard=guard, log=guard.logged, evaluate=evaluate, config=config)
    assert "held_out" in found and "the held-out reward fell from 0.8" in found["held_out"]
