"""Every entry of the catalogue has a config that loads, and a status that a record confirms."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from oxrl.algorithms import algorithm
from oxrl.cli import app
from oxrl.config import check_config, load_config
from oxrl.config.tasks import example_config
from oxrl.diagnose.verify_model import TRIALS
from oxrl.models.catalog import RECORDS, as_yaml, catalog, document, find_entry, record_of

ROOT = Path(__file__).parents[2]
SEED_NAMES = """
Qwen3-0.6B Qwen2.5-0.5B-Instruct Gemma-3-1b-it Qwen2.5-1.5B-Instruct Qwen2.5-Coder-1.5B-Instruct SmolLM2-1.7B-Instruct
Qwen2.5-3B-Instruct DeepSeek-R1-Distill-Qwen-7B Qwen2.5-7B-Instruct Qwen2.5-Coder-7B-Instruct Mistral-7B-Instruct-v0.3
Qwen2-Audio-7B-Instruct Qwen2-VL-7B-Instruct DeepSeek-R1-Distill-Llama-8B Qwen3.5-35B-A3B Qwen2.5-Coder-0.5B-Instruct
Llama-3.2-1B-Instruct Qwen2.5-Math-1.5B-Instruct Qwen2-VL-2B-Instruct Qwen3-VL-2B-Instruct SmolVLM-Instruct
Gemma-2-2b-it Qwen2.5-Coder-3B-Instruct Qwen2.5-VL-3B-Instruct Llama-3.2-3B-Instruct Phi-3.5-mini-instruct Qwen3-4B
Qwen3-VL-4B-Instruct Qwen2.5-Math-7B-Instruct Qwen2.5-VL-7B-Instruct Qwen3-8B Llama-3.1-8B-Instruct Phi-4 Qwen3.5-27B
""".split()
FULL_UP_TO = 5  # billions


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", SEED_NAMES)
def test_it_is_in_the_catalogue(name):
    entry = find_entry(name)
    assert entry.hub.rpartition("/")[2].lower() == name.lower()
    assert entry.strategy == ("full" if entry.billions < FULL_UP_TO else "lora")


@pytest.mark.parametrize("name", catalog())
def test_its_config_loads_with_the_strategy_of_the_card(name, tmp_path):
    entry = catalog()[name]
    file = tmp_path / "config.yaml"
    file.write_text(as_yaml(example_config(entry)))
    config = load_config(file)
    assert config.model.name == entry.source
    assert config.lora.enabled == (entry.strategy == "lora")
    assert not config.lora.enabled or set(config.lora.target_modules) == set(entry.lora_targets)
    samples = algorithm(config.train.alg_name).online is not None
    assert samples == (config.reward.reward_func is not None)


def test_exactly_the_models_that_are_neither_of_text_nor_multimodal_cannot_be_trained():
    loadable = {*MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping.values(), *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()}
    for entry in catalog().values():
        assert (entry.not_yet is None) == (entry.architecture in loadable), entry.name


def test_verified_is_what_has_a_record_without_problems():
    verified = {entry.name for entry in catalog().values() if entry.status == "verified"}
    assert verified == {file.stem for file in RECORDS.glob("*.json")}
    assert {"tiny", "smollm2-135m"} <= verified
    for name in verified:
        entry, record = catalog()[name], record_of(name)
        assert record["problems"] == []
        assert (record["name"], record["architecture"]) == (name, entry.architecture)
        assert record["parameters"] == pytest.approx(entry.billions * 1e9, rel=0.01)
        assert record["command"] == f"oxrl models onboard {name}"
        for trial in TRIALS:
            assert len(record[trial]["loss"]) == 2
            assert record[trial]["logit_change"] > 0


def test_the_page_is_current():
    page = ROOT / "docs" / "models.md"
    assert page.read_text() == document(), "run: python -m oxrl.models.catalog > docs/models.md"


def test_list_and_show_print_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_CACHE_DIR", str(tmp_path))  # without the records of this machine
    listed = json.loads(run("models", "list", "--json").stdout)
    assert listed.keys() == catalog().keys()
    assert listed["tiny"]["status"] == "verified"
    header, *lines, legend, _ = run("models", "list").stdout.splitlines()
    assert header.split()[0] == "name" and legend.startswith("tuning:")
    assert [line.split()[0] for line in lines] == list(catalog())
    assert next(line for line in lines if line.startswith("qwen2-audio")).split()[-3:] == [
        "audio",
        "lora",
        "config-ready",
    ]
    shown = json.loads(run("models", "show", "Qwen/Qwen3-0.6B", "--json").stdout)
    assert shown == {**listed["qwen3-0.6b"], "record": None}
    output = run("models", "show", "tiny").stdout
    assert "LlamaForCausalLM" in output and "logprob_gap" in output


def test_config_prints_a_valid_config():
    done = run("models", "config", "phi-4")
    config = check_config(yaml.safe_load(done.stdout))
    assert config.model.name == "microsoft/phi-4"
    assert config.lora.target_modules == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.trains
def test_verify_writes_its_record(tmp_path):
    done = run("models", "verify", "tiny", "--output", tmp_path / "tiny.json")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert record["problems"] == []
    assert record["source"] == "tiny"
    kept = record_of("tiny")
    assert record.keys() <= kept.keys(), "the record in the repository is of another format: onboard it again"
    for trial in TRIALS:
        assert record[trial]["loss"] == pytest.approx(kept[trial]["loss"], rel=1e-3, abs=1e-5), "it is not reproducible"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "qwen3-0.6"], "did you mean qwen3-0.6b?"),
        (["config", "gpt-4"], "no model gpt-4"),
        (["verify", "qwen3-0.6b", "--model", "tiny"], "this is not qwen3-0.6b"),
        (["verify", "tiny", "--model", "/nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_refused(arguments, message, tmp_path):
    done = run("models", *arguments, *(["--output", tmp_path / "x.json"] if arguments[0] == "verify" else []))
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not list(tmp_path.iterdir())
