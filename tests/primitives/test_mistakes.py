"""Data of an earlier stage than a primitive takes is converted where that has one meaning, else the error says how."""

import re

import pytest
import torch

import oxrl
from oxrl.algorithms.policy import Policy

ROLLOUTS = [
    oxrl.Sample(
        prompt="?",
        tokens=[1, 50, 97 + number],
        loss_mask=[0, 0, 1],
        rollout_log_probs=[-5.0],
        reward=float(number % 2),
        group_index=number // 2,
    )
    for number in range(4)
]
UNGRADED = [oxrl.Sample(prompt="?", tokens=[1, 50, 97], loss_mask=[0, 0, 1])]
ITEMS = oxrl.prepare_grpo_batch(ROLLOUTS)
ROWS = [row for item in ITEMS for row in item]
CHATS = [oxrl.Sample("chat", messages=(oxrl.Message("user", "Hi"), oxrl.Message("assistant", "Hello")))]


@pytest.fixture(scope="module")
def model():
    return oxrl.load_model("tiny")


@pytest.fixture(scope="module")
def view(model):
    return oxrl.create_policy_batch(model, ITEMS)


@pytest.fixture(scope="module")
def state():
    return oxrl.create_training_state(oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny"))


def needs_an_argument(view: Policy, advantages):
    return view.logprob * advantages


def returns_a_float(view: Policy):
    return view.logprob.sum().item()


MISTAKES = {
    "rollouts to a loss": (
        lambda m, v, s: oxrl.compute_grpo_loss(ROLLOUTS, torch.ones(4)),
        "takes Policy, the log-probs of a forward pass, not a list of Rollout; make it by create_policy_batch(model, ",
    ),
    "items to ppo": (lambda m, v, s: oxrl.compute_ppo_loss(ITEMS), "not a list of tuple; make it by create_policy_ba"),
    "rollouts to a pair loss": (lambda m, v, s: oxrl.compute_dapo_loss(ROLLOUTS), "make it by create_pair_batch(model"),
    "a policy to a pair loss": (lambda m, v, s: oxrl.compute_dapo_loss(v), "takes Pairs, the log-probs of a forward"),
    "too few advantages": (
        lambda m, v, s: oxrl.compute_grpo_loss(v, torch.ones(3)),
        "shape (3,); give one for each of 4 sequences, or for each of 12 tokens",
    ),
    "a loss that is a float": (
        lambda m, v, s: oxrl.compute_grpo_loss(v, loss_fn=lambda view: 0.5),
        "returned a float, which has no gradient; return a tensor",
    ),
    "a loss without arguments": (lambda m, v, s: oxrl.compute_grpo_loss(v, loss_fn=lambda: 1), "(view), or (view, adv"),
    "an unknown parameter": (lambda m, v, s: oxrl.compute_grpo_loss(v, clip_hihg=1), "did you mean clip_high?"),
    "a float from a custom algorithm": (
        lambda m, v, s: oxrl.training_step(s, ROLLOUTS, oxrl.create_algorithm_config(returns_a_float)),
        "returns_a_float returned a float, which has no gradient",
    ),
    "advantages for a custom algorithm": (
        lambda m, v, s: oxrl.create_algorithm_config(needs_an_argument),
        "its arguments are (view), and parameters with defaults; the advantages are view.advantage",
    ),
    "ungraded rollouts": (lambda m, v, s: oxrl.compute_grpo_advantages(UNGRADED), "was not graded; a missing grade"),
    "rewards without groups": (
        lambda m, v, s: oxrl.compute_grpo_advantages([1.0, 0.0]),
        "give the rewards of each prompt in a list of their own, [[1.0, 0.0], [0.5, 0.5]]",
    ),
    "rows as rewards": (lambda m, v, s: oxrl.compute_grpo_advantages(ITEMS), "has a tuple of Row; give numbers by pro"),
    "rollouts to gae": (lambda m, v, s: oxrl.compute_ppo_advantages(ROLLOUTS), "rewards of each token, [T] or [B, T]"),
    "rollouts to kl": (lambda m, v, s: oxrl.compute_forward_kl(ROLLOUTS, ROLLOUTS), "rollout.generation.logprobs"),
    "samples to a reference": (
        lambda m, v, s: oxrl.get_reference_logprobs(m, CHATS),
        "there is a Sample among them; rollouts are sampled by create_batch_rollouts",
    ),
    "a reference in the second place": (
        lambda m, v, s: oxrl.get_reference_logprobs(ROWS, m),
        "the order is get_reference_logprobs(ref_model, rows)",
    ),
    "samples to a policy batch": (lambda m, v, s: oxrl.create_policy_batch(m, CHATS), "assemble(sample, Renderer(tok"),
    "rows to a training step": (
        lambda m, v, s: oxrl.training_step(s, ITEMS, "grpo"),
        "training_step takes graded rollouts, or group_rollouts(rollouts), not a list of tuple",
    ),
    "an algorithm as config": (
        lambda m, v, s: oxrl.training_step(s, ROLLOUTS, oxrl.algorithm("grpo")),
        "the algorithm config is an Algorithm; give create_algorithm_config(NAME, parameters), or a name",
    ),
    "a model as backend": (
        lambda m, v, s: oxrl.per_sample_gradients(m, ITEMS, "grpo"),
        "not a LlamaForCausalLM; make one: create_pytorch_backend(model)",
    ),
    "samples without a tokenizer": (
        lambda m, v, s: oxrl.per_sample_gradients(s.backend, CHATS, "sft"),
        "not a list of Sample; prepare_grpo_batch(rollouts) makes items of rollouts",
    ),
    "rows without items": (
        lambda m, v, s: oxrl.per_sample_gradients(s.backend, ROWS, "sft"),
        "put each row into an item: (row,) for SFT, (chosen, rejected) for a pair",
    ),
    "samples to group": (lambda m, v, s: oxrl.prepare_grpo_batch(CHATS), "a Sample is not a rollout; give rollouts of"),
    "a text as generation": (
        lambda m, v, s: oxrl.Generation("4", (19,), (-0.1,), "stop"),
        "token_ids is the text '4'; write Generation(token_ids, logprobs, finish_reason, text=text)",
    ),
    "an unknown finish reason": (
        lambda m, v, s: oxrl.Generation((1,), (-0.1,), "eos"),
        "it is stop, length or aborted",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_names_what_was_given_and_the_function_that_makes_what_is_needed(name, model, view, state):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(model, view, state)


def test_a_generation_of_a_text_alone_names_the_arguments():
    with pytest.raises(TypeError, match=r"write Generation\(token_ids, logprobs, finish_reason, text=text\)"):
        oxrl.Generation("4")


def test_rollouts_are_accepted_where_rows_or_rewards_are_meant(model, view):
    half = 0.5**0.5
    for given in (ROLLOUTS, oxrl.group_rollouts(ROLLOUTS)):
        advantages = torch.stack(oxrl.compute_grpo_advantages(given))
        torch.testing.assert_close(advantages, torch.tensor([[-half, half]] * 2), atol=1e-3, rtol=0)
        assert torch.equal(oxrl.create_policy_batch(model, given).logprob, view.logprob)
        by_rollout = torch.stack(oxrl.get_reference_logprobs(model, given))
        torch.testing.assert_close(by_rollout, torch.stack(oxrl.get_reference_logprobs(model, ROWS)))
    assert torch.equal(oxrl.create_policy_batch(model, ROWS).logprob, view.logprob)
    assert oxrl.compute_advantages(ROLLOUTS, 0.5).tolist() == [-0.5, 0.5, -0.5, 0.5]
    assert len(oxrl.create_pair_batch(model, ROLLOUTS).chosen) == 2
    assert oxrl.get_reference_logprobs(model, []) == []


def test_a_rollout_of_several_rows_has_the_log_probs_of_all_its_tokens(model):
    turns = (
        oxrl.Turn((1, 50), oxrl.Generation((60, 61), (-1.0, -1.0), "stop")),
        oxrl.Turn((2, 70), oxrl.Generation((62,), (-1.0,), "stop")),  # does not start with the first turn
    )
    rollout = oxrl.Rollout(oxrl.Sample("two turns"), turns)
    first, second = oxrl.Row("1", [1, 50, 60, 61], [0, 0, 1, 1]), oxrl.Row("2", [2, 70, 62], [0, 0, 1])
    (found,) = oxrl.get_reference_logprobs(model, [rollout])
    torch.testing.assert_close(found, torch.cat(oxrl.get_reference_logprobs(model, [first, second])))


def test_advantages_may_be_those_of_each_group_and_a_loss_may_take_them(view):
    per_group = oxrl.compute_grpo_advantages(ROLLOUTS)
    assert torch.equal(oxrl.compute_grpo_loss(view, per_group), oxrl.compute_grpo_loss(view, torch.cat(per_group)))
    both = oxrl.compute_grpo_loss(view, [2.0, 0.0, 0.0, 0.0], loss_fn=needs_an_argument)
    expected = 2.0 * view.logprob.detach().double()[:3].sum() / 4  # the first of four sequences
    assert float(both) == pytest.approx(float(expected), rel=1e-6)


def test_a_name_is_a_config_and_rollouts_are_grouped(state, view):
    _, stats = oxrl.training_step(state, ROLLOUTS, "grpo")
    assert stats.reward == 0.5 and stats.metrics["trained_tokens"] == 4
    grpo = oxrl.create_algorithm_config("grpo")
    assert torch.equal(oxrl.compute_loss_by_algorithm(view, "grpo"), oxrl.compute_loss_by_algorithm(view, grpo))


def test_gradients_of_samples_need_a_tokenizer_and_those_of_rollouts_do_not(state):
    ((item, gradient),) = oxrl.per_sample_gradients(state, CHATS, "sft")
    assert item[0].id == "chat" and any(each.norm() > 0 for each in gradient.values())
    assert len(oxrl.per_sample_grad_norms(state.backend, ROLLOUTS, "grpo")) == 4
