"""The documentation pages work: Python blocks are run, commands and their options exist.

The ```python blocks of a page are run in order, in one namespace and an empty folder, with `tiny` instead of
`smollm2-135m`, inside a running event loop, as in a notebook; those of one page in a real one. A block below
`<!-- not run: why -->` is only compiled. Of ```bash blocks, every line that begins with `oxrl` is parsed as the command
line would, and not run.
"""

import asyncio
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
import typer
from nbclient import NotebookClient

from oxrl.cli import app
from tests.waiting import HANG

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "python.md"
COMMAND = typer.main.get_command(app)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\s*\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
USAGE_ERROR = typer.BadParameter.__base__  # click's UsageError, or that of typer's own copy of click
ENDS = {"|", "||", "&&", ";", ">", ">>", "2>", "<", "&"}


class Block(NamedTuple):
    line: int
    language: str
    text: str
    skip: bool


def blocks_of(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(text.count("\n", 0, match.start("text")) + 1, match["language"], match["text"], bool(match["skip"]))
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def compiled(page: Path, block: Block):
    """As if the page were the file, so that a traceback shows the line on the page."""
    text = block.text.replace("smollm2-135m", "tiny")
    return compile("\n" * (block.line - 1) + text, str(page), "exec")


@pytest.fixture
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OXRL_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path / "data"))


@pytest.mark.trains
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python") and page != NOTEBOOK], ids=named)
def test_the_python_of_a_page_runs(page, in_an_empty_folder, wandb_ended):
    async def cells():
        namespace = {"__name__": "docs"}
        for block in blocks_of(page, "python"):
            code = compiled(page, block)
            if not block.skip:
                exec(code, namespace)

    asyncio.run(cells())


@pytest.mark.trains
def test_the_python_of_a_page_runs_in_a_notebook_with_readable_output(in_an_empty_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the kernel, which starts in the empty folder
    texts = [block.text.replace("smollm2-135m", "tiny") for block in blocks_of(NOTEBOOK, "python")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    NotebookClient(notebook, timeout=int(HANG), kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    streams = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "\r" not in streams and "Traceback" not in streams
    trained = [cell for cell in notebook.cells if ".train(" in cell.source]
    for cell in trained:
        tables = [output for output in cell.outputs if output.output_type == "display_data"]
        assert len(tables) == cell.source.count(".train("), "one table for each run, updated in place"
        assert all("<table>" in table.data["text/html"] for table in tables)


def commands_of(text: str) -> list[list[str]]:
    """`oxrl ...` lines as lists of arguments, without comments and what follows a pipe or another operator."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        arguments = shlex.split(line.removeprefix("$ "), comments=True)
        while arguments and re.fullmatch(r"\w+=.*", arguments[0]):  # an environment variable
            arguments = arguments[1:]
        if arguments[:1] == ["oxrl"]:
            end = next((index for index, argument in enumerate(arguments) if argument in ENDS), len(arguments))
            commands.append(arguments[1:end])
    return commands


def parse(arguments: list[str]) -> None:
    """Parse as the command line does, down to the subcommand; nothing is run."""
    command, context = COMMAND, None
    name, rest = "oxrl", arguments
    while True:
        if rest == ["--help"]:
            return
        context = command.make_context(name, list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


COMMANDS = [
    pytest.param(arguments, id=f"{named(page)}:{' '.join(arguments)[:60]}")
    for page in PAGES
    for block in blocks_of(page, "bash")
    if not block.skip
    for arguments in commands_of(block.text)
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_command_on_a_page_exists(arguments):
    try:
        parse(arguments)
    except USAGE_ERROR as problem:
        pytest.fail(f"oxrl {' '.join(arguments)}: {problem.format_message()}")


@pytest.mark.parametrize(
    "arguments", [["trian"], ["train", "--modle", "tiny"], ["data", "shwo", "x"], ["train", "--lr", "x"]]
)
def test_an_unknown_command_is_detected(arguments):
    with pytest.raises(USAGE_ERROR):
        parse(arguments)


def test_blocks_and_commands_are_found():
    text = "$ oxrl train a.yaml \\\n  --lr 1 | tee log  # why\nX=1 oxrl plot runs\npip install x\n"
    assert commands_of(text) == [["train", "a.yaml", "--lr", "1"], ["plot", "runs"]]
    assert len(blocks_of(ROOT / "README.md", "bash")) >= 2 and len(COMMANDS) > 10
