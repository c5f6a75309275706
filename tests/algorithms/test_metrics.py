"""Metrics that losses report, worked out by hand on two pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.algorithms.recipes import bco_credit
from oxrl.data.pack import collate, count_units
from oxrl.types import Outputs, Row, merge_metrics

POLICY = {"a+": [-1.0, -1.0], "a-": [-2.0, -2.0], "b+": [-3.0, -2.0], "b-": [-1.0, -0.5]}
REFERENCE = {"a+": [-2.0, -1.0], "a-": [-1.0, -1.0], "b+": [-1.0, -1.0], "b-": [-1.0, -1.0]}
# log p: -2, -4; -5, -1.5. h = log p - log ref: 1, -2; -3, 0.5.


def _items(**scalars):
    def row(name):
        return Row(
            name,
            [1, 2, 3],
            [False, True, True],
            streams={
                "ref_logprob": np.array([0.0, *REFERENCE[name]], np.float32),
                "policy_logprob": np.array([0.0, *POLICY[name]], np.float32),
            },
            scalars=scalars,
        )

    return [(row("a+"), row("a-")), (row("b+"), row("b-"))]


def _metrics(built, items, scores=None):
    """The metrics of a step in two micro-batches."""
    parts = []
    for number, item in enumerate(items):
        batch = collate([item])
        logprob = torch.tensor([x for row in item for x in (9.0, *POLICY[row.id])])
        score = None if scores is None else torch.tensor(scores[2 * number : 2 * number + 2])
        parts.append(built.loss(Outputs(logprob, score=score), batch).metrics)
    return merge_metrics(parts, count_units(items))


def test_a_preference_loss_reports_rewards_with_its_beta_and_summed_log_probs():
    assert _metrics(algorithm("dpo", beta=0.5), _items()) == pytest.approx(
        {
            "accuracy": 0.5,
            "margin": 0.5 * (3.0 - 3.5) / 2,
            "chosen_reward": 0.5 * (1.0 - 3.0) / 2,
            "rejected_reward": 0.5 * (-2.0 + 0.5) / 2,
            "chosen_logprob": -3.5,
            "rejected_logprob": -2.75,
        }
    )


def test_a_coupled_loss_reports_the_same():
    built = algorithm("bco", beta=0.5)
    metrics = _metrics(built, built.credit(_items(), {}))
    metrics.pop("objective")
    assert metrics == pytest.approx(_metrics(algorithm("dpo", beta=0.5), _items()))


def test_without_a_reference_there_are_no_rewards_and_the_margin_is_of_log_probs():
    assert _metrics(algorithm("simpo"), _items()) == pytest.approx(
        {"accuracy": 0.5, "margin": -0.75, "chosen_logprob": -3.5, "rejected_logprob": -2.75}
    )


def test_a_reward_model_reports_its_scores():
    assert _metrics(algorithm("rm"), _items(margin=0.0), scores=[2.0, 1.0, 0.5, -1.0]) == pytest.approx(
        {"accuracy": 1.0, "margin": 1.25, "chosen_reward": 1.25, "rejected_reward": 0.0}
    )


def test_labelled_responses_have_a_mean_reward_per_label():
    rows = [row for item in _items() for row in item]
    labelled = [(replace(row, scalars={"label": float(row.id in ("a+", "a-", "b+"))}),) for row in rows]
    metrics = _metrics(algorithm("bco_unpaired", beta=0.5), bco_credit(labelled, {}))
    assert metrics["chosen_reward"] == pytest.approx(0.5 * (1.0 - 2.0 - 3.0) / 3)
    assert metrics["rejected_reward"] == pytest.approx(0.5 * 0.5)
    alone = _metrics(algorithm("bco_unpaired", beta=0.5), bco_credit(labelled[:3], {}))
    assert "rejected_reward" not in alone, "no response of the step is labelled bad"
