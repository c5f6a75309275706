"""The audit identifies why engine and trainer disagree: each difference is real, most of them in a vLLM server."""

import json
import shutil

import anyio
import pytest
import torch
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import load_config
from oxrl.diagnose.logprob_gap import audit_mismatch
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.generators.engines import Facts
from oxrl.generators.http import VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.models.load import load_model, load_tokenizer
from oxrl.run.checkpoint import checkpoints
from oxrl.run.train import train_run
from oxrl.types import ModelConfig
from tests.rows import sums, write_jsonl


def spread(model, seed=3, amount=0.1):
    """Random weights are nearly uniform at every temperature; these are not."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += amount * torch.randn_like(weight)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory, complete_run):
    """A run of GRPO at temperature 0.8 whose steps are large."""
    folder = tmp_path_factory.mktemp("mismatch")
    spread(load_model("tiny")).save_pretrained(folder / "model")
    load_tokenizer("tiny").save_pretrained(folder / "model")
    overrides = [
        f"model.name={folder / 'model'}",
        f"data.train_files_path={write_jsonl(folder / 'rows.jsonl', sums(8))}",
        "train.alg_name=grpo",
        "train.lr=1e-2",
        "train.train_steps_per_epoch=3",
        "train.train_batch_size_per_gpu=2",
        "train.checkpoint_every=1",
        "train.lr_scheduler=constant",
        "reward.reward_func=oxrl.diagnose.verify_model:any_difference",
        "rollout.n_samples=2",
        "rollout.max_tokens=16",
        "rollout.temperature=0.8",
    ]
    return train_run(load_config(None, overrides), folder / "run").folder


def audit(run, engine=None, **options):
    return anyio.run(lambda: audit_mismatch(run, engine, **options))


def changed(run, folder, **rollout):
    """A copy of the run with other sampling settings."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["rollout"] |= rollout
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def engine_at(url, run, folder, step=3, engine=VLLMEngine):
    """The vLLM server with the weights of one of the run's checkpoints."""
    path = run / f"checkpoints/step_{step:04d}"
    load_model(str(path)).save_pretrained(folder / "weights")
    server = engine(url)
    anyio.run(server.update_weights_from_checkpoint, str(folder / "weights"), 0)
    return HTTPGenerator([server], load_tokenizer(str(path)))


def test_the_runs_own_engine_agrees(run):
    shown = CliRunner().invoke(app, ["mismatch", str(run)])
    assert shown.exit_code == 0, shown.output
    assert "engine and trainer agree" in shown.output and "train.max_logprob_gap" in shown.output
    report = json.loads(CliRunner().invoke(app, ["mismatch", str(run), "--json", "--answers", "2"]).output)
    assert report["largest"] < 1e-4 and report["within"] and report["explanation"] is None
    assert report["answers"] == 2 and len(report["worst"]) == 5 and report["worst"][0]["gap"] == report["largest"]


def test_vllm_with_the_newest_weights_agrees(run, vllm_url, tmp_path):
    found = audit(run, engine_at(vllm_url, run, tmp_path))
    assert found.within and found.mean < 1e-4 and found.explanation is None


def test_stale_weights_are_named_with_their_step(run, vllm_url, tmp_path):
    found = audit(run, engine_at(vllm_url, run, tmp_path, step=2))
    assert not found.within
    assert found.explanation.cause == "stale weights" and "step_0002" in found.explanation.what


class AtTemperatureOne(VLLMEngine):
    """A server that ignores the requested temperature."""

    async def complete(self, ask):
        return await super().complete(ask._replace(sampling=ask.sampling._replace(temperature=1.0)))


def test_another_temperature_is_named(run, vllm_url, tmp_path):
    found = audit(run, engine_at(vllm_url, run, tmp_path, engine=AtTemperatureOne))
    assert not found.within
    assert (found.explanation.cause, found.explanation.what) == ("temperature", "1 instead of 0.8")
    assert "processed_logprobs" in found.advice


class AfterCutOffs(VLLMEngine):
    """A server whose log-probs are renormalised after cut-offs, as vLLM's are with `processed_logprobs`."""

    async def facts(self):
        return Facts((await super().facts()).max_length, "full")


def test_log_probs_after_cut_offs_are_named(run, vllm_url, tmp_path):
    cut = changed(run, tmp_path / "cut", top_p=0.7)
    found = audit(cut, engine_at(vllm_url, run, tmp_path, engine=AfterCutOffs))
    assert not found.within
    assert found.explanation.cause == "truncated sampling" and "top_p 0.7" in found.explanation.what


def test_another_dtype_is_named(run):
    newest = checkpoints(run / "checkpoints")[-1]
    half = load_model(ModelConfig(str(newest), dtype="bfloat16"))
    found = audit(run, EmbeddedGenerator(half, load_tokenizer(str(newest))))
    assert found.explanation.cause == "dtype" and "bfloat16" in found.explanation.what
    assert "train.alg_params.correction: truncated" in found.advice


class ReadingText(EmbeddedGenerator):
    """An engine that receives text and tokenises it itself."""

    async def generate(self, requests, sampling):
        texts = [self.tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]
        own = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        again = [request._replace(tokens=tokens) for request, tokens in zip(requests, own, strict=True)]
        return await super().generate(again, sampling)


def test_another_tokenisation_is_named(run):
    newest = str(checkpoints(run / "checkpoints")[-1])
    found = audit(run, ReadingText(load_model(newest), load_tokenizer(newest)))
    assert not found.within
    assert found.explanation.cause == "tokeniser" and found.explanation.mean < 1e-4
    assert "token ids" in found.advice


def test_an_unexplained_gap_is_reported_as_such(run, tmp_path):
    newest = str(checkpoints(run / "checkpoints")[-1])
    found = audit(run, EmbeddedGenerator(spread(load_model(newest), seed=9), load_tokenizer(newest)))
    assert not found.within and found.explanation is None
    assert "no tried change explains the gap" in str(found) and "correction: truncated" in found.advice


def test_completions_recorded_by_the_run_can_be_audited(run, tmp_path):
    found = audit(run, recorded=True)
    assert found.within and found.mean < 1e-4
    assert found.checkpoint.endswith("step_0002"), "the third step was sampled with the weights of the second"
    wrong = shutil.copytree(run, tmp_path / "wrong")
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    lines[-1]["samples"][0]["turns"][0]["logprobs"][1] -= 0.5
    (wrong / "rollouts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = audit(wrong, recorded=True)
    assert not found.within and found.largest == pytest.approx(0.5, abs=1e-3)
    assert (found.worst[0].answer, found.worst[0].position) == (0, 1)
    assert CliRunner().invoke(app, ["mismatch", str(wrong), "--recorded"]).exit_code == 1


@pytest.mark.parametrize("option", [[], ["--recorded"]])
def test_a_wrong_run_is_exit_code_2(tmp_path, option):
    assert CliRunner().invoke(app, ["mismatch", str(tmp_path / "none"), *option]).exit_code == 2
    write_jsonl(tmp_path / "rows.jsonl", sums(8))
    overrides = ["model.name=tiny", f"data.train_files_path={tmp_path / 'rows.jsonl'}", "train.alg_name=sft"]
    config = load_config(None, overrides).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    shown = CliRunner().invoke(app, ["mismatch", str(tmp_path), *option])
    assert shown.exit_code == 2 and "sft trains on files" in shown.output


@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_without_checkpoints_is_audited_with_its_initial_model(run, tmp_path, recorded):
    unsaved = shutil.copytree(run, tmp_path / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    found = audit(unsaved, recorded=recorded)
    assert found.within and found.checkpoint == str(run.parent / "model")


def test_without_recorded_rollouts_prompts_come_from_the_data(run, tmp_path):
    unrecorded = shutil.copytree(run, tmp_path / "unrecorded", ignore=shutil.ignore_patterns("rollouts.jsonl"))
    assert audit(unrecorded, answers=2).within
    with pytest.raises(ValueError, match="rollout.log_samples"):
        audit(unrecorded, recorded=True)
