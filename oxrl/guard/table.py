"""The table of all checks of a run: what each proves, when it runs, what to do, and whether it stops the run.

`python -m oxrl.guard.table > docs/checks.md` writes the page. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from oxrl.names import did_you_mean
from oxrl.tracking.health import CHECKS as OF_METRICS

Action: TypeAlias = Literal["stop", "warn", "off"]
ACTIONS: tuple[str, ...] = get_args(Action)
ALL = "all"  # in `run.checks`: the action of every check that is not named

FIRST = "the first steps, then every 100"
SAMPLES = "the first steps, then some rows of every step"
EVERY = "every step"


class GuardCheck(NamedTuple):
    """`GuardCheck("mask", "the loss mask ...", "every step", "look at ...", "stop")`: one line of the table."""

    name: str
    proves: str
    when: str
    remedy: str
    action: Action
    samples: bool = False  # of runs that sample only
    fixed: bool = False  # always on: without it a run could only do harm


_PROOFS: tuple[GuardCheck, ...] = (
    GuardCheck(
        "tokens",
        "the token ids that are trained are those that were sampled, over every turn",
        SAMPLES,
        "train on the ids of Rollout.tokens; text that is tokenised again has other ids",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "turns",
        "the next turn continues the ids of the turns before it, unless the template rewrites their text",
        SAMPLES,
        "build the next prompt from prompt_ids and generation.token_ids, as `with_tools` and `dialogue` do",
        "warn",
        samples=True,
    ),
    GuardCheck(
        "mask",
        "the loss mask covers the responses: not empty, not full, not shifted, with the end of each turn",
        SAMPLES,
        "look at the trained tokens (`oxrl data show`), and at the function that builds the rows",
        "stop",
    ),
    GuardCheck(
        "advantages",
        "responses with different rewards have advantages, on all of their tokens",
        EVERY,
        "look at the algorithm's `credit`: it must set the stream `advantage` at every trained token",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "packed_rows",
        "rows that are packed together have the log-probs that each of them has alone",
        FIRST,
        "the backend lets rows see each other: attention and positions must start again at each border of a batch",
        "stop",
    ),
    GuardCheck(
        "loss_split",
        "the derivative of the loss is the same for a step and for a split of it",
        FIRST,
        "return sums with a unit (Term(total, unit)), never a mean over the rows or tokens of a micro-batch",
        "stop",
    ),
    GuardCheck(
        "finite",
        "loss and gradient are finite",
        EVERY,
        "lower train.lr, or look at the rows in failure/batch.jsonl",
        "stop",
        fixed=True,
    ),
    GuardCheck(
        "trained_parameters",
        "every tensor that is trained has moved after the first updates; without LoRA every tensor is trained",
        "the first steps",
        "look at requires_grad, and at the parameters that the optimizer has",
        "warn",
    ),
    GuardCheck(
        "frozen_parameters",
        "no frozen tensor has moved",
        "the first steps",
        "something else than the optimizer changes the weights, or the optimizer has tensors that are frozen",
        "stop",
    ),
    GuardCheck(
        "logprob_gap",
        "sampler and trainer agree on every token that was sampled with the weights that are trained",
        "every step on fresh samples",
        "`oxrl mismatch RUN` finds the cause: other weights, precision, temperature or cut-offs",
        "stop",
        samples=True,
        fixed=True,
    ),
    GuardCheck(
        "sampler_weights",
        "the sampler has the newest weights: after an update it answers a prompt as the trainer would",
        FIRST,
        "look at `update_weights` of the engine: it must load the weights that it is given before it returns",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "sampler_adapter",
        "with LoRA, the adapter is in the weights that the sampler uses",
        FIRST,
        "the engine must merge the adapter, or load it with each update (inference_engine.adapter)",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "reward_errors",
        "the reward grades the responses: it does not raise, hang, or return something that is no finite number",
        EVERY,
        "test the reward with `oxrl rewards test`; raise reward.time_limit if it is slow",
        "warn",
        samples=True,
    ),
    GuardCheck(
        "reward_by_length",
        "the length of a response alone does not predict its reward (a suspicion, by rank correlation)",
        "over a window of 8 steps",
        "read responses with high rewards; `oxrl rewards test` tries long and short ones",
        "warn",
        samples=True,
    ),
    GuardCheck(
        "reward_by_format",
        "the format of a response alone does not predict its reward (a suspicion, by rank correlation)",
        "over a window of 8 steps",
        "read responses with high rewards; `oxrl rewards test` tries empty answers in the right format",
        "warn",
        samples=True,
    ),
    GuardCheck(
        "repetition",
        "responses do not come to repeat themselves",
        "over 5 steps",
        "set kl_coef in train.alg_params, lower train.lr, or penalise repetition in the reward",
        "warn",
        samples=True,
    ),
)

CHECKS: Mapping[str, GuardCheck] = {
    check.name: check
    for check in (
        *_PROOFS,
        *(
            GuardCheck(check.name, check.proves, f"logged steps: if {check.when}", check.remedy, "warn", check.samples)
            for check in OF_METRICS
        ),
    )
}


def actions_of(chosen: Mapping[str, str]) -> dict[str, Action]:
    """The action of every check, from `run.checks`; wrong names and actions raise a ValueError."""
    for name, action in chosen.items():
        if name != ALL and name not in CHECKS:
            hint = did_you_mean(name, CHECKS, f"; there are: {', '.join(CHECKS)}, and {ALL} for every other check")
            raise ValueError(f"{name!r:.100} is no check{hint}")
        if action not in ACTIONS:
            raise ValueError(f"the action of {name} is {action!r:.100}; it must be one of {', '.join(ACTIONS)}")
        if name != ALL and CHECKS[name].fixed and action != "stop":
            raise ValueError(f"the check {name} cannot be set to {action}: it always stops a run")
    known: dict[str, Action] = {action: action for action in get_args(Action)}
    return {
        name: check.action if check.fixed else known[chosen.get(name, chosen.get(ALL, check.action))]
        for name, check in CHECKS.items()
    }


def document() -> str:
    """The page docs/checks.md."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _HEAD
    yield "| check | proves that | when | if not | by default |"
    yield "|---|---|---|---|---|"
    for check in CHECKS.values():
        rl = " (runs that sample)" if check.samples else ""
        yield f"| `{check.name}` | {check.proves}{rl} | {check.when} | {check.remedy} | {check.action} |"
    yield _TAIL


_HEAD = """\
# Checks of a run

Most runs that learn nothing look healthy. Every run checks itself, in its first steps and cheaply thereafter: what
was sampled is what is trained, the loss sees the right tokens, the sampler has the newest weights, the reward
grades what it should. A check that fails says what, where and why, and what to do; it stops the run or warns.

```bash
oxrl check runs/first
oxrl check runs/first --json
```

prints a line per check with its state: of a run that has ended, that still trains, or that was killed. Exit code 0:
no check failed; 1: one did, and stopped the run; 2: there is no run.

| state | meaning |
|---|---|
| passed | it ran and found nothing |
| warned | it found a fault; the run went on |
| failed | it found a fault and stopped the run |
| skipped | it does not apply, cannot be made here, is off, or has not been reached; the line has the reason |

## All checks
"""

_TAIL = """
## Choose the action

`run.checks` has an action by name: `stop`, `warn` or `off`; `all` stands for every check that is not named. `finite`
and `logprob_gap` always stop a run; the latter has its limit in `train.max_logprob_gap`.

```yaml
run:
  checks: {entropy: stop, reward_by_length: off}
```

```bash
oxrl train config.yaml --set 'run.checks={all: warn}'
```

In Python, a loop takes a guard as `guard=Guard(...)`, from `oxrl.guard.monitor`; `Trainer.train` and `train_run`
have one.

## The file

`RUN/checks.jsonl` has one line for each change of a state; it is only appended to, and a resumed run drops the
lines of the steps that it repeats:

```json
{"step": 12, "check": "entropy", "state": "warned", "message": "the entropy fell ...", "remedy": "lower train.lr, ..."}
```

## What the checks do not prove

A suspicion is not a proof: `reward_by_length` and `reward_by_format` warn where a rank correlation leaves little
for the content to decide, which may be what you want. Checks of weights need a trainer in the process of the loop;
with several ranks they are skipped. What the engine returned as sampled is compared with what is trained and, by
its log-probs, with the weights; an engine that returns other tokens with the log-probs of the trainer cannot be
told from an honest one.
"""

if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
