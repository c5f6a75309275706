"""Algorithms by name: names, parameters, custom losses, and their descriptions."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.algorithms.describe import document, explain
from oxrl.algorithms.parameters import PARAMETERS, parameter_of
from oxrl.cli import app
from oxrl.config import ConfigError, check_config
from oxrl.data.render import Renderer
from oxrl.models.load import load_tokenizer
from oxrl.types import Batch, Outputs, Row, Sample
from tests.rows import write_jsonl

REQUIRED = """
    sft cpt kd rm rft dpo ipo orpo simpo cpo hinge cdpo robust_dpo exo nca sppo apo_zero apo_down aot bco dpop rdpo odpo
    discopop caldpo wpo sampo betadpo alphapo drdpo chipo focalpo gpo hdpo fdpo dposhift cposimpo tdpo kto grpo sgrpo
    dr_grpo dapo gspo cispo gmpo rloo reinforce reinforce_pp ppo online_dpo spin opd dapo_pairs remax rlhf rlaif max_rl
    minordpo bpo c2dpo spo alpha_dpo dpnll
""".split()


@pytest.mark.parametrize("name", REQUIRED)
def test_the_name_is_in_the_table(name):
    assert algorithm(name).name == name


@pytest.mark.parametrize("name", ["OnlineDPO", "online-dpo", "ONLINE_DPO"])
def test_case_and_dashes_do_not_matter(name):
    assert algorithm(name).name == "online_dpo"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("dpoo", {}, "did you mean dpo?"),
        ("dpo", {"betta": 0.1}, "did you mean beta?"),
        ("dpo", {"momentum": 0.1}, "it takes: beta"),
        ("dpo", {"beta": "high"}, "like its default 0.1"),
        ("aot", {"paired": 1}, "like its default True"),
        ("grpo", {"kl_estimator": "k9", "kl_coef": 0.1}, "k1, k2, k3"),
        ("grpo", {"kl_estimator": "k9"}, "k1, k2, k3"),
        ("kd", {"divergence": "sideways"}, "forward, reverse"),
        ("fdpo", {"divergence": "forward"}, "reverse_kl, forward_kl, js, alpha"),
        ("gpo", {"function": "sine"}, "logistic, hinge"),
        ("grpo", {"correction": "full"}, "none, truncated, masked, sequence"),
        ("reinforce", {"baseline": "other"}, "step, group, none"),
        ("tdpo", {"version": 3}, "one of 1, 2"),
        ("dpo", {"beta": -5.0}, "beta is -5.0; it must be above 0"),
        ("dpo", {"beta": 0}, "above 0"),
        ("dpo", {"beta": math.nan}, "finite"),
        ("ppo", {"value_clip": math.inf}, "finite"),
        ("rft", {"threshold": -math.inf}, "finite"),
        ("robust_dpo", {"label_smoothing": 0.5}, "at least 0 and below 0.5"),
        ("exo", {"label_smoothing": 0.0}, "above 0 and below 0.5"),
        ("grpo", {"clip_low": -0.1}, "at least 0"),
        ("grpo", {"dual_clip": 1.0}, "above 1"),
        ("grpo", {"dual_clip": "wide"}, "like its default None"),
        ("ppo", {"gamma": 1.1}, "0 to 1"),
        ("ppo", {"lam": -0.1}, "0 to 1"),
        ("reinforce_pp", {"gamma": 1.01}, "0 to 1"),
        ("kd", {"temperature": 0.0}, "above 0"),
        ("kd", {"gjs_beta": 1.0}, "above 0 and below 1"),
        ("kto", {"desirable_weight": -1.0}, "at least 0"),
        ("dr_grpo", {"max_length": 0}, "at least 1"),
        ("dr_grpo", {"max_length": 10.5}, "like its default 1024"),
        ("nowhere.py:loss", {}, f"no file {Path.cwd()}/nowhere.py"),
        ("json:no_such_function", {}, "cannot be imported"),
        ("json:dumps", {}, "annotate its first argument"),
    ],
)
def test_an_invalid_name_or_value_is_an_error_with_what_is_allowed(name, parameters, message):
    with pytest.raises(ValueError) as caught:
        algorithm(name, **parameters)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_parameter_has_its_line_and_its_default_is_within_the_range(name):
    card, printed = explain(name), str(explain(name))
    for parameter, declared in ALGORITHMS[name].schema().items():
        text = parameter_of(name, parameter)
        assert text is not None, f"{parameter} is not in PARAMETERS"
        assert declared.default is None or text.allowed.holds(declared.default)
        assert all(text[field].strip() for field in (0, 2, 3)), f"{parameter} has an empty text"
        for line in (text.meaning, text.typical, text.change):
            assert line in printed
            assert line in card.parameter_table()
    assert not re.search(r"`[A-Z_]{4,}`", printed), "the name of a constant explains nothing"


def test_every_text_belongs_to_a_parameter():
    known = {f"{name}.{each}" for name, recipe in ALGORITHMS.items() for each in recipe.schema()}
    overridden = {key for key in PARAMETERS if "." in key}
    used = known - overridden
    assert all(key in known if "." in key else any(k.endswith(f".{key}") for k in used) for key in PARAMETERS)


def test_a_config_with_a_parameter_out_of_its_range_names_the_range():
    raw = {"model": {"name": "tiny"}, "data": {"train_files_path": "x"}}
    with pytest.raises(ConfigError, match="simpo: beta is -1; it must be above 0"):
        check_config({**raw, "train": {"alg_name": "simpo", "alg_params": {"beta": -1}}})


def test_a_value_within_its_range_is_kept():
    assert algorithm("simpo", gamma=5.0).parameters["gamma"] == 5.0
    assert algorithm("dpo", beta=1).parameters["beta"] == 1
    assert algorithm("grpo", dual_clip=3.0).parameters["dual_clip"] == 3.0
    assert algorithm("grpo", dual_clip=None).parameters["dual_clip"] is None
    assert algorithm("alphapo", alpha=-0.5).parameters["alpha"] == -0.5


def pair_batch(**scalars):
    from oxrl.data.pack import collate

    streams = {"ref_logprob": np.zeros(3, np.float32)}
    rows = tuple(Row(side, [1, 2, 3], [False, True, True], streams=streams, scalars=scalars) for side in "ab")
    return collate([rows])


def value_of(built, batch: Batch, logprob: list[float]) -> float:
    return float(built.loss(Outputs(torch.tensor(logprob)), batch).terms["preference"].total)


def test_parameters_reach_the_loss():
    logprob = [0.0, -1.0, -1.0, 0.0, -2.0, -2.0]  # chosen -2, rejected -4: a margin of 2
    for beta in (0.1, 0.5):
        expected = np.log1p(np.exp(-beta * 2))
        assert value_of(algorithm("dpo", beta=beta), pair_batch(), logprob) == pytest.approx(expected, rel=1e-5)


@pytest.mark.trains
def test_a_custom_loss_works_where_a_name_works(tmp_path):
    file = tmp_path / "my_losses.py"
    file.write_text(
        "from oxrl.algorithms.policy import Policy\nfrom oxrl.algorithms.preference import Pairs\n\n"
        "def shifted(pairs: Pairs, *, shift: float = 1.0, beta: float = 0.0):\n"
        "    return pairs.rejected - pairs.chosen + shift\n\n"
        "def plain(policy: Policy):\n    return -policy.advantage * policy.logprob\n"
    )
    built = algorithm(f"{file}:shifted", shift=5.0)
    assert value_of(built, pair_batch(), [0.0, -1.0, -1.0, 0.0, -2.0, -2.0]) == pytest.approx(-2 + 5)
    with pytest.raises(ValueError, match="did you mean shift"):
        algorithm(f"{file}:shifted", shitf=1.0)
    with pytest.raises(ValueError, match="finite"):
        algorithm(f"{file}:shifted", shift=math.nan)
    assert algorithm(f"{file}:shifted", beta=-2.0).parameters["beta"] == -2.0  # PARAMETERS does not apply
    with pytest.raises(ValueError, match="at least 0"):
        algorithm(f"{file}:plain", kl_coef=-1.0)
    assert algorithm(f"{file}:plain").needs == ("sampler",)
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(8)]
    data = write_jsonl(tmp_path / "pairs.jsonl", rows)
    arguments = ["train", "--model", "tiny", "--data", str(data), "--output", str(tmp_path / "out"), "--algorithm"]
    done = CliRunner().invoke(app, [*arguments, f"{file}:shifted", "--set", "train.alg_params={shift: 2.0}"])
    assert done.exit_code == 0, done.output


def test_a_custom_loss_over_tokens_is_summed_over_the_trained_tokens():
    def focal(tokens, *, gamma=2.0):  # the view is that of its argument's name
        return -((1 - tokens.logprob.exp()) ** gamma) * tokens.logprob + 1

    logprob = np.array([0.0, -1.0, -0.5, 0.0, -2.0, -3.0])
    trained = np.flatnonzero(pair_batch().mask.numpy())
    p = np.exp(logprob[trained])
    expected = (-((1 - p) ** 3.0) * np.log(p) + 1).sum()
    built = algorithm(focal, gamma=3.0)
    total, unit = built.loss(Outputs(torch.from_numpy(logprob)), pair_batch()).terms["supervised"]
    assert (float(total), unit) == (pytest.approx(expected, rel=1e-12), "token")
    text = built.assemble(Sample("t", text="plain text"), Renderer(load_tokenizer("tiny")))
    assert text[0][0].mask.any(), "plain text can be trained on, too"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_description_with_an_example(name):
    card = explain(name)
    assert card.explanation
    assert f"alg_name: {name}" in card.example
    text = str(card)
    assert all(parameter in text for parameter in card.parameters)


def test_the_command_line_lists_and_describes_algorithms():
    run = CliRunner().invoke
    listed = run(app, ["algorithms"])
    assert all(name in listed.output for name in ALGORITHMS)
    listing = json.loads(run(app, ["algorithms", "--json"]).output)
    assert listing.keys() == ALGORITHMS.keys()
    assert [listing[name]["family"] for name in ("cpt", "dpo", "kto", "spin")] == [
        "imitation", "pairs", "judged replies", "own samples",
    ]  # fmt: skip
    assert len({each["summary"] for each in listing.values()}) == len(listing), "no two have the same summary"
    card = json.loads(run(app, ["algorithms", "DPO", "--json"]).output)
    assert card["parameters"] == {"beta": 0.1}
    assert card["allowed"] == {"beta": "above 0"}
    assert "2305.18290" in card["explanation"]
    assert "beta = 0.1 (above 0)" in run(app, ["algorithms", "dpo"]).output
    assert "a judge for its own samples" in run(app, ["algorithms", "rlaif"]).output
    wrong = run(app, ["algorithms", "dppo"])
    assert wrong.exit_code == 2
    assert "did you mean" in wrong.output


@pytest.mark.trains
def test_a_run_switches_algorithms_at_the_configured_step(tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(8)]
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {name: tiny}\n"
        f"data: {{train_files_path: {write_jsonl(tmp_path / 'pairs.jsonl', rows)}}}\n"
        "train:\n  alg_name: simpo\n  train_steps_per_epoch: 4\n  train_batch_size_per_gpu: 2\n"
        "  alg_schedule:\n    - {step: 3, alg_name: dpo, alg_params: {beta: 0.3}}\n"
    )
    done = CliRunner().invoke(app, ["train", str(config), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "algorithm_switched" in line] == [3]


def test_the_documentation_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    assert page.read_text() == document(), "run: python -m oxrl.algorithms.describe > docs/algorithms.md"


def policy_batch(sampler: float) -> Batch:
    from oxrl.data.pack import collate

    streams = {"advantage": [0, 3.0], "policy_logprob": [0, -1.0], "sampler_logprob": [0, sampler]}
    streams |= {"value": [0, 0], "return": [0, 0]}
    row = Row("a", [1, 2], [False, True], streams={name: np.array(s, np.float32) for name, s in streams.items()})
    return collate([(row,)])


@pytest.mark.parametrize(
    ("correction", "sampler", "expected"),
    [
        ("none", -1.0, -3.0),
        ("truncated", -1.0, -3.0),  # no gap, no weight
        ("truncated", -1.0 - np.log(4), -6.0),  # four times as likely for the trainer, capped at 2
        ("masked", -1.0 - np.log(4), -12.0),
        ("masked", -1.0 - np.log(40), 0.0),  # too far off: dropped
        ("sequence", -1.0 + np.log(4), -0.75),
    ],
)
def test_the_gap_between_sampler_and_trainer_is_corrected(correction, sampler, expected):
    for name in ("grpo", "ppo"):
        built = algorithm(name, correction=correction)
        losses = built.loss(Outputs(torch.tensor([0.0, -1.0]), value=torch.zeros(2)), policy_batch(sampler))
        assert float(losses.terms["policy"].total) == pytest.approx(expected, rel=1e-5)


def test_every_policy_gradient_can_be_corrected():
    policy_gradients = {name for name in ALGORITHMS if "entropy_coef" in algorithm(name).parameters}
    assert {"grpo", "sgrpo", "ppo", "rloo", "gspo", "cispo", "dapo", "dr_grpo", "reinforce"} <= policy_gradients
    for name in policy_gradients:
        assert algorithm(name, correction="masked").parameters["correction"] == "masked"


def test_the_weight_of_the_nll_can_be_set():
    logprob = [0.0, -1.0, -1.0, 0.0, -2.0, -2.0]
    for weight in (1.0, 0.25):
        built = algorithm("cpo", nll_weight=weight)
        terms = built.loss(Outputs(torch.tensor(logprob)), pair_batch()).terms
        assert float(terms["nll_chosen"].total) == pytest.approx(2 * weight)
        assert terms["nll_chosen"].unit == "chosen_token"
    assert algorithm("orpo").parameters["nll_weight"] == 1.0
