"""What a run logs to its trackers, read back with each tracker's own reader; and that no tracker can stop a run."""

import json
import os
import sqlite3
import sys
from pathlib import Path
from shutil import copy

import pytest

from oxrl.config import check_config
from oxrl.run.prepare import prepare_run
from oxrl.run.train import train_run
from oxrl.tracking.trackers import check_trackers, flattened, tracked
from tests.rows import write_jsonl

pytestmark = pytest.mark.usefixtures("wandb_ended")
ALL = ["mlflow", "tensorboard", "wandb", "trackio"]
STEPS = list(range(1, 9))
# DPO that fails in its sixth step, one step after a checkpoint, unless the file `fixed` exists.
LOSS = """
from pathlib import Path
from oxrl.algorithms.preference import Pairs, dpo

HOME = Path(__file__).parent

def loss(pairs: Pairs):
    metrics = HOME / "runs" / "one" / "metrics.jsonl"
    if metrics.exists() and len(metrics.read_text().splitlines()) == 5 and not (HOME / "fixed").exists():
        raise ZeroDivisionError("a bug in a custom loss")
    return dpo(pairs)
"""
PAIRS = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(16)]


def config_of(home: Path, trackers: list[str]):
    (home / "own.py").write_text(LOSS)
    return check_config(
        {
            "model": {"name": "tiny"},
            "data": {"train_files_path": str(write_jsonl(home / "rows.jsonl", PAIRS))},
            "train": {
                "alg_name": f"{home / 'own.py'}:loss",
                "lr": 1e-3,
                "train_steps_per_epoch": len(STEPS),
                "train_batch_size_per_gpu": 2,
                "checkpoint_every": 4,
            },
            "run": {"trackers": trackers},
        }
    )


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """One database for all tests, since MLflow takes seconds to create it."""
    import mlflow

    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{store}").search_experiments()
    return store


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory, empty_store, complete_run):
    """A run that failed in step 6 and was resumed from step 4."""
    home = tmp_path_factory.mktemp("tracked")
    (home / "runs").mkdir()
    copy(empty_store, home / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))  # read at import, which happens below
        for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(home / "no-netrc"))
        with pytest.raises(ZeroDivisionError):
            train_run(config_of(home, ALL), home / "runs" / "one")
        first = _mlflow_run(home / "runs")
        (home / "fixed").touch()
        train_run(config_of(home, ALL), home / "runs" / "one", resume=True)
        yield home / "runs", first


def _mlflow_run(runs: Path):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("oxrl").experiment_id])
    return run


def logged(runs: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]


def test_mlflow_has_one_run_with_every_step_once(resumed_run):
    import mlflow

    runs, first = resumed_run
    run = _mlflow_run(runs)
    client = mlflow.MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == list(zip(STEPS, logged(runs), strict=True))
    assert run.info.run_id == first.info.run_id
    assert (first.info.status, run.info.status) == ("FAILED", "FINISHED")
    assert run.data.params["train.lr"] == "0.001"
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {
        "config.yaml",
        "metrics.jsonl",
        "curves.png",
    }
    assert (runs / "mlflow_artifacts").is_dir(), "next to the database, not in the working directory"


def test_tensorboard_has_every_step_once(resumed_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs, _ = resumed_run
    read = EventAccumulator(str(runs / "one" / "tensorboard"))
    read.Reload()
    scalars = read.Scalars("loss")
    assert [each.step for each in scalars] == STEPS
    assert [each.value for each in scalars] == pytest.approx(logged(runs), rel=1e-6)


def offline_records(file: Path):
    """W&B's own reader is not in Python any more: a header of 7 bytes, then LevelDB's log format."""
    data, offset, record = file.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if (left := 32768 - offset % 32768) < 7:
            offset += left
            continue
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield record
            record = b""


def test_wandb_without_a_key_is_offline_and_has_every_step_once_under_one_id(resumed_run):
    from wandb.proto import wandb_internal_pb2

    runs, _ = resumed_run
    files = sorted((runs / "one" / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2 and len({file.name for file in files}) == 1, "two processes of one run"
    steps, losses = [], []
    for file in files:
        for data in offline_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                steps.append(row["_step"])
                losses.append(row["loss"])
    assert steps == STEPS
    assert losses == pytest.approx(logged(runs))


def test_trackio_has_every_step_once(resumed_run):
    runs, _ = resumed_run
    with sqlite3.connect(runs.parent / "trackio" / "oxrl.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [step for _, step, _ in rows] == STEPS
    assert len({run for run, _, _ in rows}) == 1
    assert [json.loads(metrics)["loss"] for _, _, metrics in rows] == pytest.approx(logged(runs))


def test_trackers_do_not_change_training(resumed_run, tmp_path):
    runs, _ = resumed_run
    (tmp_path / "fixed").touch()
    train_run(config_of(tmp_path, []), tmp_path / "runs" / "one")
    assert logged(tmp_path / "runs") == logged(runs)
    assert not (tmp_path / "runs" / "one" / "trackers.json").exists()


@pytest.mark.engine
def test_mlflow_keeps_a_run_in_the_store_that_is_named(tmp_path, monkeypatch, empty_store):
    import mlflow

    store = f"sqlite:///{copy(empty_store, tmp_path / 'elsewhere.db')}"
    monkeypatch.chdir(tmp_path)  # where MLflow puts the artifacts of such a store
    with tracked(["mlflow"], tmp_path / "runs" / "one", {}, uri=store) as log:
        log(1, {"loss": 2.0})
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("oxrl").experiment_id])
    assert run.data.metrics == {"loss": 2.0}
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def test_mlflow_telemetry_is_off_unless_the_user_enables_it(tmp_path, monkeypatch, empty_store):
    from mlflow.telemetry.utils import MLFLOW_DISABLE_TELEMETRY

    copy(empty_store, tmp_path)
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    with tracked(["mlflow"], tmp_path / "run", {}):
        assert MLFLOW_DISABLE_TELEMETRY.get() is True
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    with tracked(["mlflow"], tmp_path / "run", {}):
        assert MLFLOW_DISABLE_TELEMETRY.get() is False


def test_a_missing_package_is_an_error_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"wandb is not installed: pip install -e '\.\[wandb\]'"):
        prepare_run(config_of(tmp_path, ["wandb"]), tmp_path / "out")
    with pytest.raises(ValueError, match="unknown tracker 'comet'; allowed: mlflow"):
        check_trackers(["comet"])


def test_a_store_that_cannot_be_opened_is_an_immediate_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, and long enough to be taken for a broken one" * 20)
    with pytest.raises(ValueError, match="mlflow cannot be opened"), tracked(["mlflow"], tmp_path / "run", {}):
        pass


def test_a_tracker_that_fails_during_a_run_warns_once_and_does_not_stop_it(tmp_path, caplog, empty_store):
    copy(empty_store, tmp_path)
    with tracked(["mlflow", "tensorboard"], tmp_path / "run", {}) as log:
        log(1, {"loss": 1.0})
        for file in tmp_path.glob("mlflow.db*"):
            file.write_bytes(b"overwritten " * 1000)
        for step in range(2, 8):
            log(step, {"loss": 1.0})
    assert [record.getMessage()[:13] for record in caplog.records if record.name == "oxrl.tracking.trackers"] == [
        "mlflow failed"
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert len(read.Scalars("loss")) == 7, "the other trackers continue"


def test_only_rank_0_tracks(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with tracked(ALL, tmp_path, {}) as log:
        log(1, {"loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_killed_twice_before_it_catches_up_still_has_every_step_once(tmp_path):
    """Steps 1 to 5 were logged; the second process reached only step 3."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = tmp_path / "metrics.jsonl"
    for first, last in ((1, 5), (2, 3), (3, 7)):
        with tracked(["tensorboard"], tmp_path, {}) as log:
            kept = metrics.read_text().splitlines()[: first - 1] if metrics.exists() else []
            metrics.write_text("".join(f"{line}\n" for line in kept))
            for step in range(first, last + 1):
                with metrics.open("a") as file:
                    file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
                log(step, {"loss": 1.0})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [each.step for each in read.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_config_is_flattened_to_dotted_names():
    assert flattened({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


@pytest.mark.engine
def test_the_log_functions_start_a_run(tmp_path, monkeypatch, empty_store):
    """As a `logger=` for the primitives."""
    import mlflow
    import wandb

    import oxrl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy(empty_store, tmp_path)}")
    for log in (oxrl.log_to_mlflow, oxrl.log_to_tensorboard, oxrl.log_to_wandb):
        log(1, {"loss": 2.0})
    assert mlflow.get_run(mlflow.active_run().info.run_id).data.metrics == {"loss": 2.0}
    mlflow.end_run()
    assert wandb.run.settings.mode == "offline"
    wandb.finish()
    assert list(tmp_path.glob("runs/*/events.*")) and list(tmp_path.glob("wandb/offline-run-*"))
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
