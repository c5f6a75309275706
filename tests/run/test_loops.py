"""`run_sft_training` and `run_rl_training` with plain arguments: samples with tokens, engines that load checkpoints."""

from dataclasses import replace

import anyio
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import oxrl
from oxrl import RLTrainingConfig, RolloutConfig, Sample, SFTTrainingConfig
from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.cli import app
from oxrl.models.load import load_model, load_tokenizer
from oxrl.run.checkpoint import load_checkpoint
from oxrl.run.loops import run_rl_training, run_sft_training
from oxrl.tracking.health import CheckError
from oxrl.tracking.metrics import JSONLLogger
from oxrl.types import Losses, Term
from tests.rows import write_jsonl

SAMPLES = [Sample(prompt="?", tokens=[1, 50 + i, 60, 61, 2], loss_mask=[1, 0, 1, 1, 0]) for i in range(4)]


def fresh(**options):
    return create_pytorch_backend(load_model("tiny"), **options)


def sft(backend, *arguments, samples=SAMPLES, **options):
    config = SFTTrainingConfig(num_steps=3, batch_size=4, checkpoint_every=options.pop("checkpoint_every", 0))
    return trio.run(lambda: run_sft_training(backend, samples, config, *arguments, **options))


def test_samples_with_tokens_need_no_tokenizer_and_their_loss_is_the_mean_over_masked_tokens():
    history = sft(fresh(), None)
    logprob = load_model("tiny")(torch.tensor([each.tokens for each in SAMPLES])).logits.double().log_softmax(-1)
    terms = [-logprob[b, s - 1, SAMPLES[b].tokens[s]] for b in range(4) for s in (2, 3)]
    assert history[0]["loss"] == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)
    assert history[0]["trained_tokens"] == 8


def test_a_completion_as_text_is_rendered_with_the_tokenizer():
    text = [Sample(prompt="2+2?", response="4")]
    rows = oxrl.load_samples([{"prompt": "2+2?", "response": "4"}]).samples
    found, wanted = (sft(fresh(), None, samples=each, tokenizer=load_tokenizer("tiny")) for each in (text, rows))
    assert [line["loss"] for line in found] == [line["loss"] for line in wanted]
    with pytest.raises(ValueError, match="sample 0 is text: pass tokenizer="):
        sft(fresh(), samples=text)


def test_checkpoints_are_written_to_the_output_folder_and_load(tmp_path):
    backend = fresh(lr=1e-3)
    sft(backend, None, checkpoint_every=2, output_dir=tmp_path, tokenizer=load_tokenizer("tiny"))
    found = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert [path.name for path in found] == ["step_0002", "step_0003"]
    plain = dict(AutoModelForCausalLM.from_pretrained(found[-1]).named_parameters())
    assert all(weight.equal(plain[name]) for name, weight in backend.model.named_parameters())
    again = fresh()
    assert anyio.run(load_checkpoint, found[0], again).step == again.version == 2
    assert len(load_tokenizer(str(found[-1]))) == len(load_tokenizer("tiny"))


@pytest.mark.trains
def test_a_run_of_reinforcement_learning_starts_from_the_latest_checkpoint(tmp_path):
    sft(fresh(lr=1e-3), None, checkpoint_every=2, output_dir=tmp_path, tokenizer=load_tokenizer("tiny"))
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{i}?", "answer": str(i)} for i in range(4)])
    config = oxrl.Config(
        model={"name": "tiny"},
        train={"alg_name": "grpo", "train_steps_per_epoch": 1, "total_number_of_epochs": 1, "lr": 1e-12},
        data={"train_files_path": str(data)},
        reward={"reward_func": "contains"},
        rollout={"max_tokens": 4, "n_samples": 2},
    )
    latest = sorted((tmp_path / "checkpoints").glob("step_*"))[-1]
    result = trio.run(oxrl.run_rl, config, tmp_path, latest)
    before, after = (AutoModelForCausalLM.from_pretrained(path).lm_head.weight for path in (latest, result.checkpoint))
    assert result.folder == tmp_path / "rl" and torch.allclose(before, after, atol=1e-9)


def test_checkpoints_without_a_folder_are_refused_before_training(tmp_path):
    async def save(state, best_step):
        saved.append(state.step)

    saved = []
    backend = fresh()
    with pytest.raises(ValueError, match="checkpoint_every is 2, and there is no folder .* pass output_dir"):
        sft(backend, checkpoint_every=2)
    with pytest.raises(ValueError, match="pass one of them"):
        sft(backend, checkpoint_every=2, save=save, output_dir=tmp_path)
    assert backend.version == 0
    sft(backend, None, checkpoint_every=2, save=save)
    assert saved == [2, 3]


def test_a_logger_is_a_function_an_object_with_log_or_none(tmp_path, capsys):
    class Logged:
        def log(self, step, metrics):
            steps.append(step)

    steps = []
    sft(fresh(), Logged())
    sft(fresh(), JSONLLogger(tmp_path / "metrics.jsonl"))
    sft(fresh(), None)
    assert steps == [1, 2, 3] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert "loss" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no logger"):
        sft(fresh(), 3)


class Engine:
    """An engine as small as the protocol allows; it keeps the weights that it loaded."""

    def __init__(self):
        self.loaded = []

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict:
        self.loaded.append(AutoModelForCausalLM.from_pretrained(checkpoint_path).lm_head.weight.detach().clone())
        return {"path": checkpoint_path}


def sampled(prompts):
    return [
        Sample(prompt=prompt, tokens=[1, *prompt.encode(), 97 + index], loss_mask=[0] * (1 + len(prompt)) + [1])
        for index, prompt in enumerate(prompts)
    ]


def rl(backend, engines, *, steps=4, sync_every=1, **options):
    buffer = oxrl.DataBuffer(["ab", "cd", "ef"])
    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=2, generate_fn=sampled, reward_fn=lambda sample: float(sample.index)
    )
    manager = oxrl.AsyncRolloutManager(buffer, config)
    training = RLTrainingConfig(steps, sync_every, baseline=0.5, checkpoint_every=options.pop("checkpoint_every", 0))
    return trio.run(lambda: run_rl_training(backend, buffer, manager, engines, training, None, **options))


def test_engines_that_load_checkpoints_get_the_weights_every_n_steps_and_samples_are_at_most_that_old():
    backend, engines = fresh(lr=1e-3), [Engine(), Engine()]
    history = rl(backend, engines, sync_every=2)
    assert [len(engine.loaded) for engine in engines] == [3, 3], "at the start, after step 2 and after step 4"
    assert engines[0].loaded[-1].equal(backend.model.lm_head.weight) and not engines[0].loaded[0].equal(
        engines[0].loaded[1]
    )
    assert [line["age"] for line in history] == [0, 1, 0, 1] and history[-1]["grad_norm"] > 0


def test_without_engines_samples_come_from_the_trainers_module_and_checkpoints_are_written(tmp_path):
    history = rl(fresh(), [], steps=2, checkpoint_every=1, output_dir=tmp_path)
    assert [line["age"] for line in history] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_0001", "step_0002"]
    with pytest.raises(ValueError, match="there is no folder for checkpoints"):
        rl(fresh(), [], checkpoint_every=1)


def test_engines_with_one_argument_and_with_a_version_are_synced_together(tmp_path):
    class Versioned:
        async def update_weights_from_checkpoint(self, checkpoint_path, version=None):
            return {"version": version}

    class Plain:
        async def update_weights_from_checkpoint(self, checkpoint_path):
            return {"path": checkpoint_path}

    async def sync(*version):
        return await oxrl.sync_weights_to_engines([Versioned(), Plain()], str(tmp_path), *version)

    assert trio.run(sync) == [{"version": None}, {"path": str(tmp_path)}]
    assert trio.run(sync, 3) == [{"version": 3}, {"path": str(tmp_path)}]


def test_checks_are_on_by_default_and_their_states_are_in_the_output_folder(tmp_path):
    def mean_of_the_micro_batch(outputs, batch):
        total = (outputs.logprob * batch.streams["advantage"] * batch.mask).sum() / batch.mask.sum()
        return Losses({"policy": Term(-total, "constant")})

    split = replace(algorithm("reinforce"), loss=mean_of_the_micro_batch)
    with pytest.raises(CheckError, match="the check loss_split failed: .* it depends on the split"):
        rl(fresh(), [], steps=1, algorithm=split, output_dir=tmp_path / "rl")
    shown = CliRunner().invoke(app, ["check", str(tmp_path / "rl")])
    assert shown.exit_code == 1 and "failed   loss_split" in shown.stdout and "passed   tokens" in shown.stdout
    assert len(rl(fresh(), [], steps=1, algorithm=split, checks={"all": "off"})) == 1
    sft(fresh(lr=1e-3), None, output_dir=tmp_path / "sft")
    shown = CliRunner().invoke(app, ["check", str(tmp_path / "sft")])
    assert shown.exit_code == 0 and "passed   trained_parameters" in shown.stdout and "warned" not in shown.stdout
    with pytest.raises(ValueError, match="'maks' is no check; did you mean mask"):
        sft(fresh(), None, checks={"maks": "off"})


class Wrapped:
    """The methods of a backend that these names select, and no properties."""

    def __init__(self, *names):
        inner = fresh()
        for name in names:
            setattr(self, name, getattr(inner, name))


def test_a_backend_needs_only_the_methods_that_its_run_calls():
    history = sft(Wrapped("forward_backward", "optim_step"))
    assert history[-1]["trained_tokens"] == sft(fresh())[-1]["trained_tokens"]
    assert len(rl(Wrapped("forward_backward", "optim_step", "get_weights", "logprobs"), [], steps=1)) == 1


def test_missing_methods_of_a_backend_are_listed_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"backend Wrapped has no get_weights, logprobs, and this run needs them"):
        rl(Wrapped("forward_backward", "optim_step"), [])
    with pytest.raises(ValueError, match="backend Wrapped has no save, and this run needs it"):
        sft(Wrapped("forward_backward", "optim_step"), output_dir=tmp_path)
    other = Wrapped("forward_backward", "optim_step")
    other.forward_backward = lambda batch: batch
    with pytest.raises(ValueError, match=r"forward_backward\(batch\) must take \(batches, algorithm, counts\)"):
        sft(other)
