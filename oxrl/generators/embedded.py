"""Prompt ids to sampled ids with their log-probs, by the trainer's own weights: no copy, no reload.

Prompts run side by side, left-padded, with a cache. Log-probs are of the full softmax at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oxrl.types import Generation, GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EmbeddedGenerator:
    """`EmbeddedGenerator(model, tokenizer).generate([prompt_ids], GenerationConfig(max_new_tokens=32))`."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: GenerationConfig,
        on_token: Callable[[int, int], None] = lambda _prompt, _token: None,
    ) -> list[Generation]:
        """One generation per prompt; `on_token(prompt index, token)` sees each token as it is drawn."""
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("there is nothing to continue: every prompt needs at least one token")
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._generate([list(prompt) for prompt in prompts], sampling, on_token)
        finally:
            self.model.train(was_training)

    def _generate(
        self, prompts: list[list[int]], sampling: GenerationConfig, on_token: Callable[[int, int], None]
    ) -> list[Generation]:
        ends = self._end_tokens(sampling)
        drawn: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        finished = [False] * len(prompts)
        random = torch.Generator(device=self.model.device).manual_seed(sampling.seed)
        tokens, present = self._left_padded(prompts)
        cache = None
        for _ in range(sampling.max_new_tokens):
            positions = (present.cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
            output = self.model(
                input_ids=tokens,
                attention_mask=present,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            choice, chosen_logprob = draw(output.logits[:, -1].float(), sampling, random)
            for index, (token, logprob) in enumerate(zip(choice.tolist(), chosen_logprob.tolist(), strict=True)):
                if not finished[index]:
                    drawn[index].append(token)
                    logprobs[index].append(logprob)
                    on_token(index, token)
                    finished[index] = token in ends or self._said_stop(drawn[index], sampling.stop)
            if all(finished):
                break
            tokens, present = choice[:, None], torch.nn.functional.pad(present, (0, 1), value=1)
        return [
            Generation(tuple(ids), tuple(values), "stop" if done else "length", text=self._text(ids))
            for ids, values, done in zip(drawn, logprobs, finished, strict=True)
        ]

    def _left_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, prompts))
        device = self.model.device
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        present = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return tokens, torch.tensor(present, device=device)

    def _end_tokens(self, sampling: GenerationConfig) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        return {end for end in (*listed, self.tokenizer.eos_token_id, *sampling.stop_token_ids) if end is not None}

    def _said_stop(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        return bool(stop) and any(text in self._text(ids) for text in stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def draw(logits: Tensor, sampling: GenerationConfig, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row of `[B, V]` and its log-prob. Temperature 0 is greedy, its log-prob that of temperature 1."""
    if sampling.temperature == 0:
        choice = logits.argmax(-1)
        return choice, logits.log_softmax(-1).gather(1, choice[:, None])[:, 0]
    log_p = (logits / sampling.temperature).log_softmax(-1)
    weights = _keep_likely(log_p.exp(), sampling.top_k, sampling.top_p)
    # One uniform number per row, found in the cumulative sum: far cheaper than multinomial's V numbers per row.
    sums = weights.cumsum(-1)
    threshold = torch.rand(len(sums), 1, generator=random, device=sums.device) * sums[:, -1:]
    choice = torch.searchsorted(sums, threshold, right=True)[:, 0].clamp_max(weights.shape[1] - 1)
    return choice, log_p.gather(1, choice[:, None])[:, 0]


def _keep_likely(p: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k == 0 and top_p >= 1.0:
        return p
    order = p.argsort(-1, descending=True)
    sorted_p = p.gather(1, order)
    keep = sorted_p.cumsum(-1) - sorted_p < top_p
    if top_k:
        keep[:, top_k:] = False
    return torch.zeros_like(p).scatter(1, order, sorted_p * keep)
