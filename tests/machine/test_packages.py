"""Advice on installing packages."""

import re
from pathlib import Path

from oxrl.machine.packages import install_command

ROOT = Path(__file__).parents[2]


def test_no_text_advises_to_install_the_project_of_the_same_name_on_the_package_index():
    files = [
        file for folder in ("oxrl", "docs") for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md")
    ]
    advice = re.compile(r"""pip install ['"]?oxrl\b(?!` does not)""")
    found = {str(file.relative_to(ROOT)): match[0] for file in files if (match := advice.search(file.read_text()))}
    assert not found
    assert (install_command(), install_command("ray")) == ("pip install -e .", "pip install -e '.[ray]'")
