"""The scout says the truth about twelve families, by their small files and headers alone."""

import json

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config
from oxrl.models.load import load_model
from oxrl.onboarding.files import locate, read_header
from oxrl.onboarding.scout import scout
from oxrl.onboarding.structure import vllm_architectures
from oxrl.onboarding.template import template_findings, turn_end
from tests.data import chat_templates
from tests.onboarding.families import change, copy

TRUTH = {  # status, architecture, and a part of the message of each finding that is not in order
    "base": (
        "needs repair", "Olmo2ForCausalLM",
        {"pad_token": "no padding token", "template": "those of chatml", "tuned": "base: it has no chat template"},
    ),
    "wrong_end": (
        "needs repair", "MistralForCausalLM",
        {"end_token": "end with 259 (<|im_end|>), but the tokenizer's end token is 257 (<|bos|>), config.json"},
    ),
    "end_outside": ("needs repair", "Qwen3ForCausalLM", {"turn_end": "without a special token"}),
    "resized": (
        "needs repair", "Gemma2ForCausalLM",
        {
            "vocabulary": "vocab_size 320, but the embedding in the weights has 328 rows",
            "rope": "rope_theta 50000.0, but transformers reads rope_theta 10000.0",
            "dtype": "torch_dtype float16, but the weights are float32",
        },
    ),
    "experts": ("ready", "Qwen3MoeForCausalLM", {}),
    "hybrid": ("ready", "BambaForCausalLM", {}),
    "reward_model": ("blocked", "LlamaForSequenceClassification", {"architecture": "use it as reward.model"}),
    "gguf": (
        "needs repair", "LlamaForCausalLM",
        {
            "weights": "dequantised", "pad_token": "the end token is used", "template": "a plain one",
            "tuned": "base: it has no chat template",
        },
    ),
    "missing_shard": (
        "blocked", "LlamaForCausalLM", {"weights": "model-00002-of-00002.safetensors is missing, with 11 of 21 tensors"}
    ),
    "own_code": (
        "blocked", None, {"architecture": "contains custom code; review it", "custom_code": "it is not executed"}
    ),
    "encoder": ("blocked", "BertForMaskedLM", {"architecture": "not a causal language model"}),
}  # fmt: skip


def _stored(path):
    weights = load_model("tiny").parameters() if path.suffix else load_file(path / "model.safetensors").values()
    return sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("family", TRUTH)
def test_the_scout_says_the_truth(families, family):
    status, architecture, expected = TRUTH[family]
    report = scout(str(families[family]))
    assert (report.status, report.facts.get("architecture")) == (status, architecture)
    unusual = {each.name: each.message for each in report.findings if each.level != "ok"}
    assert unusual.keys() - {"spare_ids", "vllm"} == expected.keys()
    for name, part in expected.items():
        assert part in unusual[name]
    if status != "blocked":
        assert report.facts["parameters"] == _stored(families[family])
        assert check_config(report.config).model.name == str(families[family])
    assert not (families["own_code"] / "executed").exists()


def test_the_vision_model_is_reported_with_its_modalities_and_processor(families):
    report = scout(str(families["vision"]))
    assert report.status == "ready" and report.facts["modalities"] == ["text", "image"]
    assert report.facts["processors"]["processor_class"] == "Qwen2VLProcessor"
    assert report.facts["architecture"] == "Qwen2VLForConditionalGeneration"
    assert report.finding("planner").level == "ok"


def test_experts_layers_and_support_are_counted(families):
    experts, hybrid = (scout(str(families[name])) for name in ("experts", "hybrid"))
    assert (experts.facts["experts"], experts.facts["experts_per_token"]) == (4, 2)
    assert experts.facts["active_parameters"] < experts.facts["parameters"]
    assert hybrid.facts["attention"] == ["full_attention", "linear_attention"]
    assert "padding are expected" in hybrid.finding("layout").message
    assert "padded waves" in hybrid.finding("embedded").message
    assert "packed rows" in experts.finding("layout").message
    known = vllm_architectures()
    for report in (experts, hybrid):
        level = "ok" if known and report.facts["architecture"] in known else "note"
        assert report.finding("vllm").level == level
    assert experts.entry["lora_targets"] and set(experts.entry["lora_targets"]) == set(experts.facts["lora_targets"])


def test_a_header_that_is_cut_off_or_damaged_is_named(families, tmp_path):
    folder = copy(families["experts"], tmp_path / "cut")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "cut off" in scout(str(folder)).finding("weights").message
    for damaged in (b"", b"\xff" * 64, (20).to_bytes(8, "little") + b"{" * 20):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="header is damaged"):
            read_header(file)
    file.unlink()
    assert "pickled ones are not loaded" in scout(str(folder)).finding("weights").message


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("QWEN25", {"tools": "part of the prompt", "system_role": "part of the prompt"}),
        ("GEMMA", {"system_role": "refused", "tools": "dropped"}),
        ("QWEN3", {"thinking": "enable_thinking"}),
    ],
)
def test_what_a_template_can_do_is_found_by_rendering(style, expected):
    tokenizer = chat_templates.byte_level(getattr(chat_templates, style))
    found = {each.name: each.message for each in template_findings(tokenizer)}
    for name, part in expected.items():
        assert part in found[name]
    assert "inside of the trained mask" in found["turn_end"]
    assert tokenizer.convert_ids_to_tokens(turn_end(tokenizer)) in ("<|im_end|>", "<end_of_turn>")


def test_an_end_token_of_the_generation_config_is_enough(families, tmp_path):
    """As in Gemma, whose tokenizer ends texts with another token than turns."""
    folder = copy(families["wrong_end"], tmp_path / "gemma")
    change(folder / "generation_config.json", eos_token_id=[257, 259])
    found = scout(str(folder)).finding("end_token")
    assert found.level == "ok" and "the tokenizer's end token is 257" in found.message


def test_the_licence_is_read_from_the_card(families, tmp_path):
    folder = copy(families["experts"], tmp_path / "licensed")
    (folder / "README.md").write_text("---\ntags: [a]\nlicense: apache-2.0\n---\nlicense: none\n")
    assert scout(str(folder)).entry["licence"] == "apache-2.0"


def test_a_name_that_is_no_model_is_answered():
    with pytest.raises(ValueError, match="no local model someone/model, and the hub cannot be reached"):
        locate("someone/model")
    done = CliRunner().invoke(app, ["models", "scout", "someone/model"])
    assert done.exit_code == 2 and "cannot be reached" in done.output


def test_the_command_prints_a_report_or_one_json_object(families):
    done = CliRunner().invoke(app, ["models", "scout", str(families["wrong_end"])])
    assert done.exit_code == 0
    assert "repair   end_token" in done.stdout and "to repair: end_token" in done.stdout
    done = CliRunner().invoke(app, ["models", "scout", str(families["encoder"]), "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["status"] == "blocked" and report["findings"][0]["name"] == "architecture"
