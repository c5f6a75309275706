"""Gradients of single samples, for gradient norms, influence and data selection.

The gradient of an item (a conversation, a pair, a group) is its share of the gradient of a step over all items, so that
they add up to the gradient that training uses. Several items run at once with `torch.func`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.backends.local import PyTorchTrainingBackend
from oxrl.concurrency import run_blocking
from oxrl.data.pack import collate, count_units
from oxrl.loops.step import credit_step
from oxrl.names import kind_of
from oxrl.primitives.training import PolicyState, items_of
from oxrl.tensors import WITHOUT_GRADIENT, label_logprobs
from oxrl.types import Algorithm, Batch, Counts, Item, Outputs, Rollout, Sample


def per_sample_gradients(
    backend: PyTorchTrainingBackend | PolicyState,
    items: Sequence[Item] | Sequence[Rollout] | Sequence[Sample],
    algorithm: Algorithm | str,
    *,
    at_once: int = 8,
    vectorized: bool = True,
) -> Iterator[tuple[Item, dict[str, Tensor]]]:
    """Yield each item with its gradient by the name of the trained parameter, in order; dropout is off.

    With a `PolicyState`, samples are rendered by its tokenizer; with a backend, give items or rollouts. The groups of
    an RL algorithm are yielded as single rollouts, with their advantages. Memory is needed for `at_once` gradients and
    the logits of their tokens. A loss that reads more than log-probs (a divergence, an entropy, a head)
    takes one backward pass per item, as does every loss with `vectorized=False`, for models whose operations torch
    cannot vectorize.
    """
    algorithm = named_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    if isinstance(backend, PolicyState):
        items, backend = items_of(items, algorithm, backend.render, "per_sample_gradients"), backend.backend
    if not isinstance(backend, PyTorchTrainingBackend):
        raise ValueError(
            f"per_sample_gradients takes a backend of one process, not {kind_of(backend)}; make one: "
            "create_pytorch_backend(model)"
        )
    return _gradients(backend, items_of(items, algorithm, None, "per_sample_gradients"), algorithm, at_once, vectorized)


def _gradients(
    backend: PyTorchTrainingBackend, items: Sequence[Item], algorithm: Algorithm, at_once: int, vectorized: bool
) -> Iterator[tuple[Item, dict[str, Tensor]]]:
    credited = run_blocking(partial(credit_step, backend, algorithm, items, 4096, {}))
    counts = count_units(credited)
    backend.module.eval()
    with_gradient = [read for read in algorithm.reads.values() if read.statistic not in WITHOUT_GRADIENT]
    if not vectorized or with_gradient or algorithm.heads:
        yield from zip(credited, _one_by_one(backend, credited, algorithm, counts), strict=True)
        return
    for start in range(0, len(credited), at_once):
        part = credited[start : start + at_once]
        batches = [collate([item]) for item in part]
        passes = run_blocking(partial(_logprobs, backend, batches))
        slopes = [_slopes(*both, algorithm, counts) for both in zip(passes, batches, strict=True)]
        gradients = _vectorized(backend, batches, slopes)
        for index, item in enumerate(part):
            yield item, {name: each[index] for name, each in gradients.items()}


def per_sample_grad_norms(
    backend: PyTorchTrainingBackend | PolicyState,
    items: Sequence[Item] | Sequence[Rollout] | Sequence[Sample],
    algorithm: Algorithm | str,
    *,
    at_once: int = 8,
    vectorized: bool = True,
) -> list[tuple[Item, float]]:
    """Return each item with the L2 norm of its gradient; see `per_sample_gradients`."""
    shares = per_sample_gradients(backend, items, algorithm, at_once=at_once, vectorized=vectorized)
    return [(item, float(torch.stack([each.norm() for each in share.values()]).norm())) for item, share in shares]


def _trained(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    """The trained parameters, by their names in the model; those of heads have the prefix `heads.`."""
    named = backend.module.named_parameters()
    return {name.removeprefix("model."): weight for name, weight in named if weight.requires_grad}


def _one_by_one(
    backend: PyTorchTrainingBackend, items: Sequence[Item], algorithm: Algorithm, counts: Counts
) -> Iterator[dict[str, Tensor]]:
    trained = _trained(backend)
    for item in items:
        loss = backend.losses(collate([item]), algorithm, counts).shares["loss"]
        gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        yield dict(zip(trained, gradients, strict=True))


async def _logprobs(backend: PyTorchTrainingBackend, batches: Sequence[Batch]) -> list[Outputs]:
    return await backend.logprobs(batches)


def _slopes(outputs: Outputs, batch: Batch, algorithm: Algorithm, counts: Counts) -> Tensor:
    """The derivative of an item's loss with respect to the log-prob of each token."""
    logprob = outputs.logprob.double().requires_grad_()
    terms = algorithm.loss(outputs._replace(logprob=logprob), batch).terms.values()
    loss = torch.stack([term.total / counts[term.unit] for term in terms]).sum()
    (slopes,) = torch.autograd.grad(loss, logprob)
    return slopes * batch.mask


def _vectorized(
    backend: PyTorchTrainingBackend, batches: Sequence[Batch], slopes: Sequence[Tensor]
) -> Mapping[str, Tensor]:
    """The gradients of all items, `[N, ...]` each: of the sum of their log-probs weighted by the slopes."""
    model, temperature = backend.model, backend.module.temperature

    def weighted(parameters: dict[str, Tensor], tokens: Tensor, slopes: Tensor) -> Tensor:
        # No mask: rows are padded on the right, and no token attends to later ones.
        logits = functional_call(model, parameters, (), {"input_ids": tokens, "use_cache": False}).logits
        return (label_logprobs(logits / temperature, tokens) * slopes[:, 1:]).sum()

    tokens, weights = (
        _padded([_rows(flat, batch) for flat, batch in zip(flats, batches, strict=True)]).to(backend.device)
        for flats in ([batch.tokens for batch in batches], slopes)
    )
    parameters = {name: weight.detach() for name, weight in _trained(backend).items()}
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no rule for vectorization
            gradients: Mapping[str, Tensor] = vmap(grad(weighted), in_dims=(None, 0, 0))(parameters, tokens, weights)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise ValueError(
            f"torch.func cannot vectorize {type(backend.module.inner).__name__}; pass vectorized=False for one backward"
            " pass per item"
        ) from error
    return gradients


def _rows(flat: Tensor, batch: Batch) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise(batch.borders)]


def _padded(items: Sequence[Sequence[Tensor]]) -> Tensor:
    """Rows of items to `[items, rows, tokens]`, with zeros on the right and below."""
    flat = pad_sequence([row for rows in items for row in rows], batch_first=True)
    return pad_sequence(list(torch.split(flat, [len(rows) for rows in items])), batch_first=True)
