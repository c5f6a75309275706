"""The wrappers return what the table's functions return, have their extension points, and shift once."""

import inspect

import numpy as np
import pytest
import torch

from oxrl import primitives as p
from oxrl.algorithms.policy import Policy
from oxrl.algorithms.preference import Pairs
from oxrl.loops.online import prepare_grpo_batch
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Row

OWN, REF = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])


def a_policy(advantage=(1.0, 1.0, -1.0)):
    segment = torch.tensor([0, 0, 1])
    return Policy(OWN.clone().requires_grad_(), OWN.clone(), torch.tensor(advantage), torch.ones(3).bool(), segment, 2)


def test_kl_functions_estimate_and_take_another_estimator():
    gap = np.array([0.5, -1.0, 0.0])
    assert p.compute_per_token_kl(OWN, REF).tolist() == pytest.approx(gap)
    k3 = np.exp(-gap) - 1 + gap
    assert float(p.compute_reverse_kl(OWN, REF)) == pytest.approx(k3.mean())
    forward = np.exp(-gap) * -gap - (np.exp(-gap) - 1)
    assert float(p.compute_forward_kl(OWN, REF)) == pytest.approx(forward.mean())
    assert float(p.compute_forward_kl(OWN, REF, kl_fn=p.create_truncated_kl(threshold=0.4))) == pytest.approx(0.0)
    assert p.compute_batch_kl([OWN, OWN[:1]], [REF, REF[:1]]).tolist() == pytest.approx([-0.5, 0.5])
    mine = p.compute_forward_kl(OWN, REF, kl_fn=lambda own, ref: (own - ref).abs())
    assert float(mine) == pytest.approx(0.5)


def test_group_advantages_and_losses_are_those_of_the_table():
    (advantages,) = p.compute_grpo_advantages([torch.tensor([1.0, 0.0])])
    assert advantages.tolist() == pytest.approx([0.70711, -0.70711], abs=1e-4)
    doubled = p.compute_grpo_advantages([torch.tensor([1.0, 0.0])], advantage_fn=lambda rewards: 2 * rewards)
    assert doubled[0].tolist() == [2.0, 0.0]
    # On policy every ratio is 1: sequence 0 averages (-1, -1), sequence 1 has (+1); their mean is 0.
    assert float(p.compute_grpo_loss(a_policy())) == pytest.approx(0.0)
    assert float(p.compute_grpo_loss(a_policy(), torch.tensor([3.0, 1.0]))) == pytest.approx(-2.0)
    assert float(p.compute_grpo_loss(a_policy(), loss_fn=lambda view: view.advantage)) == pytest.approx(0.5)
    assert float(p.compute_ppo_loss(a_policy())) == pytest.approx(-1 / 3)


def test_ppo_losses_and_advantages():
    rewards = torch.tensor([0.0, 0.0, 1.0])
    assert p.compute_ppo_advantages(rewards, lam=1.0).tolist() == [1.0, 1.0, 1.0]
    halves = p.compute_ppo_advantages(rewards, value_fn=lambda r: torch.full_like(r, 0.5), lam=1.0)
    assert halves.tolist() == [0.5, 0.5, 0.5]
    loss = p.compute_value_loss(torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([True]))
    assert float(loss) == pytest.approx(2.0)


def test_configs_are_checked_and_accept_aliases():
    assert p.create_algorithm_config("dapo", {"beta": 0.1}).name == "dapo_pairs"
    assert p.create_algorithm_config("dapo").name == "dapo"
    clips = p.create_algorithm_config("grpo", {"clip_range": 0.3, "kl_coef": 0.2}).parameters
    assert clips == {"clip_low": 0.3, "clip_high": 0.3, "kl_coef": 0.2}
    with pytest.raises(ValueError, match="did you mean kl_coef"):
        p.create_algorithm_config("grpo", {"kl_coeff": 0.2})


def test_a_loss_can_be_chosen_by_its_config():
    pairs = Pairs(*(torch.tensor([x]) for x in (-2.0, -4.0, 0.0, 0.0, 2.0, 2.0)))
    config = p.create_algorithm_config("dpo", {"beta": 0.5})
    assert float(p.compute_loss_by_algorithm(pairs, config)) == pytest.approx(np.log1p(np.exp(-1.0)))
    assert float(p.compute_dapo_loss(pairs, beta=0.5)) == pytest.approx(np.log1p(np.exp(-1.0)))
    grpo = p.create_algorithm_config("grpo", {"kl_coef": 0.2})
    assert float(p.compute_loss_by_algorithm(a_policy(), grpo)) == pytest.approx(0.0)


def test_pairs_are_the_best_against_the_worst_or_those_of_the_selector():
    group = tuple(Row(str(r), [1, 2], [False, True], scalars={"reward": r}) for r in (0.2, 0.9, 0.1))
    ((chosen, rejected),) = p.compute_dapo_pairs([group])
    assert (chosen.id, rejected.id) == ("0.9", "0.1")
    assert p.compute_dapo_pairs([group], pair_selector=lambda groups: [groups[0][:2]]) == [group[:2]]


def test_losses_from_logits_shift_once():
    """Only the logits before a masked token matter, and only at that token."""
    logits = torch.zeros(1, 4, 5, requires_grad=True)
    labels, mask = torch.tensor([[0, 3, 1, 2]]), torch.tensor([[0, 0, 1, 0]])
    loss = p.grpo_loss(logits, labels, mask, torch.tensor([2.0]))
    loss.backward()
    assert float(loss) == pytest.approx(2 * np.log(5))
    assert logits.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [1]
    assert logits.grad[0, 1, 1] < 0, "a rewarded token becomes likelier"
    old = torch.full((1, 4), -np.log(5))
    assert float(p.ppo_loss(logits, labels, mask, torch.tensor([2.0]), old.float())) == pytest.approx(-2.0)
    half = torch.full((1, 4), -np.log(5) - np.log(2))  # the ratio is 2, held at 1.2
    assert float(p.ppo_loss(logits, labels, mask, torch.tensor([2.0]), half.float())) == pytest.approx(-2.4)
    assert p.compute_advantages(torch.tensor([1.0, 2.0]), 0.5).tolist() == [0.5, 1.5]


def test_references_freeze_follow_and_reset():
    policy = load_model("tiny")
    ref = p.create_reference_model(policy)
    assert not any(weight.requires_grad for weight in ref.parameters())
    start = ref.lm_head.weight.clone()
    with torch.no_grad():
        policy.lm_head.weight.add_(1.0)
    assert torch.equal(p.update_reference_model(ref, policy).lm_head.weight, start)
    p.update_reference_model(ref, policy, update_fn=p.create_ema_updater(decay=0.75))
    torch.testing.assert_close(ref.lm_head.weight, start + 0.25)
    reset = p.create_periodic_updater(update_every=2)
    p.update_reference_model(ref, policy, update_fn=reset)
    torch.testing.assert_close(ref.lm_head.weight, start + 0.25)
    p.update_reference_model(ref, policy, update_fn=reset)
    assert torch.equal(ref.lm_head.weight, policy.lm_head.weight)


def test_reference_logprobs_are_the_models_own_for_every_row():
    model = load_model("tiny")
    rows = [Row("a", [1, 2, 3, 4], [False, True, False, True]), Row("b", [9, 8], [False, True])]
    found = p.get_reference_logprobs(model, rows)
    for row, values in zip(rows, found, strict=True):
        tokens = torch.tensor(row.tokens)
        logits = load_model("tiny")(input_ids=tokens[None]).logits[0].float()
        expected = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0][torch.tensor(row.mask)[1:]]
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    other = p.get_reference_logprobs(model, rows, logprob_extractor=lambda model, rows: [torch.zeros(1)] * len(rows))
    assert len(other) == 2


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("compute_forward_kl", "kl_fn"),
        ("create_reference_model", "ref_model_fn"),
        ("update_reference_model", "update_fn"),
        ("get_reference_logprobs", "logprob_extractor"),
        ("compute_grpo_advantages", "advantage_fn"),
        ("compute_grpo_loss", "loss_fn"),
        ("compute_dapo_pairs", "pair_selector"),
        ("compute_ppo_advantages", "value_fn"),
        ("load_model", "model_loader"),
        ("load_tokenizer", "tokenizer_loader"),
    ],
)
def test_the_extension_point_is_there_with_a_real_default(name, point):
    assert callable(inspect.signature(getattr(p, name)).parameters[point].default)
    assert any(getattr(p, name) in functions for functions in p.CATEGORIES.values())


def test_a_policy_batch_has_the_models_log_probs_with_gradient_and_the_samplers_beside_them(tiny, tiny_model):
    config = GenerationConfig(max_new_tokens=4, temperature=0.7)
    rollouts = p.create_batch_rollouts(
        tiny_model, tiny[1], ["one", "two"], config, n_samples_per_prompt=2, reward_fn=lambda each: float(each.index)
    )
    batch = p.create_policy_batch(tiny_model, prepare_grpo_batch(rollouts), temperature=0.7)
    assert batch.num_sequences == 4 and int(batch.mask.sum()) == 16
    assert (batch.logprob - batch.sampler_logprob)[batch.mask].abs().max() < 1e-4
    expected = []
    for rollout in rollouts:
        ids = torch.tensor([rollout.tokens])
        logits = tiny_model(input_ids=ids).logits[0, -5:-1] / 0.7
        expected += logits.log_softmax(-1).gather(1, ids[0, -4:, None])[:, 0].tolist()
    assert batch.logprob[batch.mask].tolist() == pytest.approx(expected, abs=1e-4)
    first = [batch.advantage[(batch.segment == number) & batch.mask].tolist() for number in range(4)]
    assert first[0] == [first[0][0]] * 4 and first[0][0] < 0 < first[1][0]
    p.compute_grpo_loss(batch).backward()
    assert all(weight.grad is not None for weight in tiny_model.parameters())
