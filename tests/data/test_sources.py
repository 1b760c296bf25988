"""What can be named as `data.source`, and what is said when it cannot be read."""

from pathlib import Path

import numpy as np
import pytest
import zstandard

from jaxrun.config import ConfigError
from jaxrun.data import Dataset, sources

from .conftest import Opener
from .corpus import DOCUMENTS, POEM, jsonl, write


def tokens(dataset: Dataset) -> bytes:
    return bytes(np.asarray(dataset.train_tokens(), np.uint8)) + bytes(np.asarray(dataset.eval_tokens(), np.uint8))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_its_bytes(open_data: Opener, tmp_path: Path, suffix: str) -> None:
    dataset = open_data(write(tmp_path / f"poem.txt{suffix}", POEM))
    assert tokens(dataset) == POEM.encode()
    assert "as it is a single document" in dataset.describe()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_is_a_document_a_line(open_data: Opener, tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"d.jsonl{suffix}", jsonl(DOCUMENTS, "body"))
    dataset = open_data(path, text_field="body", eval_fraction=0.0)
    assert tokens(dataset) == "\0".join(DOCUMENTS).encode()


def test_documents_larger_than_any_buffer_come_through_whole(open_data: Opener, tmp_path: Path) -> None:
    documents = ["".join(f"{n} é\r\n" for n in range(m)) for m in (90_000, 3, 120_000)]
    for name in ("d.jsonl.zst", "d.jsonl.gz"):
        dataset = open_data(write(tmp_path / name, jsonl(documents)), eval_fraction=0.0)
        assert tokens(dataset) == "\0".join(documents).encode()


def test_zstd_frames_follow_one_another(open_data: Opener, tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor().compress
    path = tmp_path / "two.txt.zst"
    path.write_bytes(pack(b"first half, ") + pack(b"second half"))
    assert tokens(open_data(path)) == b"first half, second half"


def test_the_same_text_is_the_same_data_however_it_is_stored(open_data: Opener, tmp_path: Path) -> None:
    for n, document in enumerate(DOCUMENTS):
        write(tmp_path / f"folder/{n:02}.txt", document)
        write(tmp_path / f"packed/sub/{n:02}.md.gz", document)
    lines = write(tmp_path / "lines.jsonl.zst", jsonl(DOCUMENTS))
    sources = [
        tmp_path / "folder",
        tmp_path / "packed",
        tmp_path / "packed/**/*.gz",
        tmp_path / "folder/*.txt",
        lines,
    ]
    assert len({open_data(source).fingerprint for source in sources}) == 1


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(open_data: Opener, tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "c.txt", ".git/config", "a/.draft.txt"):
        write(tmp_path / "corpus" / name, f"<{name}>")
    dataset = open_data(tmp_path / "corpus", eval_fraction=0.0)
    assert tokens(dataset) == b"<a/z.txt>\0<b.txt>\0<c.txt>"


def test_empty_documents_are_no_documents(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"text": ""}\n\n{"text": "one"}\n{"text": ""}\n{"text": "two"}')
    assert tokens(open_data(path, eval_fraction=0.0)) == b"one\0two"


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 1, "<u4"), (20240801, 7, "<u4")]
)
def test_a_token_file_with_a_header_tells_its_width(
    open_data: Opener, tmp_path: Path, magic: int, version: int, dtype: str
) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, 300
    path = write(tmp_path / "t.bin", header.tobytes() + np.arange(300).astype(dtype).tobytes())
    for token_dtype in ("uint16", "uint32"):
        dataset = open_data(path, token_dtype=token_dtype, vocab_size=300, eval_fraction=0.1)
        assert np.asarray(dataset.train_tokens()).tolist() == list(range(270))
        assert np.asarray(dataset.eval_tokens()).tolist() == list(range(270, 300))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_without_a_header_has_the_width_it_is_said_to_have(
    open_data: Opener, tmp_path: Path, dtype: str
) -> None:
    path = write(tmp_path / "t.bin", np.arange(100, 200).astype(dtype).tobytes())
    dataset = open_data(path, token_dtype=dtype, eval_fraction=0.0)
    assert np.asarray(dataset.train_tokens()).tolist() == list(range(100, 200))
    assert dataset.tokenizer is None


def test_token_shards_are_one_stream(open_data: Opener, tmp_path: Path) -> None:
    for n in range(5):
        write(tmp_path / f"shard_{n}.bin", np.arange(n * 13, (n + 1) * 13).astype("<u2").tobytes())
    dataset = open_data(tmp_path / "shard_*.bin", eval_fraction=0.0, seq_len=20)
    assert np.asarray(dataset.train_tokens()).tolist() == list(range(65))
    rows = dataset.rows(0, range(3), 3)
    assert sorted(rows.inputs[:, 0].tolist()) == [0, 20, 40]
    np.testing.assert_array_equal(rows.targets, rows.inputs[:, :1] + np.arange(1, 21))


def test_shards_named_val_are_held_out(open_data: Opener, tmp_path: Path) -> None:
    for name, first in (
        ("fineweb_train_000001", 0),
        ("fineweb_train_000002", 20),
        ("fineweb_val_000000", 200),
    ):
        write(tmp_path / f"shards/{name}.bin", np.arange(first, first + 20).astype("<u2").tobytes())
    dataset = open_data(tmp_path / "shards")
    assert np.asarray(dataset.train_tokens()).tolist() == list(range(40))
    assert np.asarray(dataset.eval_tokens()).tolist() == list(range(200, 220))
    assert "fineweb_val_000000.bin" in dataset.describe()


# --- what is refused, and how


def refused(open_data: Opener, source: object, **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        open_data(source, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_missing_file_names_the_nearest(open_data: Opener, tmp_path: Path) -> None:
    write(tmp_path / "shakespeare.txt", POEM)
    assert f"did you mean {tmp_path / 'shakespeare.txt'}?" in refused(open_data, tmp_path / "shakspeare.txt")
    assert "nor does the folder" in refused(open_data, tmp_path / "nowhere" / "x.txt")
    assert "no file matches" in refused(open_data, tmp_path / "*.parquet")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst"])
def test_no_text_is_an_error(open_data: Opener, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"")
    assert f"{path} without any text" in refused(open_data, path)
    assert not list((tmp_path / "cache" / "tokens").iterdir())


def test_an_empty_folder_and_an_empty_token_file_are_errors(open_data: Opener, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert "folder without files" in refused(open_data, tmp_path / "none")
    assert "a.bin: is empty" in refused(open_data, write(tmp_path / "a.bin", b""))


def test_a_broken_json_line_is_named(open_data: Opener, tmp_path: Path) -> None:
    good = '{"text": "good"}\n'
    cases = {
        '{"text": "cut\n': "not JSON",
        '{"txt": "misnamed"}\n': "no field 'text', it holds txt; set config.data.text_field",
        '["text"]\n': "it holds a list",
        '{"text": 7}\n': "'text' is a int",
        '{"text": "\\ud800"}\n': "surrogate",
    }
    for n, (line, problem) in enumerate(cases.items()):
        path = write(tmp_path / f"{n}.jsonl.gz", good + "\n" + line + good)
        text = refused(open_data, path)
        assert f"{path}:3: " in text
        assert problem in text


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["cut", "foreign", "flipped"])
def test_a_damaged_archive_is_named_not_read_in_part(open_data: Opener, tmp_path: Path, suffix: str, name: str) -> None:
    noise = np.random.default_rng(0).integers(32, 127, 400_000).astype(np.uint8).tobytes()
    path = write(tmp_path / f"{name}.txt{suffix}", noise)
    data = bytearray(path.read_bytes())
    if name == "cut":
        data = data[: len(data) // 2]
    elif name == "foreign":
        data = bytearray(b"plain text")
    else:
        data[10] ^= 0xFF
        data[2] ^= 0xFF
    path.write_bytes(data)
    assert f"{path}: cannot be read" in refused(open_data, path)


def test_binary_files_are_not_taken_for_text(open_data: Opener, tmp_path: Path) -> None:
    write(tmp_path / "mixed/a.txt", POEM)
    picture = write(tmp_path / "mixed/b.png", b"\x89PNG\0\0\0")
    assert f"{picture}: is binary" in refused(open_data, tmp_path / "mixed")


def test_text_and_token_files_are_not_mixed(open_data: Opener, tmp_path: Path) -> None:
    write(tmp_path / "mixed/a.txt", POEM)
    write(tmp_path / "mixed/b.bin", bytes(100))
    assert "mixes token files" in refused(open_data, tmp_path / "mixed")


def test_a_token_file_that_is_not_what_it_says_is_named(open_data: Opener, tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 300
    cut = write(tmp_path / "cut.bin", header.tobytes() + bytes(2 * 299))
    assert f"{cut}: its header promises 300 tokens, it has 299" in refused(open_data, cut)
    header[1] = 2
    new = write(tmp_path / "new.bin", header.tobytes() + bytes(600))
    assert "version 2 of a token file header" in refused(open_data, new)
    odd = write(tmp_path / "odd.bin", bytes(101))
    assert "no whole number of uint16 tokens" in refused(open_data, odd)


def test_an_id_above_the_vocabulary_is_named_with_the_number_to_set(open_data: Opener, token_file: Path) -> None:
    text = refused(open_data, token_file, vocab_size=999)
    assert f"{token_file}: token 999 has id 999, above config.model.vocab_size 999; set that to 1000" in text


def test_fewer_tokens_than_a_sequence_are_refused(open_data: Opener, tmp_path: Path, token_file: Path) -> None:
    text = refused(open_data, token_file, vocab_size=1000, seq_len=950)
    assert "has 950 training tokens, a sequence takes 951" in text
    assert open_data(token_file, vocab_size=1000, seq_len=949).num_train_sequences == 1
    assert "training tokens" in refused(open_data, write(tmp_path / "a.txt", "abcd"))


def test_chars_want_utf8_and_name_the_line(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt", b"first line\nsecond\ncaf\xe9 au lait\n")
    assert f"{path}:3: not UTF-8" in refused(open_data, path, tokenizer="chars")
    cut = write(tmp_path / "cut.txt", b"first line\ncaf\xc3")
    assert f"{cut}:2: not UTF-8" in refused(open_data, cut, tokenizer="chars")


def test_what_is_unpacked_at_once_is_bounded_however_well_it_was_packed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.zst", bytes(1 << 27))
    assert path.stat().st_size < 20_000
    sizes = list(map(len, sources.unpacked(path)))
    assert sum(sizes) == 1 << 27
    assert max(sizes) <= 1 << 25
