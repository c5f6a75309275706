"""Values and gradients of the chunked projection against formulas written out in NumPy, in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oxrl import tensors as t
from oxrl.tensors import Head, Other, project, token_logprobs

RNG = np.random.default_rng(0)
T, H, V = 23, 8, 31
HIDDEN, OTHER_HIDDEN = RNG.normal(size=(T, H)), RNG.normal(size=(T, H))
WEIGHT, OTHER_WEIGHT = RNG.normal(size=(V, H)), RNG.normal(size=(V, H))
BIAS = RNG.normal(size=V)
TOKENS = RNG.integers(0, V, T)
MASK = np.array([i % 3 != 0 for i in range(T)])
SCALE, CAP = 0.7, 5.0
STATISTICS = {
    "logprob": t.logprob,
    "entropy": t.entropy,
    "correct": t.correct,
    "log_sum_squares": t.log_sum_squares,
    "forward_kl": t.forward_kl,
    "reverse_kl": partial(t.reverse_kl, temperature=2.0),
    "jensen_shannon": partial(t.jensen_shannon, beta=0.3, temperature=2.0),
}


def np_log_softmax(hidden, weight, bias, temperature=1.0):
    logits = CAP * np.tanh((hidden @ weight.T + bias) * SCALE / CAP) / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def np_statistic(name, hidden, weight, bias):
    """Per trained token: hidden i - 1 predicts token i."""
    rows = np.flatnonzero(MASK)
    log_p = np_log_softmax(hidden, weight, bias)[rows - 1]
    log_q = np_log_softmax(OTHER_HIDDEN, OTHER_WEIGHT, 0.0)[rows - 1]
    soft_p = np.exp(np_log_softmax(hidden, weight, bias, 2.0)[rows - 1])
    soft_q = np.exp(np_log_softmax(OTHER_HIDDEN, OTHER_WEIGHT, 0.0, 2.0)[rows - 1])
    middle = 0.3 * soft_q + 0.7 * soft_p
    return {
        "logprob": lambda: log_p[np.arange(len(rows)), TOKENS[rows]],
        "entropy": lambda: -(np.exp(log_p) * log_p).sum(-1),
        "correct": lambda: (log_p.argmax(-1) == TOKENS[rows]).astype(float),
        "forward_kl": lambda: (np.exp(log_q) * (log_q - log_p)).sum(-1),
        "reverse_kl": lambda: (soft_p * np.log(soft_p / soft_q)).sum(-1),
        "log_sum_squares": lambda: np.log((np.exp(log_p) ** 2).sum(-1)),
        "jensen_shannon": lambda: (
            0.3 * (soft_q * np.log(soft_q / middle)).sum(-1) + 0.7 * (soft_p * np.log(soft_p / middle)).sum(-1)
        ),
    }[name]()


def tensors(dtype=torch.float32):
    leaves = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (HIDDEN, WEIGHT, BIAS)]
    other = Other(
        torch.tensor(OTHER_HIDDEN, dtype=dtype),
        Head(torch.tensor(OTHER_WEIGHT, dtype=dtype), None, SCALE, CAP),
    )
    return leaves, other


def read(name, leaves, other, chunk):
    hidden, weight, bias = leaves
    head = Head(weight, bias, SCALE, CAP)
    wanted = {} if name == "logprob" else {name: STATISTICS[name]}
    return token_logprobs(hidden, torch.tensor(TOKENS), torch.tensor(MASK), head, wanted, other, chunk)[name]


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("name", STATISTICS)
def test_each_statistic_has_the_value_of_its_formula(name, chunk):
    leaves, other = tensors()
    values = read(name, leaves, other, chunk)
    assert values.shape == (T,)
    np.testing.assert_allclose(values[MASK].detach(), np_statistic(name, HIDDEN, WEIGHT, BIAS), atol=2e-5)
    assert not values[~MASK].any()


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("name", [name for name in STATISTICS if name != "correct"])
def test_each_statistic_has_the_gradient_of_its_formula(name, chunk):
    leaves, other = tensors()
    factors = RNG.normal(size=MASK.sum())
    (read(name, leaves, other, chunk)[MASK] * torch.tensor(factors, dtype=torch.float32)).sum().backward()
    for index, leaf in enumerate(leaves):
        arrays = [HIDDEN, WEIGHT, BIAS]
        for index_in_leaf in [(0,) * leaf.ndim, tuple(size // 2 for size in leaf.shape)]:
            sides = []
            for step in (1e-6, -1e-6):
                moved = arrays[index].copy()
                moved[index_in_leaf] += step
                inputs = [*arrays[:index], moved, *arrays[index + 1 :]]
                sides.append((np_statistic(name, *inputs) * factors).sum())
            slope = (sides[0] - sides[1]) / 2e-6
            assert float(leaf.grad[index_in_leaf]) == pytest.approx(slope, abs=2e-4)


def test_the_accuracy_does_not_change_a_bit_of_the_gradient_and_costs_no_second_pass():
    def gradients(statistics):
        (hidden, weight, bias), _ = tensors()
        head = Head(weight, bias, SCALE)
        values = token_logprobs(hidden, torch.tensor(TOKENS), torch.tensor(MASK), head, statistics, chunk=4)
        calls.clear()
        values["logprob"].sum().backward()
        return [leaf.grad for leaf in (hidden, weight, bias)]

    calls = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Calls():
        plain, wanted = gradients({}), list(calls)
        with_accuracy = gradients({"correct": t.correct})
    assert all(map(torch.equal, plain, with_accuracy))
    assert not [each for each in calls if "argmax" in each or "softmax" in each]
    assert "aten.exp_.default" in wanted and calls.count("aten.mm.default") == wanted.count("aten.mm.default")


def test_two_uniform_tokens_have_log_half_each():
    head = Head(torch.zeros(2, 3))
    values = token_logprobs(torch.randn(3, 3), torch.tensor([0, 1, 0]), torch.tensor([False, True, True]), head)
    assert values["logprob"].tolist() == pytest.approx([0.0, -0.6931472, -0.6931472])


def test_logits_in_the_thousands_stay_finite():
    hidden = torch.full((4, 8), 100.0, requires_grad=True)
    weight = torch.randn(20, 8).mul_(50).requires_grad_()
    values = project(hidden, Head(weight), torch.arange(4), [STATISTICS["logprob"], STATISTICS["entropy"]])
    sum(value.sum() for value in values).backward()
    assert all(value.isfinite().all() for value in (*values, hidden.grad, weight.grad))


class Watch(TorchDispatchMode):
    """The name and the sizes of every operation's result."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor):
                self.seen.append((function._schema.name, tuple(each.shape)))
        return out


def test_full_logits_never_exist_in_either_direction():
    """Every tensor of autograd or the projection is smaller than [N, V]."""
    n, hidden_size, vocabulary = 512, 4, 1000
    hidden = torch.randn(n, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (n,))
    with Watch() as watched:
        (values,) = project(hidden, Head(weight), targets, [STATISTICS["logprob"]], chunk=32)
        values.sum().backward()
    assert max(np.prod(shape) for _, shape in watched.seen) == 32 * vocabulary


@pytest.mark.parametrize(("chunk", "products"), [(T, 1), (8, 5)], ids=["one chunk", "three chunks"])
def test_backward_recomputes_only_chunks_that_were_not_kept(chunk, products):
    (hidden, weight, bias), _ = tensors()
    with Watch() as watched:
        (values,) = project(hidden, Head(weight, bias), torch.tensor(TOKENS), [t.logprob], chunk=chunk)
        values.sum().backward()
    logits = [shape for name, shape in watched.seen if name == "aten::mm" and shape[1] == V]
    assert len(logits) == products


def test_a_second_backward_through_one_pass_has_the_same_gradient():
    (hidden, weight, bias), _ = tensors()
    (values,) = project(hidden, Head(weight, bias), torch.tensor(TOKENS), [t.logprob], chunk=8)
    first, second = (torch.autograd.grad(values.sum(), [hidden, weight, bias], retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_without_trained_tokens_gives_zeros():
    values = token_logprobs(torch.randn(3, 4), torch.tensor([1, 2, 3]), torch.zeros(3).bool(), Head(torch.randn(5, 4)))
    assert values["logprob"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1.0, 1 / 0.7])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_written_out_gradient_of_a_head_without_a_cap_is_autograds(chunk, scale):
    """Only log-probs, at any temperature: the path of supervised and reinforcement learning."""
    hidden, weight, bias = (torch.tensor(x, requires_grad=True) for x in (HIDDEN, WEIGHT, BIAS))
    factors = torch.tensor(RNG.normal(size=T))
    logits = scale * (hidden @ weight.T + bias)
    naive = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS)[:, None])[:, 0]
    expected = torch.autograd.grad((naive * factors).sum(), [hidden, weight, bias])
    leaves = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    head = Head(leaves[1], leaves[2], scale)
    (values,) = project(leaves[0], head, torch.tensor(TOKENS), [t.logprob], chunk=chunk)
    torch.testing.assert_close(values.double(), naive, atol=1e-5, rtol=1e-5)
    with Watch() as watched:
        (values * factors.float()).sum().backward()
    assert "aten::_log_softmax" not in {name for name, _ in watched.seen}, "autograd computed the gradient"
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad.double(), gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("statistics", [(t.logprob, t.correct), (t.logprob, t.entropy)], ids=["one gradient", "two"])
def test_a_compiled_head_has_the_same_values_and_gradients(statistics):
    results = []
    for compiled in (False, True):
        random = torch.Generator().manual_seed(1)
        hidden, weight = (torch.randn(rows, 16, generator=random, requires_grad=True) for rows in (50, 300))
        targets = torch.randint(300, (50,), generator=random)
        with torch._dynamo.config.patch(disable=False):
            values = project(hidden, Head(weight, compiled=compiled), targets, statistics, chunk=20)
            (values[0] * torch.randn(50, generator=random) + values[1]).sum().backward()
        results.append((torch.stack(values).detach(), hidden.grad, weight.grad))
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, atol=2e-6, rtol=1e-5)
