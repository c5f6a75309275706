"""Former names keep working with a DeprecationWarning."""

import warnings

import anyio
import pytest

import oxrl
from oxrl.loops.online import OnlineConfig, RLTrainingConfig, run_online, run_rl_training
from oxrl.names import renamed_keywords
from oxrl.rollouts.collect import RolloutConfig, sampling_manager


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
