"""Recorded episodes: which rows their steps become, in folders of any kind and in LeRobot's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from oxrl import ActionTokens, Renderer, load_samples
from oxrl.algorithms import algorithm
from oxrl.data.assemble import assemble
from tests.drawings import encoded, picture
from tests.rows import write_jsonl

COLORS = ("red", "green", "blue")
FEATURES = {
    "observation.images.top": {"dtype": "image", "shape": [28, 28, 3]},
    "observation.state": {"dtype": "float32", "shape": [2]},
    "action": {"dtype": "float32", "shape": [2]},
}


def shown(color: str) -> bytes:
    return encoded(picture(color, 28, 28))


def steps(episode: int, length: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "observation.images.top": {"bytes": shown(COLORS[step]), "path": f"frame_{step:06d}.png"},
            "observation.state": [episode + 0.5, step / 3],
            "action": [0.1 * step, -0.1 * episode],
            "timestamp": step / 10,
            "frame_index": step,
            "episode_index": episode,
            "task_index": episode % 2,
        }
        for step in range(length)
    ]


def lerobot(folder: Path, version: str, features: dict[str, Any] = FEATURES) -> Path:
    """A dataset of three episodes as LeRobot writes it: a file per episode, from version 3 on one for several."""
    meta, data = folder / "meta", folder / "data" / "chunk-000"
    meta.mkdir(parents=True)
    data.mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps({"codebase_version": version, "fps": 10, "features": features}))
    tasks = ["reach red", "reach blue"]
    if version == "v3.0":
        pandas.DataFrame({"task_index": [0, 1]}, index=tasks).to_parquet(meta / "tasks.parquet")
        pandas.DataFrame([step for episode in range(3) for step in steps(episode)]).to_parquet(
            data / "file-000.parquet"
        )
    else:
        write_jsonl(meta / "tasks.jsonl", [{"task_index": index, "task": task} for index, task in enumerate(tasks)])
        for episode in range(3):
            pandas.DataFrame(steps(episode)).to_parquet(data / f"episode_{episode:06d}.parquet")
    return folder


def answers(samples: list[Any]) -> list[list[list[float]]]:
    return [np.round(sample.messages[-1].extra["actions"], 3).tolist() for sample in samples]


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_each_step_of_a_lerobot_dataset_is_a_row_with_its_picture_instruction_and_next_actions(tmp_path, version):
    loaded = load_samples(lerobot(tmp_path / "set", version), chunk=2)
    assert loaded.format == "actions" and len(loaded.samples) == 9
    second = loaded.samples[4]
    assert [message.text for message in second.messages] == ["reach blue", ""]
    assert [medium.data for medium in second.media] == [shown("green")]
    assert second.metadata == {"state": "1.5 0.3333", "step": 1}
    assert answers(loaded.samples[3:6]) == [[[0, -0.1], [0.1, -0.1]], [[0.1, -0.1], [0.2, -0.1]], [[0.2, -0.1]] * 2]
    assert second.id == ("file-000.parquet:5" if version == "v3.0" else "episode_000001.parquet:2")


def test_steps_become_rows_that_train_the_tokens_of_their_actions(tiny_vlm, tmp_path):
    codec = ActionTokens(low=[-1, -1], high=[1, 1], bins=20, chunk=2)
    template = {"prompt": "{instruction} from {state}"}
    loaded = load_samples(lerobot(tmp_path / "set", "v2.1"), chunk=codec.chunk, template=template)
    rows = assemble(loaded.samples, algorithm("sft"), Renderer(tiny_vlm[1], actions=codec)).items
    (row,) = rows[1]
    answer = codec.encode([[0.1, 0], [0.2, 0]], tiny_vlm[1])
    assert row.tokens[row.mask].tolist() == [*answer, tiny_vlm[1].eos_token_id]
    assert "reach red from 0.5 0.3333" in tiny_vlm[1].decode(row.tokens) and len(row.media_spans) == 1


def test_a_folder_has_files_of_steps_or_of_whole_episodes(tmp_path):
    for color in COLORS:
        (tmp_path / f"{color}.png").write_bytes(shown(color))
    whole = {"images": [f"{color}.png" for color in COLORS], "actions": ["left", "left", "right"]}
    write_jsonl(tmp_path / "whole.jsonl", [{"task": "go", **whole}] * 2)
    seen = [{"instruction": "go", "image": f"{color}.png"} for color in COLORS]
    actions = ["left", "left", "right"]
    write_jsonl(
        tmp_path / "steps.jsonl", [{**row, "action": action} for row, action in zip(seen, actions, strict=True)]
    )
    samples = load_samples(tmp_path).samples
    assert [sample.id for sample in samples[2:5]] == ["steps.jsonl:3", "whole.jsonl:1:0", "whole.jsonl:1:1"]
    assert [sample.messages[-1].extra["actions"] for sample in samples] == [["left"], ["left"], ["right"]] * 3
    assert [sample.media[0].data for sample in samples] == [str(tmp_path / f"{color}.png") for color in COLORS] * 3


def test_an_episode_ends_where_its_number_or_its_file_does(tmp_path):
    rows = [{"instruction": "go", "action": [float(n)], "episode": n // 2} for n in range(4)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", [{"instruction": "go", "action": [9.0]}])
    assert answers(load_samples(tmp_path, chunk=2).samples) == [
        [[0.0], [1.0]], [[1.0], [1.0]], [[2.0], [3.0]], [[3.0], [3.0]], [[9.0], [9.0]],
    ]  # fmt: skip


def test_columns_of_other_names_are_mapped(tmp_path):
    row = {"say": "go", "cam": {"bytes": shown("red"), "path": None}, "act": [0.5], "pose": [1.0, 2.0], "run": 7}
    pandas.DataFrame([row]).to_parquet(tmp_path / "a.parquet")
    columns = {"instruction": "say", "image": "cam", "action": "act", "state": "pose", "episode": "run"}
    (sample,) = load_samples(tmp_path, columns=columns).samples
    assert sample.messages[0].text == "go" and sample.metadata["state"] == "1 2" and len(sample.media) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (
            [{"action": [1]}],
            {},
            "a.jsonl:1: it has action, and no instruction: map it with columns",
        ),
        ([{"instruction": "go", "action": [1]}, {"instruction": "go"}], {}, "a.jsonl:2: .* and no action"),
        ([{"instruction": "go", "actions": [1, 2], "images": ["a.png"]}], {}, "it has 2 actions, and images needs a"),
        ([{"instruction": "go", "action": [1]}], {"actoin": "x"}, "'actoin' is no column of recorded .* mean action"),
        ([{"prompt": "go", "response": "left"}], {}, r"is a folder: pass one of its data files \(a\.jsonl\)"),
    ],
)
def test_what_a_recording_lacks_is_named(tmp_path, rows, columns, message):
    write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path, columns=columns)


def test_a_line_that_cannot_be_read_is_not_skipped_inside_of_an_episode(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"instruction": "go", "action": [1]}\n{"instruc\n')
    with pytest.raises(ValueError, match="a.jsonl:2: the line is not JSON.*an episode is read as a whole"):
        load_samples(tmp_path, bad_rows="skip")


def test_videos_are_refused_with_a_remedy(tmp_path):
    video = {"observation.images.top": {"dtype": "video"}, "action": {"dtype": "float32"}}
    with pytest.raises(ValueError, match="observation.images.top of .* is a video, which is not read"):
        load_samples(lerobot(tmp_path / "set", "v2.1", video))
