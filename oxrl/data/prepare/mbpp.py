"""MBPP: small Python tasks, each with three assertions. The prompt shows the signature and the first of them."""

from __future__ import annotations

import ast

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, text_of, texts_of, user_prompt
from oxrl.rewards.sandbox import undefined_names
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    tests = [test.strip() for test in texts_of(row, "test_list")]
    if not tests:
        raise BadRow("test_list is empty")
    code = text_of(row, "code").replace("\r\n", "\n")
    name, signature = function_under_test(code, tests[0])
    lines = [*texts_of(row, "test_imports"), *str(row.get("test_setup_code") or "").splitlines()]
    setup = "\n".join(line.rstrip() for line in lines)
    try:
        missing = undefined_names(tests, setup) - functions_of(code).keys()
    except SyntaxError:
        raise BadRow("test_list or its setup is not Python") from None
    if missing:
        raise BadRow(f"the tests use {min(missing)}, which is not a function and is defined only in the solution")
    metadata = {
        "tests": tests,
        "setup": setup,
        "entry_point": name,
        "task_id": row.get("task_id"),
        "solution": code,
    }
    shown = f"The function begins with `{signature}` and must pass tests such as\n\n```python\n{tests[0]}\n```"
    return [Sample("", user_prompt(text_of(row, "text", "prompt"), shown), metadata=metadata)]


def function_under_test(code: str, test: str) -> tuple[str, str]:
    """`function_under_test("def add(a, b): ...", "assert add(1, 2) == 3")` is `("add", "def add(a, b):")`."""
    try:
        defined = functions_of(code)
        calls = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    except SyntaxError:
        raise BadRow("code or test_list is not Python") from None
    name = next((call.id for call in calls if isinstance(call, ast.Name) and call.id in defined), None)
    if name is None:
        raise BadRow("the first test calls no function of the solution")
    return name, f"def {name}({ast.unparse(defined[name].args)}):"


def functions_of(code: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}


def split_of(row: Raw) -> str:
    """Return the split of a task id, as in the paper."""
    task = row.get("task_id")
    if not isinstance(task, int):
        raise BadRow("task_id must be a number: it determines the split")
    if task <= 10:
        raise BadRow("task ids 1 to 10 are reserved for few-shot prompts")
    return "test" if task <= 510 else "validation" if task <= 600 else "train"


MBPP = Dataset(
    name="mbpp",
    summary="small Python tasks with assertions",
    licence="CC-BY-4.0",
    convert=convert,
    hub="google-research-datasets/mbpp:full",
    splits={"train": "train", "validation": "validation", "test": "test"},
    elsewhere="github.com/google-research/google-research, mbpp/mbpp.jsonl or sanitized-mbpp.json",
    split_of=split_of,
    reward="code_reward_func",
    instruction="Answer with one Python code block that holds the whole program, imports included.",
    seen_real_rows=True,
)
