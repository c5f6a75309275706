"""Find the small files of a model, and read the headers of its weights; no weight is loaded.

A hub model is read from the cache; if it is not there, the small files are downloaded. Without a network the answer
takes less than two seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import LFS_POINTER, SAFETENSORS, Source, adapter_base, find_model, hub_config_file
from oxrl.parsing import read_json

HUB_SECONDS = 1.0  # for the hub to respond at all
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "*.py", "LICENSE*", "tokenizer*", "*.tiktoken")
MAX_HEADER = 100_000_000  # bytes; the limit of safetensors
_ITEM_BITS = {
    "F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8,
}  # fmt: skip
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Tensor(NamedTuple):
    """`Tensor("BF16", (320, 128), "model.safetensors")`: an entry of a header."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


class ModelFiles(NamedTuple):
    """`locate("tiny")`: where the files are, `config.json` as it is written, and the headers of the weights."""

    name: str
    source: Source
    folder: Path  # for a GGUF file, the folder that contains it
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    defects: tuple[str, ...]  # of the weights
    adapter: str | None = None  # of which this is the base
    trusted: bool = False  # whether code of the model may be executed

    @property
    def loadable(self) -> str:
        """The name from which the loaders read the small files."""
        return self.source.where if self.source.kind == "gguf" else str(self.folder)

    def json(self, file: str) -> dict[str, Any]:
        """Return the object in a JSON file; an empty one if there is no such file."""
        path = self.folder / file
        return read_json(path) if self.source.kind != "gguf" and path.is_file() else {}


def locate(name: str, revision: str | None = None) -> ModelFiles:
    """Find a model by name; a ValueError explains why there is none."""
    source = find_model(name)
    if source.kind == "adapter":
        return locate(adapter_base(source.where))._replace(name=name, adapter=name)
    if source.kind == "gguf":
        return ModelFiles(name, source, Path(source.where).parent, {}, {}, ())
    if source.kind == "builtin":
        folder = prepare_builtin(source.where)
    elif source.kind == "hub":
        folder = _hub_folder(source.where, revision)
    else:
        folder = Path(source.where)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    tensors, defects = read_headers(folder)
    return ModelFiles(name, source, folder, read_json(folder / "config.json"), tensors, tuple(defects))


def _hub_folder(name: str, revision: str | None) -> Path:
    """Return the cached snapshot of a hub model, completed by the small files if the hub responds."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folder = hub_config_file(name, revision, seconds=HUB_SECONDS).parent
    if any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", *SAFETENSORS)):
        return folder
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(SMALL_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return folder  # what is missing there becomes a finding


def read_headers(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors that the safetensors of a folder announce, and what is wrong with the files."""
    tensors: dict[str, Tensor] = {}
    defects: list[str] = []
    listed: dict[str, str] = {}
    single, index = (folder / file for file in SAFETENSORS)
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, Mapping):
            return {}, [f"{index.name} has no weight_map, which names the file of each tensor"]
        listed = {str(key): str(file) for key, file in shards.items()}
    names = sorted(set(listed.values())) if listed else [single.name] if single.is_file() or single.is_symlink() else []
    for file in names:
        try:
            tensors |= read_header(folder / file)
        except FileNotFoundError:
            defects.append(_missing(folder / file, listed))
        except ValueError as error:
            defects.append(str(error))
    if listed and not defects and (lacking := sorted(set(listed) - tensors.keys())):
        defects.append(f"{len(lacking)} tensors of {index.name} are in no file, such as {lacking[0]}")
    return tensors, defects


def _missing(file: Path, listed: Mapping[str, str]) -> str:
    why = ": its link points to no file" if file.is_symlink() else ""
    if not listed:
        return f"{file.name} is missing{why}"
    count = list(listed.values()).count(file.name)
    return f"the shard {file.name} is missing, with {count} of {len(listed)} tensors{why}"


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file by its first bytes; a ValueError if it is cut off or damaged."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length == int.from_bytes(LFS_POINTER[:8], "little"):
            raise ValueError(f"{file.name} is a pointer of Git LFS instead of the file: run `git lfs pull`")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{file.name} is not a safetensors file: its header is damaged or cut off")
        try:
            header = json.loads(opened.read(length))
            entries = {key: value for key, value in header.items() if key != "__metadata__"}
            end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
            found = {
                name: Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), file.name)
                for name, entry in entries.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"{file.name} is not a safetensors file: its header is damaged") from error
    if size < 8 + length + end:
        raise ValueError(f"{file.name} is cut off: it has {size:,} of {8 + length + end:,} bytes")
    return found


def stored_dtype(tensors: Iterable[Tensor]) -> str | None:
    """`"bfloat16"`: the floating-point type of most weights; None if there are none."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in _DTYPES:
            sizes[_DTYPES[tensor.dtype]] = sizes.get(_DTYPES[tensor.dtype], 0) + tensor.size
    return max(sizes, key=sizes.__getitem__) if sizes else None


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size * _ITEM_BITS.get(tensor.dtype, 8) // 8 for tensor in tensors)


def licence_of(files: ModelFiles) -> str | None:
    """Return the licence in the model card's header, or the first line of a licence file; None if there is neither."""
    card = files.folder / "README.md"
    if files.source.kind == "gguf":
        return None
    if card.is_file():
        found = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
        line = re.search(r"^license(?:_name)?:\s*[\"']?([\w .+-]+)", found[1], re.MULTILINE) if found else None
        if line:
            return line[1].strip()
    for file in sorted(files.folder.glob("LICEN[SC]E*")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in lines if line.strip()), None)
    return None
