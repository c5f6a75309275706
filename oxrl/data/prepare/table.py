"""One line per dataset. Tasks of reasoning-gym are named `gym:TASK`."""

from __future__ import annotations

from collections.abc import Mapping

from oxrl.data.prepare.alpaca import ALPACA
from oxrl.data.prepare.competition_math import MATH, MATH_HARD
from oxrl.data.prepare.dolly import DOLLY
from oxrl.data.prepare.geometry3k import GEOMETRY3K
from oxrl.data.prepare.gpqa import GPQA
from oxrl.data.prepare.gsm8k import GSM8K
from oxrl.data.prepare.gym import PREFIX, gym_dataset
from oxrl.data.prepare.hh_rlhf import HH_RLHF
from oxrl.data.prepare.humaneval import HUMANEVAL
from oxrl.data.prepare.librispeech import LIBRISPEECH
from oxrl.data.prepare.mbpp import MBPP
from oxrl.data.prepare.oasst import OASST, OASST_PAIRS
from oxrl.data.prepare.openr1_math import OPENR1_MATH
from oxrl.data.prepare.recipe import Dataset
from oxrl.data.prepare.self_instruct import SELF_INSTRUCT
from oxrl.data.prepare.svamp import SVAMP
from oxrl.data.prepare.ultrafeedback import ULTRAFEEDBACK, ULTRAFEEDBACK_PAIRS
from oxrl.names import did_you_mean

_TABLE = (
    GSM8K, SVAMP, MATH, MATH_HARD, OPENR1_MATH, GPQA, MBPP, HUMANEVAL, ULTRAFEEDBACK, ULTRAFEEDBACK_PAIRS, HH_RLHF,
    OASST, OASST_PAIRS, ALPACA, DOLLY, SELF_INSTRUCT, GEOMETRY3K, LIBRISPEECH,
)  # fmt: skip
DATASETS: Mapping[str, Dataset] = {dataset.name: dataset for dataset in _TABLE}


def find_dataset(name: str, size: int = 1000) -> Dataset:
    """`find_dataset("gsm8k")`; `find_dataset("gym:leg_counting", size=200)` for a task of reasoning-gym."""
    if name.startswith(PREFIX):
        return gym_dataset(name.removeprefix(PREFIX), size)
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS, ".")
        raise ValueError(
            f"no dataset is called {name!r}{hint} There are: {', '.join(DATASETS)}, and {PREFIX}TASK for a task of "
            "reasoning-gym; set data.train_files_path for a custom file"
        )
    return DATASETS[name]
