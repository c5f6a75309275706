"""Import paths are loaded or refused with a reason; former names keep working with a DeprecationWarning."""

import sys
import warnings

import anyio
import pytest

import oxrl
from oxrl.loops.online import OnlineConfig, RLTrainingConfig, run_online
from oxrl.names import import_object, nearest_name, renamed_keywords, source_file
from oxrl.rollouts.collect import RolloutConfig, sampling_manager
from oxrl.run.loops import run_rl_training


@renamed_keywords(colour="color")
def paint(wall: str, *, color: str = "white") -> str:
    """Return what is painted."""
    return f"{wall} {color}"


def test_a_former_keyword_is_passed_under_its_new_name_with_a_warning():
    with pytest.warns(DeprecationWarning, match="paint: colour is now color") as caught:
        assert paint("fence", colour="red") == "fence red"
    assert caught[0].filename == __file__, "the warning points at the caller"


def test_the_new_name_gives_no_warning_and_the_signature_is_kept():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paint("fence", color="red") == "fence red" and paint("fence") == "fence white"
    assert (paint.__name__, paint.__doc__) == ("paint", "Return what is painted.")


def test_both_names_and_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="both color and its former name colour"):
        paint("fence", colour="red", color="blue")
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        paint("fence", size=3)


@pytest.mark.parametrize(("former", "name"), [("Talk", "PolicyClient"), ("Answers", "RolloutSampler")])
def test_former_public_names_are_the_current_objects(former, name):
    with pytest.warns(DeprecationWarning, match=f"oxrl.{former} is now oxrl.{name}"):
        assert getattr(oxrl, former) is getattr(oxrl, name)


def online(**keywords):
    """Run until the first use of an argument: sync_every=2 with the trainer's own weights is refused."""
    config = OnlineConfig(num_steps=1, lag=1, sync_every=2)
    return run_online(None, oxrl.algorithm("grpo"), None, [], None, config, **keywords)


def rl(**keywords):
    class Manager:
        data_buffer = None

    return run_rl_training(None, None, Manager(), [], RLTrainingConfig(num_steps=1, sync_every=2), **keywords)


@pytest.mark.parametrize("start", [online, rl])
def test_loops_take_the_former_keyword_for_shared_weights(start):
    async def run():
        await start(taking_turns=True)

    with (
        pytest.warns(DeprecationWarning, match="taking_turns is now shares_weights"),
        pytest.raises(ValueError, match="sync_every"),
    ):
        anyio.run(run)


def test_the_online_loop_takes_the_former_keyword_for_offloading():
    async def run():
        await online(engine_aside=oxrl.loops.online.no_offload)

    with (
        pytest.warns(DeprecationWarning, match="engine_aside is now offload_engine"),
        pytest.raises(ValueError, match="sync_every"),
    ):
        anyio.run(run)


def test_a_manager_takes_the_former_keyword_for_its_sampler():
    class Sampler:
        abort = None

    with pytest.warns(DeprecationWarning, match="answers is now sampler"):
        manager = sampling_manager(None, answers=Sampler, config=RolloutConfig(batch_size=1))
    assert manager.config.generate_fn is Sampler


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nimport sys\nsys.exit(0)", r"SystemExit: 0 \(line 3\)"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(line 1\)"),
        ("import no_such_module", r"No module named 'no_such_module' \(line 1\)"),
        ("def length(:", r"invalid syntax"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", r"E \(line 3\)"),
        ("class E(BaseException):\n    def __str__(self): raise SystemExit(0)\nraise E", r"E \(line 3\)"),
        ("import asyncio\nraise asyncio.CancelledError", r"CancelledError"),
        ("other = 1", "has no attribute 'length'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_name_and_the_reason(tmp_path, source, reason):
    file = tmp_path / "my_reward.py"
    file.write_text(source)
    modules = set(sys.modules)
    with pytest.raises(ValueError, match=rf"{file}:length cannot be imported: .*{reason}"):
        import_object(f"{file}:length")
    assert not {name for name in set(sys.modules) - modules if "my_reward" in name} or "other" in source
    file.write_text("def length(): pass")
    assert import_object(f"{file}:length")() is None


def test_a_file_that_was_imported_is_found_after_the_working_directory_has_changed(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("import os\n\ndef length(): os.chdir('/')\n\nassert os.getcwd() != '/'")
    monkeypatch.chdir(tmp_path)
    length = import_object("mine.py:length")
    length()
    assert source_file("mine.py:length") == file
    assert import_object("mine.py:length") is length, "a file is executed once"
    file.write_text(file.read_text() + "  # changed")
    with pytest.raises(ValueError, match=r"mine.py:length cannot be imported: AssertionError:  \(line 5\)"):
        import_object("mine.py:length")


@pytest.mark.parametrize("path", [":name", "..:name", "json:", "json.:dumps", "no such module:name"])
def test_a_malformed_import_path_is_refused(path):
    with pytest.raises(ValueError, match="cannot be imported"):
        import_object(path)


def test_the_command_says_which_file_exits_and_fails(tmp_path):
    from typer.testing import CliRunner

    from oxrl.cli import app

    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    command = ["rewards", "test", f"{tmp_path}/exits.py:score", "--data", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "exits.py:score cannot be imported: SystemExit: 0 (line 2)" in " ".join(result.output.split())


def test_a_function_that_exits_during_a_command_is_a_failure(capsys):
    import typer

    from oxrl.cli.base import exit_on_failure

    with pytest.raises(typer.Exit) as caught, exit_on_failure("training"):
        sys.exit(0)
    assert caught.value.exit_code == 1
    assert "training failed: a function that it called exits, with 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpro", "grpo"),  # an exchange of neighbours, as few edits as for gpo
        ("grp", "grpo"),
        ("remx", "remax"),
        ("dr_gpro", "dr_grpo"),
        ("dapo_pair", "dapo_pairs"),
        ("simpol", "simpo"),
        ("reinforce++", "reinforce"),
        ("zzz", None),
    ],
)
def test_the_nearest_name_is_the_one_with_the_fewest_edits(typed, meant):
    names = ["gpo", "dpo", "grpo", "dr_grpo", "dapo", "dapo_pairs", "simpo", "remax", "reinforce", "reinforce_pp"]
    assert nearest_name(typed, names) == meant
