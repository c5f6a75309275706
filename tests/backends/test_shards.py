"""Shards are read without running code that their files may contain."""

import pickle
from pathlib import Path, PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from oxrl.backends.distributed.shards import INDEX, SHARDS, save_shards
from oxrl.backends.local import create_pytorch_backend
from oxrl.models.load import load_model
from tests.faults.test_disk import room_for

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


class MakesFolder:
    """What a crafted file can hold: unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return Path.mkdir, (Path(self.path),)


@pytest.fixture(scope="module")
def backend(tiny):
    return create_pytorch_backend(load_model(tiny[0]), lr=1e-3)


@pytest.fixture
def saved(backend, tmp_path):
    save_shards(backend, tmp_path, {})
    return tmp_path


def rewrite_index(folder, change):
    index = FileSystemReader(folder / SHARDS).read_metadata()
    change(index)
    (folder / SHARDS / INDEX).write_bytes(pickle.dumps(index))


def test_what_was_saved_is_loaded(backend, saved):
    expected = {name: weight.clone() for name, weight in backend.model.state_dict().items()}
    with torch.no_grad():
        for weight in backend.model.parameters():
            weight.zero_()
    backend.load(saved)
    assert all(weight.equal(expected[name]) for name, weight in backend.model.state_dict().items())


def test_an_index_that_would_run_code_is_refused(backend, saved):
    (saved / SHARDS / INDEX).write_bytes(pickle.dumps(MakesFolder(saved / "made")))
    with pytest.raises(ValueError, match=r"\.metadata is not the index of a checkpoint \(it refers to pathlib"):
        backend.load(saved)
    assert not (saved / "made").exists()


@pytest.mark.parametrize("changed", [b"cpathlib\nPosixPath\n", b"ctorch.serialization\n_get_layout\n"])
def test_an_index_that_would_change_an_allowed_class_or_function_is_refused(backend, saved, changed):
    """Unpickling sets attributes of any object: `__fspath__` of a path leads later writes to other files."""
    set_attribute = changed + b"N}(S'made'\nI1\nu\x86b."
    (saved / SHARDS / INDEX).write_bytes(set_attribute)
    with pytest.raises(ValueError, match="it changes <.*, which is not part of a checkpoint"):
        backend.load(saved)
    assert not hasattr(PurePosixPath, "made") and not hasattr(torch.serialization._get_layout, "made")


def test_an_entry_that_would_be_unpickled_without_restriction_is_refused(backend, saved):
    """Torch loads entries that the index does not call tensors with `weights_only=False`."""

    def point_at_object(index):
        index.state_dict_metadata["version"] = BytesStorageMetadata()
        size = (saved / SHARDS / "object").stat().st_size
        index.storage_data[MetadataIndex("version")] = _StorageInfo("object", 0, size)

    torch.save(MakesFolder(saved / "made"), saved / SHARDS / "object")
    rewrite_index(saved, point_at_object)
    with pytest.raises(ValueError, match="BytesStorageMetadata, which is not part of a checkpoint"):
        backend.load(saved)
    assert not (saved / "made").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: next(iter(index.storage_data.values())).__dict__.update(relative_path="../x"), "outside of the"),
        (lambda index: index.state_dict_metadata.update(version=5), "version is not a tensor"),
    ],
)
def test_an_index_of_other_things_is_refused(backend, saved, change, message):
    rewrite_index(saved, change)
    with pytest.raises(ValueError, match=message):
        backend.load(saved)


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(5)[:-1], b"\x8e" + b"\xff" * 9]
)
def test_a_damaged_index_is_refused(backend, saved, content):
    (saved / SHARDS / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match="is not the index of a checkpoint"):
        backend.load(saved)


@pytest.mark.parametrize("size", [500, 50_000])
def test_a_full_disk_is_an_error_of_the_operating_system(backend, tmp_path, size):
    with room_for(size), pytest.raises(OSError, match="rank 0 could not write its shard"):
        save_shards(backend, tmp_path, {})
