"""The size of a model from its config: parameters, tensors that training keeps, keys and values; no weights are loaded.

The model is built on torch's meta device, where tensors have shapes and no memory. The tensors that autograd saves are
counted there, which works for any architecture. What a run does with these numbers is in `memory` and `plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxrl.data.media_features import body_of, towers_of
from oxrl.diagnose.memory import ModelFacts
from oxrl.models.load import (
    adapter_base,
    auto_class,
    find_model,
    freeze_part,
    load_model_config,
    reads_media,
    resolve_device,
    resolve_dtype,
)
from oxrl.models.lora import LoraSettings, attach_lora, read_adapter_config
from oxrl.types import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


ATTENTION = "oxrl_counted"


COUNTED_TOKENS = 64  # length of the pass whose saved tensors are counted


def model_facts(config: ModelConfig, lora: LoraSettings | None = None) -> ModelFacts:
    """Count a model's facts on the meta device, without loading weights."""
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    source = find_model(config.name)
    if source.kind == "adapter":
        read = read_adapter_config(source.where)
        targets = read["target_modules"] if isinstance(read["target_modules"], str) else tuple(read["target_modules"])
        lora = LoraSettings(read["r"], read["lora_alpha"], 0.0, targets)
        config = config._replace(name=adapter_base(source.where), revision=None)
    parsed = load_model_config(config)
    return shape_facts(parsed, dtype, lora, trust_remote_code=config.trust_remote_code, freeze=config.freeze)


def shape_facts(
    parsed: Any,
    dtype: torch.dtype,
    lora: LoraSettings | None = None,
    *,
    trust_remote_code: bool = False,
    freeze: str = "towers",
) -> ModelFacts:
    """Count the facts of a transformers config, such as a `Qwen2Config`."""
    model = on_meta(parsed, dtype, lora, trust_remote_code)
    towers = towers_of(body_of(model)) if lora is None and reads_media(parsed) else []
    if towers:
        freeze_part(model, freeze)
    weights = {id(weight): weight for weight in model.parameters()}
    trained = [weight for weight in weights.values() if weight.requires_grad]
    text = parsed.get_text_config()
    parameters = sum(weight.numel() for weight in weights.values())
    kept, keys = kept_bytes(model, dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed, _ = kept_bytes(model, dtype)
    head = model.get_output_embeddings().weight
    return ModelFacts(
        parameters=parameters,
        trained=sum(weight.numel() for weight in trained),
        active=parameters - _inactive_parameters(model, text),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights.values()),
        masters=sum(weight.numel() for weight in trained if weight.element_size() < 4),
        layers=text.num_hidden_layers,
        hidden=head.shape[1],
        vocabulary=head.shape[0],
        kept=kept,
        kept_checkpointed=checkpointed,
        kept_keys=keys,
        cache=cache_bytes(text, dtype.itemsize),
        head_trained=head.requires_grad,
        towers=sum(weight.numel() for tower in towers for weight in tower.parameters()),
    )


def on_meta(parsed: Any, dtype: torch.dtype, lora: LoraSettings | None, trust_remote_code: bool) -> PreTrainedModel:
    import torch

    _register_attention()
    with torch.device("meta"):
        model = auto_class(parsed).from_config(
            parsed, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=trust_remote_code
        )
    return model if lora is None else attach_lora(model, lora)


def kept_bytes(model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that autograd saves per token, and the share of keys and values in them."""
    import torch

    try:
        return _count_saved(model)
    except RuntimeError:  # grouped matrix products of experts do not support float32 on the meta device
        if dtype.itemsize == 4:
            try:
                half = _count_saved(model.to(torch.bfloat16))
                return 2 * half[0], 2 * half[1]
            except RuntimeError:
                pass
            finally:
                model.to(dtype)
    return _kept_by_formula(model.config.get_text_config(), dtype.itemsize, model.is_gradient_checkpointing)


def _count_saved(model: PreTrainedModel) -> tuple[int, int]:
    import torch

    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept: dict[int, Any] = {}  # keeps references to storages, so that no address is reused

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return saved

    ids = torch.zeros(1, COUNTED_TOKENS, dtype=torch.int64, device="meta")
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        hidden = body_of(inner)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    assert hidden.requires_grad, "a pass without gradients saves nothing"
    text = inner.config.get_text_config()
    heads = 0  # layers with a state of fixed size
    if getattr(text, "num_attention_heads", None) is not None:
        heads = 2 * text.num_hidden_layers * text.num_attention_heads * _head_size(text) * hidden.element_size()
    return sum(storage.nbytes() for storage in kept.values()) // COUNTED_TOKENS, heads


def _kept_by_formula(text: Any, width: int, checkpointing: bool) -> tuple[int, int]:
    """For models that cannot run on the meta device: a layer saves 11 vectors of its width and 4 of its inner width."""
    hidden, layers = text.hidden_size, text.num_hidden_layers
    feed_forward = (
        getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * hidden
    )
    experts = (getattr(text, "num_experts_per_tok", None) or 1) if getattr(text, "moe_intermediate_size", None) else 1
    kept = width * layers * (hidden if checkpointing else 11 * hidden + 4 * feed_forward * experts)
    return kept, 2 * width * layers * hidden


def _register_attention() -> None:
    """Register an attention that computes nothing and saves what real kernels save: q, k, v, output, log-sums."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    class SavingAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = query.new_empty(*query.shape[:-1], value.shape[-1])
            ctx.save_for_backward(query, key, value, attended, query.new_empty(query.shape[:-1], dtype=torch.float32))
            return attended

    def attend(
        module: Any,  # noqa: ARG001 - the interface's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,  # noqa: ARG001 - the interface's
        **options: Any,  # noqa: ARG001 - the interface's
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
        attended: Tensor = SavingAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


def _head_size(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def cache_bytes(text: Any, width: int) -> int:
    """Bytes of keys and values of one token in all layers: `2 * layers * key heads * head size * width`."""
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if heads is None:  # layers with a state of fixed size
        return 0
    return int(2 * text.num_hidden_layers * heads * _head_size(text) * width)


def _inactive_parameters(model: PreTrainedModel, text: Any) -> int:
    """Count the parameters of the experts that are not selected for a token."""
    counts = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts, chosen = next((count for count in counts if count), 0), getattr(text, "num_experts_per_tok", None)
    if not experts or not chosen:
        return 0
    routed = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    return int(routed * (1 - chosen / experts))
