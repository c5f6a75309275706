"""`gym:oxrl/Reach-v0`: a small drawn environment: move the dot to the square of the named colour.

A picture and an instruction in words become moves of two numbers. It needs gymnasium and numpy alone, and takes
microseconds a step, so that a small model can learn to act from pixels on a laptop. Importing this module registers it.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from oxrl.names import did_you_mean

Place: TypeAlias = NDArray[np.float64]  # x to the right and y down, from 0 to 1

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 30),
    "purple": (150, 60, 190),
    "orange": (245, 130, 30),
    "cyan": (50, 200, 210),
    "pink": (245, 150, 190),
}
SPLITS = ("all", "train", "held_out")

_STEP = 0.15  # of an action of 1
_HALF_SQUARE = 0.11
_DOT = 0.08
_BACKGROUND, _DOT_COLOR = (128, 128, 128), (255, 255, 255)  # grey is 0 in what most models get
_SIGHT = 0.9  # of a centered picture: from the dot to its sides, so that no square is out of sight
_KEPT_CENTER, _KEPT_HALF = 0.2, 0.12  # of the areas of a split: distance from the middle of the picture, half a side
_MARGIN = _HALF_SQUARE + 0.04  # that straight ways to a square keep from the others
_MOST_DRAWS = 10_000


class Reach(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """`gymnasium.make("oxrl/Reach-v0", squares=3)`: an action is (dx, dy), each from -1 to 1.

    The episode ends in any square, with the reward 1.0 and `info["is_success"]` in that of the named colour. The seed
    of `reset` determines the scene. `targets` are the colours that may be named. In the `split` "train" no square
    lies in the area that is kept from its colour, in "held_out" the named one does: the middle of the upper left
    quarter for the first colour, of the upper right one for the second, then of the lower ones. With `centered`,
    the dot is in the middle of the picture, which moves with it. `instruction` words the task; it has `{color}`.
    With `exchanged`, a control, the instruction names any square of the scene, whichever must be reached.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - gymnasium's

    def __init__(
        self,
        *,
        size: int = 56,
        squares: int = 2,
        colors: Sequence[str] = ("red", "green", "blue", "yellow"),
        targets: Sequence[str] | None = None,
        split: Literal["all", "train", "held_out"] = "all",
        exchanged: bool = False,
        centered: bool = False,
        instruction: str = "reach the {color} square",
        render_mode: str | None = "rgb_array",
    ) -> None:
        self.colors, self.targets = tuple(colors), tuple(targets or colors)
        _check(size, squares, self.colors, self.targets, split, instruction)
        self.size, self.squares, self.split = size, squares, split
        self.exchanged, self.centered, self._wording = exchanged, centered, instruction
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (size, size, 3), np.uint8),
                "instruction": spaces.Text(64, charset=string.printable),
            }
        )
        self.dot: Place = np.zeros(2)
        self.places: Place = np.zeros((squares, 2))
        self.shown: tuple[str, ...] = ()  # colours of the squares; the first must be reached
        self.instruction = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        random = self.np_random
        target = self.targets[random.integers(len(self.targets))]
        others = [color for color in self.colors if color != target]
        self.shown = (target, *random.permutation(others)[: self.squares - 1].tolist())
        self.dot, self.places = self._draw_places()
        named = self.shown[random.integers(self.squares)] if self.exchanged else target
        self.instruction = self._wording.format(color=named)
        return self._observation(), {"is_success": False}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        move = np.asarray(action, dtype=np.float64).reshape(2)
        if not np.isfinite(move).all():
            raise ValueError(f"the action {move.tolist()} has a number that is not finite")
        self.dot = np.clip(self.dot + _STEP * np.clip(move, -1, 1), 0.0, 1.0)
        inside = np.abs(self.places - self.dot).max(axis=1) <= _HALF_SQUARE
        success = bool(inside[0])
        return self._observation(), float(success), bool(inside.any()), False, {"is_success": success}

    def expert(self) -> NDArray[np.float32]:
        """The action that leads straight to the square that must be reached."""
        way: Place = (self.places[0] - self.dot) / _STEP
        return np.asarray(way / max(1.0, np.abs(way).max()), dtype=np.float32)

    def render(self) -> NDArray[np.uint8]:
        return self._picture(max(self.size, 224))

    def _observation(self) -> dict[str, Any]:
        return {"image": self._picture(self.size), "instruction": self.instruction}

    def _picture(self, size: int) -> NDArray[np.uint8]:
        picture = np.full((size, size, 3), _BACKGROUND, dtype=np.uint8)
        x, y = np.meshgrid(*self._coordinates(size))
        for (left, top), color in zip(self.places, self.shown, strict=True):
            picture[(abs(x - left) <= _HALF_SQUARE) & (abs(y - top) <= _HALF_SQUARE)] = COLORS[color]
        picture[(x - self.dot[0]) ** 2 + (y - self.dot[1]) ** 2 <= _DOT**2] = _DOT_COLOR
        return picture

    def _coordinates(self, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """x of the columns and y of the rows of a picture."""
        share = (np.arange(size) + 0.5) / size
        if not self.centered:
            return share, share
        left, top = self.dot - _SIGHT
        return left + 2 * _SIGHT * share, top + 2 * _SIGHT * share

    def _draw_places(self) -> tuple[Place, Place]:
        """The dot and the squares, none in the straight way to another."""
        for _ in range(_MOST_DRAWS):
            dot = self.np_random.uniform(_DOT, 1 - _DOT, 2)
            places = self.np_random.uniform(_HALF_SQUARE, 1 - _HALF_SQUARE, (self.squares, 2))
            if self._fits_split(places) and _is_clear(dot, places):
                return dot, places
        raise RuntimeError(f"no scene with {self.squares} squares was found")  # about 1 draw in 300 is one with 4

    def _fits_split(self, places: Place) -> bool:
        kept = [
            kept_area(place) == self.colors.index(color) % 4 for place, color in zip(places, self.shown, strict=True)
        ]
        return self.split == "all" or (kept[0] if self.split == "held_out" else not any(kept))


def kept_area(place: Place) -> int | None:
    """0 to 3: the middle of the upper left, upper right, lower left or lower right quarter; None outside of these."""
    if (np.abs(np.abs(place - 0.5) - _KEPT_CENTER) > _KEPT_HALF).any():
        return None
    return int(place[0] > 0.5) + 2 * int(place[1] > 0.5)


def _is_clear(dot: Place, places: Place) -> bool:
    for index, target in enumerate(places):
        others = np.delete(places, index, axis=0)
        way = dot + np.linspace(0, 1, 12)[:, None] * (target - dot)
        if (np.abs(way[:, None] - others).max(axis=2) <= _MARGIN).any() or np.abs(target - dot).max() <= _MARGIN:
            return False
        if (np.abs(others - target).max(axis=1) <= 2 * _HALF_SQUARE).any():  # they would overlap
            return False
    return True


def _check(
    size: int, squares: int, colors: Sequence[str], targets: Sequence[str], split: str, instruction: str
) -> None:
    if unknown := [color for color in (*colors, *targets) if color not in COLORS]:
        raise ValueError(f"there is no color {unknown[0]!r:.50}{did_you_mean(str(unknown[0]), COLORS)}; {_KNOWN}")
    if len(set(colors)) < len(colors) or not set(targets) <= set(colors):
        raise ValueError("colors has a color twice, or targets has one that is not in colors")
    if not 1 <= squares <= min(4, len(colors)):
        raise ValueError(f"squares is {squares}; give 1 to 4, and not more than there are colors ({len(colors)})")
    if not 16 <= size <= 1024:
        raise ValueError(f"size is {size}; give the pixels of a side, 16 to 1024")
    if not isinstance(instruction, str) or instruction.count("{") != 1 or "{color}" not in instruction:
        raise ValueError(f"instruction is {instruction!r:.100}; give a text with {{color}}, and no other braces")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r:.50}; it is one of {', '.join(SPLITS)}")


_KNOWN = f"colors are {', '.join(COLORS)}"

gymnasium.register("oxrl/Reach-v0", f"{__name__}:Reach", max_episode_steps=10)
