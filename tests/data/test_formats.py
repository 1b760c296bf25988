"""Token files of other tools, written here by their documented layouts."""

from __future__ import annotations

import csv
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxrun.config import ConfigError

from .conftest import Opener
from .corpus import write

LENGTHS = [5, 1, 9, 3, 12, 30, 2, 7]  # tokens of each sequence
DOCUMENTS = [0, 2, 3, 6, 8]  # the sequences that begin a document, and their number at the end


def megatron(prefix: Path, tokens: np.ndarray, lengths: list[int], documents: list[int], code: int, *, modes: bool = False) -> Path:  # fmt: skip
    """As Megatron-LM's IndexedDatasetBuilder writes them."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens.tofile(prefix.with_suffix(".bin"))
    places = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * tokens.itemsize
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(struct.pack("<Q", 1))
        file.write(struct.pack("<B", code))
        file.write(struct.pack("<Q", len(lengths)))
        file.write(struct.pack("<Q", len(documents)))
        file.write(np.array(lengths, "<i4").tobytes())
        file.write(places.astype("<i8").tobytes())
        file.write(np.array(documents, "<i8").tobytes())
        if modes:
            file.write(np.zeros(len(lengths), np.int8).tobytes())
    return prefix.with_suffix(".bin")


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
@pytest.mark.parametrize("modes", [False, True])
def test_megatron_is_read_in_every_integer_type(open_data: Opener, tmp_path: Path, code: int, dtype: str, modes: bool) -> None:  # fmt: skip
    tokens = np.arange(sum(LENGTHS)).astype(dtype)
    path = megatron(tmp_path / "a_text_document", tokens, LENGTHS, DOCUMENTS, code, modes=modes)
    for source in (path, tmp_path):  # the file, or the folder with its index in it
        dataset = open_data(source, eval_fraction=0.0)
        assert np.asarray(dataset.train).tolist() == tokens.tolist()


def test_megatron_s_documents_are_known_by_name_and_place(open_data: Opener, tmp_path: Path) -> None:
    total = sum(LENGTHS)
    for n in range(2):
        tokens = np.arange(n * total, (n + 1) * total).astype("<i4")
        megatron(tmp_path / f"shard_{n}", tokens, LENGTHS, DOCUMENTS, 4)
    dataset = open_data(tmp_path, eval_fraction=0.0, seq_len=6)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])[DOCUMENTS].tolist()
    numbers = set()
    for row in range(dataset.num_train_sequences):
        rows, ids = dataset.rows(0, [row], 1000), []
        for span in dataset.provenance(0, row, 1000):
            file = int(Path(span.file).stem[-1])
            assert span.offset in starts
            assert span.document == 4 * file + starts.index(span.offset)
            first = file * total + span.offset + span.first_token
            ids += range(first, first + span.num_tokens)
            numbers.add(span.document)
        assert ids == [*rows.inputs[0], rows.targets[0, -1]]
    assert numbers == set(range(8))
    denied = dataset.without([f"shard_1.bin@{starts[2]}", "shard_0.bin@0"])
    assert denied.denied == ((0, starts[1]), (total + starts[2], total + starts[3]))
    assert dataset.without(["shard_0.bin"]).denied == ((0, total),)
    with pytest.raises(ConfigError, match="is no training document"):
        dataset.without([f"shard_0.bin@{starts[1] + 1}"])


def test_a_megatron_index_that_does_not_fit_is_refused(open_data: Opener, tmp_path: Path) -> None:
    tokens = np.arange(sum(LENGTHS)).astype("<i4")
    path = megatron(tmp_path / "a", tokens, LENGTHS, DOCUMENTS, 4)
    index = tmp_path / "a.idx"
    sound = index.read_bytes()
    for data, message in (
        (sound[:9] + struct.pack("<Q", 2) + sound[17:], "version 2 of a Megatron index"),
        (sound[:17] + b"\x07" + sound[18:], "type code 7"),
        (sound[:-1], "do not fit its 8 sequences"),
        (sound[:20], "ends in its header"),
    ):
        index.write_bytes(data)
        with pytest.raises(ConfigError, match=message) as error:
            open_data(path)
        assert "\n" not in str(error.value)
    index.write_bytes(sound)
    tokens[:-1].tofile(path)
    with pytest.raises(ConfigError, match=r"a.bin: has 272 bytes, a.idx ends at 276"):
        open_data(path)


def test_an_index_makes_no_other_data_and_what_is_none_is_ignored(
    open_data: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = megatron(tmp_path / "a", np.arange(sum(LENGTHS)).astype("<i4"), LENGTHS, DOCUMENTS, 4)
    own = open_data(path).fingerprint
    write(tmp_path / "a.idx", b"a file of another program")
    ignored = open_data(path, token_dtype="uint32")
    assert f"{tmp_path / 'a.idx'}: is no Megatron index" in caplog.text
    (tmp_path / "a.idx").unlink()
    plain = open_data(path, token_dtype="uint32")
    assert plain.fingerprint == ignored.fingerprint == own
    assert plain.train[:5].tolist() == [0, 1, 2, 3, 4]


def test_negative_ids_are_refused(open_data: Opener, tmp_path: Path) -> None:
    tokens = np.arange(sum(LENGTHS)).astype("<i4")
    tokens[11] = -100
    with pytest.raises(ConfigError, match="token 11 is negative"):
        open_data(megatron(tmp_path / "a", tokens, LENGTHS, DOCUMENTS, 4))


def llm_c(path: Path, tokens: np.ndarray, magic: int, version: int) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return write(path, header.tobytes() + tokens.tobytes())


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 1, "<u4"), (20240801, 7, "<u4")]
)
def test_llm_c_is_read_by_its_header(open_data: Opener, tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    tokens = np.arange(200).astype(dtype)
    path = llm_c(tmp_path / "fineweb_train_000001.bin", tokens, magic, version)
    assert np.asarray(open_data(path, eval_fraction=0.0).train).tolist() == tokens.tolist()


@pytest.mark.parametrize(("dtype", "option"), [("<u2", "uint16"), ("<u4", "uint32")])
def test_olmo_is_read_without_a_header_and_numpy_with_one(open_data: Opener, tmp_path: Path, dtype: str, option: str) -> None:  # fmt: skip
    tokens = np.arange(200).astype(dtype)
    path = write(tmp_path / "part-0-00000.npy", tokens.tobytes())
    assert np.asarray(open_data(path, eval_fraction=0.0, token_dtype=option).train).tolist() == tokens.tolist()
    np.save(tmp_path / "real.npy", tokens)
    assert np.asarray(open_data(tmp_path / "real.npy", eval_fraction=0.0).train).tolist() == tokens.tolist()
    np.save(tmp_path / "big_endian.npy", tokens.astype(dtype.replace("<", ">")))
    swapped = open_data(tmp_path / "big_endian.npy", eval_fraction=0.0)
    np.testing.assert_array_equal(swapped.train[:], tokens)
    assert swapped.rows(0, [0], 1).inputs.dtype == np.int32
    np.testing.assert_array_equal(swapped.rows(3, range(2), 2).targets, open_data(tmp_path / "real.npy", eval_fraction=0.0).rows(3, range(2), 2).targets)  # fmt: skip
    np.save(tmp_path / "two.npy", tokens.reshape(2, 100))
    with pytest.raises(ConfigError, match="tokens are integers in one dimension"):
        open_data(tmp_path / "two.npy")


def test_olmo_s_bounds_of_documents_are_read(open_data: Opener, tmp_path: Path) -> None:
    tokens = np.arange(60).astype("<u2")
    write(tmp_path / "in/part-0.npy", tokens.tobytes())
    bounds = [(0, 17), (17, 18), (18, 41), (41, 60)]

    def write_bounds(rows: list[tuple[int, int]]) -> None:
        with gzip.open(tmp_path / "in/part-0.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows([start, end, f"id{n}", "web.json.gz", n] for n, (start, end) in enumerate(rows))

    write_bounds(bounds)
    dataset = open_data(tmp_path / "in", eval_fraction=0.0, seq_len=10, document_mask=True)
    spans = [s for row in range(5) for s in dataset.provenance(0, row, 5)]
    assert {(s.document, s.offset) for s in spans} == {(n, start) for n, (start, _) in enumerate(bounds)}
    assert dataset.without(["part-0.npy@18"]).denied == ((18, 41),)
    rows = dataset.rows(0, range(5), 5)
    assert {int(t) for t, w in zip(rows.targets.ravel(), rows.weights.ravel(), strict=True) if not w} == {17, 18, 41}
    write_bounds(bounds[:-1])
    with pytest.raises(ConfigError, match=r"part-0.csv.gz: ends at token 41"):
        open_data(tmp_path / "in")
    write_bounds([bounds[0], bounds[2]])
    with pytest.raises(ConfigError, match=r"part-0.csv.gz:2: tokens 18 to 41 do not follow 17"):
        open_data(tmp_path / "in")


def test_kept_bounds_are_those_of_the_tokens_beside_them(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "p.npy", np.arange(60).astype("<u2").tobytes())
    write(tmp_path / "p.csv.gz", "0,20\n20,60\n")
    assert open_data(path).train.segments[0].index.count == 2  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="tokens 20 to 60 do not follow 20"):
        open_data(path, token_dtype="uint32", vocab_size=2**31 - 1)
    write(path, np.arange(80).astype("<u2").tobytes())
    with pytest.raises(ConfigError, match=r"p.csv.gz: ends at token 60, .*p.npy has 80"):
        open_data(path)


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b"0,20\n20,60\n")[:-9], b"0,20\n20,60\n", gzip.compress(b"0,20,\xff\n20,60\n"),
        gzip.compress(b"0,20," + b"x" * 200_000 + b"\n20,60\n"),
    ],
    ids=["cut", "not packed", "not UTF-8", "a field without an end"],
)  # fmt: skip
def test_damaged_bounds_are_named_in_a_line(open_data: Opener, tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "p.npy", np.arange(60).astype("<u2").tobytes())
    (tmp_path / "p.csv.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"p.csv.gz: cannot be read \(") as error:
        open_data(path)
    assert "\n" not in str(error.value)


def test_nanogpt_s_folder_is_read_with_its_meta_file(open_data: Opener, tmp_path: Path) -> None:
    for name, size in (("train", 300), ("val", 50)):
        write(tmp_path / f"{name}.bin", np.arange(size).astype("<u2").tobytes())
    write(tmp_path / "meta.pkl", b"\x80\x04K\x01.")
    dataset = open_data(tmp_path, vocab_size=300)
    assert (len(dataset.train), len(dataset.held_out)) == (300, 50)
