"""Policy losses against the papers' equations, written out sequence by sequence in NumPy, in float64."""

import math

import numpy as np
import pytest
import torch

from oxrl.algorithms.policy import (
    Distilled,
    Policy,
    cispo,
    clipped,
    dapo,
    dr_grpo,
    entropy_bonus,
    fixed_length,
    geometric_rejection,
    gmpo,
    grpo,
    gspo,
    k3_rejection,
    masked_importance,
    opd,
    per_sequence_mean,
    per_token,
    ppo_value,
    reinforce,
    sequence_importance,
    truncated_importance,
)

RNG = np.random.default_rng(7)
LENGTHS = [1, 3, 8, 2, 5, 4, 7, 1, 6, 4, 2, 9]  # trained tokens of each sequence, with a prompt before them
PROMPTS = [2, 1, 3, 1, 1, 2, 4, 1, 1, 1, 5, 1]
SEGMENT = np.repeat(np.arange(len(LENGTHS)), [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)])
MASK = np.concatenate([[False] * p + [True] * n for p, n in zip(PROMPTS, LENGTHS, strict=True)])
T = len(MASK)
SAMPLER = RNG.normal(-2.0, 1.0, T)
DRIFT = RNG.normal(0, 0.6, len(LENGTHS))[SEGMENT]  # whole sequences drift too, so that gspo's clip is reached
LOGPROB = SAMPLER + DRIFT + RNG.normal(0, 0.9, T)
ADVANTAGE = np.where(np.arange(len(LENGTHS)) % 2 == 0, 1.0, -1.0)[SEGMENT] * (0.5 + RNG.random(len(LENGTHS)))[SEGMENT]


def policy(logprob=LOGPROB, sampler=SAMPLER, advantage=ADVANTAGE, mask=MASK, segment=SEGMENT, dtype=torch.float64):
    tensors = [torch.tensor(each, dtype=dtype) for each in (logprob, sampler, advantage)]
    tensors[0].requires_grad_()
    return Policy(*tensors, torch.tensor(mask), torch.tensor(segment), int(segment.max()) + 1)


def np_token_clip(r, a, low, high, dual=math.inf):
    """The surrogate by cases: A > 0 is clipped at 1 + high; A < 0 at 1 - low, and at `dual` from above."""
    return -a * min(r, 1 + high) if a >= 0 else -a * min(max(r, 1 - low), dual)


def np_losses(logprob, per_sequence):
    """`per_sequence(ratios, advantages, logprobs) -> losses`, over the trained tokens of each sequence."""
    losses = np.zeros(T)
    for sequence in range(len(LENGTHS)):
        at = np.flatnonzero((sequence == SEGMENT) & MASK)
        losses[at] = per_sequence(np.exp(logprob[at] - SAMPLER[at]), ADVANTAGE[at], logprob[at])
    return losses


def np_clipped(low, high, dual=math.inf, weight=lambda n: 1.0):
    return lambda r, a, _: [np_token_clip(*each, low, high, dual) * weight(len(r)) for each in zip(r, a, strict=True)]


def np_gspo(low, high):
    def losses(r, a, _):
        s = np.prod(r) ** (1 / len(r))
        return [np_token_clip(s, each, low, high) / len(r) for each in a]

    return losses


def np_gmpo(low, high):
    def losses(r, a, _):  # the paper's equation, with its products and absolute values, for one advantage
        kept = [min(each * a[0], min(max(each, math.exp(-low)), math.exp(high)) * a[0]) for each in r]
        objective = np.sign(a[0]) * np.prod(np.abs(kept)) ** (1 / len(r))
        return [-objective / len(r)] * len(r)

    return losses


def np_cispo(low, high):
    return lambda r, a, logp: -np.minimum(np.maximum(r, 1 - low), 1 + high) * a * logp


def np_cispo_gradient(low, high):
    return lambda r, a, _: -np.minimum(np.maximum(r, 1 - low), 1 + high) * a


BY_LENGTH = {"weight": lambda n: 1 / n}
# name: (loss, parameters, the equation, its gradient where that is not the equation's own because of a stop-gradient)
LOSSES = {
    "clipped": (clipped, {}, np_clipped(0.2, 0.2), None),
    "clipped-high": (clipped, {"clip_low": 0.1, "clip_high": 0.5}, np_clipped(0.1, 0.5), None),
    "clipped-dual": (clipped, {"dual_clip": 1.5}, np_clipped(0.2, 0.2, 1.5), None),
    "grpo": (grpo, {}, np_clipped(0.2, 0.2, **BY_LENGTH), None),
    "grpo-all": (
        grpo,
        {"clip_low": 0.3, "clip_high": 0.4, "dual_clip": 1.5},
        np_clipped(0.3, 0.4, 1.5, **BY_LENGTH),
        None,
    ),
    "dr_grpo": (dr_grpo, {"max_length": 50}, np_clipped(0.2, 0.2, weight=lambda _: 1 / 50), None),
    "dr_grpo-all": (
        dr_grpo,
        {"clip_low": 0.3, "clip_high": 0.4, "dual_clip": 1.5},
        np_clipped(0.3, 0.4, 1.5, lambda _: 1 / 1024),
        None,
    ),
    "dapo": (dapo, {}, np_clipped(0.2, 0.28), None),
    "dapo-all": (dapo, {"clip_low": 0.3, "clip_high": 0.4, "dual_clip": 1.5}, np_clipped(0.3, 0.4, 1.5), None),
    "gspo": (gspo, {}, np_gspo(3e-4, 4e-4), None),
    "gspo-wide": (gspo, {"clip_low": 0.3, "clip_high": 0.5}, np_gspo(0.3, 0.5), None),
    "gmpo": (gmpo, {}, np_gmpo(0.4, 0.4), None),
    "gmpo-uneven": (gmpo, {"clip_low": 0.1, "clip_high": 0.6}, np_gmpo(0.1, 0.6), None),
    "cispo": (cispo, {}, np_cispo(1.0, 4.0), np_cispo_gradient(1.0, 4.0)),
    "cispo-both": (
        cispo,
        {"clip_low": 0.2, "clip_high": 0.3},
        np_cispo(0.2, 0.3),
        np_cispo_gradient(0.2, 0.3),
    ),
    "reinforce": (reinforce, {}, lambda r, a, logp: -a * logp, None),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
NAMED = {loss.__name__: loss for loss, *_ in LOSSES.values()}
every_name = pytest.mark.parametrize("loss", NAMED.values(), ids=NAMED)


def gradient_of(total, point, step=1e-6):
    """Central differences of a scalar function of a vector."""
    return np.array(
        [
            (total(point + step * unit) - total(point - step * unit)) / (2 * step)
            for unit in np.eye(len(point), dtype=np.float64)
        ]
    )


def value_and_gradient(loss, view, **parameters):
    losses = loss(view, **parameters)
    (gradient,) = torch.autograd.grad(losses.sum(), view.logprob)
    return losses.detach(), gradient


@every_loss
def test_each_loss_has_the_value_and_gradient_of_its_equation(name):
    loss, parameters, equation, stopped = LOSSES[name]
    losses, gradient = value_and_gradient(loss, policy(), **parameters)
    np.testing.assert_allclose(losses, np_losses(LOGPROB, equation), rtol=1e-9, atol=1e-12)
    if stopped is None:
        expected = gradient_of(lambda at: np_losses(at, equation).sum(), LOGPROB)
    else:
        expected = np_losses(LOGPROB, stopped)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
    assert losses.shape == (T,) and not losses[~MASK].any() and not gradient[~MASK].any()


def test_the_inputs_reach_every_branch_of_every_clip():
    ratio = np.exp(LOGPROB - SAMPLER)[MASK]
    good = ADVANTAGE[MASK] > 0
    assert (ratio[good] > 1.5).any() and (ratio[good] < 0.8).any() and (abs(ratio[good] - 1) < 0.2).any()
    assert (ratio[~good] > 1.5).any() and (ratio[~good] < 0.7).any() and (abs(ratio[~good] - 1) < 0.2).any()
    assert ratio.max() > 5
    whole = np.array([np.exp((LOGPROB - SAMPLER)[(s == SEGMENT) & MASK].mean()) for s in range(len(LENGTHS))])
    assert (whole[::2] > 1.5).any() and (whole[::2] < 1).any() and (whole[1::2] < 0.7).any() and (whole[1::2] > 1).any()


def two_tokens(ratios, advantage, logprob=-1.0):
    """One response of two tokens."""
    logprobs = np.full(2, logprob)
    return policy(logprobs, logprobs - np.log(ratios), np.full(2, advantage), np.array([True, True]), np.array([0, 0]))


@pytest.mark.parametrize(
    ("loss", "parameters", "ratios", "advantage", "expected"),
    [
        (clipped, {}, [1.5, 0.5], 2.0, [-2.4, -1.0]),
        (clipped, {}, [1.5, 0.5], -2.0, [3.0, 1.6]),
        (clipped, {"dual_clip": 3.0}, [5.0, 2.0], -2.0, [6.0, 4.0]),
        (clipped, {"dual_clip": 3.0}, [5.0, 2.0], 2.0, [-2.4, -2.4]),
        (grpo, {}, [1.5, 0.5], 2.0, [-1.2, -0.5]),
        (dr_grpo, {"max_length": 4}, [1.5, 0.5], 2.0, [-0.6, -0.25]),
        (dapo, {}, [1.5, 0.5], 2.0, [-2.56, -1.0]),
        (gspo, {"clip_low": 0.2, "clip_high": 0.2}, [1.21, 1.0], 1.0, [-0.55, -0.55]),
        (gspo, {}, [1.21, 1.0], 1.0, [-0.5002, -0.5002]),
        (gspo, {}, [0.81, 1.0], -1.0, [0.49985, 0.49985]),
        (gmpo, {}, [math.exp(0.8), 1.0], 1.0, [-0.6107013790800849] * 2),  # exp(0.2) / 2
        (gmpo, {}, [math.exp(-0.8), 1.0], -1.0, [0.4093653765389909] * 2),  # exp(-0.2) / 2
        (gmpo, {}, [math.exp(0.8), 1.0], -1.0, [0.7459123488206352] * 2),  # exp(0.4) / 2
        (cispo, {}, [8.0, 0.25], 1.0, [5.0, 0.25]),
        (cispo, {}, [8.0, 0.25], -2.0, [-10.0, -0.5]),
        (reinforce, {}, [8.0, 0.25], 2.0, [2.0, 2.0]),
    ],
)
def test_worked_by_hand(loss, parameters, ratios, advantage, expected):
    losses = loss(two_tokens(ratios, advantage), **parameters)
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-12)


@every_name
def test_on_policy_every_loss_is_the_policy_gradient_up_to_its_weight(loss):
    view = policy(logprob=SAMPLER)
    weight = {"grpo": 1 / np.array(LENGTHS), "dr_grpo": np.full(len(LENGTHS), 1 / 1024)}
    weight["gspo"] = weight["gmpo"] = weight["grpo"]
    expected = -ADVANTAGE * MASK * weight.get(loss.__name__, np.ones(len(LENGTHS)))[SEGMENT]
    np.testing.assert_allclose(value_and_gradient(loss, view)[1], expected, rtol=1e-9)


@every_loss
def test_zero_advantage_gives_zero_loss_and_gradient(name):
    loss, parameters, *_ = LOSSES[name]
    losses, gradient = value_and_gradient(loss, policy(advantage=np.zeros(T)), **parameters)
    assert not losses.any() and not gradient.any()


@every_loss
def test_untrained_tokens_are_ignored(name):
    loss, parameters, *_ = LOSSES[name]
    spoiled = [np.where(MASK, each, np.nan) for each in (LOGPROB, SAMPLER, ADVANTAGE)]
    for clean, other in zip(
        value_and_gradient(loss, policy(), **parameters),
        value_and_gradient(loss, policy(*spoiled), **parameters),
        strict=True,
    ):
        assert torch.equal(clean, other)


@every_loss
def test_a_loss_does_not_depend_on_how_a_step_is_split_or_ordered(name):
    loss, parameters, *_ = LOSSES[name]
    whole_losses, whole_gradient = value_and_gradient(loss, policy(), **parameters)
    for sequences in ([11, 4], [0], [7, 2, 3]):
        at = np.concatenate([np.flatnonzero(sequence == SEGMENT) for sequence in sequences])
        segment = np.concatenate([np.full((s == SEGMENT).sum(), i) for i, s in enumerate(sequences)])
        part = policy(LOGPROB[at], SAMPLER[at], ADVANTAGE[at], MASK[at], segment)
        losses, gradient = value_and_gradient(loss, part, **parameters)
        np.testing.assert_allclose(losses, whole_losses[at], rtol=1e-12)
        np.testing.assert_allclose(gradient, whole_gradient[at], rtol=1e-12)


@every_loss
def test_extreme_log_probs_stay_finite_in_value_and_gradient(name):
    loss, parameters, *_ = LOSSES[name]
    for far in (1e4, -1e4):
        for advantage in (3.0, -3.0):
            view = policy(np.full(T, far / 2), np.full(T, -far / 2), np.full(T, advantage), dtype=torch.float32)
            losses, gradient = value_and_gradient(loss, view, **parameters)
            assert losses.isfinite().all() and gradient.isfinite().all()


@every_loss
def test_half_precision_inputs_are_widened_before_any_arithmetic(name):
    loss, parameters, *_ = LOSSES[name]
    half = policy(dtype=torch.bfloat16)
    wide = Policy(*(each.detach().float() for each in half[:3]), *half[3:])
    losses = loss(half, **parameters)
    assert losses.dtype == torch.float32 and losses.isfinite().all()
    assert torch.equal(losses, loss(wide, **parameters))


def test_the_sampler_and_the_advantage_get_no_gradient():
    view = policy()
    view = view._replace(sampler_logprob=view.logprob, advantage=view.logprob)
    for loss in NAMED.values():
        (gradient,) = torch.autograd.grad(loss(view).sum(), view.logprob)
        assert (gradient[MASK] * -LOGPROB[MASK] > 0).all(), f"{loss.__name__} lost its gradient"


def test_gspo_with_one_token_is_grpo():
    one = {"segment": np.arange(T), "mask": np.ones(T, dtype=bool)}
    for parameters in ({"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.3, "clip_high": 0.5}):
        for ours, theirs in zip(
            value_and_gradient(gspo, policy(**one), **parameters),
            value_and_gradient(grpo, policy(**one), **parameters),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_gspo_gives_each_token_its_own_advantage():
    advantage = RNG.normal(size=T)
    _, gradient = value_and_gradient(gspo, policy(advantage=advantage), clip_low=1.0, clip_high=1e9)
    s = np.array([np.exp((LOGPROB - SAMPLER)[(i == SEGMENT) & MASK].mean()) for i in range(len(LENGTHS))])
    expected = -(s / np.array(LENGTHS))[SEGMENT] * advantage * MASK  # the paper's gradient of GSPO-token
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_reductions_to_a_simpler_loss():
    view = policy()
    assert torch.equal(dapo(view, clip_high=0.2), clipped(view))
    assert torch.equal(clipped(view, dual_clip=1e9), clipped(view))
    assert torch.equal(grpo(view), per_sequence_mean(clipped(view), view))
    assert torch.equal(dr_grpo(view), fixed_length(clipped(view), view, max_length=1024))
    torch.testing.assert_close(
        value_and_gradient(cispo, view, clip_high=1e9)[1],
        value_and_gradient(clipped, view, clip_low=1.0, clip_high=1e9)[1],
    )
    one = policy(segment=np.arange(T), mask=np.ones(T, dtype=bool))
    log_clips = {"clip_low": -math.log(0.8), "clip_high": math.log(1.2)}
    torch.testing.assert_close(gmpo(one, **log_clips), clipped(one))


def test_gmpo_is_never_further_from_zero_than_grpo_without_clips():
    view = policy()
    ours = gmpo(view, clip_low=1e9, clip_high=1e9).detach()
    theirs = grpo(view, clip_low=1.0, clip_high=1e9).detach()
    sums = [np.bincount(SEGMENT, weights=each) for each in (ours, theirs)]
    assert (abs(sums[0]) <= abs(sums[1]) + 1e-12).all()


def test_aggregations_weight_tokens_by_their_definition():
    view = policy()
    ones = torch.ones(T, dtype=torch.float64) * view.mask
    assert torch.equal(per_token(ones, view), ones)
    np.testing.assert_allclose(np.bincount(SEGMENT, weights=per_sequence_mean(ones, view)), 1.0)
    np.testing.assert_allclose(fixed_length(ones, view, max_length=8).sum(), sum(LENGTHS) / 8)


def test_a_sequence_without_trained_tokens_is_harmless():
    for loss in NAMED.values():
        losses, gradient = value_and_gradient(loss, policy(mask=np.zeros(T, dtype=bool)))
        assert not losses.any() and not gradient.any()


@pytest.mark.parametrize("bad", [{"dual_clip": 1.0}, {"dual_clip": -3.0}])
def test_a_dual_clip_of_at_most_one_is_refused(bad):
    with pytest.raises(ValueError, match="above 1"):
        clipped(policy(), **bad)


def test_a_fixed_length_below_one_is_refused():
    assert torch.equal(dr_grpo(policy(), max_length=1), clipped(policy()))
    with pytest.raises(ValueError, match="at least 1"):
        dr_grpo(policy(), max_length=0)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum())


def test_opd_is_the_reverse_kl_to_the_teacher_in_value_and_gradient():
    student, sampler, teacher = RNG.normal(size=(3, 6))

    def reverse_kl(logits):
        return (np.exp(log_softmax(logits)) * (log_softmax(logits) - log_softmax(teacher))).sum()

    logits = torch.tensor(student, requires_grad=True)
    everything = Distilled(  # every token once, weighted below by the sampler's probability
        logits.log_softmax(0),
        torch.tensor(log_softmax(sampler)),
        torch.tensor(log_softmax(teacher)),
        torch.ones(6, dtype=torch.bool),
    )
    expectation = (torch.tensor(np.exp(log_softmax(sampler))) * opd(everything)).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    np.testing.assert_allclose(expectation.detach(), reverse_kl(student), rtol=1e-9)
    np.testing.assert_allclose(gradient, gradient_of(reverse_kl, student), rtol=1e-6, atol=1e-9)


def distilled(logprob, sampler, teacher, mask, dtype=torch.float64):
    tensors = [torch.tensor(each, dtype=dtype) for each in (logprob, sampler, teacher)]
    return Distilled(tensors[0].requires_grad_(), *tensors[1:], torch.tensor(mask))


def test_opd_worked_by_hand_favours_tokens_that_the_teacher_prefers():
    view = distilled(
        [-1.0, -3.0, np.nan], [-1.0, -3.0 - math.log(2), np.nan], [-3.0, -1.0, np.nan], [True, True, False]
    )
    losses, gradient = value_and_gradient(opd, view)
    np.testing.assert_allclose(losses, [2.0, -4.0, 0.0])
    np.testing.assert_allclose(gradient, [2.0, -4.0, 0.0])


def test_opd_is_finite_far_away_and_wide_in_half_precision():
    for sign in (1, -1):
        view = distilled([sign * 1e4], [-sign * 1e4], [-1e4], [True], torch.float32)
        assert all(each.isfinite().all() for each in value_and_gradient(opd, view))
    half = distilled(LOGPROB, SAMPLER, SAMPLER - 1, MASK, torch.bfloat16)
    assert torch.equal(opd(half), opd(Distilled(*(each.float() for each in half[:3]), half.mask)))


VALUES, OLD, RETURNS = RNG.normal(size=(3, 40))


def np_value_loss(values, clip):
    held = [min(max(v, o - clip), o + clip) for v, o in zip(values, OLD, strict=True)]
    return np.array([0.5 * max((v - r) ** 2, (h - r) ** 2) for v, h, r in zip(values, held, RETURNS, strict=True)])


@pytest.mark.parametrize("clip", [0.2, 0.7, math.inf])
def test_the_value_loss_has_the_value_and_gradient_of_its_equation(clip):
    mask = np.arange(40) % 5 != 0
    values = torch.tensor(np.where(mask, VALUES, np.nan), requires_grad=True)
    losses = ppo_value(values, torch.tensor(OLD), torch.tensor(RETURNS), torch.tensor(mask), clip=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    np.testing.assert_allclose(losses.detach(), np_value_loss(VALUES, clip) * mask, rtol=1e-9)
    expected = gradient_of(lambda at: np_value_loss(at, clip).sum(), VALUES)
    np.testing.assert_allclose(gradient, expected * mask, rtol=1e-6, atol=1e-8)


def test_the_value_loss_has_a_gradient_for_the_value_alone():
    value, old, target = (torch.tensor([each], requires_grad=True) for each in (1.0, 0.5, 2.0))
    loss = ppo_value(value, old, target, torch.tensor([True]), clip=0.2)
    assert torch.autograd.grad(loss.sum() + 0 * value.sum(), (old, target), allow_unused=True) == (None, None)


def test_value_and_entropy_worked_by_hand_and_widened():
    value, old, target = torch.tensor([[1.0, 1.0, 0.6], [0.5, 0.5, 0.5], [0.0, 2.0, 2.0]])
    mask = torch.tensor([True, True, True])
    torch.testing.assert_close(ppo_value(value, old, target, mask), torch.tensor([0.5, 0.845, 0.98]))
    assert ppo_value(value.bfloat16(), old.bfloat16(), target.bfloat16(), mask).dtype == torch.float32
    entropy = torch.tensor([2.0, 1.0, math.nan], requires_grad=True)
    bonus = entropy_bonus(entropy, torch.tensor([True, True, False]))
    torch.testing.assert_close(bonus, torch.tensor([-0.02, -0.01, 0.0]))
    torch.testing.assert_close(torch.autograd.grad(bonus.sum(), entropy)[0], torch.tensor([-0.01, -0.01, 0.0]))
    assert entropy_bonus(entropy.bfloat16(), mask, entropy_coef=0.5)[0] == -1.0


def weights_of(correction, trainer=LOGPROB, sampler=SAMPLER, dtype=torch.float64, **parameters):
    arguments = (torch.tensor(trainer, dtype=dtype), torch.tensor(sampler, dtype=dtype))
    return correction(*arguments, torch.tensor(MASK), torch.tensor(SEGMENT), **parameters)


RATIO = np.exp(LOGPROB - SAMPLER) * MASK
PRODUCT = np.array([np.prod(RATIO[(s == SEGMENT) & MASK]) for s in range(len(LENGTHS))])
GEOMETRIC = PRODUCT ** (1 / np.array(LENGTHS))
K3 = np.array([np.mean((RATIO - 1 - np.log(RATIO, where=MASK))[(s == SEGMENT) & MASK]) for s in range(len(LENGTHS))])


def kept(sequences):
    assert 2 < sequences.sum() < len(LENGTHS) - 2, "the bound separates the sequences"
    return sequences[SEGMENT] * MASK * 1.0


CORRECTIONS = {
    "truncated": (truncated_importance, {}, np.where(RATIO > 2, 2, RATIO)),
    "truncated-tight": (truncated_importance, {"cap": 1.1}, np.where(RATIO > 1.1, 1.1, RATIO)),
    "masked": (masked_importance, {}, np.where((RATIO < 0.5) | (RATIO > 5), 0, RATIO)),
    "masked-tight": (masked_importance, {"low": 0.9, "high": 1.3}, np.where((RATIO < 0.9) | (RATIO > 1.3), 0, RATIO)),
    "sequence": (sequence_importance, {}, np.minimum(PRODUCT, 2)[SEGMENT] * MASK),
    "geometric": (
        sequence_importance,
        {"geometric": True, "cap": 1.3},
        np.minimum(GEOMETRIC, 1.3)[SEGMENT] * MASK,
    ),
    "geometric-rejection": (geometric_rejection, {"bound": 0.5}, kept((GEOMETRIC >= 1 / 1.5) & (GEOMETRIC <= 1.5))),
    "k3-rejection": (k3_rejection, {"bound": 0.4}, kept(K3 <= 0.4)),
}
every_correction = pytest.mark.parametrize("name", CORRECTIONS)


@every_correction
def test_each_correction_has_the_weights_of_its_formula(name):
    correction, parameters, expected = CORRECTIONS[name]
    np.testing.assert_allclose(weights_of(correction, **parameters), expected, rtol=1e-9)


@every_correction
def test_corrections_carry_no_gradient_and_ignore_untrained_tokens(name):
    correction, parameters, expected = CORRECTIONS[name]
    spoiled = torch.tensor(np.where(MASK, LOGPROB, np.nan), requires_grad=True)
    weights = correction(spoiled, torch.tensor(SAMPLER), torch.tensor(MASK), torch.tensor(SEGMENT), **parameters)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights, expected, rtol=1e-9)


@every_correction
def test_corrections_are_one_where_trainer_and_sampler_agree(name):
    correction, parameters, _ = CORRECTIONS[name]
    np.testing.assert_allclose(weights_of(correction, SAMPLER, SAMPLER, **parameters), MASK.astype(float))


@every_correction
def test_corrections_are_finite_far_away_and_wide_in_half_precision(name):
    correction, parameters, _ = CORRECTIONS[name]
    for far in (1e4, -1e4):
        assert weights_of(correction, np.full(T, far), np.full(T, -far), torch.float32, **parameters).isfinite().all()
    half = weights_of(correction, dtype=torch.bfloat16, **parameters)
    rounded = [torch.tensor(each).bfloat16().double().numpy() for each in (LOGPROB, SAMPLER)]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, weights_of(correction, *rounded, torch.float32, **parameters))


def test_empty_inputs_give_empty_losses():
    nothing = np.zeros(0)
    view = Policy(*policy(nothing, nothing, nothing, nothing > 0, np.zeros(1, dtype=int))[:4], torch.zeros(0).long(), 0)
    for loss in NAMED.values():
        assert loss(view).shape == (0,)
    for correction, parameters, _ in CORRECTIONS.values():
        assert correction(view.logprob, view.sampler_logprob, view.mask, view.segment, **parameters).shape == (0,)


@pytest.mark.parametrize(
    ("correction", "bound"), [(geometric_rejection, math.expm1(0.25)), (k3_rejection, math.expm1(0.25) - 0.25)]
)
def test_a_rejection_leaves_out_what_is_beyond_its_bound(correction, bound):
    trainer, sampler = torch.tensor([0.25, 0.25]).double(), torch.zeros(2).double()
    ones = torch.ones(2).bool(), torch.zeros(2).long()
    assert correction(trainer, sampler, *ones, bound=bound * (1 + 1e-9)).tolist() == [1, 1]
    assert correction(trainer, sampler, *ones, bound=bound * (1 - 1e-9)).tolist() == [0, 0]


def test_a_cap_that_is_not_positive_is_refused():
    assert weights_of(truncated_importance, cap=0.05).max() == pytest.approx(0.05)
    with pytest.raises(ValueError, match="positive"):
        weights_of(truncated_importance, cap=0.0)


@pytest.mark.parametrize("size", [0.05, 1.0])
def test_clips_for_one_side_follow_the_sign_of_the_advantage_however_small(size):
    """Ratio e^2 with A > 0 and dual_clip: the usual clip, not the dual one; gmpo: the upper clip, not the lower."""
    up = Policy(
        torch.tensor([2.0]), torch.zeros(1), torch.tensor([size]), torch.ones(1).bool(), torch.zeros(1).long(), 1
    )
    assert clipped(up, dual_clip=3.0).item() == pytest.approx(-1.2 * size)
    assert gmpo(up).item() == pytest.approx(-size * math.exp(0.4))
    down = up._replace(logprob=torch.tensor([-2.0]))
    assert gmpo(down).item() == pytest.approx(-size * math.exp(-2.0))
