"""What a recorded step taught: token by token, and in words why it taught nothing or little.

Reads the record alone: no model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.diagnose.step_difference import name_of
from oxrl.run.folder import current_stage
from oxrl.tracking.step_files import StepRecord, read_step

MOST = 0.5  # a share from which on something is a reason for learning little
SHARE = (
    "share: |d loss / d log p| of the token by the sum of it over all trained tokens of the step; how fast the loss "
    "changes with this log-prob, before the model: terms such as a value head or an entropy bonus are not in it"
)


NOTHING: Mapping[str, str] = {
    "mask empty": "`oxrl data show` shows the masks of rows; rft trains on rewards above its threshold",
    "learning rate zero": "see train.lr, lr_scheduler and warmup_steps_ratio",
    "all truncated": "raise rollout.max_tokens",
    "equal rewards": "easier or harder prompts, more rollout.n_samples, or a reward with more grades",
    "advantage zero": "look at the credit function and at the baseline",
    "all clipped": "a smaller learning rate, fewer iterations, or a wider clip range",
    "gradient zero": "look at the loss, and at frozen parameters",
}
"""Reasons for learning nothing at all, and what to do."""
LITTLE: Mapping[str, str] = {
    "most rewards equal": "easier or harder prompts, or rollout.filter: check_reward_nonzero_std",
    "most clipped": "a smaller learning rate, or fewer iterations",
}


class Reason(NamedTuple):
    """`Reason("equal rewards", "in each of the 8 groups all answers have the same reward")`: a cause, its numbers."""

    name: str
    what: str

    @property
    def remedy(self) -> str:
        return {**NOTHING, **LITTLE}[self.name]

    def to_json(self) -> dict[str, str]:
        return {**self._asdict(), "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.name}: {self.what}; {self.remedy}"


class Token(NamedTuple):
    """One token of an answer; None where it has no such number."""

    position: int
    id: int
    piece: str
    trained: bool
    sampler_logprob: float | None
    policy_logprob: float | None
    ratio: float | None
    clipped: bool | None
    advantage: float | None
    share: float | None


class Explained(NamedTuple):
    """Result of `explain`: the reasons for which the step taught `nothing` or little, and the tokens of an answer."""

    step: int
    learned: str  # "nothing", "little" or "something"
    reasons: tuple[Reason, ...]
    summary: Mapping[str, Any]
    recorded: Mapping[int, int]  # groups whose tokens are recorded, and their answers
    answer: str
    tokens: tuple[Token, ...]

    def to_json(self) -> dict[str, Any]:
        reasons = [reason.to_json() for reason in self.reasons]
        return {**self._asdict(), "reasons": reasons, "tokens": [token._asdict() for token in self.tokens]}

    def __str__(self) -> str:
        numbers = "  ".join(f"{name} {_number(value)}" for name, value in self.summary.items() if value is not None)
        lines = [f"step {self.step} taught {self.learned}", f"  {numbers}", *(f"  {reason}" for reason in self.reasons)]
        if self.answer:
            shown = [_HEADER, *map(_line, self.tokens), SHARE] if self.tokens else ["its tokens are not recorded"]
            lines += ["", self.answer, *shown]
        else:
            lines += self._how_to_see_tokens()
        return "\n".join(lines)

    def _how_to_see_tokens(self) -> Iterator[str]:
        if self.recorded:
            groups = ", ".join(f"{group} (0 to {count - 1})" for group, count in self.recorded.items())
            yield f"  token by token: --group and --answer, recorded are {groups}"


def _number(value: float) -> str:
    """A count as it is, anything else with four digits."""
    return f"{value}" if isinstance(value, int) else f"{value:.4g}"


_HEADER = "  position      id  token           trained   sampler    policy     ratio  clipped  advantage    share"


def _line(token: Token) -> str:
    def number(value: float | None, width: int, digits: str) -> str:
        return f"{'' if value is None else format(value, digits):>{width}}"

    flags = [{True: "yes", False: "no", None: ""}[each] for each in (token.trained, token.clipped)]
    share = "" if token.share is None else f"{100 * token.share:.2f}%"
    return (
        f"  {token.position:8}  {token.id:6}  {token.piece!r:14.14}  {flags[0]:>7} "
        f"{number(token.sampler_logprob, 9, '.4f')} {number(token.policy_logprob, 9, '.4f')} "
        f"{number(token.ratio, 9, '.4f')}  {flags[1]:>7}  {number(token.advantage, 9, '.4f')}  {share:>7}"
    )


def explain(run: str | Path, step: int, group: int | None = None, answer: int | None = None) -> Explained:
    """Explain a recorded step. `group` and `answer` choose the answer whose tokens are shown; without them, none.

    Of several that fit, it is the one whose tokens have the largest gradient.
    """
    record = read_step(current_stage(Path(run)), step)
    reasons = tuple(reasons_of(record))
    nothing = [reason for reason in reasons if reason.name in NOTHING]
    learned = "nothing" if nothing else "little" if reasons else "something"
    chosen = None if group is None and answer is None else _chosen(record, group, answer)
    return Explained(
        step,
        learned,
        reasons,
        _summary(record),
        Counter(each["group"] for each in record.answers),
        "" if chosen is None else _title(chosen),
        () if chosen is None else tuple(_tokens(record, chosen)),
    )


def _title(answer: Mapping[str, Any]) -> str:
    reward = f", reward {answer['reward']}" if answer["kind"] == "answer" else ""
    return f"{name_of(answer)} ({answer['sample_id']}){reward}"


def _summary(record: StepRecord) -> dict[str, Any]:
    metrics, totals = record.step["metrics"], record.step["totals"]
    names = ("reward", "reward_std", "truncated", "loss", "grad_norm", "lr")
    return {**{name: metrics.get(name) for name in names}, **totals}


def reasons_of(record: StepRecord) -> Iterator[Reason]:
    """The causes in the order of the computation; what follows from one of them is not named again."""
    metrics, totals = record.step["metrics"], record.step["totals"]
    if not totals["trained"]:
        none = f"none of the {totals['rows']} rows has a trained token"
        yield Reason("mask empty", none if totals["rows"] else "the algorithm made no row from the answers")
        return
    if metrics.get("lr") == 0:
        yield Reason("learning rate zero", "no weight changes, whatever the gradient is")
    cause = _without_advantage(record) or _clipped(totals)
    if cause is None and metrics.get("grad_norm") == 0:
        cause = Reason("gradient zero", "the loss does not depend on any trained weight here")
    if cause is None:
        yield from _little(record)
    else:
        yield cause._replace(what=cause.what + _moved_anyway(record))


def _moved_anyway(record: StepRecord) -> str:
    digests = record.step["digests"]
    moved = digests["weights"] is not None and digests["weights"] != digests["weights_before"]
    return " (weights moved anyway: by weight decay, by AdamW's momentum or by another term)" if moved else ""


def _trained_groups(record: StepRecord) -> list[dict[str, Any]]:
    return [group for group in record.step["groups"] if "rewards" in group and group["left_out"] is None]


def _without_advantage(record: StepRecord) -> Reason | None:
    """Why all advantages of the step are 0; None if they are not, or if the algorithm has none."""
    totals, groups = record.step["totals"], _trained_groups(record)
    if totals["with_advantage"] or not totals["credited"]:
        return None
    if not groups or any(group["std"] for group in groups):
        return Reason("advantage zero", "rewards differ, but credit assignment gave every token the advantage 0")
    values = sorted({group["mean"] for group in groups if group["mean"] is not None})
    same = f"in each of the {len(groups)} groups all answers have the same reward"
    if record.step["metrics"].get("truncated") == 1:
        return Reason("all truncated", f"every answer was cut off at rollout.max_tokens, and {same}")
    return Reason("equal rewards", f"{same} ({', '.join(f'{value:g}' for value in values[:4])})")


def _clipped(totals: Mapping[str, float]) -> Reason | None:
    if not totals["with_advantage"] or totals["clipped"] < totals["with_advantage"]:
        return None
    where = "outside of the clip range, or masked by the correction"
    return Reason("all clipped", f"all {totals['clipped']} tokens with an advantage are {where}")


def _little(record: StepRecord) -> Iterator[Reason]:
    totals, groups = record.step["totals"], _trained_groups(record)
    flat, credited = sum(not group["std"] for group in groups), totals["with_advantage"]
    if totals["credited"] and flat >= MOST * len(groups) > 0:
        yield Reason("most rewards equal", f"in {flat} of {len(groups)} groups all answers have the same reward")
    if credited and totals["clipped"] >= MOST * credited:
        yield Reason("most clipped", f"{totals['clipped']} of {credited} tokens with an advantage")


def _chosen(record: StepRecord, group: int | None, answer: int | None) -> dict[str, Any]:
    """The answer that was asked for; of a group the one whose tokens have the largest gradient."""
    found = [each for each in record.answers if group in (None, each["group"]) and answer in (None, each["index"])]
    if not found:
        recorded = sorted({each["group"] for each in record.answers})
        parts = (("group", group), ("answer", answer))
        wanted = ", ".join(f"{name} {number}" for name, number in parts if number is not None)
        raise ValueError(
            f"step {record.step['step']} has no record of {wanted}; recorded groups: "
            f"{', '.join(map(str, recorded)) or 'none'} (rollout.record: full records all)"
        )
    return max(found, key=lambda each: sum(map(abs, filter(None, _list(each, "gradient")))))


def _list(answer: Mapping[str, Any], name: str) -> Sequence[Any]:
    return (answer.get("tokens") or {}).get(name) or ()


def _tokens(record: StepRecord, answer: Mapping[str, Any]) -> Iterator[Token]:
    total = record.step["totals"]["gradient"]
    tokens = answer.get("tokens")
    if tokens is None:
        return
    none = [None] * len(tokens["ids"])
    names = ("sampler_logprob", "policy_logprob", "ratio", "clipped", "advantage", "gradient")
    columns = [tokens[name] or none for name in names]
    ids, pieces, mask = (tokens[name] for name in ("ids", "pieces", "mask"))
    for position, (token, piece, trained, *numbers) in enumerate(zip(ids, pieces, mask, *columns, strict=True)):
        sampler, policy, ratio, clipped, advantage, gradient = numbers
        share = abs(gradient) / total if gradient is not None and total else gradient
        was_clipped = None if clipped is None else bool(clipped)
        yield Token(position, token, piece, bool(trained), sampler, policy, ratio, was_clipped, advantage, share)
