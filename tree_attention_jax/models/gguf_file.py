"""A GGUF file: typed look-ups in its metadata and its tensors as float32, with errors that name the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np


class _Reader(gguf.GGUFReader):
    """Reads through a plain array: the table of contents takes a million slices, and those of a memmap are slow."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


class GGUFFile:
    """An open (memory-mapped) GGUF file. Reading the table of contents takes seconds, so share one of these.

    Raises FileNotFoundError, or ValueError for a file that is not GGUF or is cut short.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        try:
            reader = _Reader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"{self.path}: not a GGUF file, or cut short ({error})") from error
        self.metadata = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    @classmethod
    def open(cls, file: GGUFFile | str | os.PathLike[str]) -> GGUFFile:
        return file if isinstance(file, GGUFFile) else cls(file)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key` as a Python value; `default` where the file has none."""
        field = self.metadata.get(key)
        return default if field is None else field.contents()

    def require(self, key: str, kind: type = object) -> Any:
        """The metadata value of `key`. Raises ValueError where it is missing or no `kind`."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path}: metadata key {key!r} is missing")
        if not isinstance(value, kind):
            raise ValueError(f"{self.path}: metadata key {key!r} must be {kind.__name__}, found {value!r}")
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor `name`, dequantized: float32, `shape` in NumPy's order (GGUF lists it reversed).

        Raises ValueError where it is missing or of another shape, NotImplementedError where the `gguf`
        package can't dequantize its type.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.path}: tensor {name!r} is missing, expected shape {list(shape)}")
        found = tuple(int(size) for size in reversed(stored.shape))
        if found != shape:
            raise ValueError(f"{self.path}: tensor {name!r} has shape {list(found)}, the metadata's is {list(shape)}")
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            kind = stored.tensor_type.name
            raise NotImplementedError(
                f"{self.path}: tensor {name!r} is stored as {kind}, which the gguf package can't dequantize; "
                f"convert the file to F16, Q8_0 or Q4_K"
            ) from error
        return values.reshape(shape)
