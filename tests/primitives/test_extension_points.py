"""Every extension point is a parameter of that name, and the function passed there is called."""

import json

import pytest
import torch

import oxrl
from oxrl.algorithms import kl, policy, preference
from oxrl.algorithms.assemble import best_and_worst
from oxrl.algorithms.credit import zscore
from oxrl.algorithms.preference import Pairs
from oxrl.loops.step import step_optimizer
from oxrl.models.load import load_hf_model, load_hf_tokenizer
from oxrl.models.reference import frozen_copy, keep_reference
from oxrl.models.reward_model import RewardModel
from oxrl.primitives.algorithms import token_logprobs_of
from oxrl.primitives.inference import sampled_logprobs, tokenizer_template
from oxrl.rollouts.envs import never
from oxrl.rollouts.tools import count_tool_calls
from oxrl.testing import ScriptedGenerator, fake_rollout
from oxrl.types import Row

CALL = f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': '1'}})}</tool_call>"
CHAT = [oxrl.Message("user", "2 + 2?")]
FEW = oxrl.GenerationConfig(max_new_tokens=2)
LONG = oxrl.GenerationConfig(max_new_tokens=200)
LP, REF = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
ROWS = [Row("a", [1, 2, 3], [False, True, True])]
CALLS = oxrl.extract_tool_calls(CALL)


class Setting:
    """What the calls below need; a model is loaded once."""

    def __init__(self):
        self.model, self.tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
        self.both = self.model, self.tokenizer

    @property
    def pairs(self):
        return Pairs(*[torch.tensor([-1.0])] * 6)

    @property
    def view(self):
        return policy.Policy(LP, LP, torch.ones(2), torch.ones(2, dtype=torch.bool), torch.zeros(2).long(), 1)

    @property
    def groups(self):
        scored = [Row(f"r{n}", [1, 2], [False, True], scalars={"reward": float(n)}) for n in range(2)]
        return [tuple(scored)]

    def scripted(self, *texts):
        return ScriptedGenerator(self.tokenizer, texts)

    def episode(self, **points):
        return oxrl.create_multiturn_rollout(
            *self.both, CHAT, LONG, tools=[oxrl.calculator], generator=self.scripted(CALL, "1"), **points
        )

    def trained(self, **points):
        state = oxrl.create_training_state(*self.both, ref_model=frozen_copy(self.model))
        given = {
            "prompt_loader": lambda _: ["a"],
            "reward_fn": lambda rollout: float(rollout.index),
            "logger": lambda step, metrics: None,
        }
        grpo = oxrl.create_algorithm_config("grpo")
        return oxrl.train(
            initial_state=state,
            num_iterations=1,
            gen_config=FEW,
            algorithm_config=grpo,
            n_samples_per_prompt=2,
            **{**given, **points},
        )


POINTS = {
    "inference": {
        "model_loader": [(load_hf_model, lambda w, **p: oxrl.load_model("tiny", **p))],
        "tokenizer_loader": [(load_hf_tokenizer, lambda w, **p: oxrl.load_tokenizer("tiny", **p))],
        "generator": [
            (
                lambda *args: [oxrl.Generation((5,), (-1.0,), "stop")],
                lambda w, **p: oxrl.generate(*w.both, "a", FEW, **p),
            ),
            (
                lambda *args: [oxrl.Generation((5,), (-1.0,), "stop")],
                lambda w, **p: oxrl.create_rollout(*w.both, "a", FEW, **p),
            ),
        ],
        "logprob_extractor": [(sampled_logprobs, lambda w, **p: oxrl.generate_with_logprobs(*w.both, "a", FEW, **p))],
        "template_fn": [(tokenizer_template, lambda w, **p: oxrl.apply_chat_template(w.tokenizer, CHAT, **p))],
        "tool_parser": [
            (oxrl.parse_xml_tools, lambda w, **p: oxrl.extract_tool_calls(CALL, **p)),
            (
                oxrl.parse_xml_tools,
                lambda w, **p: oxrl.generate_conversation_turn(*w.both, CHAT, LONG, generator=w.scripted(CALL), **p),
            ),
        ],
    },
    "rewards": {
        "reward_fn": [
            (lambda rollout: 1.0, lambda w, **p: oxrl.compute_scalar_reward(fake_rollout("a"), **p)),
            (lambda rollout: 1.0, lambda w, **p: oxrl.compute_batch_rewards([fake_rollout("a")], **p)),
        ],
        "aggregator": [(min, lambda w, **p: oxrl.aggregate_vector_rewards([1.0, 2.0], **p))],
        "shaping_fn": [(lambda reward: 2 * reward, lambda w, **p: oxrl.apply_reward_shaping([1.0], **p))],
        "normalizer": [(list, lambda w, **p: oxrl.normalize_rewards([1.0, 2.0], **p))],
        "scorer": [
            (
                lambda model, rows: [0.5] * len(rows),
                lambda w, **p: oxrl.compute_reward_model_score(RewardModel(w.model), fake_rollout("a"), **p),
            )
        ],
    },
    "kl divergence": {
        "kl_fn": [
            (kl.k1, lambda w, **p: oxrl.compute_forward_kl(LP, REF, **p)),
            (kl.k1, lambda w, **p: oxrl.compute_reverse_kl(LP, REF, **p)),
            (kl.k1, lambda w, **p: oxrl.compute_per_token_kl(LP, REF, **p)),
            (kl.k1, lambda w, **p: oxrl.compute_batch_kl([LP], [REF], **p)),
            (kl.k1, lambda w, **p: oxrl.create_rollout(*w.both, "a", FEW, ref_model=w.model, **p)),
        ],
        "ref_model_fn": [(frozen_copy, lambda w, **p: oxrl.create_reference_model(w.model, **p))],
        "update_fn": [(keep_reference, lambda w, **p: oxrl.update_reference_model(w.model, w.model, **p))],
        "logprob_extractor": [(token_logprobs_of, lambda w, **p: oxrl.get_reference_logprobs(w.model, ROWS, **p))],
    },
    "rollouts": {
        "reward_fn": [
            (lambda rollout: 1.0, lambda w, **p: oxrl.create_rollout(*w.both, "a", FEW, **p)),
            (lambda rollout: 1.0, lambda w, **p: oxrl.create_batch_rollouts(*w.both, ["a"], FEW, **p)),
            (lambda rollout: 1.0, lambda w, **p: w.episode(**p)),
        ],
        "tool_parser": [(oxrl.parse_xml_tools, lambda w, **p: w.episode(**p))],
        "tool_executor": [
            (lambda calls, tools: ["1"] * len(calls), lambda w, **p: w.episode(**p)),
            (lambda calls, tools: ["1"] * len(calls), lambda w, **p: oxrl.execute_tools(CALLS, **p)),
            (lambda calls, tools: ["1"] * len(calls), lambda w, **p: oxrl.execute_and_track_tools(CALLS, **p)),
        ],
        "tool_tracker": [
            (count_tool_calls, lambda w, **p: w.episode(**p)),
            (count_tool_calls, lambda w, **p: oxrl.track_tool_calls([], **p)),
            (count_tool_calls, lambda w, **p: oxrl.execute_and_track_tools(CALLS, [oxrl.calculator], **p)),
        ],
        "stop_condition": [(never, lambda w, **p: w.episode(**p))],
    },
    "algorithms": {
        "advantage_fn": [(zscore, lambda w, **p: oxrl.compute_grpo_advantages([torch.tensor([0.0, 1.0])], **p))],
        "loss_fn": [
            (policy.grpo, lambda w, **p: oxrl.compute_grpo_loss(w.view, torch.ones(1), **p)),
            (policy.clipped, lambda w, **p: oxrl.compute_ppo_loss(w.view, **p)),
            (preference.dapo_pairs, lambda w, **p: oxrl.compute_dapo_loss(w.pairs, **p)),
        ],
        "pair_selector": [(best_and_worst, lambda w, **p: oxrl.compute_dapo_pairs(w.groups, **p))],
        "value_fn": [(torch.zeros_like, lambda w, **p: oxrl.compute_ppo_advantages(torch.ones(2), **p))],
    },
    "training loop": {
        "prompt_loader": [(lambda iteration: ["a"], lambda w, **p: w.trained(**p))],
        "optimizer_step_fn": [(step_optimizer, lambda w, **p: w.trained(**p))],
        "ref_model_update_fn": [(keep_reference, lambda w, **p: w.trained(**p))],
        "checkpoint_fn": [(lambda state: None, lambda w, **p: w.trained(**p))],
        "eval_fn": [(lambda state: {"eval": 1.0}, lambda w, **p: w.trained(**p))],
        "logger": [(lambda step, metrics: None, lambda w, **p: w.trained(**p))],
    },
}
CASES = [
    pytest.param(point, function, call, id=f"{category}-{point}-{number}")
    for category, points in POINTS.items()
    for point, cases in points.items()
    for number, (function, call) in enumerate(cases)
]


@pytest.fixture(scope="module")
def setting():
    return Setting()


@pytest.mark.parametrize(("point", "function", "call"), CASES)
def test_the_function_that_is_passed_is_called(setting, point, function, call):
    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    call(setting, **{point: spy})
    assert calls


def test_the_table_covers_every_category():
    assert POINTS.keys() == oxrl.primitives.CATEGORIES.keys()
