"""Repairs in a copy: each is proven, the original and the weights are untouched, and and failures are reported."""

import hashlib
import json

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.data.render import Renderer
from oxrl.models.load import end_tokens, load_hf_tokenizer, load_model, load_model_config, load_tokenizer
from oxrl.onboarding.repair import repair, repairs_in
from oxrl.onboarding.scout import scout
from oxrl.types import Message, ModelConfig
from tests.onboarding.families import change, copy, working_code

CHAT = [Message("user", "hi"), Message("assistant", "hello"), Message("user", "1?"), Message("assistant", "2")]


def contents(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def repaired(folder, tmp_path, **options):
    before = contents(folder)
    fixed = repair(scout(str(folder)), output=tmp_path / "fixed", **options)
    assert contents(folder) == before, "the original is untouched"
    assert (tmp_path / "fixed" / "model.safetensors").resolve() == folder / "model.safetensors"
    return fixed


def test_a_base_model_gets_a_template_by_family_and_a_padding_token(families, tmp_path):
    fixed = repaired(families["base"], tmp_path)
    assert [each.repair for each in fixed.changes] == ["pad_token", "template"]
    assert fixed.report.status == "ready" and not fixed.failed
    tokenizer = load_hf_tokenizer(fixed.name)
    assert tokenizer.pad_token == "<|pad|>"
    (row,) = Renderer(tokenizer).conversation(CHAT, id="a")
    assert tokenizer.decode(row.tokens[row.mask]) == "hello<|im_end|>2<|im_end|>"
    assert repairs_in(tmp_path / "fixed")["source"] == str(families["base"])


def test_a_model_without_special_tokens_gets_the_plain_template_said_loudly(families):
    fixed = repair(scout(str(families["gguf"])))
    assert fixed.settings == {"model": {"chat_template": "plain"}}
    assert "THE MODEL HAS NEVER SEEN" in fixed.changes[0].message and fixed.report.status == "ready"
    load_tokenizer(ModelConfig(str(families["gguf"]), chat_template="plain"))


def test_a_wrong_end_token_is_corrected_in_all_files(families, tmp_path):
    fixed = repaired(families["wrong_end"], tmp_path)
    assert [each.repair for each in fixed.changes] == ["end_token"]
    assert load_hf_tokenizer(fixed.name).eos_token == "<|im_end|>"
    assert end_tokens(ModelConfig(fixed.name)) == (259,)
    assert load_model_config(ModelConfig(fixed.name)).eos_token_id == 259


def test_other_end_tokens_of_the_generation_config_are_kept(families, tmp_path):
    folder = copy(families["wrong_end"], tmp_path / "model")
    change(folder / "generation_config.json", eos_token_id=[257, 261])  # the first one begins texts
    assert end_tokens(ModelConfig(repair(scout(str(folder))).name)) == (259, 261)


def test_a_repair_that_another_one_makes_necessary_is_made_too(families, tmp_path):
    folder = copy(families["wrong_end"], tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    report = scout(str(folder))
    assert report.repairs == ("template",), "without a template nothing is known about the end of turns"
    fixed = repair(report)
    assert [each.repair for each in fixed.changes] == ["template", "end_token"] and fixed.report.status == "ready"


def test_a_turn_end_outside_is_put_inside_and_nothing_else_of_the_text_changes(families, tmp_path):
    fixed = repaired(families["end_outside"], tmp_path)
    before, after = load_hf_tokenizer(str(families["end_outside"])), load_hf_tokenizer(fixed.name)
    chat = [message.to_dict() for message in CHAT]
    for turns in (chat[:1], chat[:3]):
        texts = [
            each.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for each in (before, after)
        ]
        assert texts[0] == texts[1]
    (row,) = Renderer(after).conversation(CHAT, id="a")
    assert after.decode(row.tokens[row.mask]) == "hello<|im_end|>2<|im_end|>"


def test_vocabulary_rope_and_dtype_are_written_as_the_weights_are(families, tmp_path):
    fixed = repaired(families["resized"], tmp_path)
    assert [each.repair for each in fixed.changes] == ["vocabulary", "dtype", "rope"]
    model = load_model(fixed.name)
    assert model.config.rope_parameters["rope_theta"] == 50000.0
    assert model.get_input_embeddings().weight.shape[0] == 328
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with pytest.raises((ValueError, RuntimeError)):
        load_model(str(families["resized"]))


def test_spare_ids_are_named_on_request_only(families, tmp_path):
    folder = families["experts"]
    assert repair(scout(str(folder)), output=tmp_path / "none").changes == ()
    assert not (tmp_path / "none").exists()
    fixed = repaired(folder, tmp_path, only=["spare_ids"])
    tokenizer = load_hf_tokenizer(fixed.name)
    assert tokenizer.decode([319]) == "<|oxrl_reserved_319|>" and tokenizer.encode("hé") == [*"hé".encode()]
    with pytest.raises(ValueError, match="no repair is called 'rop'; there are: vocabulary"):
        repair(scout(str(folder)), only=["rop"])


def test_a_repair_that_does_not_help_is_undone_and_reported(families, tmp_path):
    folder = copy(families["base"], tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace('"special": true', '"special": false'))
    change(folder / "tokenizer_config.json", eos_token=None, bos_token=None, extra_special_tokens=None)
    change(folder / "config.json", eos_token_id=None, pad_token_id=None, bos_token_id=None)
    change(folder / "generation_config.json", eos_token_id=None, pad_token_id=None, bos_token_id=None)
    fixed = repair(scout(str(folder)), output=tmp_path / "fixed")
    assert any(each.startswith("template: no template passes the proof") for each in fixed.failed)
    assert "template" not in [each.repair for each in fixed.changes]


def test_code_of_the_model_is_executed_in_repairs_only_if_the_user_says_so(tmp_path):
    folder = working_code(tmp_path / "own")
    change(folder / "config.json", rotary_emb_base=50000.0, rope_parameters=None)
    report = scout(str(folder), trust_remote_code=True)
    fixed = repair(report, trust_remote_code=True, output=tmp_path / "fixed")
    assert [each.repair for each in fixed.changes] == ["rope"] and fixed.report.status == "ready"
    assert any("trust_remote_code" in each for each in repair(report, output=tmp_path / "not").failed)


def test_a_folder_that_is_not_a_repaired_copy_is_never_overwritten(families, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="was not written by a repair"):
        repair(scout(str(families["wrong_end"])), output=tmp_path / "mine")


def test_the_copy_is_beside_the_model_and_the_command_says_what_it_changed(families, tmp_path):
    folder = copy(families["wrong_end"], tmp_path / "model")
    done = CliRunner().invoke(app, ["models", "scout", str(folder), "--fix", "--json"])
    report = json.loads(done.stdout)
    assert report["name"] == str(tmp_path / "model-repaired") and report["status"] == "ready"
    assert [each["repair"] for each in report["changes"]] == ["end_token"]
    assert report["entry"]["name"] == "model" and report["config"]["model"] == {"name": report["name"]}
    assert (tmp_path / "model-repaired" / "model.safetensors").is_symlink()
    done = CliRunner().invoke(app, ["models", "scout", str(folder), "--fix"])
    assert "repaired end_token" in done.stdout and "the weights there are links" in done.stdout
    assert CliRunner().invoke(app, ["models", "scout", str(folder), "--repair", "rope"]).exit_code == 2
