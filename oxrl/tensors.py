"""Hidden states to values per token: the token shift, the chunked vocabulary projection, and statistics of logits.

The shift, by which position i - 1 predicts token i, is in `token_logprobs` and, for full logits, `label_logprobs`.
The projection never holds more than one chunk of logits, forward or backward; a statistic is a function of such a
chunk. No model, config, or I/O.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

Statistic: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(logits [C, V] float32, targets [C], the other model's logits [C, V] or None) -> [C]."""


class Head(NamedTuple):
    """The vocabulary projection: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    compiled: bool = False  # compute statistics, and the gradient of log-probs, with compiled code

    def over(self, tokens: Tensor) -> Head:
        """The projection on these tokens alone, in their order."""
        # An embedding is a gather whose gradient is summed in a fixed order, on a GPU too.
        weight = nn.functional.embedding(tokens, self.weight)
        return self._replace(weight=weight, bias=None if self.bias is None else self.bias[tokens])


class Other(NamedTuple):
    """Another model at the same positions, for statistics of two models: its hidden states [N, H'] and its head."""

    hidden: Tensor
    head: Head


def logprob(logits: Tensor, targets: Tensor, _other: Tensor | None = None) -> Tensor:
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def entropy(logits: Tensor, _targets: Tensor, _other: Tensor | None = None) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def correct(logits: Tensor, targets: Tensor, _other: Tensor | None = None) -> Tensor:
    """1 where the most likely token is the target."""
    return (logits.argmax(-1) == targets).float()


WITHOUT_GRADIENT: frozenset[Statistic] = frozenset({correct})
"""Statistics that are constant almost everywhere: the backward pass leaves them out."""


def log_sum_squares(logits: Tensor, _targets: Tensor, _other: Tensor | None = None) -> Tensor:
    """log of the sum over the vocabulary of p^2: the certainty of the distribution, independent of the target."""
    return (2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)


def reverse_kl(logits: Tensor, _targets: Tensor, other: Tensor | None, *, temperature: float = 1.0) -> Tensor:
    """KL(model || other), over the whole vocabulary."""
    assert other is not None, "reverse_kl compares with another model: pass `other`"
    log_p = (logits / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - (other / temperature).log_softmax(-1))).sum(-1)


def forward_kl(logits: Tensor, _targets: Tensor, other: Tensor | None, *, temperature: float = 1.0) -> Tensor:
    """KL(other || model), over the whole vocabulary."""
    assert other is not None, "forward_kl compares with another model: pass `other`"
    log_q = (other / temperature).log_softmax(-1)
    return (log_q.exp() * (log_q - (logits / temperature).log_softmax(-1))).sum(-1)


def jensen_shannon(
    logits: Tensor, _targets: Tensor, other: Tensor | None, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """beta KL(other || m) + (1 - beta) KL(model || m), m = beta other + (1 - beta) model; 0 < beta < 1.

    Agarwal et al. 2023, arXiv:2306.13649.
    """
    assert other is not None, "jensen_shannon compares with another model: pass `other`"
    log_p, log_q = (logits / temperature).log_softmax(-1), (other / temperature).log_softmax(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    towards_other = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * towards_other + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)


def logprob_gradient(logits: Tensor, targets: Tensor, value: Tensor, grad: Tensor) -> Tensor:
    """d(sum of grad * logprob) / d logits, written into `logits`: the most used gradient, without autograd."""
    log_total = logits.gather(1, targets[:, None]) - value[:, None]
    gradient = logits.sub_(log_total).exp_().mul_(-grad[:, None])
    return gradient.scatter_add_(1, targets[:, None], grad[:, None])


def segment_sums(values: Tensor, segments: Tensor, num_rows: int) -> Tensor:
    """`[T]` summed by row: `[R]`."""
    return values.new_zeros(num_rows).index_add(0, segments, values)


def label_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probs of all labels but the first, from `[..., S, V]` of `[..., S]`: `[..., S - 1]`; -100 gives 0."""
    precise = logits if logits.dtype.itemsize >= 4 else logits.float()
    targets = labels[..., 1:]
    logprob = precise[..., :-1, :].log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    return logprob.masked_fill(targets < 0, 0.0)


def _new_logprob_gradient(logits: Tensor, targets: Tensor, value: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """As `logprob_gradient`, in a new tensor of `dtype`: compiled, it is one pass over the logits."""
    log_total = logits.gather(1, targets[:, None]) - value[:, None]
    gradient = (logits - log_total).exp() * -grad[:, None]
    sampled = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return torch.where(sampled, gradient + grad[:, None], gradient).to(dtype)


@lru_cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def token_logprobs(
    hidden: Tensor,
    tokens: Tensor,
    mask: Tensor,
    head: Head,
    statistics: Mapping[str, Statistic] = MappingProxyType({}),
    other: Other | None = None,
    chunk: int | None = None,
    allowed: Tensor | None = None,
) -> dict[str, Tensor]:
    """`logprob` and the named statistics of each masked token, `[T]` each, 0 elsewhere.

    `hidden[i - 1]` predicts `tokens[i]`: the shift happens here. A mask never covers the first token
    of a row, so no row reads the hidden states of its neighbour. `other.hidden` is `[T, H']` too.
    With `allowed`, ascending ids that include all masked tokens, distributions are over these tokens alone.
    """
    trained = mask.nonzero().squeeze(1)
    wanted = {"logprob": logprob, **statistics}
    targets = tokens[trained]
    if allowed is not None:
        targets, head = torch.searchsorted(allowed, targets), head.over(allowed)
        other = other and other._replace(head=other.head.over(allowed))
    values = project(
        hidden[trained - 1],
        head,
        targets,
        list(wanted.values()),
        other=other and Other(other.hidden[trained - 1], other.head),
        chunk=chunk,
    )
    empty = torch.zeros(len(tokens), dtype=torch.float32, device=hidden.device)
    return {name: empty.index_put((trained,), value) for name, value in zip(wanted, values, strict=True)}


def project(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    statistics: Sequence[Statistic],
    other: Other | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """Statistics of `hidden [N, H]` projected on the vocabulary, `[N]` float32 each, chunk by chunk in both directions.

    By default the float32 logits of a chunk take a quarter GiB on CPU and 1 GiB on GPU, which needs larger products.
    """
    chunk = chunk or max(1, (2**26 if hidden.device.type == "cpu" else 2**28) // len(head.weight))
    if other is not None:
        other = Other(other.hidden, other.head._replace(weight=_for_products(other.head.weight)))
    plan = _Plan(head.scale, head.softcap, tuple(statistics), other, targets, chunk, head.compiled and other is None)
    values: Tensor = _Projection.apply(hidden, head.weight, head.bias, plan)  # type: ignore[no-untyped-call]
    return values.unbind(0)


class _Plan(NamedTuple):
    scale: float
    softcap: float | None
    statistics: tuple[Statistic, ...]
    other: Other | None
    targets: Tensor
    chunk: int
    compiled: bool

    def chunks(self) -> Iterator[slice]:
        total = len(self.targets)
        return (slice(start, min(start + self.chunk, total)) for start in range(0, total, self.chunk))

    def blocks(self, part: slice, logits: Tensor) -> Iterator[_Block]:
        """Split a chunk into blocks, so that the temporaries of statistics are small and their memory is reused."""
        size = -(-self.chunk // 16)
        pieces = torch.split(logits, size)
        others: Sequence[Tensor | None] = [None] * len(pieces)
        if self.other is not None:
            hidden, head = self.other.hidden[part], self.other.head
            other_logits = _scaled_logits(hidden, head.weight, head.bias, head.scale)
            others = [_capped(piece, head.softcap) for piece in torch.split(other_logits, size)]
        starts = range(part.start, part.stop, size)
        for start, piece, other in zip(starts, pieces, others, strict=True):
            yield _Block(slice(start, start + len(piece)), piece, other)

    def values(self, block: _Block, which: Sequence[Statistic] | None = None) -> Tensor:
        targets = self.targets[block.positions]
        return _stacked(block.logits, targets, block.other, which or self.statistics, self.softcap)

    def only_logprob(self) -> int | None:
        """The index of `logprob`, if it is the only statistic that has a gradient, and that of uncapped logits."""
        wanted = [index for index, statistic in enumerate(self.statistics) if statistic not in WITHOUT_GRADIENT]
        alone = [self.statistics[index] for index in wanted] == [logprob] and self.softcap is None
        return wanted[0] if alone else None


def _stacked(
    logits: Tensor, targets: Tensor, other: Tensor | None, statistics: Sequence[Statistic], softcap: float | None
) -> Tensor:
    capped = _capped(logits, softcap)
    return torch.stack([statistic(capped, targets, other) for statistic in statistics])


class _Block(NamedTuple):
    positions: slice  # of the [N] tokens
    logits: Tensor  # scaled, not capped yet
    other: Tensor | None  # the other model's


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.plan = plan
        values = torch.empty(len(plan.statistics), len(hidden), dtype=torch.float32, device=hidden.device)
        matrix = _for_products(weight)
        for part in plan.chunks():
            # The last chunk is kept: a step that fits into one chunk, as most do, projects once instead of twice.
            block = ctx.kept = None  # free one chunk before the next is computed
            ctx.kept = _scaled_logits(hidden[part], matrix, bias, plan.scale)
            if plan.compiled:
                values[:, part] = _compiled_values(plan, part, ctx.kept)
                continue
            for block in plan.blocks(part, ctx.kept):
                values[:, block.positions] = plan.values(block)
        ctx.save_for_backward(hidden, weight, bias, values)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, values = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        matrix = _for_products(weight)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for part in reversed(list(plan.chunks())):
            scaled = _scaled_logits(hidden[part], matrix, bias, plan.scale) if ctx.kept is None else ctx.kept
            ctx.kept = None
            # Gradients of raw logits have the scale as a factor; applying it to [S, C] here is cheaper.
            weights = grads[0][:, part] * plan.scale
            d_logits = _logits_gradient(plan, part, scaled, values[:, part], weights, matrix.dtype)
            del scaled  # only the half-precision copy is needed from here
            if grad_hidden is not None:
                grad_hidden[part] = (d_logits @ matrix).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, d_logits.T, hidden[part].to(matrix.dtype))
            if grad_bias is not None:
                grad_bias += d_logits.sum(0)
            del d_logits  # before the next chunk is computed
        return (
            grad_hidden,
            grad_weight if grad_weight is None else grad_weight.to(weight.dtype),
            grad_bias if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _compiled_values(plan: _Plan, part: slice, logits: Tensor) -> Tensor:
    targets = plan.targets[part]
    _mark_rows(logits, targets)
    return _compiled(_stacked)(logits, targets, None, plan.statistics, plan.softcap)


def _mark_rows(*tensors: Tensor) -> None:
    """One compiled function for any number of rows."""
    for each in tensors:
        torch._dynamo.maybe_mark_dynamic(each, 0)


def _logits_gradient(
    plan: _Plan, part: slice, logits: Tensor, values: Tensor, grads: Tensor, dtype: torch.dtype
) -> Tensor:
    """d(sum of statistics weighted by `grads [S, C]`) / d(logits of a chunk), which may be overwritten."""
    index = plan.only_logprob()
    if plan.compiled and index is not None:
        operands = (logits, plan.targets[part], values[index].contiguous(), grads[index].contiguous())
        _mark_rows(*operands)
        return _compiled(_new_logprob_gradient)(*operands, dtype)
    for block in plan.blocks(part, logits):
        own = slice(block.positions.start - part.start, block.positions.stop - part.start)
        _overwrite_with_gradient(block, plan, values[:, own], grads[:, own])
    return logits.to(dtype)


def _overwrite_with_gradient(block: _Block, plan: _Plan, values: Tensor, grads: Tensor) -> None:
    """Overwrite the block's logits with d(sum of statistics weighted by `grads [S, C]`) / d(those logits)."""
    index = plan.only_logprob()
    if index is not None:
        logprob_gradient(block.logits, plan.targets[block.positions], values[index], grads[index])
        return
    wanted = [index for index, statistic in enumerate(plan.statistics) if statistic not in WITHOUT_GRADIENT]
    chosen = [plan.statistics[index] for index in wanted]
    gradient = torch.zeros(())
    with torch.enable_grad():
        leaf = block.logits.detach().requires_grad_()
        pairs = [
            (value, grad)
            for value, grad in zip(
                plan.values(block._replace(logits=leaf), chosen) if chosen else [], grads[wanted], strict=True
            )
            if value.requires_grad
        ]
        if pairs:
            (gradient,) = torch.autograd.grad([v for v, _ in pairs], leaf, [g for _, g in pairs])
    block.logits.copy_(gradient)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _for_products(weight: Tensor) -> Tensor:
    """Half-precision products on a GPU can return float32; on CPU the matrix itself is cast, once per pass."""
    return weight.detach() if weight.is_cuda else weight.detach().float()


def _scaled_logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """`scale * (hidden @ matrix.T + bias)`, accumulated *and* returned in float32.

    bf16 logits are wrong in the second digit.
    """
    if matrix.dtype == torch.float32:
        logits = (hidden.detach().float() * scale) @ matrix.T
    else:
        logits = torch.mm(hidden.detach().to(matrix.dtype), matrix.T, out_dtype=torch.float32)
        if scale != 1.0:
            logits.mul_(scale)
    return logits if bias is None else logits.add_(bias.detach().float(), alpha=scale)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=torch.float32)


def count_windowed_layers(model_config: Any) -> int:
    """Return how many layers of a transformers text config attend to a sliding or chunked window."""
    kinds = getattr(model_config, "layer_types", None)
    if kinds is not None:
        return sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return int(model_config.num_hidden_layers) if getattr(model_config, "sliding_window", None) else 0


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the blocks of a transformers model that it declares as not to be split."""
    blocks = set(model._no_split_modules or ())
    return [part for part in model.modules() if type(part).__name__ in blocks]


# Whether torch's kernel accepts fewer key heads than query heads (newer than torch 2.11); not a function, because
# compiled layers read it.
TAKES_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Borders(NamedTuple):
    """Where the rows of a packed sequence begin, `[rows + 1]` int32, and the length of the longest."""

    starts: Tensor
    longest: int


def variable_length_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Borders,
    keys: Borders,
    *,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Causal attention inside each row of `[1, heads, N, dim]`, as one kernel: `[1, N, heads, dim]`.

    For GPUs and half precision. Where a row has more keys than queries, the queries are aligned with the last keys.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    shared_heads: dict[str, Any] = {"enable_gqa": True} if TAKES_SHARED_HEADS else {}
    if not shared_heads:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attended = varlen_attn(
        q,
        k,
        v,
        queries.starts,
        keys.starts,
        queries.longest,
        keys.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **shared_heads,
    )
    assert isinstance(attended, Tensor), "a tuple is returned only with log-sum-exp"
    return attended[None]
