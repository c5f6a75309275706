"""The table of all checks of a run: what each verifies, when it is made, its remedy, and its default action.

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
        "the trained token ids are the sampled ones, over every turn",
        SAMPLES,
        "train on the ids of Rollout.tokens; text that is tokenised again has other ids",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "turns",
        "the prompt of a turn begins with the ids of the turns before it, unless the template rewrites their text",
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
        "rows that are packed together have the same log-probs as each row alone",
        FIRST,
        "make attention and positions of the backend start again at each row of a batch (`Batch.borders`)",
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
        "every trained tensor has changed after the first updates; without LoRA every tensor is trained",
        "the first steps",
        "look at requires_grad, and at the parameters that the optimizer has",
        "warn",
    ),
    GuardCheck(
        "frozen_parameters",
        "no frozen tensor has changed",
        "the first steps",
        "look for code besides the optimizer that changes weights, and for frozen tensors among those of the optimizer",
        "stop",
    ),
    GuardCheck(
        "logprob_gap",
        "sampler and trainer have the same log-prob for every token that was sampled with the current weights",
        "every step on fresh samples",
        "`oxrl mismatch RUN` finds the cause: other weights, precision, temperature or cut-offs",
        "stop",
        samples=True,
        fixed=True,
    ),
    GuardCheck(
        "sampler_weights",
        "the sampler has the newest weights: after an update its log-probs of a continuation are the trainer's",
        FIRST,
        "look at `update_weights` of the engine: it must load the weights that it is given before it returns",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "sampler_adapter",
        "with LoRA, the adapter is in the weights that the sampler uses",
        FIRST,
        "let the engine merge the adapter, or load it with each update (inference_engine.adapter)",
        "stop",
        samples=True,
    ),
    GuardCheck(
        "reward_errors",
        "the reward grades the responses: it does not raise or hang, and what it returns is a finite number",
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
        "responses do not become repetitive",
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
            GuardCheck(
                check.name,
                check.proves,
                f"every logged step; fails if {check.when}",
                check.remedy,
                "warn",
                check.samples,
            )
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
    yield "| check | verifies that | when | remedy | default |"
    yield "|---|---|---|---|---|"
    for check in CHECKS.values():
        rl = " (runs that sample)" if check.samples else ""
        yield f"| `{check.name}` | {check.proves}{rl} | {check.when} | {check.remedy} | {check.action} |"
    yield _TAIL


_HEAD = """\
# Checks of a run

Most runs that learn nothing look healthy. Every run therefore checks itself, thoroughly in its first steps and cheaply
after them: that the sampled tokens are the trained ones, that the loss covers the right tokens, that the sampler has
the newest weights, and that the reward grades what it should. A failed check names the fault, the step and the row or
tensor, and the remedy; it stops the run or warns.

```bash
oxrl check runs/first
oxrl check runs/first --json
```

prints one line per check with its state. The run may have ended, may still be training, or may have been killed. Exit
codes: 0 if no check failed; 1 if a check failed and stopped the run; 2 if the folder has no run, or a run without
checks.

| state | meaning |
|---|---|
| passed | the check was made and found no fault |
| warned | it found a fault; the run continued |
| failed | it found a fault and stopped the run |
| skipped | it does not apply, cannot be made in this run, is off, or is not due yet; the line says which |

## All checks
"""

_TAIL = """
## Choose the action

`run.checks` sets the action of a check by name: `stop`, `warn` or `off`; `all` stands for every check that is not
named. `finite` and `logprob_gap` always stop a run; the limit of the latter is `train.max_logprob_gap`.

```yaml
run:
  checks: {entropy: stop, reward_by_length: off}
```

```bash
oxrl train config.yaml --set 'run.checks={all: warn}'
```

## In Python

`Trainer.train`, `train_run`, `run_sft_training` and `run_rl_training` check by default: the first two as `run.checks`
says, the last two as their argument `checks` does. `run_offline`, `run_online` and loops of your own check nothing
unless they get a guard:

```python
import oxrl
from oxrl.guard.monitor import Guard

rows = [oxrl.Row(f"r{i}", [1, 50 + i, 60, 2], [0, 0, 1, 1]) for i in range(4)]
backend = oxrl.create_pytorch_backend(oxrl.load_model("tiny"), lr=1e-3)
guard = Guard({"frozen_parameters": "off"})
source, config = oxrl.DataBuffer([(row,) for row in rows]), oxrl.OfflineConfig(num_steps=2, batch_size=4)


async def train():
    await oxrl.run_offline(backend, oxrl.algorithm("sft"), source, config, guard=guard, log=guard.logged)


oxrl.run_blocking(train)
print(guard.findings, guard.states["mask"].state)  # [] passed
```

## The file

`RUN/checks.jsonl` has one line for each change of a state. It is only appended to; a resumed run drops the lines of
the steps that it repeats.

```json
{"step": 12, "check": "entropy", "state": "warned", "message": "the entropy fell ...", "remedy": "lower train.lr, ..."}
```

## What the checks do not prove

- `reward_by_length` and `reward_by_format` are suspicions: length or format nearly determines the order of the rewards,
  which may be what you want.
- `trained_parameters` and `frozen_parameters` need the weights in the process of the loop. Elsewhere, as with several
  ranks and vLLM, they are skipped.
- `tokens` compares the trained tokens with those that the engine returned, and `logprob_gap` the engine's log-probs
  with the trainer's. An engine that returned other tokens than it sampled, with the trainer's log-probs of them, would
  pass both.
"""

if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
