"""Chat templates that a config sets: by name, file or text, proven and saved with the run."""

import json
import os

import pytest

from oxrl import Trainer
from oxrl.config import load_config
from oxrl.data.render import Renderer
from oxrl.models.chat_templates import TEMPLATES, read_template, set_template
from oxrl.models.load import load_model, load_tokenizer
from oxrl.run.arguments import sections_of
from oxrl.run.train import open_model
from oxrl.types import Message, ModelConfig
from tests.data.chat_templates import Style, byte_level
from tests.rows import sums

CHAT = [
    Message(role, text)
    for role, text in (
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "1?"),
        ("assistant", "2"),
    )
]
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}


def base_tokenizer(*special):
    """The tokenizer of a base model: no template, and its end-of-sequence token ends no turn."""
    tokenizer = byte_level(Style("", (*special, "<s>", "<|endoftext|>"), eos="<|endoftext|>", bos="<s>"))
    tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_trains_the_assistants_turns_and_ends_at_their_last_token(name):
    tokenizer = base_tokenizer(*TEMPLATES[name].special)
    set_template(tokenizer, name.upper())
    end = ENDS.get(name, "<|endoftext|>")
    (row,) = Renderer(tokenizer).conversation(CHAT, id="a")
    assert [part.strip() for part in tokenizer.decode(row.tokens[row.mask]).split(end)] == ["hello", "2", ""]
    context = tokenizer.decode(row.tokens[~row.mask])
    assert context.index("Be brief.") < context.index("hi") < context.index("1?") and context.count("Be brief.") == 1
    assert tokenizer.eos_token == end, "engines stop there"
    prompt = tokenizer.decode(Renderer(tokenizer).prompt(CHAT[:-1]))
    assert tokenizer.decode(row.tokens).startswith(prompt)
    with pytest.raises(ValueError, match="no format for tools"):
        Renderer(tokenizer).prompt(CHAT[:2], tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatlm", "no template is called 'chatlm'; did you mean chatml.*no such file.*plain"),
        ("llama3", "llama3 needs the special tokens .*<|eot_id|>.*use plain"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "model.chat_template: .*without a special token"),
        ("{{ messages[0].nothing.at_all }}", "model.chat_template: .*does not accept these messages"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_weights_are_read(template, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(ModelConfig("tiny", chat_template=template))


def test_a_template_is_a_name_a_file_or_a_text(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATES["plain"].text)
    assert [read_template(given) for given in ("Plain", str(file), TEMPLATES["plain"].text)] == [
        "plain", *[TEMPLATES["plain"].text] * 2,
    ]  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for given in (tmp_path, tmp_path / "pipe", tmp_path / "bytes", "a\0b", "~no-such-user/x", "x" * 5000):
        with pytest.raises(ValueError, match="model.chat_template: .* cannot be read"):
            read_template(str(given))
    file.write_text("x" * 1_000_001)
    with pytest.raises(ValueError, match="more than 1,000,000 characters"):
        read_template(str(file))
    assert sections_of({"chat_template": file}) == {"model": {"chat_template": str(file)}}


@pytest.mark.trains
def test_a_base_model_learns_with_a_template_that_its_checkpoints_keep(tmp_path):
    base, file = tmp_path / "base", tmp_path / "chat.jinja"
    load_model("tiny").save_pretrained(base)
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template, tokenizer.eos_token = None, "<|pad|>"
    tokenizer.save_pretrained(base)
    trainer = Trainer(base, algorithm="sft", data=sums(8), steps=1)
    with pytest.raises(ValueError, match=r"no chat template: .* set model.chat_template \(chatml, plain"):
        trainer.train(output=tmp_path / "run")
    file.write_text(TEMPLATES["chatml"].text)
    result = trainer.train(output=tmp_path / "run", chat_template=file)
    file.unlink()
    assert load_config(result.folder / "config.yaml").model.chat_template == TEMPLATES["chatml"].text
    saved = json.loads((result.best_checkpoint / "tokenizer_config.json").read_text())
    assert saved["eos_token"] == "<|im_end|>"
    _, render = open_model(str(result.folder))  # as chat and evaluation do
    assert (
        render.tokenizer.decode(render.prompt(CHAT[1:2])) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    again = Trainer(base).train(output=result.folder, resume=True, steps=2)
    assert [row["step"] for row in again.history] == [2], "a resume does not need the file"
