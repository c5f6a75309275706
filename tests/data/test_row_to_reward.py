"""From a raw row to trained tokens and rewards: every dataset is prepared, rendered for a chat model, and graded.

The reference answer earns the full reward and a wrong one nothing, by the reward that the dataset names.
"""

from functools import partial
from typing import Any

import anyio
import pytest

from oxrl.algorithms import algorithm
from oxrl.data.assemble import assemble
from oxrl.data.prepare import DATASETS, find_dataset, prepare_samples
from oxrl.data.render import Renderer
from oxrl.models.load import load_tokenizer
from oxrl.rewards import BUILDERS, check_samples, grade, reward
from oxrl.rewards.trial import synthetic_rollout, wrong_answers
from oxrl.types import Item, Sample
from tests.data.cases import CASES, Case, case_name
from tests.waiting import HANG

ASSISTANT_HEADER = "<|im_start|>assistant\n"
END_OF_TURN = "<|im_end|>"
ANSWER_FORMATS = {
    "gsm8k_reward_func": "We work it out.\n#### {}",
    "math_reward_func": "We work it out: $\\boxed{{{}}}$.",
    "reasoning_reward_func": "<think>\nWe work it out.\n</think>\n<answer>\n\\boxed{{{}}}\n</answer>",
    "mcqa_reward_func": "We work it out.\nAnswer: {}",
    "code_reward_func": "Here it is:\n```python\n{}\n```",
}
CONCURRENT = 8  # so that no program waits for many others
GRADED = [case for case in CASES if DATASETS[case.dataset].reward in ANSWER_FORMATS]


def samples_of(case: Case) -> list[Sample]:
    return [each for split in prepare_samples(find_dataset(case.dataset), case.files)[0].values() for each in split]


def trained_text(item: Item, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.tokens[row.mask]).strip() for row in item]


def last_text(messages: Any) -> str:
    content = messages[-1].content  # of parts, the text behind the last medium
    return (content if isinstance(content, str) else content[-1]["text"]).strip() + END_OF_TURN


def test_every_row_is_rendered_for_its_algorithm(case, smollm2):
    samples = samples_of(case)
    kinds = {medium.kind for sample in samples for medium in sample.media}
    tokenizer = load_tokenizer({"image": "tiny-vlm", "audio": "tiny-audio"}[kinds.pop()]) if kinds else smollm2[1]
    render = Renderer(tokenizer)
    for sample in samples:
        if sample.chosen:
            (item,) = assemble([sample], algorithm("dpo"), render).items
            chosen, rejected = item
            begin = int(chosen.mask.argmax())
            assert (
                begin == rejected.mask.argmax() and chosen.tokens[:begin].tolist() == rejected.tokens[:begin].tolist()
            )
            assert tokenizer.decode(chosen.tokens[:begin]).endswith(ASSISTANT_HEADER)
            assert trained_text(item, tokenizer) == [last_text(sample.chosen), last_text(sample.rejected)]
            assert last_text(sample.chosen) != last_text(sample.rejected)
        elif sample.messages[-1].role == "assistant":
            (item,) = assemble([sample], algorithm("sft"), render).items
            (text,) = trained_text(item, tokenizer)
            assert text.endswith(last_text(sample.messages))
            assert text.count(END_OF_TURN) == sum(message.role == "assistant" for message in sample.messages)
        else:
            prompt = tokenizer.decode(render.prompt(sample.messages, media=sample.media))
            assert prompt.endswith(last_text(sample.messages) + "\n" + ASSISTANT_HEADER)


def graded(name: str, answers: list[tuple[Sample, str]], **parameters: Any) -> list[float | None]:
    if name == "code_reward_func":
        parameters["timeout"] = HANG
    without_limit = partial(grade, time_limit=HANG)
    earned: list[float | None] = []
    for start in range(0, len(answers), CONCURRENT):
        some = [synthetic_rollout(*answer) for answer in answers[start : start + CONCURRENT]]
        rollouts = anyio.run(without_limit, some, reward(name, **parameters))
        assert [rollout.error for rollout in rollouts if rollout.error] == []
        earned += [rollout.reward for rollout in rollouts]
    return earned


@pytest.mark.parametrize("case", GRADED, indirect=True, ids=case_name)
def test_the_reference_answer_earns_the_full_reward_and_a_wrong_one_nothing(case):
    samples, name = samples_of(case), str(DATASETS[case.dataset].reward)
    check_samples(reward(name), samples)
    completion_of = ANSWER_FORMATS[name].format
    right = [str(sample.answer or sample.metadata["solution"]) for sample in samples]
    wrong = [wrong_of(sample, answer) for sample, answer in zip(samples, right, strict=True)]
    for answers, expected in ((right, 1.0), (wrong, 0.0)):
        completions = [completion_of(answer) for answer in answers]
        earned = graded(name, list(zip(samples, completions, strict=True)))
        assert [sample for sample, each in zip(samples, earned, strict=True) if each != expected] == []


def wrong_of(sample: Sample, right: str) -> str:
    if sample.answer is None:
        return f"{right}\n\ndef {sample.metadata['entry_point']}(*_, **__):\n    return 'no'"
    return wrong_answers(right, ["x^2 + 1", r"\frac{7}{9}"])[0]


WORKED = {  # the worked solution of a row
    "gsm8k": lambda metadata: metadata["solution"],
    "math": lambda metadata: metadata["solution"],
    "math_hard": lambda metadata: metadata["solution"],
    "svamp": lambda metadata: f"#### {eval(metadata['Equation']):.12g}",
}


@pytest.mark.parametrize("case", [case for case in CASES if case.dataset in WORKED], indirect=True, ids=case_name)
def test_the_answer_of_a_row_is_the_result_of_its_worked_solution(case):
    samples = samples_of(case)
    worked = [(sample, WORKED[case.dataset](sample.metadata)) for sample in samples]
    strictly = graded(str(DATASETS[case.dataset].reward), worked, strict=True)
    assert [each for each, earned in zip(worked, strictly, strict=True) if earned != 1.0] == []


def test_every_dataset_that_names_a_reward_is_graded_here():
    """Except for model-based rewards, which have no full score."""
    named = {name for name, dataset in DATASETS.items() if dataset.reward and dataset.reward not in BUILDERS}
    assert named == {case.dataset for case in GRADED}
