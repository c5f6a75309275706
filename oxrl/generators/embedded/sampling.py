"""Logits to sampled tokens: counter-based random numbers, cut-off rules, and one search per token.

A sampled token depends on its own row of logits, rules and random number only, not on the rest of the batch. Computing
logits and ending sequences are left to `decoders` and `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oxrl.seeds import GOLDEN_GAMMA, MASK, splitmix64
from oxrl.types import GenerationConfig

BLOCK = 256  # tokens whose probabilities are summed before they are searched
LIKELIEST = 1024  # tokens that are sorted first; hardly any nucleus is larger, and a full sort takes ten times as long


def stream_key(sampling_seed: int, request_seed: int) -> int:
    """Return the state, of the random generator's 2^64, at which the numbers of one request start."""
    return splitmix64(splitmix64(sampling_seed & MASK) ^ ((request_seed + GOLDEN_GAMMA) & MASK))


def uniforms(
    keys: Sequence[int] | NDArray[np.uint64], positions: Sequence[int] | NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (key, position), by splitmix64 as a counter."""
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    states = np.array(keys, dtype=np.uint64) + counters * np.uint64(GOLDEN_GAMMA)
    return np.asarray((splitmix64(states) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def uniforms_of(keys: Tensor, positions: Tensor) -> Tensor:
    """As `uniforms`, on the keys' device: int64 tensors with the same bits, whose products wrap around."""
    state = keys + (positions + 1) * _signed(GOLDEN_GAMMA)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


class Drawn(NamedTuple):
    """A token per row, its log-prob under the full softmax, and the probability that its rules cut off; `[B]` each."""

    tokens: Tensor
    logprobs: Tensor
    cut_mass: Tensor


def draw(
    logits: Tensor,
    rules: Sequence[GenerationConfig],
    numbers: NDArray[np.float64],
    never: Tensor | None = None,
) -> Drawn:
    """Sample one token per row of `[B, V]`, each by its own rules and number in [0, 1).

    Temperature 0 is greedy, with the log-prob at temperature 1. Tokens below min-p are removed first, then all but the
    top-k; top-p is a share of the rest, as in vLLM. Tokens of `never` are cut off by every rule. With `allowed_tokens`
    the vocabulary of a row is these tokens.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, rule in enumerate(rules):
        rows_of.setdefault(rule.allowed_tokens, []).append(row)
    if not any(rows_of):
        return _draw(logits, rules, numbers, never)
    drawn = Drawn(*(torch.zeros(len(logits), dtype=kind, device=logits.device) for kind in _DRAWN))
    for allowed, rows in rows_of.items():
        tokens = torch.tensor(allowed or range(logits.shape[1]), device=logits.device)
        own = _draw(logits[rows][:, tokens], [rules[row] for row in rows], numbers[rows], None if allowed else never)
        for values, part in zip(drawn, own._replace(tokens=tokens[own.tokens]), strict=True):
            values[rows] = part
    return drawn


_DRAWN = (torch.int64, torch.float32, torch.float64)


def _draw(
    logits: Tensor, rules: Sequence[GenerationConfig], numbers: NDArray[np.float64], never: Tensor | None
) -> Drawn:
    p = _probabilities(logits, rules)
    allowed = p if never is None else p.index_fill(1, never, 0.0)
    tokens = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    cut_mass = torch.zeros(len(p), dtype=torch.float64, device=p.device)
    thresholds = torch.from_numpy(numbers).to(p.device)
    rows_of: dict[tuple[float, ...], list[int]] = {}  # other fields of a rule have no effect on a draw
    for row, rule in enumerate(rules):
        rows_of.setdefault((rule.temperature == 0, rule.top_k, rule.top_p, rule.min_p), []).append(row)
    for own_rows in rows_of.values():
        rule = rules[own_rows[0]]
        rows = slice(None) if len(own_rows) == len(p) else own_rows
        own, own_thresholds = allowed[rows], thresholds[rows]
        if rule.temperature == 0:
            tokens[rows] = own.argmax(-1)
        elif rule.top_k == 0 and rule.top_p >= 1.0 and rule.min_p == 0.0:
            tokens[rows] = search(own, own_thresholds)
            if never is not None:
                cut_mass[rows] = p[rows][:, never].double().sum(-1)
        else:
            tokens[rows], cut_mass[rows] = _draw_likely(own, rule, own_thresholds, max(LIKELIEST, rule.top_k))
    return Drawn(tokens, p.gather(1, tokens[:, None])[:, 0].log(), cut_mass)


def _probabilities(logits: Tensor, rules: Sequence[GenerationConfig]) -> Tensor:
    temperatures = [rule.temperature or 1.0 for rule in rules]
    logits = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    return logits.softmax(-1)


def _draw_likely(p: Tensor, rule: GenerationConfig, numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return tokens sampled from those that the rule keeps, and the probability that it cuts off."""
    kept, order = likeliest(p, rule, width)
    tokens = order.gather(1, search(kept, numbers)[:, None])[:, 0]
    cut_mass = (1.0 - kept.double().cumsum(-1)[:, -1]).clamp_min(0.0)
    if kept.shape[1] < p.shape[1] and rule.top_k == 0:
        too_flat = kept[:, -1] > 0  # the rule may keep more tokens than were sorted
        if bool(too_flat.any()):
            everything = _draw_likely(p[too_flat], rule, numbers[too_flat], p.shape[1])
            tokens[too_flat], cut_mass[too_flat] = everything
    return tokens, cut_mass


def likeliest(p: Tensor, rule: GenerationConfig, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` likeliest of each row, in order: probabilities, 0 where the rule cuts them, and tokens."""
    sorted_p, order = p.topk(min(width, p.shape[1]), dim=-1)
    floor = rule.min_p * sorted_p[:, :1]
    kept = sorted_p * (sorted_p >= floor)
    if rule.top_k:
        kept[:, rule.top_k :] = 0.0
    if rule.top_p < 1.0:
        sums = kept.double().cumsum(-1)
        total = sums[:, -1:] if rule.top_k else _blocks(p * (p >= floor)).double().cumsum(-1)[:, -1:]
        kept = kept * (sums - kept < rule.top_p * total)
    return kept, order


def search(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return per row of `[B, V]` the first index at which the running share of the sum exceeds the number in [0, 1).

    Blocks are summed in float32 and searched in float64, then the tokens of one block: float32 sums over a whole
    vocabulary would starve its tail, float64 ones cost ten times as much. Tokens of weight 0 are never found.
    """
    return _search(_blocks(weights), numbers, lambda indices: weights.gather(1, indices), weights.shape[1])


def _search(blocks: Tensor, numbers: Tensor, weights_at: Callable[[Tensor], Tensor], size: int) -> Tensor:
    block, rest = _search_row(blocks, numbers)
    indices = block[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)
    inside = weights_at(indices.clamp_max(size - 1)) * (indices < size)
    return (block * BLOCK + _search_row(inside, rest)[0]).clamp_max(size - 1)  # for rows of NaN


def _blocks(weights: Tensor) -> Tensor:
    """Return sums of `[B, V]` over blocks of the vocabulary; bit-identical for any number of rows."""
    rows, size = weights.shape
    full = size - size % BLOCK
    blocks = weights[:, :full].reshape(rows, full // BLOCK, BLOCK).sum(-1)
    return blocks if full == size else torch.cat([blocks, weights[:, full:].sum(-1, keepdim=True)], dim=1)


def _exponential_blocks(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of `exp(logits / temperature)` over blocks of the vocabulary, in proportion, and the log of them all.

    Each block has its own maximum, so that one pass over `[B, V]` suffices.
    """
    largest, sums = block_exponentials(logits, temperature)
    top = largest.amax(-1, keepdim=True)
    blocks = sums * (largest - top).exp()
    return blocks, top + blocks.sum(-1, keepdim=True).log()


@torch.library.custom_op("oxrl::block_exponentials", mutates_args=())
def block_exponentials(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Per block of `logits [B, V] / temperature [B]`: its maximum, and the sum of `exp` of what is below it."""
    if logits.is_cuda:
        from oxrl.generators.embedded import kernels

        return kernels.block_exponentials(logits, temperature, BLOCK)
    scaled = logits.float() / temperature[:, None]
    full = scaled.shape[1] - scaled.shape[1] % BLOCK
    parts = [scaled[:, :full].reshape(len(scaled), full // BLOCK, BLOCK), scaled[:, None, full:]]
    largest, sums = zip(*(_exponentials(part) for part in parts if part.numel()), strict=True)
    return torch.cat(largest, dim=1), torch.cat(sums, dim=1)


@block_exponentials.register_fake
def _(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    largest, sums = (temperature.new_empty(logits.shape[0], -(-logits.shape[1] // BLOCK)) for _ in range(2))
    return largest, sums


def _exponentials(part: Tensor) -> tuple[Tensor, Tensor]:
    largest = part.amax(-1).clamp_min(torch.finfo(part.dtype).min)  # a block may consist of -inf
    return largest, (part - largest[..., None]).exp().sum(-1)


def _search_row(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index found, and how far into its weight the number reaches, again in [0, 1)."""
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    # Rounding may lift a threshold to the sum itself, which nothing exceeds.
    thresholds = torch.minimum(numbers[:, None] * total, total.nextafter(torch.zeros_like(total)))
    indices = torch.searchsorted(sums, thresholds, right=True).clamp_max(weights.shape[1] - 1)
    own = weights.double().gather(1, indices)
    reached = (thresholds - (sums.gather(1, indices) - own)) / own
    return indices[:, 0], reached[:, 0].clamp(0.0, 1.0 - 2.0**-53)


class Rules(NamedTuple):
    """The rules of each row on the device, `[B]` each; temperature 0 is greedy."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; 0: no limit
    top_p: Tensor  # float64
    min_p: Tensor  # float32


class Draws(NamedTuple):
    """Which kinds of draws a batch needs; each costs passes over the logits."""

    plain: bool
    cut: bool
    greedy: bool

    @classmethod
    def of(cls, rules: Iterable[GenerationConfig]) -> Draws:
        kinds = {(rule.temperature == 0, rule.top_k > 0 or rule.top_p < 1.0 or rule.min_p > 0.0) for rule in rules}
        return cls((False, False) in kinds, (False, True) in kinds, any(greedy for greedy, _ in kinds))


def draw_rows(logits: Tensor, rules: Rules, numbers: Tensor, draws: Draws) -> tuple[Drawn, Tensor]:
    """As `draw`, without the host: every row by its own rules; also which rows could not be decided.

    With cut-off rules only the `LIKELIEST` tokens are sorted. A row whose rules may keep more is undecided, and `draw`
    has to do it. Without cut-off rules the logits are read once, and no probabilities are written to memory.
    """
    greedy = rules.temperature == 0
    own_temperature = torch.where(greedy, 1.0, rules.temperature)
    blocks, total = _exponential_blocks(logits, own_temperature)
    temperature = own_temperature[:, None]
    tokens = torch.zeros_like(rules.top_k)
    undecided, cut_mass = torch.zeros_like(greedy), torch.zeros_like(numbers)
    if draws.plain:
        tokens = _search(
            blocks,
            numbers,
            lambda indices: (logits.gather(1, indices).float() / temperature - total).exp(),
            logits.shape[1],
        )
    if draws.cut:
        p = (logits.float() / temperature - total).exp()
        kept, order, plain = _likeliest_rows(p, rules)
        likely = order.gather(1, search(kept, numbers)[:, None])[:, 0]
        more = ((kept[:, -1] > 0) & (rules.top_k == 0)) | (rules.top_k > kept.shape[1])
        undecided = ~plain & ~greedy & more & (kept.shape[1] < p.shape[1])
        cut_mass = torch.where(plain | greedy, cut_mass, (1.0 - kept.double().sum(-1)).clamp_min(0.0))
        tokens = torch.where(plain, tokens, likely)
    if draws.greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    logprobs = logits.gather(1, tokens[:, None]).float() / temperature - total
    return Drawn(tokens, logprobs[:, 0], cut_mass), undecided


def _likeliest_rows(p: Tensor, rules: Rules) -> tuple[Tensor, Tensor, Tensor]:
    """As `likeliest`, with the rules of each row; also which rows have no cut-off rule."""
    sorted_p, order = p.topk(min(LIKELIEST, p.shape[1]), dim=-1)
    floor = rules.min_p[:, None] * sorted_p[:, :1]
    ranks = torch.arange(sorted_p.shape[1], device=p.device)
    kept = sorted_p * (sorted_p >= floor) * ((rules.top_k[:, None] == 0) | (ranks < rules.top_k[:, None]))
    sums = kept.double().cumsum(-1)
    everything = _blocks(p * (p >= floor)).double().sum(-1, keepdim=True)
    total = torch.where(rules.top_k[:, None] > 0, sums[:, -1:], everything)
    kept = kept * ((rules.top_p[:, None] >= 1.0) | (sums - kept < rules.top_p[:, None] * total))
    plain = (rules.top_k == 0) & (rules.top_p >= 1.0) & (rules.min_p == 0.0)
    return kept, order, plain
