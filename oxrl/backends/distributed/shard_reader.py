"""Read what `torch.distributed.checkpoint` wrote, without running code that the files of a checkpoint may contain.

Its index, `.metadata`, is a pickle: only classes that describe tensors are allowed in it. Entries that are not tensors
(torch would unpickle them without restriction) and files outside of the folder are refused.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata

from oxrl.backends.distributed.shards import INDEX

_INSTANCES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,
    **{(each.__module__, each.__qualname__): each for each in (*_INSTANCES, metadata._MEM_FORMAT_ENCODING)},
}


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python: that in C would let a file set attributes of an allowed class or function."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], _INSTANCES):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r:.99}, which is not part of a checkpoint")
        super().load_build()  # type: ignore[misc]  # not in the stubs

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of a checkpoint")
        return _ALLOWED[module, name]


class ShardReader(filesystem.FileSystemReader):
    """`load(state, storage_reader=ShardReader(folder))`."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> metadata.Metadata:
        file = Path(self.path) / INDEX
        content = BytesIO(file.read_bytes())
        try:
            found = _checked(_Unpickler(content).load())
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(
                f"{file} is not the index of a checkpoint ({error}), so nothing was loaded: restore the file, or start "
                f"a new run with {file.parents[1]} as the model"
            ) from error
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


def _checked(found: Any) -> metadata.Metadata:
    if not isinstance(found, metadata.Metadata):
        raise TypeError(f"it holds {type(found).__name__}")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor")
    for info in found.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"it refers to {info.relative_path}, outside of the folder")
    return found
