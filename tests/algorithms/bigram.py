"""A bigram language model in float64: the next token depends on the last token alone."""

import torch

from oxrl.data.pack import collate, count_units, pack
from oxrl.loops.step import credit_step
from oxrl.tensors import logprob, segment_sums
from oxrl.types import ImmediateTrainFuture, Outputs


class Bigram:
    def __init__(self, vocabulary, seed, size=0.5):
        generator = torch.Generator().manual_seed(seed)
        shapes = {"table": (vocabulary, vocabulary), "value": (vocabulary,), "score": (vocabulary,)}
        self.weights = {
            name: (size * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
            for name, shape in shapes.items()
        }

    def outputs(self, batch, reads, others):
        before, last = batch.tokens.roll(1), batch.tokens[torch.tensor(batch.borders[1:]) - 1]
        logits, mask = self.weights["table"][before], batch.mask.double()
        other_logits = {name: other.weights["table"][before].detach() for name, other in others.items()}
        statistics = {n: r.statistic(logits, batch.tokens, other_logits.get(r.of)) * mask for n, r in reads.items()}
        value = self.weights["value"]
        score = segment_sums(self.weights["score"][batch.tokens], batch.segments, batch.num_rows)
        return Outputs(logprob(logits, batch.tokens) * mask, statistics, value[before] * mask, value[last], score)


class BigramBackend:
    """The part of `Backend` that `credit_step` uses, and the gradient of a step."""

    layout = "packed"
    parallel = 1

    def __init__(self, vocabulary):
        roles = ("policy", "ref", "teacher")
        self.models = {role: Bigram(vocabulary, seed) for seed, role in enumerate(roles)}
        self.passes = []

    def logprobs(self, batches, which="policy", reads=None):
        self.passes.append(which)
        with torch.no_grad():
            return ImmediateTrainFuture([self.models[which].outputs(b, reads or {}, self.models) for b in batches])

    def gradient(self, batches, algorithm, counts):
        """Summed over `batches`, each term divided by the count of its unit in the whole step."""
        policy = self.models["policy"]
        sums = {name: torch.zeros_like(weight) for name, weight in policy.weights.items()}
        for batch in batches:
            terms = algorithm.loss(policy.outputs(batch, algorithm.reads, self.models), batch).terms.values()
            loss = sum(term.total / counts[term.unit] for term in terms)
            found = torch.autograd.grad(loss, policy.weights.values(), allow_unused=True)
            for name, grad in zip(sums, found, strict=True):
                sums[name] += 0 if grad is None else grad
        return sums

    async def step_gradient(self, items, algorithm, budget=1_000_000):
        """Of a step on one rank."""
        credited = await credit_step(self, algorithm, items, budget, {})
        batches = [collate(part) for part in pack(credited, budget)]
        return self.gradient(batches, algorithm, count_units(credited))


def relative_difference(one, other):
    size = torch.stack([grad.norm() for grad in one.values()]).norm()
    assert size > 1e-9, "a gradient of zero would agree with anything"
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm() / size)
