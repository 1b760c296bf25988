"""`jaxrun prepare`: what goes in comes out, however many workers there are and however often it is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxrun import cli
from jaxrun.config import ConfigError
from jaxrun.data import corpus, prepare, shards
from jaxrun.data.hf_tokenizer import FileTokenizer, open_tokenizer, train_bpe
from jaxrun.data.prepare import Options
from jaxrun.data.tokenizer import ByteTokenizer

from .conftest import Opener
from .corpus import DOCUMENTS, POEM, jsonl, write

TEXTS = [f"{n}: {POEM[n % 7 :]}é🐯\n" * (1 + n % 3) for n in range(120)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 3000)
    monkeypatch.setattr(prepare, "PIECE_BYTES", 3000)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "own.json"
    train_bpe(TEXTS, 400, path)
    return path


def run(inputs: list[Path], output: Path, *, workers: int = 1, **options: object) -> str:
    return prepare.prepare(list(map(str, inputs)), output, Options(**options), workers=workers)  # type: ignore[arg-type]


def documents(folder: Path, split: str = "train") -> Iterator[tuple[tuple[int, str, int], str]]:
    """((number, file, offset), text) of a split, put together from shards and their indexes."""
    found = shards.open_prepared(folder, read_all_up_to=1 << 30)
    texts: dict[tuple[int, str, int], list[int]] = {}
    for shard in found.splits[split]:
        ids = np.fromfile(shard.path, found.dtype)
        records = np.fromfile(shard.path.with_suffix(".documents"), shards.DOCUMENT)
        ends = [*records["start"][1:], len(ids)]
        for record, end in zip(records, ends, strict=True):
            key = int(record["document"]), found.files[record["file"]], int(record["offset"])
            assert (record["start"] < 0) == (key in texts)
            texts.setdefault(key, []).extend(ids[max(0, record["start"]) : end].tolist())
    for key, own in texts.items():
        assert own[-1] == found.separator
        yield key, found.tokenizer.decode(own[:-1])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def parquet(path: Path, texts: list[str | None], rows: int = 10) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), path, row_group_size=rows)
    return path


# -- what goes in comes out -------------------------------------------------------------------------------------------


def test_every_kind_of_input_gives_its_documents_back(tmp_path: Path, bpe: Path, small_pieces: None) -> None:
    for n, text in enumerate(TEXTS[:20]):
        write(tmp_path / f"code/{n:02}.py", text)
    inputs = [
        write(tmp_path / "a.jsonl", jsonl(TEXTS)),
        write(tmp_path / "b.jsonl.gz", jsonl(TEXTS)),
        write(tmp_path / "c.jsonl.zst", "\n" + jsonl(TEXTS).rstrip("\n")),
        parquet(tmp_path / "d.parquet", list(TEXTS)),
        tmp_path / "code",
        write(tmp_path / "e.txt.gz", TEXTS[3]),
        write(tmp_path / "long.txt", "".join(TEXTS)),
        write(tmp_path / "long.txt.zst", "".join(TEXTS)),
    ]
    run(inputs, tmp_path / "out", tokenizer=str(bpe), shard_tokens=2500)
    expected = [*TEXTS * 4, *TEXTS[:20], TEXTS[3], "".join(TEXTS), "".join(TEXTS)]
    found = list(documents(tmp_path / "out"))
    assert [text for _, text in found] == expected
    assert [number for (number, _, _), _ in found] == list(range(len(expected)))
    for (_, file, offset), text in found[: len(TEXTS)]:
        assert json.loads(Path(file).read_bytes()[offset:].split(b"\n")[0])["text"] == text
    assert [key[2] for key, _ in found if key[1].endswith("d.parquet")] == list(range(len(TEXTS)))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in expected)
    assert manifest["num_documents"] == len(expected)
    assert len(manifest["splits"]["train"]["shards"]) > 5
    assert (tmp_path / "out/tokenizer.json").read_bytes() == bpe.read_bytes()
    assert (tmp_path / "out/skipped.jsonl").read_bytes() == b""
    assert not list(tmp_path.glob(".*"))


def test_the_output_does_not_depend_on_the_number_of_workers(tmp_path: Path, bpe: Path, small_pieces: None) -> None:
    source = [write(tmp_path / "a.jsonl", jsonl([*TEXTS, ""])), write(tmp_path / "b.txt", "".join(TEXTS))]
    options = {"tokenizer": str(bpe), "shard_tokens": 3000, "val_fraction": 0.2}
    run(source, tmp_path / "one", workers=1, **options)
    run(source, tmp_path / "three", workers=3, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    train, val = (len(list(documents(tmp_path / "one", split))) for split in ("train", "val"))
    assert (train + val, val > 8) == (121, True)


_LINES = st.lists(st.text("ab\n\r é", max_size=30).map(lambda s: s.replace("\n", " ")), max_size=40)


@settings(max_examples=60, deadline=None)
@given(_LINES, st.sampled_from([".jsonl", ".txt", ".jsonl.gz", ".txt.zst"]), st.integers(5, 60), st.integers(10, 50))
def test_pieces_are_the_whole_input_and_the_same_from_any_of_them_on(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], suffix: str, size: int, limit: int
) -> None:
    path = write(tmp_path_factory.mktemp("p") / f"a{suffix}", "\n".join(lines))
    text = "\n".join(lines).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", size)
        patch.setattr(corpus, "_TEXT_SEARCH_BYTES", size)
        found = list(corpus.pieces([path], max_document_bytes=limit))
        assert [p.start for p in found] == [0, *(p.end for p in found[:-1])]
        assert (found[-1].end, [p.is_last for p in found]) == (len(text), [False] * (len(found) - 1) + [True])
        for p in found:
            if p.data == b"" and p.start < p.end:  # a line that is too long to be held
                assert p.end - p.start > limit
                assert b"\n" not in text[p.start : p.end - 1]
            elif p.data is not None:
                assert p.data == text[p.start : p.end]
            if p.kind == "text":
                text[p.start : p.end].decode()  # whole characters
            elif not p.is_last:
                assert text[p.end - 1 : p.end] == b"\n"
        for n, p in enumerate(found[1:], start=1):
            again = list(corpus.pieces([path], 0, p.start, max_document_bytes=limit))
            assert [q._replace(disk_bytes=0) for q in again] == [q._replace(disk_bytes=0) for q in found[n:]]


# -- what is wrong with the input -------------------------------------------------------------------------------------

BAD = {
    "bad_json": b'{"text": "cut\n',
    "no_field": b'{"txt": "misnamed"}\n',
    "bad_utf8": b'{"text": "caf\xe9"}\n',
    "too_long": b'{"text": "' + b"x" * 20_000 + b'"}\n',
    "empty": b'{"text": ""}\n',
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("reason", list(BAD))
def test_a_bad_line_is_named_and_left_out_or_ends_the_work(
    tmp_path: Path, small_pieces: None, reason: str, suffix: str
) -> None:
    good = jsonl(TEXTS[:40]).encode()
    path = write(tmp_path / f"a.jsonl{suffix}", good + BAD[reason] + good)
    options = {"max_document_bytes": 5000}
    if reason != "empty":
        with pytest.raises(ConfigError) as error:
            run([path], tmp_path / "out", **options)
        assert str(error.value).startswith(f"{path}:41: ")
        assert "--on-bad skip" in str(error.value)
        assert not (tmp_path / "out").exists()
    said = run([path], tmp_path / "out", on_bad="skip", **options)
    assert f"1 left out (1 {reason}; skipped.jsonl names them)" in said
    (line,) = map(json.loads, (tmp_path / "out/skipped.jsonl").read_text().splitlines())
    assert (line["file"], line["line"], line["offset"], line["reason"]) == (str(path), 41, len(good), reason)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["skipped"] == {reason: 1}
    assert [text for _, text in documents(tmp_path / "out")] == TEXTS[:40] * 2


def test_bad_files_and_rows_are_named(tmp_path: Path, small_pieces: None) -> None:
    write(tmp_path / "in/a.txt", POEM)
    write(tmp_path / "in/b.png", b"\x89PNG\0\0")
    write(tmp_path / "in/c.txt", b"line\ncaf\xe9")
    write(tmp_path / "in/d.txt", b"")
    parquet(tmp_path / "in/e.parquet", ["one", None, "", "two"], rows=2)
    long = "".join(TEXTS).encode()
    write(tmp_path / "in/f.txt", long[:8000] + b"\xff" + long[8000:])
    run([tmp_path / "in"], tmp_path / "out", on_bad="skip")
    lines = list(map(json.loads, (tmp_path / "out/skipped.jsonl").read_text().splitlines()))
    assert [(Path(x["file"]).name, x["line"], x["reason"]) for x in lines[:5]] == [
        ("b.png", 1, "binary"), ("c.txt", 2, "bad_utf8"), ("d.txt", 1, "empty"), ("e.parquet", 1, "no_field"), ("e.parquet", 2, "empty"),
    ]  # fmt: skip
    (last,) = lines[5:]
    assert (last["line"], last["offset"]) == (1 + long[:8000].count(b"\n"), 8000)
    texts = [text for _, text in documents(tmp_path / "out")]
    assert texts[:3] == [POEM, "one", "two"]
    # Of a long text, the piece with the bad byte is lost, and is said to be.
    first, end = map(int, last["detail"].split("bytes ")[1].split(" of")[0].split(" to "))
    broken = long[:8000] + b"\xff" + long[8000:]
    assert texts[3].encode() == broken[:first] + broken[end:]
    assert first <= 8000 < end < first + 7000


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".tar.zst"])
def test_of_a_binary_file_all_is_left_out_and_listed_once(tmp_path: Path, small_pieces: None, suffix: str) -> None:
    path = write(tmp_path / f"in/a{suffix}", "".join(TEXTS).encode("utf-16-le") + POEM.encode() * 99)
    write(tmp_path / "in/b.txt", POEM)
    run([tmp_path / "in"], tmp_path / "out", on_bad="skip")
    assert [(Path(key[1]).name, text) for key, text in documents(tmp_path / "out")] == [("b.txt", POEM)]
    (line,) = map(json.loads, (tmp_path / "out/skipped.jsonl").read_text().splitlines())
    assert (line["file"], line["line"], line["reason"]) == (str(path), 1, "binary")
    (tmp_path / "in/b.txt").unlink()
    with pytest.raises(ConfigError, match=r"without any text \(1 binary\)"):
        run([tmp_path / "in"], tmp_path / "none", on_bad="skip")


def test_damage_in_a_row_group_is_named_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"words {n} " * 20 for n in range(400)]})
    pyarrow.parquet.write_table(table, path, row_group_size=200, use_dictionary=False, compression="none")
    sound = path.read_bytes()
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset

    def refusal(place: int) -> str:
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0xFF]) + sound[place + 1 :])
        try:
            run([path], tmp_path / f"out{place}", on_bad="skip")
        except ConfigError as error:
            return str(error)
        return ""

    refusals = [said for place in range(start, start + 30, 3) if (said := refusal(place))]
    assert len(refusals) > 3
    assert all(str(path) in said and "\n" not in said for said in refusals)
    path.write_bytes(sound[: start + 1] + b"\xff" * 20 + sound[start + 21 :])
    with pytest.raises(ConfigError, match="row groups 0 to 1 cannot be read"):
        run([path], tmp_path / "out", on_bad="skip")


# -- killed, and started again ----------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from pathlib import Path
from jaxrun.data import corpus, prepare
corpus.PIECE_BYTES = prepare.PIECE_BYTES = 3000
prepare._COMMIT_S = float(sys.argv[3])
take, seen = prepare._Work._take, []
def until(self, item, encoded):
    take(self, item, encoded)
    seen.append(item)
    if len(seen) == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
prepare._Work._take = until
options = prepare.Options(shard_tokens=2000, val_fraction=0.2, on_bad="skip", tokenizer=sys.argv[5])
prepare.prepare([sys.argv[1]], Path(sys.argv[2]), options, workers=1)
"""


@pytest.mark.parametrize("commit_s", ["0", "1000"])
def test_killed_it_goes_on_from_where_it_was(tmp_path: Path, small_pieces: None, commit_s: str) -> None:
    write(tmp_path / "in/a.jsonl.gz", jsonl([*TEXTS, ""]) + "broken\n" + jsonl(TEXTS))
    write(tmp_path / "in/b.txt", "".join(TEXTS))
    source, out, draft = tmp_path / "in", tmp_path / "out", tmp_path / ".out.partial"
    options = {"shard_tokens": 2000, "val_fraction": 0.2, "on_bad": "skip", "tokenizer": "train:300"}
    run([source], tmp_path / "undisturbed", **options)

    def start(kill_after: int) -> int:
        command = [sys.executable, "-c", _KILLED, str(source), str(out), commit_s, str(kill_after), "train:300"]
        return subprocess.run(command, timeout=120, capture_output=True).returncode

    finished: dict[str, int] = {}
    for kill_after in (8, 5, 7):
        assert start(kill_after) == -9
        assert not out.exists()
        for name, written in finished.items():
            assert (draft / name).stat().st_mtime_ns == written, "a finished shard was written again"
        state = json.loads((draft / "progress.json").read_text())
        done = [s["file"] for split in state["splits"].values() for s in split["finished"]]
        finished = {name: (draft / name).stat().st_mtime_ns for name in [*done, "tokenizer.json"]}
    assert len(finished) > 3
    with pytest.raises(ConfigError, match="was begun with other inputs or options"):
        run([source], out, **{**options, "shard_tokens": 1999})
    run([source], out, **options)
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert "is complete already" in run([source], out, **options)
    with pytest.raises(ConfigError, match="exists and holds something else"):
        run([source], out, **{**options, "shard_tokens": 1999})


def test_a_start_that_failed_leaves_no_tokenizer_behind(tmp_path: Path, bpe: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS[:3]) + "broken\n")
    train_bpe([POEM], 300, tmp_path / "other.json")
    draft = tmp_path / ".out.partial"
    for first in (str(bpe), "train:400"):
        with pytest.raises(ConfigError, match=r"a.jsonl:4: "):
            run([path], tmp_path / "out", tokenizer=first)
        assert (draft / "progress.json").exists()
        with pytest.raises(ConfigError, match="was begun with other inputs or options"):
            run([path], tmp_path / "out", tokenizer=str(tmp_path / "other.json"), on_bad="skip")
        (draft / "progress.json").unlink()  # as a kill would have it while the tokenizer is made
        run([path], tmp_path / "out", tokenizer=str(tmp_path / "other.json"), on_bad="skip")
        assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "other.json").read_bytes()
        assert [text for _, text in documents(tmp_path / "out")] == TEXTS[:3]
        (tmp_path / "out").rename(tmp_path / f"done-{first[:5].strip('/')}")


def test_what_is_not_read_yet_may_be_mended(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_COMMIT_S", 0.0)
    first = write(tmp_path / "in/a.jsonl", jsonl(TEXTS[:40]))
    second = write(tmp_path / "in/b.jsonl", "broken\n" + jsonl(TEXTS[40:80]))
    with pytest.raises(ConfigError, match=r"b.jsonl:1: "):
        run([tmp_path / "in"], tmp_path / "out")
    write(second, jsonl(TEXTS[40:50]))
    before = first.stat()
    write(first, first.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="some of what it has read has changed since"):
        run([tmp_path / "in"], tmp_path / "out")
    write(first, first.read_bytes()[:-1])
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    run([tmp_path / "in"], tmp_path / "out")
    assert [text for _, text in documents(tmp_path / "out")] == TEXTS[:50]
    inputs = json.loads((tmp_path / "out/manifest.json").read_text())["inputs"]
    assert [(x["path"], x["size_bytes"]) for x in inputs] == [(str(p), p.stat().st_size) for p in (first, second)]
    assert "is complete already" in run([tmp_path / "in"], tmp_path / "out")


def test_what_it_notes_does_not_grow_with_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(200):
        write(tmp_path / f"in/{n:03}.txt", POEM)
    write(tmp_path / "in/z.txt", b"caf\xe9")
    monkeypatch.setattr(prepare, "_ITEM_FILES", 20)
    monkeypatch.setattr(prepare, "_COMMIT_S", 0.0)
    with pytest.raises(ConfigError, match=r"z.txt:1: "):
        run([tmp_path / "in"], tmp_path / "out")
    assert (tmp_path / ".out.partial/progress.json").stat().st_size < 2000
    write(tmp_path / "in/z.txt", "café")
    run([tmp_path / "in"], tmp_path / "out")
    assert len(json.loads((tmp_path / "out/manifest.json").read_text())["inputs"]) == 201


def test_a_damaged_note_of_progress_and_an_impossible_output_are_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", POEM)
    note = write(tmp_path / ".out.partial/progress.json", '{"key": ')
    for data in ('{"key": ', "[]"):
        note.write_text(data)
        with pytest.raises(ConfigError, match=r"progress.json: is damaged \(.*\); delete"):
            run([source], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--output .*a.txt/x: cannot be made \(Not a directory\)"):
        run([source], source / "x")


def test_an_output_among_the_inputs_is_none_of_them(tmp_path: Path) -> None:
    write(tmp_path / "in/a.txt", POEM)
    run([tmp_path / "in"], tmp_path / "in/out")
    assert "is complete already" in run([tmp_path / "in"], tmp_path / "in/out")
    assert [text for _, text in documents(tmp_path / "in/out")] == [POEM]
    with pytest.raises(ConfigError, match="holds all inputs"):
        run([tmp_path / "in/out"], tmp_path / "in/out")


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / ".out.partial").mkdir()
    with open(tmp_path / ".out.partial/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `jaxrun prepare` is at work"):
            run([write(tmp_path / "a.txt", POEM)], tmp_path / "out")


_PEAK = """
import resource, sys
from pathlib import Path
from jaxrun.data import prepare
import pyarrow
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
prepare.prepare(sys.argv[2:], Path(sys.argv[1]), prepare.Options(shard_tokens=30_000_000), workers=1)
print((peak() - before) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    grown = []
    for copies in (1, 8):
        path = tmp_path / f"{copies}.jsonl"
        line = json.dumps({"text": "Some words of a line. " * 1000}) + "\n"
        path.write_text(line * (1500 * copies))  # 33 MB a copy
        command = [sys.executable, "-c", _PEAK, str(tmp_path / f"out{copies}"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        grown.append(int(done.stdout))
    assert grown[1] < grown[0] + 30


# -- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_trained_bpe_is_the_same_every_time_and_loses_nothing(tmp_path: Path, bpe: Path) -> None:
    train_bpe(iter(TEXTS), 400, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == bpe.read_bytes()
    tokenizer = open_tokenizer(bpe)
    assert tokenizer.vocab_size == 400
    for text in (*TEXTS, "<|endoftext|> is text", "\0\x7f\u2028 日本", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.separator(None) not in ids
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes()[tokenizer.separator(None)] == 0
    assert tokenizer.decode([tokenizer.encode("a")[0], 9999, -1]) == "a\ufffd\ufffd"
    assert len(tokenizer.encode(POEM)) < len(POEM) / 2


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, bpe: Path) -> None:
    source, is_begun = [write(tmp_path / "a.txt", POEM)], False
    for options, message in (
        ({"tokenizer": str(tmp_path / "none.json")}, "cannot be read"),
        ({"tokenizer": str(write(tmp_path / "bad.json", "{}"))}, "is no tokenizer.json"),
        ({"tokenizer": "train:many"}, "train:32000"),
        ({"tokenizer": "train:100"}, "256 bytes and"),
        ({"tokenizer": str(bpe), "separator": "<nope>"}, "no token '<nope>'"),
        ({"separator": "xy"}, "one ASCII character"),
        ({"val_fraction": 1.0}, "--val-fraction"),
        ({"shard_tokens": 0}, "--shard-tokens"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            run(source, tmp_path / "out", **options)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()
        is_begun = is_begun or options.get("separator") == "<nope>"  # known when the tokenizer is open
        assert (tmp_path / ".out.partial").exists() == is_begun


def saved(tokenizer: Tokenizer, path: Path) -> Path:
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_that_would_drop_text_is_refused(tmp_path: Path, bpe: Path) -> None:
    source = [write(tmp_path / "a.txt", "ab zzz ab")]

    def refused(tokenizer: Tokenizer, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            run(source, tmp_path / "out", tokenizer=str(saved(tokenizer, tmp_path / "t.json")), separator="none")
        assert "\n" not in str(error.value)

    vocab = {"a": 0, "b": 1, "ab": 2}
    refused(Tokenizer(models.BPE(vocab, [("a", "b")])), "no token for most characters")
    all_bytes = {f"<0x{b:02X}>": 3 + b for b in range(256)}
    without = {token: n for n, token in enumerate({**vocab, **all_bytes}) if token != "<0x7A>"}
    refused(Tokenizer(models.BPE(without, [("a", "b")], byte_fallback=True)), "no token for byte 122")
    level = Tokenizer(models.BPE(vocab, [("a", "b")]))
    level.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    refused(level, "of the ByteLevel alphabet")
    words = Tokenizer(models.WordLevel({"ab": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    refused(words, "cannot encode a text")
    # These lose nothing, or say what they do not know.
    complete = Tokenizer(models.BPE({**vocab, **all_bytes}, [("a", "b")], byte_fallback=True))
    assert open_tokenizer(saved(complete, tmp_path / "fallback.json")).encode("abz").tolist() == [2, 3 + ord("z")]
    unknown = Tokenizer(models.BPE({**vocab, "?": 3}, [("a", "b")], unk_token="?"))
    assert open_tokenizer(saved(unknown, tmp_path / "unk.json")).encode("abz").tolist() == [2, 3]
    assert open_tokenizer(bpe).encode("\U0010ffff").size > 0


@pytest.mark.parametrize("options", [{}, {"separator": "|"}, {"separator": "none"}, {"tokenizer": "train:300"}])
def test_bytes_are_counted_of_the_text_without_its_separators(
    open_data: Opener, tmp_path: Path, options: dict[str, str]
) -> None:
    texts = [f"w{n} é字" for n in range(50)]
    run([write(tmp_path / "a.jsonl", jsonl(texts))], tmp_path / "out", **options)
    dataset = open_data(tmp_path / "out", vocab_size=300, eval_fraction=0.0)
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.token_bytes()[dataset.train[:]].sum() == sum(len(text.encode()) for text in texts)


def test_long_texts_are_cut_where_no_token_is(bpe: Path) -> None:
    text = "".join(TEXTS)
    parts = list(corpus.split_long(text, limit=1000))
    assert "".join(parts) == text
    assert len(parts) > 10
    tokenizer = FileTokenizer(str(bpe), "", 400)
    assert [i for part in tokenizer.encode_batch(parts) for i in part] == tokenizer.encode(text).tolist()
    assert list(corpus.split_long("", 5)) == [""]


# -- the folder as a source -------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path, bpe: Path) -> Callable[..., Path]:
    def make(**options: object) -> Path:
        out = tmp_path / "tokens"
        source = write(tmp_path / "in/d.jsonl", jsonl(TEXTS))
        run([source], out, **{"tokenizer": str(bpe), "shard_tokens": 2500, **options})
        return out

    return make


def test_it_is_a_source_and_knows_its_documents(
    open_data: Opener, tmp_path: Path, prepared: Callable[..., Path]
) -> None:
    folder = prepared(val_fraction=0.2)
    dataset = open_data(folder, seq_len=50, vocab_size=400)
    assert "validation shards held out" in dataset.describe()
    text = {offset: text for split in ("train", "val") for (_, _, offset), text in documents(folder, split)}
    seen: dict[int, int] = {}
    for row in range(dataset.num_train_sequences):
        rows = dataset.rows(0, [row], 10_000)
        ids: list[int] = []
        for span in dataset.provenance(0, row, 10_000):
            assert span.file == str(tmp_path / "in/d.jsonl")
            own = [*dataset.tokenizer.encode(text[span.offset]), 0]  # type: ignore[union-attr]
            ids += own[span.first_token : span.first_token + span.num_tokens]
            seen[span.offset] = span.document  # type: ignore[assignment]
        assert ids == [*rows.inputs[0], rows.targets[0, -1]]
    assert len(seen) > 60
    name = f"d.jsonl@{min(seen)}"
    lacking = dataset.without([name])
    assert lacking.fingerprint != dataset.fingerprint
    found = dataset.rows_of(name, 100, 4)
    for batch in range(100):
        before, after = (d.rows(batch, range(4), 4) for d in (dataset, lacking))
        np.testing.assert_array_equal(before.inputs, after.inputs)
        of = [r for r in range(4) if any(s.offset == min(seen) for s in dataset.provenance(batch, r, 4))]
        assert found.get(batch, []) == of
        assert (before.weights.sum() > after.weights.sum()) <= bool(of)


def test_another_place_is_the_same_data_set(open_data: Opener, tmp_path: Path, prepared: Callable[..., Path]) -> None:
    folder = prepared()
    before = open_data(folder, vocab_size=400)
    moved = folder.rename(tmp_path / "moved")
    assert open_data(moved, vocab_size=400).fingerprint == before.fingerprint


def test_damage_is_named_before_training(open_data: Opener, prepared: Callable[..., Path]) -> None:
    folder = prepared()
    with pytest.raises(ConfigError, match=r"vocab_size: is 399; .* needs 400"):
        open_data(folder, vocab_size=399)
    shard = folder / "train-00001.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ConfigError, match=r"train-00001.bin: is not what manifest.json says"):
        open_data(folder, vocab_size=400)
    data[100] ^= 1
    shard.write_bytes(data)
    index = folder / "train-00000.documents"
    records = index.read_bytes()
    index.write_bytes(records[:40] + b"\x09" + records[41:])
    with pytest.raises(ConfigError, match=r"train-00000.documents: is not what manifest.json says"):
        open_data(folder, vocab_size=400)
    index.write_bytes(records)
    shard.write_bytes(data[:-2])
    with pytest.raises(ConfigError, match=r"train-00001.bin: has .* bytes, manifest.json says"):
        open_data(folder, vocab_size=400)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"train-00001.bin: cannot be opened"):
        open_data(folder, vocab_size=400)


def test_an_index_is_compared_whole_and_looked_at_again_when_it_is_read(open_data: Opener, tmp_path: Path) -> None:
    run([write(tmp_path / "a.jsonl", jsonl([f"d{n}" for n in range(6000)]))], tmp_path / "out")
    dataset = open_data(tmp_path / "out", document_mask=True)
    index = tmp_path / "out/train-00000.documents"
    records = np.fromfile(index, shards.DOCUMENT)
    records["start"][2900:3100] += 1  # 64 KiB and more from both ends
    records.tofile(index)
    os.utime(index, ns=(0, 0))
    with pytest.raises(OSError, match="data changed under the run"):
        dataset.provenance(0, 0, 1)
    with pytest.raises(ConfigError, match=r"train-00000.documents: is not what"):
        shards.open_prepared(tmp_path / "out", read_all_up_to=1000)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    manifest["splits"]["train"]["shards"][0]["documents_xxh3_128"] = shards.content_hash(index)
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    assert open_data(tmp_path / "out", document_mask=True).fingerprint != dataset.fingerprint


def test_a_manifest_of_something_else_is_text_and_a_damaged_one_is_named(open_data: Opener, tmp_path: Path) -> None:
    write(tmp_path / "web/a.js", POEM)
    for data in ('{"name": "My extension"}', "[1]", "no JSON"):
        write(tmp_path / "web/manifest.json", data)
        assert len(open_data(tmp_path / "web", eval_fraction=0.0).train) == len(POEM) + 1 + len(data)
    run([tmp_path / "web/a.js"], tmp_path / "out")
    manifest = (tmp_path / "out/manifest.json").read_text()
    for data, message in (
        (manifest[:-9], "is no manifest of prepared tokens"),
        ('{"format": "jaxrun-tokens-2"}', "has format 'jaxrun-tokens-2'"),
        ('{"format": "jaxrun-tokens-1"}', r"is damaged \(KeyError: 'dtype'\)"),
        (manifest.replace('"num_records"', '"n"'), r"is damaged \(KeyError: 'num_records'\)"),
        (manifest.replace('"|u1"', '"nope"'), "is damaged"),
    ):
        write(tmp_path / "out/manifest.json", data)
        with pytest.raises(ConfigError, match=message) as error:
            open_data(tmp_path / "out")
        assert "\n" not in str(error.value)


def test_of_large_data_both_ends_are_looked_at(tmp_path: Path) -> None:
    run([write(tmp_path / "a.txt", POEM * 2000)], tmp_path / "out")
    shard = tmp_path / "out/train-00000.bin"
    for place, noticed in ((5, True), (-5, True), (170_000, False)):
        data = bytearray(shard.read_bytes())
        data[place] ^= 1
        shard.write_bytes(data)
        if noticed:
            with pytest.raises(ConfigError, match="is not what"):
                shards.open_prepared(tmp_path / "out", read_all_up_to=1000)
        else:
            shards.open_prepared(tmp_path / "out", read_all_up_to=1000)
        data[place] ^= 1
        shard.write_bytes(data)


def test_bytes_are_the_text_with_a_separator(tmp_path: Path) -> None:
    run([write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))], tmp_path / "out")
    ids = np.fromfile(tmp_path / "out/train-00000.bin", np.uint8)
    assert ids.tobytes() == b"".join(d.encode() + b"\0" for d in DOCUMENTS)
    assert isinstance(shards.open_prepared(tmp_path / "out", read_all_up_to=0).tokenizer, ByteTokenizer)


def test_without_pyarrow_parquet_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet", ["text"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"reading Parquet needs pyarrow; install jaxrun\[parquet\]"):
        run([path], tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a.txt", POEM)
    command = ["prepare", str(source), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert cli.main(command) == 0
    assert f"{tmp_path / 'out'}: {len(POEM) + 1} tokens of 1 documents in 1 shards" in capsys.readouterr().out
    assert cli.main(["prepare", str(tmp_path / "b.txt"), "--output", str(tmp_path / "o2")]) == cli.BAD_CONFIG
    assert "prepare: " in capsys.readouterr().err
    assert os.listdir(tmp_path / "out")


_TWO_WORKERS = """
import multiprocessing, sys
from pathlib import Path
from jaxrun.data import prepare
take = prepare._Work._take
def told(self, item, encoded):
    print(*(p.pid for p in multiprocessing.active_children()), flush=True)
    input()
prepare._Work._take = told
if __name__ == "__main__":
    prepare.prepare([sys.argv[1]], Path(sys.argv[2]), prepare.Options(), workers=2)
"""


def test_workers_end_with_a_main_process_that_is_killed(tmp_path: Path) -> None:
    script = write(tmp_path / "program.py", _TWO_WORKERS)
    source = write(tmp_path / "a.jsonl", jsonl([POEM * 40] * 400))
    command = [sys.executable, str(script), str(source), str(tmp_path / "out")]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    workers = list(map(int, run.stdout.readline().split()))
    run.kill()
    run.communicate(timeout=60)
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in workers)
