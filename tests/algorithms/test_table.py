"""Every algorithm of the table: it learns from its rows, and the gradient does not depend on micro-batches."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.algorithms.assemble import conversation_items, text_items
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.assemble import assemble
from oxrl.data.pack import collate, count_units, pack
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.loops.evaluate import evaluate_offline
from oxrl.loops.step import credit_step, train_step
from oxrl.models.load import load_model_config, load_tokenizer
from oxrl.primitives.gradients import per_sample_gradients
from oxrl.types import Losses, ModelConfig, Row
from tests.algorithms import test_preference as formulas

pytestmark = pytest.mark.anyio
PARAMETERS = {
    "kd": {"kd_weight": 1.0},  # the likelihood of the rows would lead away from this teacher
    "discopop": {"tau": 5.0},  # with the paper's 0.05 its gradient at the start has the opposite sign, as published
}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@lru_cache
def first_model():
    """One layer of `tiny` with its vocabulary: enough to learn the first word of a response."""
    config = load_model_config(ModelConfig("tiny"))
    config.update({"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def a_model():
    return deepcopy(first_model())


def a_teacher():
    """A sharper distribution than the student's."""
    model = a_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def backend_for(name, **options):
    built = algorithm(name)
    others = {"ref": a_model, "teacher": a_teacher}
    models = {role: others[role]() for role in {*built.others}}
    return create_pytorch_backend(a_model(), heads=built.heads, others=models, **options)


async def gradients(backend, built, items, budget):
    """The gradient of one step, in micro-batches of at most `budget` tokens."""
    credited = await credit_step(backend, built, items, budget, {})
    batches = [collate(part) for part in pack(credited, budget)]
    metrics = await backend.forward_backward(batches, built, count_units(credited))
    grads = {n: p.grad.clone() for n, p in backend.module.named_parameters() if p.grad is not None}
    backend.optimizer.zero_grad()
    return grads, metrics, len(batches)


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_the_gradient_does_not_depend_on_micro_batches_or_row_order(name, rows_of):
    backend = backend_for(name)
    with torch.no_grad():  # away from the start, where policy and reference are equal and much is zero
        for parameter in backend.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        for head in backend.module.heads.values():
            head.weight.normal_(generator=torch.Generator().manual_seed(2))
    built, items = algorithm(name), rows_of(name, 6, 0)
    whole, metrics, one = await gradients(backend, built, items, 100_000)
    parts, parts_metrics, many = await gradients(backend, built, items, 90)
    reordered, _, _ = await gradients(backend, built, items[::-1] if built.arrange is list else items, 90)
    assert one == 1 < many
    assert parts_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    size = torch.stack([g.norm() for g in whole.values()]).norm()
    assert size > 1e-6, "a gradient of zero would agree with anything"
    for other in (parts, reordered):
        assert other.keys() == whole.keys()
        assert torch.stack([(other[n] - whole[n]).norm() for n in whole]).norm() < 2e-4 * size


@pytest.mark.parametrize("name", ["sft", "dpnll", "aot", "kto", "grpo", "gspo", "tdpo", "rm", "ppo", "online_dpo"])
async def test_the_gradients_of_the_samples_of_a_step_add_up_to_that_of_the_step(name, rows_of):
    backend, built, items = backend_for(name), algorithm(name), rows_of(name, 5, 0)
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    whole, _, _ = await gradients(backend, built, items, 100_000)
    shares = [share for _, share in per_sample_gradients(backend, items, built, at_once=3)]
    size = torch.stack([g.norm() for g in whole.values()]).norm()
    assert len(shares) >= 5 and size > 1e-6
    for parameter, gradient in whole.items():
        total = sum(share[parameter.removeprefix("model.")] for share in shares)
        assert (total - gradient).norm() < 2e-4 * size, parameter


def flipped(built):
    def loss(outputs, batch):
        losses = built.loss(outputs, batch)
        return Losses({n: t._replace(total=-t.total) for n, t in losses.terms.items()}, losses.metrics)

    return replace(built, loss=loss)


async def progress(backend, name, items):
    """A metric on held-out rows that increases as the algorithm learns from its rows."""
    built = algorithm(name, **PARAMETERS.get(name, {}))
    if built.assemble in (conversation_items, text_items) or name == "rft":
        scores = await evaluate_offline(backend, built, items, 4000)
        return -scores.get("eval_teacher_kl", scores["eval_nll"])
    if name in ("rm", "kto", "bco_unpaired"):
        return (await evaluate_offline(backend, built, items, 4000))["eval_accuracy"] * 10
    if name == "opd":
        return -abs((await evaluate_offline(backend, built, items, 4000))["eval_teacher_gap"])
    return await margin(backend, [row for item in items for row in item])


async def margin(backend, rows: list[Row]) -> float:
    """Mean log-prob per token of the good responses minus that of the bad ones."""
    batch = collate([(replace(row, scalars={}),) for row in rows])
    (outputs,) = await backend.logprobs([batch])
    spans = zip(batch.borders[:-1], batch.borders[1:], strict=True)
    means = [outputs.logprob[a:b].sum() / batch.mask[a:b].sum() for a, b in spans]
    good = [i for i, row in enumerate(rows) if row.scalars.get("reward", row.id.endswith("chosen")) > 0]
    bad = [i for i in range(len(rows)) if i not in good]
    return float(sum(means[i] for i in good) / len(good) - sum(means[i] for i in bad) / len(bad))


@pytest.mark.trains
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_an_algorithm_learns_from_its_rows_and_unlearns_with_its_sign_flipped(name, rows_of):
    train, held_out = rows_of(name, 48, 1), rows_of(name, 12, 2)
    gains = []
    for change in (lambda built: built, flipped):
        backend = backend_for(name, lr=3e-3)
        built, memory = change(algorithm(name, **PARAMETERS.get(name, {}))), {}
        before = await progress(backend, name, held_out)
        for step in range(6):
            items = [train[(8 * step + k) % len(train)] for k in range(8)]
            await train_step(backend, built, items, 4000, memory)
        gains.append(await progress(backend, name, held_out) - before)
    assert gains[0] > 0.05
    assert gains[1] < 0.02


def test_the_eval_metric_falls_as_the_model_learns():
    """The surrogate of a policy gradient and the weighted sum of a coupled loss do not, so neither selects the best."""
    judged = {name: algorithm(name).eval_metric for name in ALGORITHMS}
    coupled = {name for name, by in judged.items() if by == "objective"}
    assert coupled == {"aot", "drdpo", "bco", "betadpo", "alpha_dpo"}
    assert all(judged[name] is None for name in ("grpo", "ppo", "rloo", "dapo", "gspo", "remax", "opd", "rlhf"))
    assert all(judged[name] == "loss" for name in ("sft", "dpo", "kto", "rm", "kd", "orpo", "rft", "online_dpo"))


def recorded(p):
    """The pairs of `test_preference.numbers` as rows, with the log-prob of each response on its last token."""

    def row(side, i):
        length = int(getattr(p, f"len_{side}")[i])
        policy, ref = np.zeros((2, length + 1))
        policy[-1], ref[-1] = getattr(p, side)[i], getattr(p, f"ref_{side}")[i]
        streams = {"policy_logprob": policy, "ref_logprob": ref}
        return Row(f"{i}-{side}", [1] * (length + 1), [False] + [True] * length, streams=streams)

    return [(row("chosen", i), row("rejected", i)) for i in range(len(p.chosen))]


@pytest.mark.parametrize("name", ["bco", "betadpo", "alpha_dpo"])
def test_running_statistics_are_averages_of_the_steps_with_momentum_0_9(name):
    steps = [formulas.numbers(1), formulas.numbers(2)]
    both = [formulas.h(p) for p in steps]
    gaps = [w / p.len_chosen - r / p.len_rejected for p, (w, r) in zip(steps, both, strict=True)]
    weighed = [np.full(9, 0.9 / 9), np.full(9, 0.1 / 9)]
    mean = sum((gap * weight).sum() for gap, weight in zip(gaps, weighed, strict=True))
    deviations = [((gap - mean) ** 2 * weight).sum() for gap, weight in zip(gaps, weighed, strict=True)]
    statistics = {
        "bco": {"baseline": 0.9 * np.mean(both[0]) + 0.1 * np.mean(both[1])},
        "betadpo": {"baseline": 0.9 * np.mean(both[0][0] - both[0][1]) + 0.1 * np.mean(both[1][0] - both[1][1])},
        "alpha_dpo": {"baseline": mean, "spread": np.sqrt(sum(deviations))},
    }[name]
    built, memory = algorithm(name), {}
    built.credit(recorded(steps[0]), memory)
    trained = built.credit(recorded(steps[1]), memory)
    expected = getattr(formulas, name)(steps[1], steps[1], **statistics)
    np.testing.assert_allclose([sum(row.scalars["objective"] for row in item) for item in trained], expected, rtol=1e-9)


def test_rejection_sampling_keeps_responses_at_or_above_the_threshold_alone(rows_of):
    rows = [{"prompt": "a?", "responses": ["x", "y", "z"], "rewards": [0.2, 0.5, 0.9]}]
    rows += [{"prompt": "b?", "responses": ["u", "v"], "rewards": [0.0, 0.1]}]
    samples = load_samples(rows).samples
    items = assemble(samples, algorithm("rft", threshold=0.5), Renderer(load_tokenizer("tiny"))).items
    assert [row.id for (row,) in items] == ["rows:1/1", "rows:1/2"]


async def test_a_step_without_variance_in_rewards_is_warned_about(rows_of, caplog):
    from oxrl.data.buffer import DataBuffer
    from oxrl.loops.offline import OfflineConfig, run_offline

    items = [
        tuple(replace(row, scalars={**row.scalars, "reward": 1.0}) for row in item) for item in rows_of("grpo", 4, 3)
    ]
    config = OfflineConfig(num_steps=1, batch_size=4)
    await run_offline(backend_for("grpo"), algorithm("grpo"), DataBuffer(items), config, log=lambda step, metrics: None)
    assert "nothing was learned" in caplog.text


@pytest.mark.parametrize("name", ["kto", "bco_unpaired"])
def test_a_step_with_only_good_or_only_bad_responses_is_warned_about_once(name, caplog):
    def judged(*labels):
        streams = {"policy_logprob": np.zeros(2, np.float32), "ref_logprob": np.zeros(2, np.float32)}
        scalars = [{"label": label, "mismatched": mismatched} for mismatched in (0.0, 1.0) for label in labels]
        return [(Row(str(i), [1, 2], [False, True], streams=streams, scalars=s),) for i, s in enumerate(scalars)]

    built, memory = algorithm(name), {}
    built.credit(judged(1.0, 0.0), memory)
    assert not caplog.text
    for _ in range(3):
        built.credit(judged(0.0), memory)
    assert caplog.text.count("mix the labels") == 1
    assert "bad" in caplog.messages[0]
    built.credit(judged(1.0, 1.0), {})
    assert len(caplog.messages) == 2
