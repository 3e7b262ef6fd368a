"""Modules of a repository that is no package, from a folder that the user names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.peers import Unsuitable


def load(checkout: Path, folders: tuple[str, ...], module: str) -> ModuleType:
    """``module`` from the first of ``folders`` below the checkout that has it."""
    relative = Path(*module.split(".")).with_suffix(".py")
    for folder in folders:
        if (checkout / folder / relative).is_file():
            place = str(checkout / folder)
            if place not in sys.path:
                sys.path.insert(0, place)
            try:
                return importlib.import_module(module)
            except Exception as error:  # whatever the checkout's own imports raise
                raise Unsuitable(f"{checkout / folder / relative} cannot be imported: {error!r}") from None
    looked = ", ".join(str(checkout / folder / relative) for folder in folders)
    raise Unsuitable(f"there is no {looked}: is {checkout} a checkout of it?")
