"""Compiled layers where there is no GPU: they are refused with a reason, and nothing changes."""

import pytest

from oxrl.backends.compiled import compile_layers
from oxrl.backends.forward import LanguageModel
from oxrl.backends.layout import prepare_layout
from tests.contracts.test_backend import load_tiny


def test_compiling_without_a_gpu_is_refused_if_asked_for_and_left_out_otherwise():
    module = LanguageModel(load_tiny())
    prepare_layout(module)
    with pytest.raises(ValueError, match=r"model\.compile is true, but that needs a GPU .* cpu .*: set auto or false"):
        compile_layers(module, wanted=True)
    assert not compile_layers(module, expected_tokens=1e15)
    assert not compile_layers(module, wanted=False)
    assert not any("forward" in vars(layer) for layer in module.inner.model.layers)
