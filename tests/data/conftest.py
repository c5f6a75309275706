"""Every dataset on every kind of raw rows, one after the other."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.at_hand import CASES, Case, case_name, copies_of


@pytest.fixture(params=CASES, ids=case_name)
def case(request: Any, tmp_path: Path) -> Case:
    return copies_of(request.param, tmp_path / "rows")
