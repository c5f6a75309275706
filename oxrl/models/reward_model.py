"""A reward model as a reward: token rows to scores, read by the score head at the last token of each row.

Loads checkpoints of the algorithm `rm` (full or LoRA, with the heads in the same folder) and any sequence classifier of
transformers with one label. Training is in the algorithm `rm`.
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
    lock: threading.Lock = field(default_factory=threading.Lock)  # one forward pass at a time: grading runs in threads


Scorer: TypeAlias = Callable[[RewardModel, Sequence[Sequence[int]]], list[float]]
RenderRollout: TypeAlias = Callable[[Rollout], Sequence[int]]


def is_reward_model(folder: str | Path) -> bool:
    """Whether a checkpoint has a score head, as the algorithm rm trains one."""
    from safetensors import safe_open

    heads = Path(folder) / HEADS
    if not heads.is_file():
        return False
    with safe_open(heads, "pt") as weights:
        return SCORE in weights.keys()  # noqa: SIM118 - not a mapping


def load_reward_model(config: ModelConfig | str) -> RewardModel:
    """`load_reward_model("runs/rm/checkpoints/step_0200")`, or the name of a sequence classifier."""
    config = ModelConfig(config) if isinstance(config, str) else config
    heads = Path(config.name) / HEADS
    if heads.is_file():
        return _load_trained(config, heads)
    return RewardModel(_load_classifier(config))


def _load_trained(config: ModelConfig, heads: Path) -> RewardModel:
    from safetensors.torch import load_file

    model = load_model(config, is_trainable=False)  # checks the files of a checkpoint, this one too
    weights = load_file(heads)
    if SCORE not in weights:
        raise ValueError(f"{heads} has no score head (it has {', '.join(weights)}); the algorithm rm trains one")
    text_config = model.config.get_text_config()
    if config.attn_implementation == "sdpa" and getattr(text_config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa ignores the soft cap on attention scores
    return RewardModel(model, weights[SCORE].to(model.device))


def _load_classifier(config: ModelConfig) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source, options = find_model(config.name), {"revision": config.revision or "main"}
    not_a_reward_model = ValueError(
        f"{config.name} is not a reward model: it has neither {HEADS} nor the head of a sequence classifier; train "
        f"one with the algorithm rm, or use a sequence classifier"
    )
    if source.kind not in ("folder", "hub"):
        raise not_a_reward_model
    try:
        parsed = AutoConfig.from_pretrained(source.where, trust_remote_code=config.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise not_a_reward_model from error
    if not any(name.endswith("ForSequenceClassification") for name in parsed.architectures or ()):
        raise not_a_reward_model
    if parsed.num_labels != 1:
        raise ValueError(f"{config.name} classifies into {parsed.num_labels} classes; a reward model has one label")
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
    """Return a score per row; each row must end with the end of the answer. Rows of similar length are batched."""
    if empty := [index for index, row in enumerate(rows) if not len(row)]:
        raise ValueError(f"row {empty[0]} has no tokens to score")
    # A classifier finds the last token by looking for padding; single rows avoid mistakes.
    size = 1 if reward_model.head is None else batch_size
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    scores = [0.0] * len(rows)
    with reward_model.lock:
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            for index, score in zip(chosen, _forward(reward_model, [rows[i] for i in chosen]), strict=True):
                scores[index] = score
    return scores


def _forward(reward_model: RewardModel, rows: Sequence[Sequence[int]]) -> list[float]:
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
    """Return prompt and completion in the policy's tokens, for a reward model with the policy's tokenizer."""
    return rollout.tokens


def compute_reward_model_score(
    reward_model: RewardModel,
    rollout: Rollout,
    *,
    scorer: Scorer = score_tokens,
    render: RenderRollout = last_turn_tokens,
) -> float:
    """Return the reward model's score of one rollout."""
    return scorer(reward_model, [render(rollout)])[0]


def reward_model_reward(
    reward_model: RewardModel, *, scorer: Scorer = score_tokens, render: RenderRollout = last_turn_tokens
) -> Reward:
    """Return the reward model as a reward; the answers to one prompt are scored in one batch."""

    @group_reward
    def reward_model_score(rollouts: Sequence[Rollout]) -> list[float]:
        return scorer(reward_model, [render(rollout) for rollout in rollouts])

    return as_reward(reward_model_score)


def rm_reward_func(*, model: str, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False) -> Reward:
    """Score of the conversation by a reward model: a run of `rm`, or any sequence classifier with one label.

    The model is loaded when the first answer is graded. It uses its own tokenizer and chat template, which may differ
    from the policy's.
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
    """Render a conversation with this tokenizer as in training: up to the end of the last answer."""
    render = Renderer(tokenizer)

    def tokens(rollout: Rollout) -> Sequence[int]:
        row = render.conversation(rollout.messages, id=rollout.id)[-1]
        return [int(token) for token in row.tokens]

    return tokens
