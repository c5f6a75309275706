"""A reward model as a reward: token rows to scores, read by the score head at the last token of each row.

Loads checkpoints of the algorithm `rm` (full or LoRA, with the heads in the same folder) and any sequence classifier of
transformers with one label. Rows of a model that reads images or audio come with their media. Training is in the
algorithm `rm`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from oxrl.concurrency import in_thread
from oxrl.data.render import Renderer
from oxrl.models.load import (
    check_model,
    find_model,
    freeze,
    load_model,
    load_processor,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from oxrl.rewards.grade import Reward, Ungraded, as_reward, group_reward
from oxrl.types import IntArray, ModelConfig, Rollout, Row, Sample, Score

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEADS = "heads.safetensors"
SCORE = "score.weight"
_PLURALS = {"image": "images", "audio": "audio"}


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A frozen model, and the weight `[1, width]` of its score head; a sequence classifier has its head inside."""

    model: PreTrainedModel
    head: Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # one forward pass at a time: grading runs in threads


ScoredRow: TypeAlias = Sequence[int] | Row
"""Token ids; a `Row` if they have media."""
Scorer: TypeAlias = Callable[[RewardModel, Sequence[ScoredRow]], list[float]]
RenderRollout: TypeAlias = Callable[[Rollout], ScoredRow]


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
    if model.config._attn_implementation == "sdpa" and getattr(text_config, "attn_logit_softcapping", None):
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


def score_tokens(reward_model: RewardModel, rows: Sequence[ScoredRow], *, batch_size: int = 8) -> list[float]:
    """Return a score per row; each row must end with the end of the answer. Rows of similar length are batched."""
    from oxrl.data.media_features import media_towers

    if empty := [index for index, row in enumerate(rows) if not len(row)]:
        raise ValueError(f"row {empty[0]} has no tokens to score")
    forward, size = _forward, batch_size
    if (
        reward_model.head is None
    ):  # a classifier finds the last token by looking for padding; single rows avoid mistakes
        forward, size = _classify, 1
    elif media_towers(_inner(reward_model.model)) is not None:
        forward, size = _forward_with_media, 1
    elif with_media := [row.id for row in rows if isinstance(row, Row) and row.media]:
        raise ValueError(f"row {with_media[0]} has media, and the reward model reads text only")
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    scores = [0.0] * len(rows)
    with reward_model.lock:
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            for index, score in zip(chosen, forward(reward_model, [rows[i] for i in chosen]), strict=True):
                scores[index] = score
    return scores


def _ids(row: ScoredRow) -> IntArray:
    return np.asarray(row.tokens if isinstance(row, Row) else row, np.int64)


def _classify(reward_model: RewardModel, rows: Sequence[ScoredRow]) -> list[float]:
    import torch

    model, (row,) = reward_model.model, rows
    if isinstance(row, Row) and row.media:
        raise ValueError(f"row {row.id} has media, and {type(model).__name__}, a sequence classifier, gets text only")
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.from_numpy(_ids(row))[None].to(model.device)).logits
        return [float(score) for score in logits[:, 0].float()]


def _forward(reward_model: RewardModel, rows: Sequence[ScoredRow]) -> list[float]:
    import torch

    from oxrl.data.media_features import body_of

    model = reward_model.model
    tensors = [torch.from_numpy(_ids(row)).to(model.device) for row in rows]
    with torch.no_grad():
        tokens = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        present = torch.arange(tokens.shape[1], device=model.device)[None] < lengths[:, None]
        body = body_of(_inner(model))
        hidden: Tensor = body(input_ids=tokens, attention_mask=present.long(), use_cache=False).last_hidden_state
        return _read(reward_model, hidden[torch.arange(len(rows), device=model.device), lengths - 1])


def _forward_with_media(reward_model: RewardModel, rows: Sequence[ScoredRow]) -> list[float]:
    """One row at a time. The towers run once for the answers to a prompt: they are frozen, and keep their outputs."""
    import torch

    from oxrl.data.media_features import MediaRow, body_inputs, body_of, place

    (row,), inner = rows, _inner(reward_model.model)
    id, media = (row.id, row.media) if isinstance(row, Row) else ("to score", ())
    ids = _ids(row)
    with torch.no_grad():
        placed = place(inner, [MediaRow(id, ids, media)])  # refuses placeholders without their media
        own = {} if placed is None or placed.positions is None else {"position_ids": placed.positions[:, None]}
        tokens = torch.from_numpy(ids)[None].to(inner.device)
        hidden = body_of(inner)(**body_inputs(inner, tokens, placed), **own, use_cache=False).last_hidden_state
        return _read(reward_model, hidden[:, -1])


def _read(reward_model: RewardModel, last: Tensor) -> list[float]:
    assert reward_model.head is not None
    return [float(score) for score in (last.float() @ reward_model.head.float().T)[:, 0]]


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def last_turn_tokens(rollout: Rollout) -> ScoredRow:
    """Return prompt and completion in the policy's tokens, for a reward model with the policy's tokenizer."""
    if not rollout.media:
        return rollout.tokens
    return Row(rollout.id, np.array(rollout.tokens), np.array(rollout.loss_mask, np.bool_), media=rollout.media)


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

    return Reward("rm_reward_func", outcomes, partial(check_reads_media, config))


def check_reads_media(config: ModelConfig, sample: Sample) -> None:
    """Raise a ValueError if a model that grades answers cannot read what they are about; loads no weights."""
    if not sample.media:
        return
    read = _kinds_read(config)
    if unread := [_PLURALS[medium.kind] for medium in sample.media if medium.kind not in read]:
        known = " and ".join(("text", *(_PLURALS[kind] for kind in read))) if read else "text only"
        raise ValueError(
            f"{sample.id} has {unread[0]}, and {config.name}, which grades the answers, reads {known}: name a model "
            f"that reads {unread[0]}"
        )


@lru_cache(maxsize=8)
def _kinds_read(config: ModelConfig) -> tuple[str, ...]:
    processor = load_processor(config)
    return () if processor is None else tuple(processor.placeholders)


def conversation_tokens(tokenizer: PreTrainedTokenizerBase) -> RenderRollout:
    """Render a conversation with this tokenizer as in training: up to the end of the last answer."""
    render = Renderer(tokenizer)

    def tokens(rollout: Rollout) -> ScoredRow:
        row = render.conversation(rollout.messages, id=rollout.id, media=rollout.media)[-1]
        return row if row.media else row.tokens.tolist()

    return tokens
