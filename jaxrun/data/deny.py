"""Deny lists: documents that are read and not trained on. Their place stays, so every other batch stays what it was."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jaxrun.config import ConfigError


def name(file: str, offset: int | None) -> str:
    """FILE@OFFSET: the document that begins at this byte of the (uncompressed) file. FILE: all of it."""
    return file if offset is None else f"{file}@{offset}"


def parse(text: str) -> tuple[str, int | None]:
    file, at, offset = text.rpartition("@")
    return (file, int(offset)) if at and offset.isdecimal() else (text, None)


def read(path: Path) -> list[str]:
    """The names in a deny list: one a line; what follows a # at the start of a line is a remark.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config.data.deny: {path} cannot be read ({error}); name a text file, a document a line"
        ) from None
    return sorted({line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")})


def add(path: Path, names: Iterable[str], *, comment: str) -> int:
    """Appends the names that the list does not have yet; how many those are.

    Raises:
      ConfigError: it cannot be read or written.
    """
    path = path.expanduser()
    new = sorted(set(names) - set(read(path) if path.exists() else ()))
    if new:
        try:
            with open(path, "a+") as file:
                file.seek(0)
                text = file.read()
                begun = "\n" if text and not text.endswith("\n") else ""  # an editor's last line
                file.write(begun + "\n".join([f"# {comment}", *new]) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}); name a file in a folder of yours"
            ) from None
    return len(new)
