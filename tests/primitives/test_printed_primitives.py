"""Calls of the primitives in the forms in which users write them: data flow, swapped functions, three patterns."""

import json
import math
import subprocess
import sys
from itertools import cycle

import numpy as np
import pytest
import torch

import oxrl
from oxrl import (
    GenerationConfig,
    Message,
    Sample,
    compute_forward_kl,
    compute_loss_by_algorithm,
    create_algorithm_config,
    create_loss_batch,
    create_rollout,
    generate,
    load_checkpoint,
    save_checkpoint,
    train,
)
from oxrl.algorithms.policy import Distilled, Policy
from oxrl.algorithms.preference import Pairs
from oxrl.algorithms.supervised import Scores
from oxrl.algorithms.unpaired import Labelled
from oxrl.concurrency import run_blocking
from oxrl.loops.step import train_step
from oxrl.testing import ScriptedGenerator, fake_rollout
from tests.engines import need_vllm, sglang_stand_in
from tests.waiting import HANG

PROMPT, PROMPTS = "What is 12 * 12?", ["Say hello.", "Name a city."]
CHAT = oxrl.Conversation((Message("user", PROMPT),))
FEW, GREEDY = GenerationConfig(max_new_tokens=3), GenerationConfig(max_new_tokens=4, temperature=0.0)
LONG = GenerationConfig(max_new_tokens=200)
CALL = f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': '12 * 12'}})}</tool_call>"


def my_reward(rollout):
    return float(len(rollout.generation.token_ids) + rollout.index)


def my_kl(logprobs, ref_logprobs) -> float:
    return sum(abs(float(own) - float(ref)) for own, ref in zip(logprobs, ref_logprobs, strict=True)) / len(logprobs)


@pytest.fixture(scope="module")
def setting():
    model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
    reference = oxrl.create_reference_model(model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.2)
    return model, tokenizer, reference


def fresh(**options):
    model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
    return oxrl.create_training_state(model, tokenizer, ref_model=oxrl.create_reference_model(model), **options)


# Functions over classes, explicit data flow


def test_a_reward_is_what_its_function_returns():
    rollout = fake_rollout("four", reward=0.25)
    assert oxrl.compute_reward(rollout, lambda each: 2.0 * len(each.generation.text)) == 8.0
    assert oxrl.compute_reward(rollout) == 0.25
    parts = [lambda each: 1.0, lambda each: 0.5, lambda each: len(each.generation.text)]
    assert oxrl.compute_reward(rollout, lambda each: oxrl.weighted_sum([part(each) for part in parts])) == 5.5


def test_a_rollout_is_built_up_one_argument_at_a_time(setting):
    model, tokenizer, reference = setting
    plain = create_rollout(model, tokenizer, PROMPT, FEW)
    assert (plain.prompt, plain.rewards, plain.kl_divergence) == (PROMPT, None, None)
    assert create_rollout(model, tokenizer, PROMPT, FEW, reward_fn=lambda r: len(r.generation.token_ids)).rewards == 3.0
    assert create_rollout(model, tokenizer, PROMPT, FEW, ref_model=reference).kl_divergence > 0
    with_tools = create_rollout(model, tokenizer, PROMPT, FEW, tool_parser=oxrl.parse_tools)
    assert with_tools.generation.token_ids
    complete = create_rollout(
        model, tokenizer, PROMPT, FEW, ref_model=reference, reward_fn=my_reward, tool_parser=oxrl.parse_tools
    )
    assert complete.rewards == 3.0 and complete.kl_divergence > 0


# KL functions


def test_kl_functions_take_the_numbers_of_a_generation_and_a_function_that_returns_one_number(setting):
    model, tokenizer, reference = setting
    rollout = create_rollout(model, tokenizer, PROMPT, FEW, ref_model=reference, kl_fn=my_kl)
    row = oxrl.Row("r", rollout.tokens, np.array(rollout.loss_mask) > 0)
    own, ref = rollout.generation.logprobs, oxrl.get_reference_logprobs(reference, [row])[0].tolist()
    gaps = np.abs(np.array(own) - np.array(ref))
    assert gaps.min() > 1e-3
    assert float(compute_forward_kl(own, ref, kl_fn=my_kl)) == pytest.approx(gaps.mean(), rel=1e-5)
    assert float(oxrl.compute_reverse_kl(own, ref, kl_fn=my_kl)) == pytest.approx(gaps.mean(), rel=1e-5)
    assert oxrl.compute_per_token_kl(own, ref, kl_fn=my_kl).tolist() == pytest.approx(gaps.tolist(), rel=1e-5)
    assert oxrl.compute_batch_kl([own], [ref], kl_fn=my_kl).tolist() == pytest.approx([gaps.mean()], rel=1e-5)
    assert rollout.kl_divergence == pytest.approx(gaps.mean(), abs=1e-4)
    for kl_fn in (oxrl.create_truncated_kl(threshold=1.0), oxrl.create_adaptive_kl(confidence_threshold=0.1)):
        assert math.isfinite(compute_forward_kl(own, ref, kl_fn=kl_fn))
    with pytest.raises(ValueError, match="same tokens"):
        compute_forward_kl(own, ref[:1])


# Generation backends


def test_an_engine_can_be_the_generator_of_every_function(setting):
    model, tokenizer, _ = setting
    expected = generate(model, tokenizer, PROMPT, GREEDY)
    engine = oxrl.EmbeddedGenerator(model, tokenizer)
    assert generate(None, tokenizer, PROMPT, GREEDY, generator=engine) == expected
    sampled = [oxrl.batch_generate(model, tokenizer, PROMPTS, FEW, **given) for given in ({}, {"generator": engine})]
    assert [each.token_ids for each in sampled[0]] == [each.token_ids for each in sampled[1]]
    chat = oxrl.create_multiturn_rollout(None, tokenizer, CHAT, GREEDY, generator=engine)
    assert chat.generation.token_ids == create_rollout(model, tokenizer, CHAT, GREEDY).generation.token_ids
    with sglang_stand_in(model, tokenizer) as server:
        for generator in (oxrl.sglang_generator(server.url, tokenizer), oxrl.sglang_generator):
            found = generate(server.url, tokenizer, PROMPT, GREEDY, generator=generator)
            assert found.token_ids == expected.token_ids


def test_sglang_needs_the_address_of_a_server(setting):
    model, tokenizer, _ = setting
    for given in (model, "tiny"):
        with pytest.raises(ValueError, match=r"not the address of one: start one with .*launch_server.*generator="):
            generate(given, tokenizer, PROMPT, GREEDY, generator=oxrl.sglang_generator)
    with pytest.raises(ValueError, match=r"load it: load_model\('tiny'\)"):
        generate("tiny", tokenizer, PROMPT, GREEDY)


def test_vllm_in_process_can_be_the_generator(vllm_in_process, setting):
    model, tokenizer, _ = setting
    run_blocking(vllm_in_process.update_weights, oxrl.Weights(model, vllm_in_process.version + 1))
    found = generate(None, tokenizer, PROMPT, GREEDY, generator=vllm_in_process)
    assert found.token_ids == generate(model, tokenizer, PROMPT, GREEDY).token_ids


BY_VLLM = """
import torch, oxrl
from oxrl.primitives.engines import close_vllm
model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
config = oxrl.GenerationConfig(max_new_tokens=4, temperature=0.0)
for _ in range(2):
    found = oxrl.generate(model, tokenizer, "hello", config, generator=oxrl.vllm_generator)
    wanted = oxrl.generate(model, tokenizer, "hello", config)
    assert found.token_ids == wanted.token_ids, (found, wanted)
    assert torch.allclose(torch.tensor(found.logprobs), torch.tensor(wanted.logprobs), atol=1e-3)
    with torch.no_grad():
        model.lm_head.weight.mul_(-2.0)  # the next call samples from these weights
close_vllm()
"""


@pytest.mark.engine
def test_the_function_that_starts_vllm_samples_from_the_current_weights_of_the_model():
    need_vllm()
    done = subprocess.run([sys.executable, "-c", BY_VLLM], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-2000:]


# Losses


def a_policy():
    segment = torch.tensor([0, 0, 1])
    logprob = torch.tensor([-1.0, -2.0, -0.5])
    return Policy(logprob, logprob.clone(), torch.tensor([1.0, 1.0, -1.0]), torch.ones(3).bool(), segment, 2)


def test_a_custom_loss_replaces_the_loss():
    batch, advantages = a_policy(), torch.tensor([2.0, 4.0])
    assert oxrl.compute_grpo_loss(batch, advantages, loss_fn=lambda view: view.advantage).item() == 4.0
    assert oxrl.compute_ppo_loss(batch, advantages, loss_fn=lambda view: view.advantage.max()).item() == 4.0
    pairs = Pairs(*[torch.tensor([-1.0, -3.0])] * 6)
    assert oxrl.compute_dapo_loss(pairs, loss_fn=lambda pairs: pairs.chosen).item() == -2.0


def test_a_loss_of_ones_own_is_an_algorithm_by_its_path_or_as_a_function(tmp_path):
    def scaled(view: Policy, *, scale: float = 1.0):
        return -scale * view.advantage * view.logprob * view.mask

    file = tmp_path / "mine.py"
    file.write_text(
        "from oxrl.algorithms.preference import Pairs\n\n\n"
        "def gap(pairs: Pairs, *, scale: float = 1.0):\n    return scale * (pairs.rejected - pairs.chosen)\n"
    )
    by_path = create_algorithm_config(f"{file}:gap", {"scale": 3.0})
    assert by_path.name == f"{file}:gap"
    pairs = Pairs(*(torch.tensor([each]) for each in (-1.0, -2.0, 0.0, 0.0, 1.0, 1.0)))
    assert compute_loss_by_algorithm(pairs, by_path).item() == -3.0
    one, two = (create_algorithm_config(scaled, {"scale": scale}) for scale in (1.0, 2.0))
    assert compute_loss_by_algorithm(a_policy(), one).item() == pytest.approx((1.0 + 2.0 - 0.5) / 3)
    assert compute_loss_by_algorithm(a_policy(), two).item() == pytest.approx(2 * (1.0 + 2.0 - 0.5) / 3)
    _, stats = oxrl.training_iteration(fresh(), PROMPTS, FEW, two, my_reward, n_samples_per_prompt=2)
    assert stats.metrics["grad_norm"] > 0
    with pytest.raises(ValueError, match="annotate its first argument"):
        create_algorithm_config(lambda view: view.advantage)
    with pytest.raises(ValueError, match="no parameter scales.*did you mean scale"):
        create_algorithm_config(scaled, {"scales": 2.0})


def test_losses_of_views_are_means_over_their_units():
    def loss(view, name, **parameters):
        return float(compute_loss_by_algorithm(view, create_algorithm_config(name, parameters)))

    def logistic(z):
        return np.log1p(np.exp(-z))

    assert loss(a_policy(), "ppo") == loss(a_policy(), "dapo") == pytest.approx(-1 / 3)
    assert loss(a_policy(), "grpo") == pytest.approx(0.0)
    numbers = [torch.tensor(each) for each in ([1.0, 0.0], [0.5, 2.0], [0.0, 0.0])]
    assert loss(Scores(*numbers), "rm") == pytest.approx((logistic(0.5) + logistic(-2.0)) / 2)
    labelled = Labelled(torch.tensor([3.0, -1.0]), torch.tensor([True, False]), torch.tensor(0.5))
    assert loss(labelled, "bco_unpaired", beta=0.2) == pytest.approx((logistic(0.5) + logistic(0.3)) / 2)
    assert loss(labelled, "kto", beta=0.2) == pytest.approx((1 / (1 + np.exp(0.5)) + 1 / (1 + np.exp(0.3))) / 2)
    student = Distilled(
        *(torch.tensor(each) for each in ([-1.0, -2.0], [-1.0, -1.5], [-3.0, -1.0])), torch.ones(2).bool()
    )
    assert loss(student, "opd") == pytest.approx((2.0 + np.exp(-0.5) * -1.0) / 2)
    with pytest.raises(
        ValueError, match="the batch is a Policy, and kto takes Labelled or a LossBatch; create_loss_batch"
    ):
        loss(a_policy(), "kto")


def answered(*texts):
    return tuple((Message("assistant", text),) for text in texts)


ASKED = (Message("user", "2 + 2?"),)
DATA = [  # of each kind, in two rows
    [Sample(f"chat {n}", (*ASKED, Message("assistant", f"{n}"))) for n in range(2)],
    [Sample(f"text {n}", text=f"{n} and more") for n in range(2)],
    [Sample(f"pair {n}", ASKED, chosen=answered("4")[0], rejected=answered(f"{n}!")[0]) for n in range(2)],
    [Sample(f"label {n}", (*ASKED, Message("assistant", f"{n}")), label=bool(n)) for n in range(2)],
    [
        Sample(
            f"group {n}",
            ASKED,
            responses=answered("4", "44", f"{n}"),
            rewards=(1.0, 0.5, 0.0),
            metadata={"greedy_reward": 0.5},
        )
        for n in range(2)
    ],
]


def samples_for(name, render):
    for samples in DATA:
        try:
            return [oxrl.algorithm(name).assemble(sample, render) for sample in samples] and samples
        except ValueError:  # rows of another kind
            continue
    raise AssertionError(f"no rows for {name}")


@pytest.fixture(scope="module")
def complete_state(setting):
    """With a reference, a teacher and all heads; its learning rate is 0."""
    return fresh(lr=0.0, weight_decay=0.0, teacher=setting[2], heads=("value", "score"))


@pytest.mark.parametrize("name", oxrl.ALGORITHMS)
def test_the_loss_of_every_algorithm_is_the_one_that_a_training_step_reports(complete_state, name):
    state, config = complete_state, create_algorithm_config(name)
    samples = samples_for(name, state.render)
    batch = create_loss_batch(state, samples, config)
    loss = compute_loss_by_algorithm(batch, config)
    items = [item for sample in samples for item in oxrl.algorithm(name).assemble(sample, state.render)]
    trained = run_blocking(train_step, state.backend, oxrl.algorithm(name), items, 10_000)
    assert loss.requires_grad and loss.item() == pytest.approx(trained["loss"], abs=1e-5)


def test_rows_become_pairs_and_rollouts_a_batch_of_any_algorithm(setting):
    model, tokenizer, reference = setting
    rollouts = oxrl.create_batch_rollouts(
        model, tokenizer, PROMPTS, FEW, n_samples_per_prompt=3, reward_fn=lambda rollout: float(rollout.index)
    )
    chosen = oxrl.compute_dapo_pairs(rollouts)
    by_group = oxrl.compute_dapo_pairs(oxrl.group_rollouts(rollouts))
    assert [[row.id for row in pair] for pair in by_group] == [[row.id for row in pair] for pair in chosen]
    assert [[row.id.rpartition("/")[2] for row in pair] for pair in chosen] == [["2", "0"], ["2", "0"]]
    pairs = oxrl.create_pair_batch(model, chosen, ref_model=reference)
    summed = [sum(rollouts[index].generation.logprobs) for index in (2, 5)]
    assert pairs.chosen.tolist() == pytest.approx(summed, abs=1e-3) and pairs.chosen.requires_grad
    rows = [pair[0] for pair in chosen]
    expected = [float(each.sum()) for each in oxrl.get_reference_logprobs(reference, rows)]
    assert pairs.ref_chosen.tolist() == pytest.approx(expected, abs=1e-3)
    assert not oxrl.create_pair_batch(model, chosen).ref_chosen.any()
    margin = (pairs.chosen - pairs.ref_chosen - pairs.rejected + pairs.ref_rejected).detach().double().numpy()
    assert float(oxrl.compute_dapo_loss(pairs, beta=0.5)) == pytest.approx(np.log1p(np.exp(-0.5 * margin)).mean())
    with pytest.raises(ValueError, match="each item is a pair"):
        oxrl.create_pair_batch(model, [chosen[0][:1]])
    state, config = fresh(), create_algorithm_config("dapo", {"beta": 0.1})
    batch = create_loss_batch(state, oxrl.group_rollouts(rollouts), config)
    assert compute_loss_by_algorithm(batch, config).item() == pytest.approx(np.log(2), abs=1e-5)
    with pytest.raises(ValueError, match="the batch was made for dapo_pairs.*not for grpo"):
        compute_loss_by_algorithm(batch, create_algorithm_config("grpo"))
    for name, missing in {"ppo": "a value head", "kd": "a teacher"}.items():
        with pytest.raises(ValueError, match=f"{name} .*needs {missing}: create_training_state"):
            create_loss_batch(state, rollouts, create_algorithm_config(name))


def test_ppo_advantages_take_rows_of_tokens_with_dones():
    rewards, values = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 2.0]]), torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.4, 0.5]])
    dones = torch.tensor([[0, 1, 1], [0, 0, 1]])
    several = oxrl.compute_ppo_advantages(rewards, values, dones, 0.9, 0.8)
    short = oxrl.compute_ppo_advantages(rewards[0, :2], values[0, :2], gamma=0.9, lam=0.8)
    complete = oxrl.compute_ppo_advantages(rewards[1], values[1], gamma=0.9, gae_lambda=0.8)
    assert several.tolist() == [[*short.tolist(), 0.0], complete.tolist()]
    assert several[1].tolist() == pytest.approx([0.56 + 0.72 * (0.05 + 0.72 * 1.5), 0.05 + 0.72 * 1.5, 1.5])
    after = torch.cat([values, torch.tensor([[0.0], [2.0]])], 1)
    cut = oxrl.compute_ppo_advantages(rewards, after, torch.zeros(2, 3), 0.9, 0.8)
    assert cut[1, -1].item() == pytest.approx(2.0 + 0.9 * 2.0 - 0.5)
    lists = oxrl.compute_ppo_advantages(rewards.tolist(), values.tolist(), dones.tolist(), 0.9, 0.8)
    assert torch.equal(lists, several)
    assert oxrl.compute_grpo_advantages([[1.0, 0.0]])[0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


# Tools


def test_a_tool_call_is_executed_and_a_condition_stops_the_episode(setting):
    model, tokenizer, reference = setting
    for executor in (oxrl.execute_tools, oxrl.execute_functions):
        rollout = oxrl.create_multiturn_rollout(
            model,
            tokenizer,
            CHAT,
            LONG,
            ref_model=reference,
            reward_fn=lambda rollout: float("144" in rollout.messages[2].content),
            tools=[oxrl.calculator],
            tool_parser=oxrl.parse_tools,
            tool_executor=executor,
            stop_condition=lambda conv: "DONE" in conv.messages[-1].content,
            generator=ScriptedGenerator(tokenizer, [CALL, f"DONE {CALL}", "never sampled"]),
        )
        assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
        assert (rollout.reward, rollout.metadata["ended"]) == (1.0, "stop_condition")
        assert rollout.metadata["tools"] == {"calculator": 1} and rollout.kl_divergence > 0


def test_an_executor_may_take_the_calls_alone(setting):
    _, tokenizer, _ = setting
    rollout = oxrl.create_multiturn_rollout(
        None,
        tokenizer,
        CHAT,
        LONG,
        tool_parser=oxrl.parse_xml_tools,
        tool_executor=lambda calls: [f"called {call.name}" for call in calls],
        generator=ScriptedGenerator(tokenizer, [CALL, "144"]),
    )
    assert rollout.messages[2].content == "called calculator"


# Training


def get_algorithm(iteration):
    if iteration < 2:
        return create_algorithm_config("grpo", {"kl_coef": 0.2})
    if iteration < 3:
        return create_algorithm_config("grpo", {"kl_coef": 0.05})
    return create_algorithm_config("dapo", {"beta": 0.1})


def test_a_quick_start_switches_algorithms():
    logged = []
    final_state = oxrl.quick_start_training(
        model_name="tiny",
        prompts=PROMPTS,
        reward_fn=my_reward,
        num_iterations=3,
        algorithm_config=get_algorithm,
        gen_config=FEW,
        n_samples_per_prompt=2,
        logger=lambda step, metrics: logged.append(metrics),
    )
    assert final_state.state.step == 3
    assert ["kl" in each for each in logged] == [True, True, False] and "preference" in logged[2]


def test_custom_everything_with_checkpoints_in_the_default_folder(tmp_path, monkeypatch, wandb_ended):
    monkeypatch.setenv("OXRL_CHECKPOINT_DIR", str(tmp_path / "saved"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    final_state = train(
        initial_state=fresh(lr=1e-3),
        prompt_loader=PROMPTS,
        num_iterations=2,
        gen_config=FEW,
        algorithm_config=create_algorithm_config("grpo", {"kl_coef": 0.1}),
        reward_fn=my_reward,
        n_samples_per_prompt=2,
        ref_model_update_fn=oxrl.create_ema_updater(decay=0.5),
        checkpoint_fn=save_checkpoint,
        eval_fn=lambda state: {"eval": float(state.state.step)},
        logger=oxrl.log_to_wandb,
    )
    assert [path.name for path in sorted((tmp_path / "saved").iterdir())] == ["step_0001", "step_0002"]
    restored = load_checkpoint(tmp_path / "saved", fresh())
    assert restored.state == final_state.state
    for one, other in ((restored.policy, final_state.policy), (restored.reference, final_state.reference)):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert not torch.equal(restored.reference.lm_head.weight, restored.policy.lm_head.weight)


def test_checkpoints_of_plain_code_and_of_async_loops_are_the_same(tmp_path):
    state = fresh()
    saved = save_checkpoint(state, tmp_path / "plain", keep_last=1)
    assert saved == tmp_path / "plain" / "step_0000"
    assert load_checkpoint(state, saved).state == load_checkpoint(saved.parent, state).state == state.state

    async def loop():
        folder = await save_checkpoint(tmp_path / "loop", state.backend, oxrl.TrainingState(step=7))
        return folder, await load_checkpoint(folder, state.backend)

    folder, plain = run_blocking(loop)
    assert folder.name == "step_0007" and plain.step == 7
    with pytest.raises(ValueError, match="step_0007 is of another run, beyond step 0; .* with load_checkpoint"):
        save_checkpoint(state, tmp_path / "loop")


@pytest.mark.parametrize(
    ("ref_update", "follows"),
    [(lambda ref, policy: ref, False), (oxrl.create_periodic_updater(update_every=2), True)],
)
def test_a_reference_is_kept_or_reset(ref_update, follows):
    options = {"n_samples_per_prompt": 2, "logger": lambda step, metrics: None}
    final = train(
        fresh(lr=1e-3),
        PROMPTS,
        2,
        FEW,
        create_algorithm_config("grpo"),
        my_reward,
        ref_model_update_fn=ref_update,
        **options,
    )
    assert torch.equal(final.reference.lm_head.weight, final.policy.lm_head.weight) == follows


class Loader:
    """As torch's data loader: every `iter` starts over."""

    def __iter__(self):
        return iter([[PROMPTS[0]], PROMPTS])


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (PROMPTS, [2, 2, 2]),
        (tuple(PROMPTS), [2, 2, 2]),
        (cycle([PROMPTS, PROMPTS[:1]]), [2, 1, 2]),
        (cycle(PROMPTS), [1, 1, 1]),
        (Loader(), [1, 2, 1]),
        (lambda iteration: PROMPTS * iteration, [2, 4, 6]),
    ],
)
def test_prompts_come_from_a_list_an_iterator_a_loader_or_a_function(loader, sizes):
    seen = []

    async def once(sample, policy):
        seen.append(sample.id)
        return await oxrl.single_turn(sample, policy)

    grpo, counts, evals = create_algorithm_config("grpo"), [], []
    train(
        fresh(), loader, 3, FEW, grpo, my_reward, n_samples_per_prompt=2, env=once, eval_fn=lambda state: 0.5,
        logger=lambda step, metrics: (counts.append(len(seen) // 2), seen.clear(), evals.append(metrics["eval"])),
    )  # fmt: skip
    assert counts == sizes and evals == [0.5] * 3


def test_an_iterator_that_ends_and_other_objects_are_refused():
    options = (FEW, create_algorithm_config("grpo"), my_reward)
    with pytest.raises(ValueError, match="prompt_loader ended before iteration 1"):
        train(fresh(), iter([]), 1, *options)
    with pytest.raises(ValueError, match=r"pass iter\(prompt_loader\)"):
        train(fresh(), [PROMPTS, PROMPTS], 1, *options)
    for loader in ("Say hello.", 3):
        with pytest.raises(ValueError, match="give a function of the iteration, a list of prompts, or an iterator"):
            train(fresh(), loader, 1, *options)
