"""A setting that vLLM does not have is rejected before vLLM is imported."""

import dataclasses

import pytest

from oxrl.generators.vllm.settings import check_settings, vllm_settings
from tests.engines import need


@pytest.mark.engine
def test_the_settings_read_from_its_source_include_those_of_its_dataclass():
    need("vllm")
    from vllm.engine.arg_utils import EngineArgs

    assert {field.name for field in dataclasses.fields(EngineArgs)} <= vllm_settings()


def test_a_misspelt_setting_gets_the_nearest():
    need("vllm")
    check_settings(["gpu_memory_utilization", "max_model_len"])
    with pytest.raises(ValueError, match="gpu_memory_utilisation .*did you mean gpu_memory_utilization"):
        check_settings(["gpu_memory_utilisation"])
