"""HumanEval: Python functions to complete, for evaluation only. Its `check(candidate)` becomes single assertions."""

from __future__ import annotations

import ast

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, text_of, user_prompt
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    name = text_of(row, "entry_point")
    prompt, solution, test = (str(row.get(key) or "") for key in ("prompt", "canonical_solution", "test"))
    try:
        given, check = given_code(prompt, name), check_function(test)
    except SyntaxError:
        raise BadRow("prompt or test is not Python") from None
    tests = assertions(check, name)
    setup = given if tests else f"{given}\n\n{ast.unparse(check)}".strip()
    metadata = {
        "tests": tests or [f"assert check({name}) is None"],
        "setup": setup,
        "entry_point": name,
        "task_id": row.get("task_id"),
        "solution": prompt + solution,
    }
    return [Sample("", user_prompt("Complete this function.", f"```python\n{prompt.strip()}\n```"), metadata=metadata)]


def given_code(prompt: str, name: str) -> str:
    """Return the prompt's code without the function: imports, and other functions that the tests may call."""
    return "\n".join(
        ast.unparse(node)
        for node in ast.parse(prompt).body
        if not (isinstance(node, ast.FunctionDef) and node.name == name)
    )


def check_function(test: str) -> ast.FunctionDef:
    functions = [node for node in ast.parse(test).body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(functions) != 1:
        raise BadRow("test defines no function check(candidate)")
    return functions[0]


def assertions(check: ast.FunctionDef, name: str) -> list[str]:
    """Return the assertions of a check with the function's name; none if it has other statements, such as a loop.

    An assertion that does not mention the function (`assert True`) passes for any program and is left out.
    """
    candidate = check.args.args[0].arg
    statements = [node for node in check.body if not _is_text(node)]
    if not all(isinstance(node, ast.Assert) for node in statements):
        return []
    relevant = [node for node in statements if any(_is_name(part, candidate) for part in ast.walk(node))]
    for node in relevant:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id == candidate:
                part.id = name
    return [ast.unparse(node) for node in relevant]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


HUMANEVAL = Dataset(
    name="humaneval",
    summary="Python functions to complete, with assertions",
    licence="MIT",
    convert=convert,
    hub="openai/openai_humaneval",
    splits={"test": "test"},
    elsewhere="github.com/openai/human-eval, data/HumanEval.jsonl.gz",
    reward="code_reward_func",
    instruction="Answer with one Python code block that holds the whole program, imports included.",
    seen_real_rows=True,
)
