"""The scout says the truth about twelve families, by their small files and headers alone."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config
from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import load_model
from oxrl.onboarding.attempt import failed_outcome
from oxrl.onboarding.files import HUB_SECONDS, locate, read_header
from oxrl.onboarding.pipeline import Options, onboard
from oxrl.onboarding.repair import repair
from oxrl.onboarding.scout import scout
from oxrl.onboarding.structure import vllm_architectures
from oxrl.onboarding.template import template_findings, turn_end
from tests.data import chat_templates
from tests.onboarding.families import change, copy, plain, working_code
from tests.web import Quiet, serving

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
        "blocked", None,
        {
            "architecture": "contains custom code; review it", "custom_code": "it is not executed",
            "tokenizer": "it needs custom code of the model",
        },
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


OTHER_TEMPLATE = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def _keep(folder, chosen):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: each for name, each in weights.items() if chosen(name)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _text(folder, file, text):
    (folder / file).write_text(text)


def _link(folder, file):
    (folder / file).symlink_to(folder / "nowhere")


PLANTED = {  # finding -> its level, part of its message, and the fault
    "the template of another family": (
        "turn_end", "repair", "it writes <|start_header_id|>, which is no token of this tokenizer",
        lambda folder: _text(folder, "chat_template.jinja", OTHER_TEMPLATE),
    ),
    "a template with a mistake": (
        "turn_end", "repair", "Unexpected end of template",
        lambda folder: _text(folder, "chat_template.jinja", "{% for m in messages %}"),
    ),
    "no end token": (
        "end_token", "repair", "the tokenizer has no end token",
        lambda folder: change(folder / "tokenizer_config.json", eos_token=None),
    ),
    "an end token without a number": (
        "end_token", "repair", "generation_config.json has an eos_token_id that is not the id of a token",
        lambda folder: change(folder / "generation_config.json", eos_token_id="<|im_end|>"),
    ),
    "an end token outside of the vocabulary": (
        "end_token", "repair", "generation_config.json ends with 999 (no token)",
        lambda folder: change(folder / "generation_config.json", eos_token_id=999),
    ),
    "a padding token of another kind of model": (
        "pad_token", "repair", "but config.json has -1",
        lambda folder: change(folder / "config.json", pad_token_id=-1),
    ),
    "no head": (
        "shapes", "blocked", "lack 10,240 of 39,072 parameters, such as lm_head.weight; if the model was trained with",
        lambda folder: _keep(folder, lambda name: name != "lm_head.weight"),
    ),
    "no weights of a layer": (
        "shapes", "blocked", "lack 6,144 of 39,072 parameters, such as model.layers.1.mlp.down_proj.weight",
        lambda folder: _keep(folder, lambda name: "layers.1.mlp" not in name),
    ),
    "the config of another size": (
        "shapes", "blocked", "such as model.layers.0.mlp.gate_proj.weight: 64 x 32 instead of 80 x 32",
        lambda folder: change(folder / "config.json", intermediate_size=80),
    ),
    "a pointer instead of the weights": (
        "weights", "blocked", "is a pointer of Git LFS instead of the file: run `git lfs pull`",
        lambda folder: _text(folder, "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4\n"),
    ),
    "a tokenizer that is cut off": (
        "tokenizer", "blocked", "tokenizer.json is not valid JSON",
        lambda folder: _text(folder, "tokenizer.json", '{"version": "1.0", "added_tokens": ['),
    ),
    "no tokenizer": (
        "tokenizer", "blocked", "has no tokenizer: it contains none of tokenizer.json",
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
    ),
    "the tokenizer of a larger model": (
        "vocabulary", "blocked", "but the embedding has 100 rows: take the model's tokenizer",
        lambda folder: plain(folder, vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    ),
    "quantised weights": (
        "quantization", "blocked", "are quantised (bitsandbytes): use the unquantised model",
        lambda folder: change(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
    ),
    "an unknown architecture": (
        "architecture", "blocked", "has the type 'qwen99', which transformers",
        lambda folder: change(folder / "config.json", model_type="qwen99"),
    ),
    "the name of another architecture": (
        "architecture", "note", "config.json names Qwen3ForCausalLM, but transformers builds LlamaForCausalLM",
        lambda folder: change(folder / "config.json", architectures=["Qwen3ForCausalLM"]),
    ),
    "a text instead of a number": (
        "architecture", "blocked", "cannot be used: Validation error for field 'hidden_size'",
        lambda folder: change(folder / "config.json", hidden_size="32"),
    ),
    "no heads": (
        "architecture", "blocked", "cannot be used: ZeroDivisionError: integer division",
        lambda folder: change(folder / "config.json", num_attention_heads=0, head_dim=None),
    ),
    "experts that are none": (
        "architecture", "blocked", "transformers cannot build it from its config.json: ",
        lambda folder: change(
            folder / "config.json", model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=-1
        ),
    ),
    "an index without files": (
        "weights", "blocked", "model.safetensors.index.json has no weight_map",
        lambda folder: _text(folder, "model.safetensors.index.json", '{"weight_map": []}'),
    ),
    "a link to no file": (
        "weights", "blocked", "model.safetensors is missing: its link points to no file",
        lambda folder: (folder / "model.safetensors").rename(folder / "x") and _link(folder, "model.safetensors"),
    ),
    "pickled weights": (
        "weights", "blocked", "pytorch_model.bin is pickled, and not loaded",
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    ),
    "a classifier": (
        "architecture", "blocked", "this is a classifier of 2 classes",
        lambda folder: change(
            folder / "config.json", architectures=["LlamaForSequenceClassification"], id2label={"0": "a", "1": "b"}
        ),
    ),
    "an end token that is true": (
        "end_token", "repair", "generation_config.json has an eos_token_id that is not the id of a token",
        lambda folder: change(folder / "generation_config.json", eos_token_id=True),
    ),
    "a list of own classes": (
        "architecture", "ok", "LlamaForCausalLM, known to transformers",
        lambda folder: change(folder / "config.json", auto_map=["x"], architectures="LlamaForCausalLM"),
    ),
    "a template without pictures": (
        "media", "note", "the template writes no <|image_pad|> for image: such rows are refused",
        lambda folder: (
            copy(prepare_builtin("tiny-vlm"), folder),
            _text(folder, "chat_template.jinja", chat_templates.CHATML.template),
        ),
    ),
    "no processor": (
        "processor", "blocked", "the processor of",
        lambda folder: (copy(prepare_builtin("tiny-vlm"), folder), (folder / "processor_config.json").unlink()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_the_exit_code_says_whether_it_can_be_repaired(tmp_path, fault):
    name, level, part, plant = PLANTED[fault]
    folder = plain(tmp_path / "model")
    if fault in ("no processor", "a template without pictures"):
        shutil.rmtree(folder)
    plant(folder)
    done = CliRunner().invoke(app, ["models", "scout", str(folder), "--json"])
    assert done.exit_code == (1 if level == "blocked" else 0), done.output
    report = json.loads(done.stdout)
    found = [each for each in report["findings"] if each["name"] == name and each["level"] == level]
    assert [part in each["message"] for each in found] == [True], report["findings"]
    assert report["status"] == {"blocked": "blocked", "repair": "needs repair"}.get(level, "ready")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_json_is_named(tmp_path, file):
    folder = plain(tmp_path / "model")
    (folder / file).write_text("<!doctype html>")
    done = CliRunner().invoke(app, ["models", "scout", str(folder)])
    assert done.exit_code == 2 and f"{file} is not valid JSON" in done.output


@pytest.mark.parametrize(
    ("config", "more", "layout"),
    [
        ("MambaConfig", {"state_size": 8}, "padding"),
        ("GptOssConfig", {"head_dim": 8, "num_local_experts": 2}, "padding"),
        ("MixtralConfig", {"num_local_experts": 2}, "packed"),  # its experts are stored under other names
        ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 16}, "packed"),
        ("GPTNeoXConfig", {}, "packed"),
    ],
)
def test_other_architectures_are_ready_with_all_their_weights(tmp_path, config, more, layout):
    report = scout(str(plain(tmp_path / "model", config, **more)))
    assert report.status == "ready"
    for name in ("shapes", "planner", "lora"):
        assert report.finding(name).level == "ok", report.finding(name)
    assert layout in report.finding("layout").message


def test_code_of_the_model_is_executed_and_proposed_only_if_the_user_says_so(tmp_path):
    folder = str(working_code(tmp_path / "model"))
    assert "review it" in scout(folder).blockers[0].message
    report = scout(folder, trust_remote_code=True)
    assert report.status == "ready" and report.config["model"] == {"name": folder, "trust_remote_code": True}
    assert "by its own code" in report.finding("architecture").message


def test_the_vision_model_is_reported_with_its_modalities_and_processor(families):
    report = scout(str(families["vision"]))
    assert report.status == "ready" and report.facts["modalities"] == ["text", "image"]
    assert report.facts["processors"]["processor_class"] == "Qwen2VLProcessor"
    assert report.facts["architecture"] == "Qwen2VLForConditionalGeneration"
    assert report.finding("planner").level == report.finding("media").level == "ok"


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
    assert "there are no weights in safetensors" in scout(str(folder)).finding("weights").message


def test_a_gguf_file_that_is_cut_off_is_named(families, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(families["gguf"].read_bytes()[:500])
    report = scout(str(tmp_path / "cut.gguf"))
    assert {each.name for each in report.blockers} == {"architecture", "tokenizer"}
    assert all("it is damaged or cut off" in each.message for each in report.blockers)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("QWEN25", {"tools": "part of the prompt", "system_role": "part of the prompt"}),
        ("GEMMA", {"system_role": "refused", "tools": "dropped"}),
        ("QWEN3", {"thinking": "enable_thinking", "generation_prompt": r"is '<|im_start|>assistant\n'"}),
        ("PHI3", {"generation_prompt": r"message is followed by '<|end|>\n<|assistant|>\n'"}),
    ],
)
def test_what_a_template_can_do_is_found_by_rendering(style, expected):
    tokenizer = chat_templates.byte_level(getattr(chat_templates, style))
    found = {each.name: each.message for each in template_findings(tokenizer)}
    for name, part in expected.items():
        assert part in found[name]
    assert "inside of the trained mask" in found["turn_end"]
    assert tokenizer.convert_ids_to_tokens(turn_end(tokenizer)) in ("<|im_end|>", "<end_of_turn>", "<|end|>")


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


class Hub(Quiet):
    """Serves the files of a folder as `someone/model`; `requested` has what was asked for."""

    def do_GET(self):
        self.server.requested.append((self.command, self.path))
        name = self.path.partition("?")[0].rpartition("/")[2]
        if self.path.startswith("/api/"):
            files = [
                {
                    "type": "file",
                    "rfilename": file.name,
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": file.name,
                }
                for file in self.server.folder.iterdir()
            ]
            about = {"id": "someone/model", "sha": "1" * 40, "siblings": files}
            return self.reply(200, files if "/tree/" in self.path else about)
        if not (file := self.server.folder / name).is_file():
            return self.reply(404, X_Error_Code="EntryNotFound")
        return self.reply(200, file.read_bytes(), ETag=f'"{name}"', X_Repo_Commit="1" * 40)

    do_HEAD = do_GET


def _use_hub(monkeypatch, url, cache):
    """The settings that HF_ENDPOINT and HF_HOME make when a process starts."""
    template = url + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    settings = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(cache)}
    for name, value in {**settings, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)


def test_a_hub_model_is_scouted_without_its_weights_and_from_the_cache_once_it_was(families, tmp_path, monkeypatch):
    with serving(Hub, folder=families["wrong_end"], requested=[]) as hub:
        _use_hub(monkeypatch, hub.url, tmp_path / "cache")
        report = scout("someone/model")
        assert report.status == "needs repair" and report.repairs == ("end_token",)
        assert "oxrl models fetch someone/model" in report.finding("weights").message
        assert report.facts["parameters"] == _stored(families["wrong_end"])
        assert report.entry["hub"] == report.config["model"]["name"] == "someone/model"
        files = {path.rpartition("/")[2] for command, path in hub.requested if command == "GET"}
        assert "tokenizer.json" in files and "model.safetensors" not in files
        with pytest.raises(ValueError, match="run `oxrl models fetch someone/model` first"):
            repair(report, output=tmp_path / "fixed")
    found = scout("someone/model")
    assert (found.findings, found.facts) == (report.findings, report.facts), "the hub is gone"


def test_a_hub_model_is_onboarded_with_its_weights_in_the_repaired_copy(families, tmp_path, monkeypatch):
    tried = []

    def attempt(task, folder, seconds):
        tried.append(task)
        assert load_model(task.weights).get_input_embeddings().weight.shape[0] == 320
        return failed_outcome(folder, task, "exception", "as planted")

    monkeypatch.setenv("OXRL_CACHE_DIR", str(tmp_path / "oxrl"))
    options = Options(tmp_path / "work", tmp_path / "records", attempt=attempt)
    with serving(Hub, folder=families["wrong_end"], requested=[]) as hub:
        _use_hub(monkeypatch, hub.url, tmp_path / "cache")
        first, second = (onboard(["someone/model"], options)[0] for _ in range(2))
    assert [Path(task.weights).name for task in tried] == ["someone-model"], "in the cache, and once"
    assert "as planted" in first.why and "as before" in second.why


def test_a_hub_that_never_replies_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections, and nothing more
        _use_hub(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "cache")
        with pytest.raises(ValueError, match="no local model someone/model, and the hub cannot be reached"):
            scout("someone/model")
    assert HUB_SECONDS <= 1, "the command reports it within two seconds"


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
