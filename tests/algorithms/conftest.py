"""Rows for every kind of algorithm."""

import random

import pytest

from oxrl.algorithms import algorithm
from oxrl.algorithms.assemble import (
    conversation_items,
    group_against_greedy_items,
    group_items,
    labelled_items,
    pair_items,
    text_items,
)
from oxrl.data.assemble import assemble
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.models.load import load_tokenizer


def raw_rows(kind, n, seed):
    """Good responses start with "yes", bad ones with "no"; the rest is noise of unequal length."""
    rng = random.Random(seed)

    def response(word):
        return word + " " + "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 9)))

    rows = []
    for _ in range(n):
        prompt = "".join(rng.choice("abcdef") for _ in range(rng.randint(2, 12))) + "?"
        good, bad = response("yes"), response("no")
        swap, group = rng.random() < 0.5, [good, bad, response("no"), response("yes")]
        rows.append(
            {
                conversation_items: {"prompt": prompt, "response": good},
                text_items: {"text": f"{prompt} {good}"},
                pair_items: {"prompt": prompt, "chosen": good, "rejected": bad, "score_chosen": 2, "score_rejected": 1},
                labelled_items: {"prompt": prompt, "completion": bad if swap else good, "label": not swap},
                group_items: {"prompt": prompt, "responses": group, "rewards": [1.0, 0.0, 0.0, 1.0]},
                group_against_greedy_items: {
                    "prompt": prompt,
                    "responses": group,
                    "rewards": [1.0, 0.0, 0.0, 1.0],
                    "greedy_reward": 0.5,
                },
            }[kind]
        )
    return rows


@pytest.fixture(scope="module")
def rows_of():
    tokenizer = load_tokenizer("tiny")
    cache = {}

    def make(name, n, seed):
        kind = algorithm(name).assemble if name != "rft" else "rft"  # its rows are groups, some of them left out
        if (kind, n, seed) not in cache:
            samples = load_samples(raw_rows(group_items if kind == "rft" else kind, n, seed)).samples
            cache[kind, n, seed] = assemble(samples, algorithm(name), Renderer(tokenizer)).items
        return cache[kind, n, seed]

    return make
