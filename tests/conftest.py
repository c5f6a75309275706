"""What every test shares: no hub, one thread, no GPU, and the two built-in models."""

from __future__ import annotations

import gc
import os
import signal
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # facts are about float32 on the CPU, also on a machine with a GPU
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.environ["CUDA_VISIBLE_DEVICES"]:  # vLLM compiles a function or two with a C++ compiler, in each run
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack trace for a peer that ends on purpose
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # it ends actors if other processes fill the memory
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; its children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints a warning to standard output

from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

from oxrl.models.load import load_model, load_tokenizer
from oxrl.types import ModelConfig
from tests import holding, leftovers
from tests.forks import close as close_forks
from tests.forks import forks  # noqa: F401
from tests.scheduling import (  # noqa: F401
    SHARED,
    end_engines_after,
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)
from tests.waiting import HANG

WATCH = pytest.StashKey[leftovers.Watch]()
LEFT = pytest.StashKey[list[str]]()
_START: dict[str, Any] = {}  # states of generators, by module


hypothesis.settings.register_profile(  # the same examples in every run, on a slow machine too
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    config.option.timeout = config.option.timeout or HANG
    if leftovers.VARIABLE not in os.environ:  # neither a worker nor a run inside of a test
        config.stash[WATCH] = leftovers.Watch()


def pytest_collection_finish() -> None:
    gc.freeze()  # later collections skip imported modules; DeepSpeed collects at each start


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    end_engines_after(item, nextitem)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    SHARED.close()  # after an interrupt no test is torn down
    close_forks()
    gc.unfreeze()  # or compiled extensions report leaks at the end
    yield
    if (watch := session.config.stash.get(WATCH, None)) is None:
        return
    session.config.stash[LEFT] = watch.end()
    if session.config.stash[LEFT]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("left behind by the run", red=True)
        terminalreporter.write_line("\n".join(left))


@pytest.fixture(scope="session")
def complete_run() -> None:
    """For fixtures that train a complete run: the tests that use them are marked `trains`."""


@pytest.fixture(scope="module")
def wandb_ended() -> Iterator[None]:
    """End the process of Weights & Biases, which would outlive the tests, and any run that is still open."""
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.finish()
        wandb.teardown()


@pytest.fixture(autouse=True)
def random_numbers_of_a_test_do_not_depend_on_the_tests_before(request: pytest.FixtureRequest) -> None:
    """Each test begins with the generator `RNG` of its module as that was after the import."""
    if isinstance(generator := getattr(request.module, "RNG", None), np.random.Generator):
        generator.bit_generator.state = _START.setdefault(request.module.__name__, generator.bit_generator.state)


@pytest.fixture(scope="session")
def tiny() -> tuple[ModelConfig, Any]:
    """The random model of 0.5 M parameters, as a config to load it from, and its tokenizer (do not change it)."""
    config = ModelConfig("tiny", dtype="float32", device="cpu")
    return config, load_tokenizer(config)


@pytest.fixture
def tiny_model(tiny: tuple[ModelConfig, Any]) -> Any:
    """Fresh weights for one test, which may change them."""
    return load_model(tiny[0])


@pytest.fixture(scope="session")
def tiny_vlm() -> tuple[ModelConfig, Any]:
    """The random model that reads images, as a config to load it from, and its tokenizer (do not change it)."""
    config = ModelConfig("tiny-vlm", dtype="float32", device="cpu")
    return config, load_tokenizer(config)


@pytest.fixture(scope="session")
def tiny_audio() -> tuple[ModelConfig, Any]:
    """The random model that reads sounds, as a config to load it from, and its tokenizer (do not change it)."""
    config = ModelConfig("tiny-audio", dtype="float32", device="cpu")
    return config, load_tokenizer(config)


@pytest.fixture(scope="session")
def smollm2() -> tuple[ModelConfig, Any]:
    """The real SmolLM2-135M-Instruct, downloaded and converted on the first use, and its tokenizer."""
    config = ModelConfig("smollm2-135m", dtype="float32", device="cpu")
    return config, load_tokenizer(config)


@pytest.fixture(scope="session")
def holds(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines that are started from now on can be held by `tests.holding`."""
    os.environ[holding.VARIABLE] = str(tmp_path_factory.mktemp("holds"))


# Engines end with the last test that uses them (`tests.scheduling`).


@pytest.fixture(scope="session")
def vllm_url(holds: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vLLM server with `tiny`."""
    from tests.engines import vllm_server

    return SHARED.enter_context(vllm_server(tmp_path_factory.mktemp("vllm") / "server.log"))


@pytest.fixture(scope="session")
def vllm_in_process(holds: None) -> Any:
    """vLLM in this process with `tiny` and room for an adapter."""
    from tests.engines import vllm_here

    return SHARED.enter_context(vllm_here())


@pytest.fixture(scope="session")
def vllm_images(holds: None) -> Any:
    """vLLM in this process with `tiny-vlm` and room for an adapter."""
    from tests.engines import vllm_here

    return SHARED.enter_context(vllm_here("tiny-vlm"))


@pytest.fixture(scope="session")
def audio_for_vllm(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Any]:
    """As `tiny_audio`, for sounds of up to 30 seconds: vLLM runs no other."""
    from oxrl.models.builtin_media import build_tiny_audio

    folder = tmp_path_factory.mktemp("audio")
    build_tiny_audio(folder, 30)
    config = ModelConfig(str(folder), dtype="float32", device="cpu")
    return config, load_tokenizer(config)


@pytest.fixture(scope="session")
def vllm_sounds(holds: None, audio_for_vllm: tuple[ModelConfig, Any]) -> Any:
    """vLLM in this process with a model that reads sounds."""
    from tests.engines import vllm_here

    return SHARED.enter_context(vllm_here(audio_for_vllm[0].name, lora=0))  # vLLM has no adapters for Qwen2-Audio


@pytest.fixture(scope="session")
def vllm_images_url(holds: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vLLM server with `tiny-vlm`."""
    from tests.engines import vllm_server

    return SHARED.enter_context(vllm_server(tmp_path_factory.mktemp("vllm") / "server.log", "tiny-vlm"))


@pytest.fixture(scope="session")
def ray_images(request: pytest.FixtureRequest) -> Any:
    """A vLLM replica as an actor with `tiny-vlm` and room for an adapter."""
    from tests.engines import need_vllm, one_replica

    need_vllm("tiny-vlm")
    request.getfixturevalue("ray_here")
    return SHARED.enter_context(one_replica("tiny-vlm"))


@pytest.fixture(scope="session")
def ray_here(holds: None) -> None:
    """A Ray cluster on loopback, with room for a few actors."""
    from tests.engines import local_cluster

    SHARED.enter_context(local_cluster())


@pytest.fixture(scope="session")
def ray_ranks(ray_here: None) -> Any:
    """Two ranks as actors."""
    from tests.engines import two_actors

    return SHARED.enter_context(two_actors())


@pytest.fixture(scope="session")
def ray_replicas(ray_here: None) -> Any:
    """A vLLM replica as an actor with `tiny` and room for an adapter."""
    from tests.engines import one_replica

    return SHARED.enter_context(one_replica())
