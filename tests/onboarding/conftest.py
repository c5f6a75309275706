from __future__ import annotations

from pathlib import Path

import pytest

from tests.onboarding.families import MAKERS, make


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve small models by family (do not change them)."""
    home = tmp_path_factory.mktemp("families")
    return {family: make(family, home / family) for family in MAKERS}
