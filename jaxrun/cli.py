"""`jaxrun <verb>`: reads the command line, calls the room that does the work, and turns its end into an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrun import __version__
from jaxrun import config as config_lib
from jaxrun.config import Config, ConfigError

log = logging.getLogger("jaxrun")

BAD_CONFIG = 78


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else BAD_CONFIG
    if argv[0] == "--version":
        print(f"jaxrun {__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        return _fail(ConfigError(f"no such command: {verb}; there are {', '.join(VERBS)}"))
    _log_to_stderr()
    try:
        return VERBS[verb][0](rest)
    except ConfigError as error:
        return _fail(error)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"jaxrun {verb}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else "no message"
        log.debug("traceback", exc_info=True)
        print(
            f"jaxrun {verb}: {type(error).__name__}: {text} ({where.filename}:{where.lineno}); {_where_traceback_is()}",
            file=sys.stderr,
        )
        return 1


def _fail(error: ConfigError) -> int:
    for line in str(error).splitlines():
        print(f"jaxrun: {line}", file=sys.stderr)
    return BAD_CONFIG


def _usage() -> str:
    lines = [f"  {verb:<12} {text}" for verb, (_, text) in VERBS.items()]
    return "usage: jaxrun <command> …    (jaxrun <command> --help says more)\n\n" + "\n".join(lines)


# -- logging ----------------------------------------------------------------------------------------------------------


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.setLevel(logging.INFO)
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.DEBUG)


def _where_traceback_is() -> str:
    files = [h.baseFilename for h in log.handlers if isinstance(h, logging.FileHandler)]
    if files:
        return f"the traceback is in {files[0]}"
    traceback.print_exc()
    return "the traceback is above"


# -- arguments --------------------------------------------------------------------------------------------------------


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--config.a.b=v` and `--config.a.b v` out of the arguments: (the others, [("a.b", "v"), …])."""
    others: list[str] = []
    overrides: list[tuple[str, str]] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith("--config."):
            others.append(word)
            continue
        path, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            if not left or left[0].startswith("--"):
                raise ConfigError(f"{word}: has no value; write {word}=VALUE")
            value = left.pop(0)
        overrides.append((path, value))
    return others, overrides


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours: one line, exit code 78."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help shows how to call it")


def _train(argv: Sequence[str]) -> int:
    parser = _Parser(prog="jaxrun train", description="Trains, or goes on training, a run. --config.a.b=v overrides one option of the config; the last one wins.")  # fmt: skip
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="a .py with get_config(), or a run's config.json"
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", type=Path, help="the run directory")
    parser.add_argument(
        "--accept-config-change", action="store_true", help="resume although the change makes it another run"
    )
    others, overrides = split_overrides(argv)
    args = parser.parse_args(others)
    config = config_lib.load(args.config, overrides)
    if args.workdir.exists() and not args.workdir.is_dir():
        raise ConfigError(f"{args.workdir}: is a file, a run directory is needed; choose another --workdir")

    from jaxrun import train

    return train.train(config, args.workdir, accept_config_change=args.accept_config_change)


def _run_config(workdir: Path) -> Config:
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{workdir}: is no run directory (it has no config.json); give the --workdir of a run")
    return config_lib.load(path)


def _eval(argv: Sequence[str]) -> int:
    parser = _Parser(prog="jaxrun eval", description="The loss of a checkpoint on all held-out text.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest sound one)")
    args = parser.parse_args(argv)
    config = _run_config(args.run)

    from jaxrun import inference

    inference.print_evaluation(config, args.run, step=args.step)
    return 0


def _sample(argv: Sequence[str]) -> int:
    parser = _Parser(prog="jaxrun sample", description="Text that the model writes.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest sound one)")
    parser.add_argument("--prompt", default="\n", help="the text to go on from")
    parser.add_argument("--tokens", type=int, default=256, help="how many to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = _run_config(args.run)
    if not args.prompt:
        raise ConfigError("jaxrun sample: --prompt is empty; give at least one character")
    if args.tokens < 1 or args.temperature < 0:
        raise ConfigError("jaxrun sample: --tokens has to be 1 or more, --temperature 0 or more")

    from jaxrun import inference

    print(inference.sample(config, args.run, step=args.step, prompt=args.prompt, num_tokens=args.tokens, temperature=args.temperature, seed=args.seed))  # fmt: skip
    return 0


VERBS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train a run, or go on with it"),
    "eval": (_eval, "held-out loss of a checkpoint"),
    "sample": (_sample, "text that the model writes"),
}

if __name__ == "__main__":
    sys.exit(main())
