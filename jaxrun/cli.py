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
from jaxrun.config import ConfigError
from jaxrun.launch.exits import BAD_CONFIG
from jaxrun.launch.heartbeat import be_supervised

log = logging.getLogger("jaxrun")


def main(argv: Sequence[str] | None = None) -> int:  # noqa: PLR0911 (one for each way to end)
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
    for earlier in log.handlers:  # of another run in this process
        earlier.close()
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


def _train_arguments(parser: _Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, config_lib.Config]:
    """What `train` and `supervise` are called with."""
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
    return args, config


def _train(argv: Sequence[str]) -> int:
    be_supervised()
    parser = _Parser(prog="jaxrun train", description="Trains, or goes on training, a run. --config.a.b=v overrides one option of the config; the last one wins.")  # fmt: skip
    args, config = _train_arguments(parser, argv)

    from jaxrun import train

    return train.train(config, args.workdir, accept_config_change=args.accept_config_change)


def _supervise(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="jaxrun supervise",
        allow_abbrev=False,  # the flags are passed on
        description="`jaxrun train` with the same flags, started again after a crash, a kill or a hang, until it ends by itself. What is taken for a hang: config.launch.",
    )
    parser.add_argument("--max-restarts", type=int, metavar="N", help="stop after so many (default: no limit)")
    args, config = _train_arguments(parser, argv)
    if args.max_restarts is not None and args.max_restarts < 0:
        raise ConfigError(f"jaxrun supervise: --max-restarts is {args.max_restarts}; it cannot be negative")

    from jaxrun.launch.supervise import Supervisor

    words = [sys.executable, "-m", "jaxrun.cli", "train", *_without(argv, "--max-restarts")]
    return Supervisor(words, config, args.workdir, max_restarts=args.max_restarts).run()


def _without(argv: Sequence[str], flag: str) -> list[str]:
    """The arguments less a flag and its value."""
    kept, left = [], iter(argv)
    for word in left:
        if word == flag:
            next(left, None)
        elif not word.startswith(flag + "="):
            kept.append(word)
    return kept


def _prepare(argv: Sequence[str]) -> int:
    parser = _Parser(prog="jaxrun prepare", description="Text, JSONL (.gz, .zst), Parquet and folders of source code to shards of tokens. Killed, the same command goes on where it was.")  # fmt: skip
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, folder or glob")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to be made; name it as config.data.source")  # fmt: skip
    parser.add_argument("--tokenizer", default="bytes", metavar="bytes|FILE.json|train:VOCAB", help="bytes; a Hugging Face tokenizer.json; or train a byte-level BPE of VOCAB tokens on the inputs (default: bytes)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core); the output does not depend on it")  # fmt: skip
    parser.add_argument("--field", default="text", help="of JSONL and Parquet that holds the text (default: text)")
    parser.add_argument("--on-bad", choices=["skip", "fail"], default="fail", help="what to do with bad UTF-8, broken lines, missing fields and overlong documents (default: fail); empty documents are left out and listed")  # fmt: skip
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="a shard ends with the document that fills it (default: 100,000,000)")  # fmt: skip
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="F", help="share of the documents to hold out, by a hash of their content (default: 0)")  # fmt: skip
    parser.add_argument("--separator", metavar="TOKEN", help="what ends a document (default: the tokenizer's end of text; bytes: \\0); none: nothing")  # fmt: skip
    parser.add_argument("--max-document-bytes", type=int, default=1 << 26, metavar="N", help="a longer line or cell is bad (default: 64 MiB); text files may have any size")  # fmt: skip
    parser.add_argument("--train-bytes", type=int, default=1 << 28, metavar="N", help="how much of the inputs train:VOCAB looks at (default: 256 MiB, evenly spread)")  # fmt: skip
    args = parser.parse_args(argv)
    from jaxrun.data import prepare

    options = prepare.Options(
        tokenizer=args.tokenizer, field=args.field, on_bad=args.on_bad, shard_tokens=args.shard_tokens, val_fraction=args.val_fraction,
        separator=args.separator, max_document_bytes=args.max_document_bytes, train_bytes=args.train_bytes,
    )  # fmt: skip
    print(prepare.prepare(args.inputs, args.output, options, workers=args.workers))
    return 0


def _eval(argv: Sequence[str]) -> int:
    parser = _Parser(prog="jaxrun eval", description="The loss of a checkpoint on all held-out text.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest sound one)")
    parser.add_argument("--batches", type=int, metavar="N", help="only the first N held-out batches (default: all)")
    args = parser.parse_args(argv)
    if args.batches is not None and args.batches < 1:
        raise ConfigError(f"jaxrun eval: --batches is {args.batches}; it has to be 1 or more")

    from jaxrun import inference, operate

    config = operate.load_config(args.run)
    inference.print_evaluation(config, args.run, step=args.step, max_batches=args.batches)
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
    if not args.prompt:
        raise ConfigError("jaxrun sample: --prompt is empty; give at least one character")
    if args.tokens < 1 or args.temperature < 0:
        raise ConfigError("jaxrun sample: --tokens has to be 1 or more, --temperature 0 or more")

    from jaxrun import inference, operate

    text = inference.sample(
        operate.load_config(args.run), args.run, step=args.step, prompt=args.prompt, num_tokens=args.tokens,
        temperature=args.temperature, seed=args.seed,
    )  # fmt: skip
    print(text)
    return 0


def _checkpoints(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="jaxrun checkpoints", description="A run's checkpoints: step, label, size, age, state of the hashes."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    args = parser.parse_args(argv)

    from jaxrun import operate

    print(operate.list_checkpoints(args.run))
    return 0


def _verify(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="jaxrun verify", description="Reads every byte of the checkpoints; exit code 1 if one is damaged."
    )
    parser.add_argument("path", type=Path, metavar="RUN|DIR", help="a run directory, or one checkpoint")
    args = parser.parse_args(argv)

    from jaxrun import operate

    damaged = 0
    for path, problems in operate.verify(args.path):
        print(f"{path}: {'sound' if not problems else 'damaged'}", *problems, sep="\n  ")
        damaged += bool(problems)
    return 1 if damaged else 0


def _rewind(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="jaxrun rewind", description="An operator's own rewind; the next start of the run carries it out."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "--to", type=int, required=True, metavar="S", help="the checkpoint to go back to; 0 is the start"
    )
    parser.add_argument("--skip", metavar="A:B", help="batches to discard, from A up to but not including B")
    parser.add_argument(
        "--lr-scale", type=float, default=1.0, metavar="X", help="factor on the learning rate, ramped back to 1"
    )
    args = parser.parse_args(argv)
    skip = None
    if args.skip:
        first, colon, end = args.skip.partition(":")
        if not (colon and first.isdecimal() and end.isdecimal()):
            raise ConfigError(f"--skip {args.skip}: write FIRST:END, batch indices counted from 0")
        skip = (int(first), int(end))

    from jaxrun import operate

    decision = operate.rewind(
        args.run, operate.load_config(args.run), to_step=args.to, skip=skip, lr_scale=args.lr_scale
    )
    print(
        f"journaled: back to step {args.to}, discarding {decision.skip or 'nothing'}, learning rate x {decision.lr_scale:g}; start the run again"
    )
    return 0


def _ledger(argv: Sequence[str]) -> int:
    parser = _Parser(prog="jaxrun ledger", description="What a run was trained on, what it skipped, and why.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, metavar="N", help="the documents that step N saw")
    what.add_argument("--document", metavar="FILE[@OFFSET]", help="the steps that saw a document, or any of a file")
    what.add_argument("--skipped", action="store_true", help="what was discarded, its worst sequences, and why")
    what.add_argument("--deny", type=Path, metavar="LIST", help="add the worst sequences' documents to a deny list")
    parser.add_argument("--worst", type=int, default=5, metavar="N", help="sequences of each window (default: 5)")
    args = parser.parse_args(argv)
    if args.worst < 1:
        raise ConfigError(f"jaxrun ledger: --worst is {args.worst}; it has to be 1 or more")

    from jaxrun import operate
    from jaxrun.ledger import Ledger

    ledger = Ledger(operate.load_config(args.run), args.run)
    if args.deny:
        lines = iter([ledger.deny(args.deny, args.worst)])
    elif args.step is not None:
        lines = ledger.step(args.step)
    elif args.document is not None:
        lines = ledger.document(args.document)
    else:
        lines = ledger.skipped(args.worst) if args.skipped else ledger.summary()
    for line in lines:
        print(line)
    return 0


def _replay(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="jaxrun replay",
        description="Computes a recorded step again and looks at it closely; exit code 1 if the bits differ.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--step", type=int, required=True, metavar="N")
    parser.add_argument("--attempt", type=int, metavar="A", help="which time (default: the last that ran the step)")
    parser.add_argument("--sequences", type=int, default=3, metavar="K", help="of the batch, the worst (default: 3)")
    args = parser.parse_args(argv)
    if args.sequences < 0:
        raise ConfigError(f"jaxrun replay: --sequences is {args.sequences}; it has to be 0 or more")

    from jaxrun import operate
    from jaxrun.replay import replay

    found = replay(operate.load_config(args.run), args.run, args.step, args.attempt)
    print(found.text(args.sequences))
    return 0 if found.repeats else 1


def _metrics(argv: Sequence[str]) -> int:
    from jaxrun.telemetry.series import metrics_main

    return metrics_main(argv)


def _watch(argv: Sequence[str]) -> int:
    from jaxrun import watch

    return watch.main(argv)


def _report(argv: Sequence[str]) -> int:
    from jaxrun import report

    return report.main(argv)


def _backtest(argv: Sequence[str]) -> int:
    from jaxrun.guard import backtest

    return backtest.main(argv)


VERBS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "prepare": (_prepare, "text to shards of tokens"),
    "train": (_train, "train a run, or go on with it"),
    "supervise": (_supervise, "train, and start again after a crash, a kill or a hang"),
    "eval": (_eval, "held-out loss of a checkpoint"),
    "sample": (_sample, "text that the model writes"),
    "watch": (_watch, "a run in the terminal, while it goes and afterwards"),
    "report": (_report, "one or several runs as one HTML file"),
    "metrics": (_metrics, "a run's numbers for notebooks"),
    "checkpoints": (_checkpoints, "a run's checkpoints and what they are worth"),
    "verify": (_verify, "read every byte of the checkpoints"),
    "ledger": (_ledger, "what was trained on, skipped, and why"),
    "replay": (_replay, "compute one recorded step again and look at it closely"),
    "rewind": (_rewind, "send a run back to a checkpoint"),
    "backtest": (_backtest, "the guard over an old loss curve"),
}

if __name__ == "__main__":
    sys.exit(main())
