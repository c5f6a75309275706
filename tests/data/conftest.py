"""The fixture `case`: every dataset with each of its sets of raw rows."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.cases import CASES, Case, case_name, copies_of


@pytest.fixture(params=CASES, ids=case_name)
def case(request: Any, tmp_path: Path) -> Case:
    return copies_of(request.param, tmp_path / "rows")
