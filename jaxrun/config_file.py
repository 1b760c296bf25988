"""Reads a config file: Python with a `get_config()`, or JSON."""

from __future__ import annotations

import difflib
import json
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrun.config import Config, ConfigError, to_dict


def read(path: Path, options: Sequence[str]) -> dict[str, Any]:
    """The config in a file, as a nested dict that is not validated yet.

    Args:
      options: dotted paths of all there are.

    Raises:
      ConfigError: no such file, or it cannot be run or parsed.
    """
    if not path.is_file():
        there = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such config file{hint}")
    if path.suffix == ".json":
        try:
            tree = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error})") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: holds a {type(tree).__name__}, a config is an object of sections")
        return tree
    module = types.ModuleType("jaxrun_config_file")
    module.__file__ = str(path)
    try:
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        if not callable(getattr(module, "get_config", None)):
            raise ConfigError(f"{path}: defines no get_config(); it has to return a jaxrun.config.Config")
        config = module.get_config()
    except ConfigError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = frames[-1].lineno if frames else getattr(error, "lineno", 0)
        known = _hint_for_keyword(error, options)
        raise ConfigError(f"{path}:{line}: {type(error).__name__}: {error}{known}") from None
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: get_config() returned a {type(config).__name__}, not a jaxrun.config.Config")
    return to_dict(config)


def _hint_for_keyword(error: Exception, options: Sequence[str]) -> str:
    """For `TrainConfig(num_step=…)`: the nearest right name."""
    text = str(error)
    if not isinstance(error, TypeError) or "unexpected keyword argument" not in text:
        return ""
    word = text.rsplit("'", 2)[-2]
    near = difflib.get_close_matches(word, [p.rsplit(".", 1)[-1] for p in options], n=1)
    return f"; did you mean {near[0]}?" if near else ""
