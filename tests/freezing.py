"""Snapshots of whole objects, to show that a call that failed changed nothing."""

import numpy as np


def freeze(*objects):
    """A comparable snapshot of everything that objects hold: two equal ones mean that nothing changed."""

    def walk(value):
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, dict):
            return [(walk(k), walk(v)) for k, v in value.items()]
        if isinstance(value, (list, tuple)):
            return [walk(v) for v in value]
        if isinstance(value, (int, float, str, bool, np.generic, type(None))):
            return value
        if id(value) in seen or callable(value):
            return type(value).__name__
        seen.add(id(value))
        return walk(vars(value))

    seen = set()
    return [walk(o) for o in objects]
