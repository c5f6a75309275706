"""Published chat formats, each as a small template, and tokenizers to test them with."""

from __future__ import annotations

import json
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


class Style(NamedTuple):
    """A template, the special tokens it writes, and added tokens that are not special."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    added: tuple[str, ...] = ()
    rstrip: tuple[str, ...] = ()  # special tokens that strip the space after them


CHATML = Style(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
)

LLAMA3 = Style(
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
)

_QWEN_TOOLS = (
    "{% if tools %}# Tools\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>{% endif %}<|im_end|>\n"
)
_QWEN_CALLS = (
    "{% for c in m.tool_calls %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_QWEN_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)

QWEN25 = Style(
    "<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are Qwen.{% endif %}"
    + _QWEN_TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_RESULTS
    + "{% elif not (m.role == 'system' and loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}" + _QWEN_CALLS + "{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    added=("<tool_call>", "</tool_call>"),
)

QWEN3 = Style(
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + _QWEN_RESULTS + "{% elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% if m.tool_calls %}" + _QWEN_CALLS + "{% endif %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
)

GEMMA = Style(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    eos="<eos>",
    bos="<bos>",
)

MISTRAL = Style(
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}",
    special=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    eos="</s>",
    bos="<s>",
)

PHI3 = Style(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    eos="<|endoftext|>",
)

_DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")

DEEPSEEK_V3 = Style(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "<｜tool▁call▁begin｜>{{ c.function.name }}\n{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>"
    "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
    special=(
        *_DEEPSEEK_SPECIAL,
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    eos="<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
)

DEEPSEEK_R1 = Style(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
    special=_DEEPSEEK_SPECIAL,
    eos="<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
    added=("<think>", "</think>"),
)

HARMONY = Style(
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary "
    "json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    eos="<|return|>",
)

COHERE = Style(
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}",
    special=(
        "<BOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    eos="<|END_OF_TURN_TOKEN|>",
    bos="<BOS_TOKEN>",
)

LLAMA2 = Style(
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}",
    special=("<s>", "</s>"),
    eos="</s>",
    bos="<s>",
)


def wrapped(core: Tokenizer, style: Style) -> PreTrainedTokenizerFast:
    core.add_special_tokens(
        [AddedToken(token, normalized=False, special=True, rstrip=token in style.rstrip) for token in style.special]
    )
    core.add_tokens([AddedToken(token, normalized=False) for token in style.added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=style.eos, bos_token=style.bos)
    tokenizer.chat_template = style.template
    return tokenizer


def byte_level(style: Style, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, so that no merge hides a mistake, except for `merges`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return wrapped(core, style)


def merging(style: Style, corpus: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level with merges learnt from `corpus`, across spaces and lines too; it puts BOS before plain text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = wrapped(core, style)
    if style.bos:
        bos = (style.bos, tokenizer.bos_token_id)
        core = tokenizer.backend_tokenizer
        core.post_processor = processors.TemplateProcessing(single=f"{style.bos} $A", special_tokens=[bos])
    return tokenizer


def sentencepiece_like(style: Style, corpus: list[str], *, legacy: bool) -> PreTrainedTokenizerFast:
    """Spaces are `▁`; one more is put before a text, or, if `legacy`, before every part of it between added tokens."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *fallback], show_progress=False)
    core.train_from_iterator(corpus, trainer)
    if legacy:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.pre_tokenizer = None
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(_without_special_bytes(core), style)


def _without_special_bytes(core: Tokenizer) -> Tokenizer:
    """A trainer keeps its special tokens special; the bytes of a fallback are ordinary tokens."""
    state = json.loads(core.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))
