"""Exported models: complete weights that other libraries load, with the logits of the run's own model."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config
from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import adapter_base, load_model, load_tokenizer, name_public_base
from oxrl.models.reward_model import HEADS
from oxrl.run.export import export_model, fetch_model, merge_run, push_model
from oxrl.run.folder import resolve_weights
from oxrl.run.train import train_run
from tests.rows import sums, write_jsonl

PAIRS = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(8)]


def trained(folder, *, lora=False, algorithm="sft"):
    rows = write_jsonl(folder / "rows.jsonl", PAIRS if algorithm == "rm" else sums(8))
    train = {"alg_name": algorithm, "lr": 1e-2, "train_steps_per_epoch": 2}
    config = {"model": {"name": "tiny"}, "data": {"train_files_path": str(rows)}, "train": train}
    train_run(check_config({**config, "lora": {"enabled": lora}}), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(complete_run, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("lora"), lora=True)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40)[None] + 5, use_cache=False).logits


def test_a_merged_model_has_the_same_logits_and_needs_no_adapter(adapted, tmp_path):
    folder = merge_run(str(adapted), tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    own = load_model(resolve_weights(str(adapted)), is_trainable=False)
    base = load_model("tiny", is_trainable=False)
    assert torch.allclose(logits(plain), logits(own), atol=1e-5)
    assert not torch.allclose(logits(plain), logits(base), atol=1e-2)
    assert AutoTokenizer.from_pretrained(folder).chat_template == load_tokenizer("tiny").chat_template
    assert not [file for file in folder.iterdir() if "adapter" in file.name or "optimizer" in file.name]
    assert list(tmp_path.iterdir()) == [folder], "the draft is gone"


def test_an_adapter_can_be_exported_unmerged(adapted, tmp_path):
    folder = export_model(str(adapted), tmp_path / "adapter", adapter=True)
    loaded = PeftModel.from_pretrained(load_model("tiny"), folder).eval()
    assert torch.allclose(
        logits(loaded), logits(load_model(resolve_weights(str(adapted)), is_trainable=False)), atol=1e-6
    )


def test_files_of_checkpoints_and_exports_have_the_permissions_of_new_files(adapted, tmp_path):
    before = os.umask(0o027)
    try:
        folder = export_model(str(adapted), tmp_path / "out")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o640}
    (tmp_path / "new").touch()
    permissions = (tmp_path / "new").stat().st_mode
    assert {file.stat().st_mode for file in Path(resolve_weights(str(adapted))).iterdir()} == {permissions}


def test_an_exported_adapter_names_its_base_as_others_find_it(adapted, tmp_path):
    folder = export_model(str(adapted), tmp_path / "out", adapter=True)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert settings["base_model_name_or_path"] == "tiny"
    cache = "/home/someone/.cache"
    bases = {
        f"{cache}/oxrl/smollm2-135m-v1": ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
        f"{cache}/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de": ("Qwen/Qwen3-0.6B", "c1899de"),
        "/home/someone/runs/first/checkpoints/step_0010": ("/home/someone/runs/first/checkpoints/step_0010", None),
    }
    for base, named in bases.items():
        file.write_text(json.dumps({**settings, "base_model_name_or_path": base}))
        name_public_base(folder)
        written = json.loads(file.read_text())
        assert (written["base_model_name_or_path"], written["revision"]) == named
        builtin = "SmolLM2" in named[0]
        assert adapter_base(str(folder)) == ("smollm2-135m" if builtin else named[0]), "it is loaded as it was trained"
        (folder / "oxrl_base.json").unlink(missing_ok=True)


def test_the_model_card_names_base_model_data_and_settings(adapted, tmp_path):
    card = (export_model(str(adapted), tmp_path / "out") / "README.md").read_text()
    assert "| base model | tiny |" in card and "| algorithm | sft |" in card and "rows.jsonl" in card
    assert "| LoRA | rank 16 |" in card and "| checkpoint | step_0002 |" in card


def test_weights_can_be_stored_in_another_type(adapted, tmp_path):
    folder = export_model(str(adapted), tmp_path / "half", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


@pytest.mark.trains
def test_a_reward_model_keeps_its_head(tmp_path):
    run = trained(tmp_path, algorithm="rm")
    folder = export_model(str(run), tmp_path / "out")
    assert (folder / HEADS).read_bytes() == (tmp_path / "run" / "checkpoints" / "step_0002" / HEADS).read_bytes()


@pytest.mark.parametrize("name", [HEADS, "chat_template.jinja", "additional_chat_templates/other.jinja"])
def test_a_link_out_of_the_folder_is_not_exported(name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    model = tmp_path / "model"
    (model / name).parent.mkdir(parents=True)
    (model / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{model / name} is a link to {secret}, outside of the folder"):
        export_model(str(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_inside_a_folder_and_of_the_hub_cache_are_exported(tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "v1"
    shutil.copytree(prepare_builtin("tiny"), blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "linked").symlink_to(snapshot)
    assert (export_model(str(tmp_path / "linked"), tmp_path / "out") / "model.safetensors").is_file()


def test_a_folder_with_files_is_not_overwritten(adapted, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        export_model(str(adapted), tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert (export_model(str(adapted), tmp_path / "empty") / "model.safetensors").exists()


def test_a_model_without_an_adapter_cannot_be_merged():
    with pytest.raises(ValueError, match="no adapter to merge"):
        merge_run("tiny", "somewhere")


def test_the_commands_print_the_folder(adapted, tmp_path):
    run = CliRunner().invoke(app, ["merge", str(adapted), "--output", str(tmp_path / "merged"), "--json"])
    assert json.loads(run.stdout) == {"folder": str(tmp_path / "merged"), "pushed_to": None}
    run = CliRunner().invoke(app, ["export", "tiny", "--adapter", "--output", str(tmp_path / "x")])
    assert run.exit_code == 2 and "no adapter" in run.stderr and not (tmp_path / "x").exists()


def test_pushing_needs_a_token_and_a_valid_name(adapted, tmp_path, monkeypatch):
    folder = export_model(str(adapted), tmp_path / "out")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ValueError, match="HF_TOKEN"):
        push_model(folder, "someone/model")
    monkeypatch.setenv("HF_TOKEN", "not-a-token")
    with pytest.raises(ValueError, match="owner/name"):
        push_model(folder, "some one/mo del")
    with pytest.raises(ValueError, match="someone/model could not be written"):
        push_model(folder, "someone/model")


def test_fetching_takes_names_of_the_catalogue_and_reports_an_unreachable_hub():
    assert (fetch_model("tiny") / "model.safetensors").exists()
    with pytest.raises(ValueError, match="hub cannot be reached"):
        fetch_model("qwen3-0.6b")
    with pytest.raises(ValueError, match="there is no model qwen9"):
        fetch_model("qwen9")


def test_a_run_without_a_checkpoint_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        resolve_weights(str(tmp_path))
