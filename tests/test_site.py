"""Links and anchors of the pages resolve, every page is in the navigation, every command exists."""

import ast
import re
from pathlib import Path

import pytest
import typer
import yaml

import oxrl
from oxrl.cli import app
from oxrl.config import load_stages
from oxrl.names import import_object

ROOT = Path(__file__).parents[1]
COMMAND = typer.main.get_command(app)
document, explanation, stub = (
    import_object(f"{ROOT}/docs/api_page.py:{name}") for name in ("document", "explanation", "stub")
)
ROOT_PAGES = [f"{name}.md" for name in ("README", "FAQ", "CONTRIBUTING", "CHANGELOG", "BUG_REPORTING", "AGENTS")]
ROOT_PAGES += ["benchmarks/README.md"]
PAGES = sorted([*(ROOT / page for page in ROOT_PAGES), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def prose(page):
    return FENCE.sub("", page.read_text())


def slug(heading):
    """Return the anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page):
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors_resolve(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{link} does not exist"
        assert path.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert not anchor or anchor in anchors(path), f"{link}: there is no such heading"


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for entry in nav for each in entry.values() for page in _leaves(each)]
    elsewhere = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md"}
    expected = [elsewhere.get(name_of(page), name_of(page).removeprefix("docs/")) for page in PAGES]
    assert sorted(listed) == sorted(expected)


def _leaves(entry):
    return [entry] if isinstance(entry, str) else [page for each in entry for page in each.values()]


def commands_in_prose(text):
    """Each `oxrl ...` between backticks; blocks are checked in test_docs.py."""
    found = [re.fullmatch(r"oxrl (.+)", code) for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text))]
    return [match[1] for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_that_are_mentioned_exist(page):
    for command in commands_in_prose(page.read_text()):
        group, arguments = COMMAND, command.split()
        while arguments and hasattr(group, "commands") and not arguments[0].startswith("-"):
            assert arguments[0] in group.commands, f"oxrl {command}: there is no command {arguments[0]}"
            group = group.commands[arguments.pop(0)]
        known = {"--help", "--install-completion", "--show-completion"}
        known |= {option for parameter in group.params for option in parameter.opts}
        for option in [each.partition("=")[0] for each in arguments if each.startswith("--")]:
            assert option in known, f"oxrl {command}: there is no option {option}"


def test_commands_are_found_in_prose():
    assert commands_in_prose("Use `oxrl train --fast`, not `other --fast`.") == ["train --fast"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_repository_that_are_mentioned_exist(page):
    inside = r"`((?:oxrl|tests|docs|examples|benchmarks|registry)/[\w/.-]*)"
    for path in re.findall(inside, prose(page)):
        assert (ROOT / path).exists(), f"there is no {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_complete_configs_on_a_page_load(page, tmp_path):
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if "model" in yaml.safe_load(block):
            (tmp_path / "config.yaml").write_text(block)
            assert load_stages(tmp_path / "config.yaml")


def test_the_api_page_is_up_to_date():
    written = (ROOT / "docs" / "api.md").read_text()
    assert written == document(), "run: python docs/api_page.py > docs/api.md"


def test_the_picture_of_the_readme_shows_the_recorded_measurements():
    picture = (ROOT / "assets" / "results.svg").read_text()
    assert picture == import_object(f"{ROOT}/docs/results_figure.py:figure")(), (
        "run: python docs/results_figure.py > assets/results.svg"
    )
    for recorded in ("oxRL 70.8", "TRL 28", "oxRL 4.01", "TRL 8.07", "seed 2", "rewards shuffled"):
        assert f">{recorded}</text>" in picture
    assert (ROOT / "README.md").read_text().index("assets/results.svg") < 2500, "on the first screen"


def test_the_call_path_of_the_architecture_page_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\| \d+\. .*? \| (.+) \| (.+) \|$", page, re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "oxrl").rglob("*.py"))
    assert len(steps) > 10
    for functions, files in steps:
        assert all((ROOT / file).exists() for file in re.findall(r"`([^`]+)`", files)), files
        for function in re.findall(r"`([^`]+)`", functions):
            name = function.split(".")[-1]
            assert re.search(rf"\b(def|class) {name}\b|^\s+{name}: ", source, re.MULTILINE), function


def test_type_checkers_know_every_public_name():
    written = (ROOT / "oxrl" / "__init__.pyi").read_text()
    assert written == stub(), "run: python docs/api_page.py --stub > oxrl/__init__.pyi"


def test_every_public_name_is_explained():
    names = [(home, name) for home, names in oxrl._HOMES.items() for name in names.split()]
    assert not [f"{home}.{name}" for home, name in names if not explanation(home, name)]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("callback", "FAQ.md"),
        ("hyperparameter", "docs/troubleshooting.md"),
        ("hyperparameter", "FAQ.md"),
        ("multi-turn environment", "docs/reinforcement.md"),
        ("notebook", "docs/primitives.md"),
        ("early stopping", "docs/configuration.md"),
        ("gradient accumulation", "docs/performance.md"),
        ("row template", "docs/datasets.md"),
    ],
)
def test_searching_for_a_usual_word_finds_its_page(words, page):
    """The search of the site indexes the text of its pages."""
    text = FENCE.sub("", (ROOT / page).read_text()).lower()
    assert words in text


def test_pages_name_no_local_paths_and_no_open_tasks():
    for page in PAGES:
        for text in ("/work/", "/tmp/w/", "shared/seeds", "TODO", "FIXME"):
            assert text not in page.read_text(), f"{name_of(page)} has {text}"


def texts_in_the_code():
    """All strings of the package, with … where something is filled in."""
    for file in (ROOT / "oxrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%(?:\.\d)?[a-z]", "…", node.value)


def test_the_messages_in_troubleshooting_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [match[1] for match in re.finditer(r"^\| `(.+?)`(?: \(a remark\))? \|", page, re.MULTILINE)]
    texts = list(texts_in_the_code())
    assert len(quoted) > 40
    for message in quoted:
        pattern = ".*".join(re.escape(part) for part in message.split("…"))
        assert any(re.search(pattern, text, re.DOTALL) for text in texts), message
