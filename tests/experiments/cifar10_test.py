"""CIFAR-10: its data, its models, its trainings, on small images that are made here."""

import io
import tarfile
import zipfile

import numpy as np
import PIL.Image
import pytest

from benchmarks import records
from benchmarks.cifar10 import data


@pytest.fixture(scope="module")
def images() -> data.Images:
    """As many as six files of a hundred have."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(600, 32, 32, 3), dtype=np.uint8)
    return data.Images(pixels, rng.integers(10, size=600).astype(np.int32))


def _records(images: data.Images) -> bytes:
    """One byte of label, then a plane for each color, of each image."""
    rows = []
    for image, label in zip(*images, strict=True):
        rows.append(bytes([label]))
        rows += [image[:, :, color].tobytes() for color in range(3)]
    return b"".join(rows)


def _files(images: data.Images) -> dict[str, bytes]:
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    parts = [images.take(slice(100 * i, 100 * i + 100)) for i in range(6)]
    return {name: _records(part) for name, part in zip(names, parts, strict=True)}


def _write_archive(folder, images):
    folder.mkdir()
    with tarfile.open(folder / data.ARCHIVE, "w:gz") as archive:
        for name, content in reversed(_files(images).items()):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _write_mosaics(folder, images):
    folder.mkdir()
    with zipfile.ZipFile(folder / "cifar10_webp.zip", "w") as files:
        files.writestr("labels_uint8.bin", images.labels.astype(np.uint8).tobytes())
        for i in range(6):
            mosaic = np.zeros((320, 320, 3), np.uint8)
            for j, image in enumerate(images.images[100 * i : 100 * i + 100]):
                row, column = 32 * (j // 10), 32 * (j % 10)
                mosaic[row : row + 32, column : column + 32] = image
            file = io.BytesIO()
            PIL.Image.fromarray(mosaic).save(file, "WEBP", lossless=True, exact=True)
            files.writestr(f"{i:03d}.webp", file.getvalue())


@pytest.mark.parametrize("write", [_write_archive, _write_mosaics])
def test_every_format_is_read_alike(tmp_path, images, write):
    write(tmp_path / "data", images)
    cifar = data.load(tmp_path / "data")
    np.testing.assert_array_equal(cifar.train.images, images.images[:500])
    np.testing.assert_array_equal(cifar.train.labels, images.labels[:500])
    np.testing.assert_array_equal(cifar.test.images, images.images[500:])
    np.testing.assert_array_equal(cifar.test.labels, images.labels[500:])
    assert not cifar.is_published


def test_other_images_are_not_taken_for_the_published_ones(
    tmp_path, images, monkeypatch
):
    monkeypatch.setattr(data, "SHA256", data.sha256(images))
    _write_archive(tmp_path / "same", images)
    assert data.load(tmp_path / "same").is_published
    images.images[0, 0, 0, 0] ^= 1
    _write_archive(tmp_path / "other", images)
    assert not data.load(tmp_path / "other").is_published


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="cifar10.download"):
        data.load(tmp_path)


def test_images_to_validate_on_are_not_trained_on():
    fit, validation = data.split_validation(1_000)
    assert len(fit) == 900 and len(validation) == 100
    assert sorted([*fit, *validation]) == list(range(1_000))


def test_what_is_on_record_is_not_made_again(tmp_path):
    path = tmp_path / "records.jsonl"
    first = records.Records(path).get({"a": (1, 2), "seed": 0}, lambda: {"b": 3})
    again = records.Records(path)
    found = again.get({"a": (1, 2), "seed": 0}, lambda: pytest.fail("made again"))
    assert found == first | {"a": [1, 2]}
    assert again.get({"a": (1, 2), "seed": 1}, lambda: {"b": 4})["b"] == 4
    assert len(records.read(path)) == 2


def test_a_line_that_was_cut_off_does_not_block_the_record(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b"')
    assert records.read(path) == [{"a": 1}]
    row = records.Records(path).get({"a": 2}, lambda: {"b": 3})
    assert records.read(path) == [{"a": 1}, row]
