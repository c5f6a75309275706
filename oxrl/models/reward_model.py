"""A reward model as a reward: token rows to the score that its head reads at the last token of each.

Loads what the algorithm `rm` trained (a checkpoint's folder with its heads beside it, full or LoRA) and any sequence
classifier of transformers with one label. Training one is not done here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from oxrl.concurrency import in_thread
from oxrl.data.render import Renderer
from oxrl.models.load import check_model, find_model, freeze, load_model, load_tokenizer, resolve_device, resolve_dtype
from oxrl.rewards.grade import Reward, Ungraded, as_reward, group_reward
from oxrl.types import ModelConfig, Rollout, Score

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEADS = "heads.safetensors"
SCORE = "score.weight"


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A frozen model, and the weight `[1, width]` of its score head; a sequence classifier has its head inside."""

    model: PreTrainedModel
    head: Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # groups are graded in threads, models are large


Scorer: TypeAlias = Callable[[RewardModel, Sequence[Sequence[int]]], list[float]]
RenderRollout: TypeAlias = Callable[[Rollout], Sequence[int]]


def load_reward_model(config: ModelConfig | str) -> RewardModel:
    """`load_reward_model("runs/rm/checkpoints/step_0200")`, or the name of a sequence classifier."""
    config = ModelConfig(config) if isinstance(config, str) else config
    heads = Path(config.name) / HEADS
    if heads.is_file():
        return _trained_here(config, heads)
    return RewardModel(_classifier(config))


def _trained_here(config: ModelConfig, heads: Path) -> RewardModel:
    from safetensors.torch import load_file

    weights = load_file(heads)
    if SCORE not in weights:
        raise ValueError(f"{heads} has no score head (it has {', '.join(weights)}); the algorithm rm trains one")
    model = load_model(config, is_trainable=False)
    text_config = model.config.get_text_config()
    if config.attn_implementation == "sdpa" and getattr(text_config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa would leave out the soft cap on attention scores
    return RewardModel(model, weights[SCORE].to(model.device))


def _classifier(config: ModelConfig) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source, options = find_model(config.name), {"revision": config.revision or "main"}
    neither = ValueError(
        f"{config.name} is no reward model: it has neither {HEADS} nor the head of a sequence classifier; train one "
        f"with the algorithm rm, or give a sequence classifier"
    )
    if source.kind not in ("folder", "hub"):
        raise neither
    try:
        parsed = AutoConfig.from_pretrained(source.where, trust_remote_code=config.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise neither from error
    if not any(name.endswith("ForSequenceClassification") for name in parsed.architectures or ()):
        raise neither
    if parsed.num_labels != 1:
        raise ValueError(f"{config.name} tells {parsed.num_labels} classes apart; a reward model has one label")
    device = resolve_device(config.device)
    model = AutoModelForSequenceClassification.from_pretrained(
        source.where,
        dtype=resolve_dtype(config.dtype, device),
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        use_safetensors=True,  # pickled weights can run code when they are read
        **options,
    )
    return freeze(model.to(device))


def score_tokens(reward_model: RewardModel, rows: Sequence[Sequence[int]], *, batch_size: int = 8) -> list[float]:
    """A score per row, which must end where the answer ends. Rows of like length run side by side."""
    if empty := [index for index, row in enumerate(rows) if not len(row)]:
        raise ValueError(f"row {empty[0]} has no tokens to score")
    # A classifier looks for its last token itself, by what padding looks like: one row at a time leaves no doubt.
    size = 1 if reward_model.head is None else batch_size
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    scores = [0.0] * len(rows)
    with reward_model.lock:
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            for index, score in zip(chosen, _pass(reward_model, [rows[i] for i in chosen]), strict=True):
                scores[index] = score
    return scores


def _pass(reward_model: RewardModel, rows: Sequence[Sequence[int]]) -> list[float]:
    import torch

    model, head = reward_model.model, reward_model.head
    tensors = [torch.tensor(list(row), device=model.device) for row in rows]
    with torch.no_grad():
        if head is None:
            logits: Tensor = model(input_ids=torch.stack(tensors)).logits
            return [float(score) for score in logits[:, 0].float()]
        tokens = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        present = torch.arange(tokens.shape[1], device=model.device)[None] < lengths[:, None]
        body = _body(model)
        hidden: Tensor = body(input_ids=tokens, attention_mask=present.long(), use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(rows), device=model.device), lengths - 1]
        return [float(score) for score in (last.float() @ head.float().T)[:, 0]]


def _body(model: Any) -> Any:
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return getattr(inner, inner.base_model_prefix)


def last_turn_tokens(rollout: Rollout) -> list[int]:
    """All that the policy saw and said, in its own tokens: for a reward model with the policy's tokenizer."""
    return rollout.tokens


def chat_tokens(tokenizer: PreTrainedTokenizerBase) -> RenderRollout:
    """The conversation in the reward model's own tokens and template, for one that does not share the policy's."""

    def tokens(rollout: Rollout) -> list[int]:
        chat = [message.to_dict() for message in rollout.messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return tokens


def compute_reward_model_score(
    reward_model: RewardModel,
    rollout: Rollout,
    *,
    scorer: Scorer = score_tokens,
    render: RenderRollout = last_turn_tokens,
) -> float:
    """What the reward model gives for the last turn of one rollout."""
    return scorer(reward_model, [render(rollout)])[0]


def reward_model_reward(
    reward_model: RewardModel, *, scorer: Scorer = score_tokens, render: RenderRollout = last_turn_tokens
) -> Reward:
    """The reward model as a reward; the answers to one prompt are scored together."""

    @group_reward
    def reward_model_score(rollouts: Sequence[Rollout]) -> list[float]:
        return scorer(reward_model, [render(rollout) for rollout in rollouts])

    return as_reward(reward_model_score)


def rm_reward_func(*, model: str, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False) -> Reward:
    """What a reward model gives for the conversation: a run of `rm`, or any sequence classifier with one label.

    The model is loaded when the first answer is graded. It reads the conversation in its own tokens and template, so it
    need not share the policy's.
    """
    config = ModelConfig(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    check_model(config)
    lock, loaded = threading.Lock(), list[Reward]()

    def scores() -> Reward:
        with lock:
            if not loaded:
                render = conversation_tokens(load_tokenizer(config))
                loaded.append(reward_model_reward(load_reward_model(config), render=render))
            return loaded[0]

    async def outcomes(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        return await (await in_thread(scores)).outcomes(rollouts, time_limit)

    return Reward("rm_reward_func", outcomes)


def conversation_tokens(tokenizer: PreTrainedTokenizerBase) -> RenderRollout:
    """The conversation as the row that training would make of it: to where the answer ends, and not beyond."""
    render = Renderer(tokenizer)

    def tokens(rollout: Rollout) -> Sequence[int]:
        row = render.conversation(rollout.messages, id=rollout.id)[-1]
        return [int(token) for token in row.tokens]

    return tokens
