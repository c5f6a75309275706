"""Datasets by name: rows in each raw schema become samples, splits without overlap, and a correct card.

Five rows per dataset are in `raw/`. With OXRL_TEST_DATA set to a folder of real copies (`cases.REAL` names them), the
first 200 rows of each run through the same tests. Rewards of the samples are tested in `test_row_to_reward.py`.
"""

import gzip
import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import ConfigError, check_config
from oxrl.data.formats import BadRow
from oxrl.data.prepare import DATASETS, find_dataset, prepare, prepare_samples, read_card, split_file
from oxrl.data.prepare.mbpp import function_under_test
from oxrl.data.sources import load_samples, read_rows
from oxrl.rewards.gym import reasoning_gym_score
from oxrl.run.prepare import resolve
from oxrl.types import Generation, Message, Rollout, Sample, Turn
from tests.data.cases import CASES, RAW, REAL, case_name, own_rows


def samples_of(name: str, **options: Any) -> dict[str, list[Sample]]:
    return prepare_samples(find_dataset(name), own_rows(name), **options)[0]


def all_of(name: str) -> list[Sample]:
    return [sample for samples in samples_of(name, instruction="").values() for sample in samples]


def prompt_of(sample: Sample) -> str:
    replied = sample.messages[-1].role == "assistant"
    texts = [str(message.content) for message in sample.messages[: -1 if replied else None]]
    return "".join("".join(texts).lower().split())


def test_a_prepared_dataset_is_read_back_as_the_samples_it_was_made_of(case, tmp_path):
    samples, _ = prepare_samples(find_dataset(case.dataset), case.files)
    folder = prepare(case.dataset, files=case.files, output=tmp_path / "out")
    for split, expected in samples.items():
        read = load_samples(folder / f"{split}.jsonl")
        assert [sample.id for sample in read.samples] == [f"{split}.jsonl:{i}" for i in range(1, len(expected) + 1)]
        assert [(s.messages, s.answer, s.chosen, s.rejected, s.metadata) for s in read.samples] == [
            (s.messages, s.answer, s.chosen, s.rejected, s.metadata) for s in expected
        ]
    assert sum(map(len, samples.values())) >= (100 if case.real else 2)


def test_the_card_describes_the_files(case, tmp_path):
    card = read_card(prepare(case.dataset, files=case.files, output=tmp_path / "out"))
    for split, entry in card["splits"].items():
        content = (tmp_path / "out" / f"{split}.jsonl").read_bytes()
        assert entry == {
            "file": f"{split}.jsonl", "rows": len(content.splitlines()), "sha256": sha256(content).hexdigest()
        }  # fmt: skip
    assert card["name"] == case.dataset and card["licence"]
    assert card["verified"] == ("on real rows" if case.dataset in REAL else "schema only")
    assert [entry["name"] for entry in card["source"]["files"]] == [
        Path(file.rpartition("=")[2]).name for file in case.files
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != "media") == sorted(
        ["card.json", *(f"{split}.jsonl" for split in card["splits"])]
    )


def test_no_two_splits_share_a_prompt(case):
    splits = list(prepare_samples(find_dataset(case.dataset), case.files)[0].values())
    seen: set[str] = set()
    for samples in splits:
        prompts = {(prompt_of(sample), sample.media) for sample in samples}
        assert not prompts & seen
        seen |= prompts


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_preparing_twice_makes_the_same_bytes(case, tmp_path):
    once = prepare(case.dataset, files=case.files, output=tmp_path / "out")
    first = files_of(once)
    again = prepare(case.dataset, files=case.files, output=tmp_path / "out")
    assert files_of(again) == first
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "rows", ".out.lock"}  # nothing is left over


def test_every_dataset_verified_on_real_rows_has_a_real_case():
    assert {name for name, dataset in DATASETS.items() if dataset.seen_real_rows} == set(REAL)


def test_gsm8k_answers_are_plain_numbers():
    samples = samples_of("gsm8k", instruction="")
    assert [sample.answer for sample in samples["train"]] == ["72", "1234", "-5", "15"]
    assert [sample.answer for sample in samples["test"]] == ["32", "12.5", "82", "180", "12"]
    assert samples["train"][0].metadata["solution"] == "There are 6*12=72 rolls.\n#### 72"


def test_gsm8k_solutions_can_be_imitated_too(tmp_path):
    folder = prepare("gsm8k", files=own_rows("gsm8k"), output=tmp_path / "gsm8k")
    read = load_samples(folder / "train.jsonl", columns={"response": "solution"})
    assert read.samples[0].messages[-1] == Message("assistant", "There are 6*12=72 rolls.\n#### 72")


def test_prompts_in_train_and_test_are_removed_from_train_and_counted():
    samples, card = prepare_samples(DATASETS["gsm8k"], own_rows("gsm8k"))
    assert card["overlap_removed"] == {"train": 1}
    assert not any("4 boxes" in str(sample.messages[0].content) for sample in samples["train"])
    assert any("4 boxes" in str(sample.messages[0].content) for sample in samples["test"])


def test_one_split_alone_does_not_claim_to_have_been_compared():
    _, card = prepare_samples(DATASETS["gsm8k"], own_rows("gsm8k")[:1])
    assert "not known" in card["overlap_removed"]


def test_math_answers_are_what_is_in_the_last_box():
    samples, card = prepare_samples(DATASETS["math"], own_rows("math"))
    assert [sample.answer for sample in samples["train"]] == [
        r"\frac{1}{2}", r"2\sqrt{2}", r"\{3, 7\}", r"\begin{pmatrix} \frac{1}{2} \end{pmatrix}", "4"
    ]  # fmt: skip
    assert [entry["reason"] for entry in card["skipped"]] == [r"solution has no \boxed{} with content"]
    assert r"\boxed{}" in str(samples["train"][0].messages[0].content)


def test_math_hard_is_level_five():
    samples, card = prepare_samples(DATASETS["math_hard"], own_rows("math_hard"))
    assert {split: [sample.metadata["level"] for sample in each] for split, each in samples.items()} == {
        "train": ["Level 5"] * 2, "test": ["Level 5"] * 2
    }  # fmt: skip
    assert card["skipped"] == [{"reason": "below level 5", "rows": 6, "first": "math.train.jsonl:1"}]


def test_proofs_are_left_out_of_openr1_math():
    assert sorted(str(sample.answer) for sample in all_of("openr1_math")) == ["(0,1)", "5", "99", r"\frac{7}{2}"]


def test_svamp_is_one_question_and_a_plain_number():
    answers = {str(sample.messages[0].content): sample.answer for sample in all_of("svamp")}
    assert answers["If 24 nuts are shared by 8 squirrels, How many nuts does each get?"] == "3"
    assert answers["Ana has 12 apples and eats 5. How many apples are left?"] == "7"
    assert sorted(map(str, answers.values())) == ["1200", "3", "6.5", "63", "7"]


def test_the_letter_of_gpqa_is_that_of_the_right_choice():
    right = {"Nitrogen", "The photon", "Ohm", "The mitochondrion", "7"}
    samples = all_of("gpqa")
    for sample in samples:
        lines = str(sample.messages[0].content).splitlines()
        assert next(line for line in lines if line.startswith(f"{sample.answer}. "))[3:] in right
    assert len({sample.answer for sample in samples}) > 1  # the right choice is not always at the same position


def passes(program: str, metadata: Any) -> bool:
    names: dict[str, Any] = {}
    try:
        exec(program, names)
        exec(metadata["setup"], names)
        for test in metadata["tests"]:
            exec(test, names)
    except Exception:  # noqa: BLE001 - whatever it is, the program did not pass
        return False
    return True


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dataset in ("mbpp", "humaneval")], indirect=True, ids=case_name
)
def test_no_test_of_code_is_passed_by_a_function_that_is_not_there(case):
    samples = [each for split in prepare_samples(DATASETS[case.dataset], case.files)[0].values() for each in split]
    for sample in samples:
        metadata, name = sample.metadata, sample.metadata["entry_point"]
        assert metadata["tests"] and all(test.startswith("assert ") for test in metadata["tests"])
        assert passes(metadata["solution"], metadata), metadata["task_id"]
        for test in metadata["tests"]:
            absent = f"{metadata['solution']}\ndef {name}(*_, **__): raise NotImplementedError"
            assert not passes(absent, {**metadata, "tests": [test]}), (metadata["task_id"], test)
        assert f"def {name}(" in str(sample.messages[0].content)


def test_mbpp_is_divided_by_task_id():
    samples, card = prepare_samples(DATASETS["mbpp"], own_rows("mbpp"))
    found = {split: [sample.metadata["task_id"] for sample in each] for split, each in samples.items()}
    assert found == {"train": [700, 900], "validation": [520], "test": [20]}
    assert card["skipped"] == [
        {"reason": "task ids 1 to 10 are reserved for few-shot prompts", "rows": 1, "first": "mbpp.jsonl:1"}
    ]


def test_tests_that_need_a_class_or_module_of_the_solution_are_left_out_of_mbpp(tmp_path):
    rows = [
        {"task_id": 700, "text": "Chain.", "code": "class Pair: pass\ndef chain(p): return 1", "test_list": [each]}
        for each in ("assert chain(Pair()) == 1", "assert chain(sys.maxsize) == 1", "assert chain(2) == 1")
    ]
    rows.append({**rows[2], "test_setup_code": "import"})
    (tmp_path / "mbpp.json").write_text(json.dumps(rows))
    samples, card = prepare_samples(DATASETS["mbpp"], [str(tmp_path / "mbpp.json")])
    assert [sample.metadata["tests"] for sample in samples["train"]] == [["assert chain(2) == 1"]]
    assert [entry["reason"][:20] for entry in card["skipped"]] == [
        "test_list or its set", "the tests use Pair, ", "the tests use sys, w"
    ]  # fmt: skip


def test_the_other_file_of_mbpp_is_read_too(tmp_path):
    row = {
        "task_id": 700, "prompt": "Write a function to halve a number.", "code": "def half(x):\n  return x / 2",
        "test_imports": ["import math"], "test_list": ["assert math.isclose(half(1), 0.5)"],
    }  # fmt: skip
    (tmp_path / "sanitized.json").write_text(json.dumps([row]))
    sample = prepare_samples(DATASETS["mbpp"], [str(tmp_path / "sanitized.json")])[0]["train"][0]
    assert sample.metadata["entry_point"] == "half" and sample.metadata["setup"] == "import math"


def test_a_signature_has_the_names_and_defaults_of_the_solution():
    assert function_under_test("def f(a, *, b=1): return a", "assert set(f(2)) == {1}") == ("f", "def f(a, *, b=1):")
    with pytest.raises(BadRow, match="calls no function"):
        function_under_test("def f(): pass", "assert g() == 1")


def test_humaneval_checks_become_assertions_about_the_function():
    by_name = {sample.metadata["entry_point"]: sample.metadata for sample in all_of("humaneval")}
    assert by_name["total"]["tests"] == ["assert total([1, 2]) == 3", "assert total([]) == 0, 'nothing'"]
    assert by_name["is_even"]["tests"] == ["assert is_even(4) is True", "assert is_even(3) is False"]
    assert by_name["decode"]["tests"] == ["assert check(decode) is None"]
    assert "def encode(" in by_name["decode"]["setup"] and "def check(" in by_name["decode"]["setup"]


def test_ultrafeedback_is_prompts_or_pairs():
    prompts, pairs = samples_of("ultrafeedback"), samples_of("ultrafeedback_pairs")
    assert prompts["train"][0].messages == (Message("user", "Say hello in French."),)  # the first is in test as well
    assert not prompts["train"][0].chosen
    assert pairs["train"][0].chosen == (Message("assistant", "Bonjour!"),)
    assert pairs["train"][0].metadata == {"score_chosen": 8.0, "score_rejected": 2.0, "prompt_id": "train1"}
    assert len(pairs["train"]) == 3  # one overlaps, one is a tie


def test_hh_rlhf_is_a_dialogue_and_two_replies():
    sample = samples_of("hh_rlhf")["train"][1]
    assert [message.role for message in sample.messages] == ["user", "assistant", "user"]
    assert sample.chosen == (Message("assistant", "Lima."),)
    assert sample.rejected == (Message("assistant", "Cusco, I think."),)


def test_hh_rlhf_leaves_out_empty_replies_and_dialogues_that_part_earlier(tmp_path):
    prompt = "\n\nHuman: Hi.\n\nAssistant: "
    pairs = [("", "Go away."), ("Hello.", ""), ("Hello.\n\nAssistant: You?", "Go away."), ("Hello.", "Go away.")]
    rows = [{"chosen": prompt + better, "rejected": prompt + worse} for better, worse in pairs]
    (tmp_path / "hh.json").write_text(json.dumps(rows))
    samples, card = prepare_samples(DATASETS["hh_rlhf"], [f"train={tmp_path / 'hh.json'}"])
    assert [sample.chosen[0].content for sample in samples["train"]] == ["Hello."]
    assert {entry["reason"]: entry["rows"] for entry in card["skipped"]} == {
        "a reply is empty": 2, "the dialogues differ in more than their last reply": 1
    }  # fmt: skip


def test_oasst_follows_the_best_replies():
    conversations = {str(sample.messages[0].content): sample for sample in all_of("oasst")}
    assert [message.content for message in conversations["How do I learn to swim?"].messages] == [
        "How do I learn to swim?", "Take lessons.", "And at home?", "Practise breathing."
    ]  # fmt: skip
    assert len(conversations) == 4  # the fifth has no reply


def test_oasst_pairs_are_ranked_and_trees_stay_together():
    samples = samples_of("oasst_pairs")
    pairs = [(str(s.chosen[0].content)[:4], str(s.rejected[0].content)[:4]) for each in samples.values() for s in each]
    assert Counter(pairs) == Counter(
        [("Take", "Watc"), ("Take", "Jump"), ("Watc", "Jump"), ("Prac", "Use "), ("No: ", "It i")]
    )
    trees = [{sample.metadata["message_tree_id"] for sample in each} for each in samples.values()]
    assert len(trees) == 2 and not trees[0] & trees[1]


def test_instructions_and_what_they_are_about_are_one_message():
    alpaca = {str(s.messages[0].content): s.messages[1].content for s in all_of("alpaca")}
    assert alpaca["Correct the sentence.\n\nHe go home."] == "He goes home."
    dolly = {str(s.messages[0].content): s.messages[1].content for s in all_of("dolly")}
    assert dolly["What is a fjord?"] == "A long, narrow arm of the sea between cliffs."
    assert dolly["Who founded the town?\n\nThe town was founded by a miller called Ada in 1512."] == "Ada, a miller."
    seeds = [(str(s.messages[0].content), s.messages[1].content) for s in all_of("self_instruct")]
    assert ("Add the numbers.\n\n4 4", "8") in seeds and len(seeds) == 6


def test_which_prompts_are_held_out_does_not_depend_on_their_order(tmp_path):
    rows = [{"instruction": f"Say {i}.", "output": str(i)} for i in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps(rows[::-1]))
    one, other = (prepare_samples(DATASETS["alpaca"], [str(tmp_path / name)])[0] for name in ("a.json", "b.json"))
    held_out = {str(sample.messages[0].content) for sample in one["test"]}
    assert len(held_out) == 4 and len(one["train"]) == 196
    assert held_out == {str(sample.messages[0].content) for sample in other["test"]}
    assert held_out != {f"Say {i}." for i in range(4)}


def test_an_instruction_is_appended_to_the_question_and_can_be_omitted():
    question = "A baker fills 6 trays with 12 rolls each. How many rolls are there?"
    assert samples_of("gsm8k", instruction="")["train"][0].messages == (Message("user", question),)
    assert samples_of("gsm8k", instruction="Be brief.")["train"][0].messages == (
        Message("user", f"{question}\n\nBe brief."),
    )
    assert "####" in str(samples_of("gsm8k")["train"][0].messages[0].content)


def test_a_copy_may_be_compressed(tmp_path):
    packed = tmp_path / "svamp.jsonl.gz"
    packed.write_bytes(gzip.compress((RAW / "svamp.jsonl").read_bytes()))
    assert prepare_samples(DATASETS["svamp"], [str(packed)])[0] == samples_of("svamp")


def rollout_of(text: str, sample: Sample) -> Rollout:
    return Rollout(sample, (Turn((1,), Generation((2,), (0.0,), "stop", text=text)),))


def test_tasks_of_reasoning_gym_are_datasets_graded_from_their_file(tmp_path):
    folder = prepare("gym:leg_counting", size=30, output=tmp_path / "legs")
    card = read_card(folder)
    assert {split: entry["rows"] for split, entry in card["splits"].items()} == {"train": 30, "test": 3}
    assert card["overlap_removed"] == {} and card["reward"] == "reasoning_gym_score"
    for sample in load_samples(folder / "test.jsonl").samples:
        assert reasoning_gym_score(rollout_of(str(sample.answer), sample)) == 1.0
        assert reasoning_gym_score(rollout_of("no idea", sample)) < 0.1


def test_a_task_that_json_cannot_represent_is_refused(tmp_path):
    with pytest.raises(ValueError, match="create the samples in Python"):
        prepare("gym:arc_agi", size=2, output=tmp_path / "arc")
    with pytest.raises(ValueError, match="no_such_task"):
        prepare("gym:no_such_task", size=2, output=tmp_path / "none")


def test_evaluation_only_datasets_are_refused_for_training(tmp_path):
    for name in ("humaneval", "gpqa"):
        folder = prepare(name, files=own_rows(name), output=tmp_path / name)
        assert sorted(read_card(folder)["splits"]) == ["test"]
        with pytest.raises(ValueError, match="evaluation only"):
            prepare(name, files=own_rows(name), splits=["train"], output=tmp_path / "other")
        with pytest.raises(ConfigError, match="evaluation only"):
            check_config({"model": {"name": "tiny"}, "data": {"dataset": name}})
        config = check_config({"model": {"name": "tiny"}, "data": {"train_files_path": str(folder / "test.jsonl")}})
        with pytest.raises(ValueError, match="evaluation only"):
            resolve(config)


def test_training_on_a_test_split_is_warned_about(tmp_path, caplog):
    folder = prepare("alpaca", files=own_rows("alpaca"), output=tmp_path / "alpaca")
    for split, warned in (("train", False), ("test", True)):
        caplog.clear()
        path = str(folder / f"{split}.jsonl")
        raw = {"model": {"name": "tiny"}, "train": {"alg_name": "sft"}, "data": {"train_files_path": path}}
        resolve(check_config(raw))
        assert ("is the test split of alpaca" in caplog.text) == warned


def test_a_config_names_a_dataset_that_was_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path))
    prepare("alpaca", files=own_rows("alpaca"))
    raw = {"model": {"name": "tiny"}, "train": {"alg_name": "sft"}, "data": {"dataset": "alpaca"}}
    config = check_config(raw)
    assert len(resolve(config).source) == 4
    (tmp_path / "alpaca" / "train.jsonl").write_text('{"prompt": "Hi", "response": "Ho"}\n')
    with pytest.raises(ValueError, match="does not match the hash in its card"):
        resolve(config)


def test_a_dataset_is_prepared_when_it_is_first_used(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path / "new"))
    raw = {
        "model": {"name": "tiny"}, "data": {"dataset": "gym:leg_counting"}, "train": {"alg_name": "grpo"},
        "reward": {"reward_func": "reasoning_gym_score"},
    }  # fmt: skip
    assert resolve(check_config(raw)).online
    before = split_file("gym:leg_counting").stat().st_mtime_ns
    assert split_file("gym:leg_counting").stat().st_mtime_ns == before
    assert split_file("gym:leg_counting", "test") == tmp_path / "new" / "gym-leg_counting" / "test.jsonl"


def test_without_network_the_error_explains_how_to_pass_a_local_copy(tmp_path):
    for name in ("gsm8k", "oasst"):
        with pytest.raises(ValueError, match=rf"oxrl data prepare {name} --from"):
            prepare(name, output=tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(ValueError, match=r"not on the hub; .*seed_tasks.jsonl.*--from FILE"):
        prepare("self_instruct", output=tmp_path / "self_instruct")


def test_rows_through_the_datasets_library_are_those_of_the_file(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("gsm8k", "svamp", "dolly"):  # one published with splits, two without
        repository = tmp_path / name
        repository.mkdir()
        for file in own_rows(name):
            split = file.partition("=")[0] if "=" in file else "train"
            (repository / f"{split}.jsonl").write_bytes(Path(file.rpartition("=")[2]).read_bytes())
        splits = DATASETS[name].splits if name == "gsm8k" else {"train": "train"}
        samples, card = prepare_samples(DATASETS[name]._replace(hub=str(repository), splits=splits))
        assert samples == samples_of(name)
        assert len(card["source"]["revision"]) > 8


def test_dataset_and_files_exclude_each_other():
    with pytest.raises(ConfigError, match="both set"):
        check_config({"model": {"name": "tiny"}, "data": {"dataset": "gsm8k", "train_files_path": "rows.jsonl"}})
    with pytest.raises(ConfigError, match="did you mean openr1_math"):
        check_config({"model": {"name": "tiny"}, "data": {"dataset": "openr1math"}})
    assert check_config({"model": {"name": "tiny"}, "data": {"dataset": "openr1_math"}}).data.train_files == {}


@pytest.mark.parametrize(
    ("name", "files", "splits", "message"),
    [
        ("gsm8k", ["rows.jsonl"], [], "name the split of rows.jsonl, as in --from train=rows.jsonl"),
        ("gsm8k", ["train=no_such.jsonl"], [], "there is no file no_such.jsonl"),
        ("gsm8k", [], ["dev"], "has no split 'dev'; it has: train, test"),
        ("gsm8k", [f"train={RAW / 'alpaca.jsonl'}"], [], "alpaca.jsonl:1: there is no column answer"),
        ("mbpp", [str(RAW / "mbpp.jsonl"), f"test={RAW / 'mbpp.jsonl'}"], [], "of every file, or of none"),
        ("gym:leg_counting", ["rows.jsonl"], [], "leave --from out"),
        ("gsm", [], [], "did you mean gsm8k?"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, name, files, splits, message):
    with pytest.raises(ValueError) as caught:
        prepare(name, files=files, splits=splits, output=tmp_path / "out")
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_failed_preparation_leaves_the_earlier_one_as_it_was(tmp_path):
    folder = prepare("svamp", files=own_rows("svamp"), output=tmp_path / "svamp")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="none of the 5 rows"):
        prepare("svamp", files=own_rows("alpaca"), output=folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_split_is_replaced_only_if_that_was_asked_for(tmp_path):
    train, test = own_rows("gsm8k")
    folder = prepare("gsm8k", files=[train, test], output=tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        ValueError, match=r"has the splits train, test, of which train .* would be removed: pass --over"
    ):
        prepare("gsm8k", files=[test], output=folder)
    with pytest.raises(ValueError, match=r"of which train \(4 rows\) would be replaced by other rows"):
        prepare("gsm8k", files=[train, test], instruction="Be brief.", output=folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    prepare("gsm8k", files=[test], output=folder, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"test.jsonl", "card.json"}


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="something other than svamp"):
        prepare("svamp", files=own_rows("svamp"), output=tmp_path / "precious")
    prepare("alpaca", files=own_rows("alpaca"), output=tmp_path / "alpaca")
    with pytest.raises(ValueError, match="something other than svamp"):
        prepare("svamp", files=own_rows("svamp"), output=tmp_path / "alpaca")
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


def test_bad_rows_are_counted_by_reason(tmp_path):
    lines = (RAW / "gsm8k.train.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "not json", '{"question": "q", "answer": "no marker"}']))
    _, card = prepare_samples(DATASETS["gsm8k"], [f"train={tmp_path / 'rows.jsonl'}"])
    assert {entry["first"]: entry["rows"] for entry in card["skipped"]} == {"rows.jsonl:6": 1, "rows.jsonl:7": 1}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prepares_and_reports(tmp_path):
    files = [part for file in own_rows("gsm8k") for part in ("--from", file)]
    result = run("data", "prepare", "gsm8k", *files, "--output", tmp_path / "out", "--json")
    card = json.loads(result.stdout.splitlines()[-1])
    assert card["splits"]["train"]["rows"] == 4 and card["reward"] == "gsm8k_reward_func"
    fewer = ("data", "prepare", "gsm8k", *files, "--output", tmp_path / "out", "--split", "test")
    refused = run(*fewer)
    assert refused.exit_code == 2 and "pass --overwrite" in refused.output
    plain = run(*fewer, "--overwrite")
    assert "5 rows" in plain.stdout and "on real rows" in plain.stdout
    assert [path.name for path in (tmp_path / "out").glob("*.jsonl")] == ["test.jsonl"]
    wrong = run("data", "prepare", "gsm8k", "--from", "rows.jsonl", "--output", tmp_path / "none")
    assert wrong.exit_code == 2 and "--from train=rows.jsonl" in wrong.output


def test_the_command_lists_every_dataset():
    listed = json.loads(run("data", "list", "--json").stdout)
    assert list(listed) == list(DATASETS) and listed["gpqa"]["evaluation_only"]
    plain = run("data", "list").stdout
    assert all(name in plain for name in [*DATASETS, "gym:TASK"])


def test_every_raw_file_has_five_rows():
    assert {path.name: len(list(read_rows(path))) for path in RAW.iterdir()} == {p.name: 5 for p in RAW.iterdir()}
