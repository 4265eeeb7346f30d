"""Published layouts are read as they are written; what is damaged is named with its file, and its row where it has one."""

import gzip
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpexp.errors import UserError
from dpexp.tasks import image_files
from dpexp.tasks.cifar import CIFAR, find_cifar, read_cifar
from dpexp.tasks.image_files import (
    cached,
    decode,
    read_idx,
    read_idx_pair,
    read_jpeg_tar,
)
from dpexp.tasks.image_folders import read_folder
from tests.tasks import image_data

CLASSES = ["cat", "dog"]


def mnist_pair(root: Path, name: str = "train") -> tuple[Path, Path]:
    return root / f"mnist/{name}-images-idx3-ubyte.gz", root / f"mnist/{name}-labels-idx1-ubyte"


def test_idx_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    made = image_data.mnist(tmp_path)
    for split, name in (("train", "train"), ("dev", "t10k")):
        images = read_idx_pair(*mnist_pair(tmp_path, name), classes=10)
        assert images.pixels.shape == (len(images), 1, 28, 28)
        assert images.pixels.dtype == np.uint8
        assert np.array_equal(images.pixels[:, 0], made[split][0])
        assert np.array_equal(images.labels, made[split][1])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-5], r"promises 10x28x28 = 7840 bytes, and 7835 follow"),
        (lambda data: data + b"more", "and 7844 follow"),
        (lambda data: data[:10], "ends inside its header"),
        (lambda data: b"\0\0\x08\x01" + data[4:], "magic number is 2049, and 2051 is that of idx images"),
        (lambda data: b"\0\0\x0d\x03" + data[4:], "magic number is 3331"),
        (lambda data: b"", r"ends inside its header \(0 bytes\)"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path: Path, damage, says: str) -> None:
    image_data.mnist(tmp_path)
    path, _ = mnist_pair(tmp_path)
    path.write_bytes(gzip.compress(damage(gzip.decompress(path.read_bytes()))))
    with pytest.raises(UserError, match=says) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_a_cut_off_download_and_pairs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    image_data.mnist(tmp_path)
    images, labels = mnist_pair(tmp_path)
    _, other = mnist_pair(tmp_path, "t10k")
    with pytest.raises(UserError, match=r"10 images, and .* 6 labels"):
        read_idx_pair(images, other, 10)
    with pytest.raises(UserError, match="row 8: label 7 is outside the 7 classes"):
        read_idx_pair(images, labels, 7)
    images.write_bytes(images.read_bytes()[:-30])
    with pytest.raises(UserError, match="can't be read"):
        read_idx_pair(images, labels, 10)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("form", ["cifar10", "cifar100"])
def test_every_version_of_cifar_is_found_and_read(
    tmp_path: Path, form: str, binary: bool, archive: bool
) -> None:
    place = tmp_path / form if archive else tmp_path  # both are looked into
    place.mkdir(exist_ok=True)
    made = image_data.cifar(place, form, binary=binary, archive=archive)
    found = find_cifar(tmp_path, form)
    assert found is not None
    splits = read_cifar(*found, classes={"cifar10": 10, "cifar100": 100}[form])
    for split, (pixels, labels) in made.items():
        assert np.array_equal(splits[split].pixels, pixels)
        assert np.array_equal(splits[split].labels, labels)


def test_the_same_images_have_one_hash_in_every_layout(tmp_path: Path) -> None:
    hashes = set()
    for binary in (False, True):
        place = tmp_path / str(binary)
        place.mkdir()
        image_data.cifar(place, "cifar10", binary=binary)
        splits = read_cifar(*find_cifar(place, "cifar10"), classes=10)
        hashes.add(splits["train"].sha256)
        assert splits["dev"].sha256 not in hashes
    assert len(hashes) == 1


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path: Path) -> None:
    image_data.cifar(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps({b"data": Payload(tmp_path / "executed")}, protocol=2))
    with pytest.raises(UserError, match=r"data_batch_3: this pickle asks for .*mkdir"):
        read_cifar(*find_cifar(tmp_path, "cifar10"), classes=10)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "this is no CIFAR batch"),
        (b"\x80\x02}q", "this is no CIFAR batch"),
        (pickle.dumps([1, 2]), "no field data"),
        (image_data.python2_batch(np.zeros((2, 3071), np.uint8), [0, 1], "labels"), "rows of 3072 bytes"),
        (image_data.python2_batch(np.zeros((2, 3072), np.uint8), [0], "labels"), "a list of 2 classes"),
        (
            image_data.python2_batch(np.zeros((2, 3072), np.uint8), [0, 1], "fine_labels"),
            "labels must be a list",
        ),
        (
            image_data.python2_batch(np.zeros((2, 3072), np.uint8), [0, 10], "labels"),
            "label 10 is outside the 10 classes",
        ),
    ],
)
def test_malformed_batches_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    image_data.cifar(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_cifar(*find_cifar(tmp_path, "cifar10"), classes=10)


def test_missing_and_cut_off_files_of_cifar_are_named(tmp_path: Path) -> None:
    image_data.cifar(tmp_path, "cifar10", binary=True)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data_batch_4.bin: 30729 bytes are no whole number of rows of 3073"):
        read_cifar(*find_cifar(tmp_path, "cifar10"), classes=10)
    path.unlink()
    with pytest.raises(UserError, match=r"data_batch_4.bin missing"):
        read_cifar(*find_cifar(tmp_path, "cifar10"), classes=10)
    image_data.cifar(tmp_path, "cifar100", archive=True)
    archive = tmp_path / CIFAR["cifar100"][0].archive
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(UserError, match="is damaged"):
        read_cifar(*find_cifar(tmp_path, "cifar100"), classes=100)


def jpeg_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, data in members.items():
            image_data.add(tar, name, data)
    return path


def test_a_tar_of_jpeg_files_is_read_with_the_classes_of_its_folders(tmp_path: Path) -> None:
    members = {"train/dog/0000.jpg": image_data.jpeg(1), "train/cat/0000.jpg": image_data.jpeg(2)}
    images = read_jpeg_tar(jpeg_tar(tmp_path / "train.tar.xz", members), CLASSES, (32, 32))
    assert images.labels.tolist() == [1, 0]
    assert np.array_equal(images.pixels[0], decode(image_data.jpeg(1), "here", channels=3))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            {"train/cow/0000.jpg": image_data.jpeg(1)},
            r"train/cow/0000.jpg: its folder cow is none of the classes cat, dog",
        ),
        (
            {"train/cat/0000.jpg": image_data.jpeg(1, 31)},
            r"0000.jpg: 31x31 pixels, and all images must be 32x32",
        ),
        ({"train/cat/0001.jpg": image_data.jpeg(1)[:300]}, r"cat/0001.jpg: this image can't be read"),
        ({}, "holds no images"),
    ],
)
def test_malformed_tars_are_refused(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_jpeg_tar(jpeg_tar(tmp_path / "train.tar.xz", members), CLASSES, (32, 32))


def test_a_cut_off_tar_is_refused(tmp_path: Path) -> None:
    path = jpeg_tar(tmp_path / "train.tar.xz", {f"train/cat/{i}.jpg": image_data.jpeg(i) for i in range(3)})
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(UserError, match="is damaged"):
        read_jpeg_tar(path, CLASSES, (32, 32))


def test_an_image_is_turned_converted_scaled_and_cut(tmp_path: Path) -> None:
    wide = np.zeros((10, 20, 3), np.uint8)
    wide[:, 5:15] = 200  # the middle square
    Image.fromarray(wide).save(tmp_path / "wide.png")
    data = (tmp_path / "wide.png").read_bytes()
    assert decode(data, "here", channels=3).shape == (3, 10, 20)
    assert decode(data, "here", channels=1).shape == (1, 10, 20)
    assert decode(data, "here", channels=3, resize=5).min() > 150, "the middle is kept"
    turned = Image.fromarray(wide).getexif()
    turned[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(wide).save(tmp_path / "turned.jpg", exif=turned)
    assert decode((tmp_path / "turned.jpg").read_bytes(), "here", channels=3).shape == (3, 20, 10)


def own(root: Path, **settings):
    wanted = {"channels": 3, "size": None, "cache": root.parent / "cache"}
    return read_folder(root, CLASSES, "data.train", **(wanted | settings))


def test_own_folders_are_read_class_by_class_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = image_data.folder(tmp_path / "mine", {"cat": 3, "dog": 2})
    (root / "cat" / "notes.txt").write_text("none")
    (root / "cat" / ".hidden.png").write_text("none")
    (kept := root / "cat" / ".ipynb_checkpoints").mkdir()
    (kept / "000-checkpoint.png").write_bytes((root / "cat" / "000.png").read_bytes())
    images, passed_over = own(root)
    assert images.labels.tolist() == [0, 0, 0, 1, 1]
    assert passed_over == 1
    assert np.array_equal(
        images.pixels[4], decode((root / "dog" / "001.png").read_bytes(), "here", channels=3)
    )
    monkeypatch.setattr("dpexp.tasks.image_folders.decode", None)  # from here on nothing may be decoded
    again, _ = own(root)
    assert again.sha256 == images.sha256
    (root / "dog" / "001.png").write_bytes(image_data.jpeg(7, 8, "PNG"))
    with pytest.raises(TypeError):
        own(root)


def test_what_is_wrong_with_own_folders_is_named(tmp_path: Path) -> None:
    root = image_data.folder(tmp_path / "mine", {"cat": 2, "dog": 2})
    (root / "dog" / "big.png").write_bytes(image_data.jpeg(1, 12, "PNG"))
    with pytest.raises(
        UserError, match=r"dog/big.png: 12x12 pixels, and .*cat/000.png has 8x8.*task.image_size=12"
    ):
        own(root)
    assert own(root, size=6)[0].pixels.shape == (5, 3, 6, 6)
    (root / "dog" / "big.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"dog/big.png: this image can't be read"):
        own(root)
    (root / "dog" / "big.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"dog/big.png: .*it is empty"):
        own(root)
    Image.fromarray(np.full((8, 8), 4000, np.uint16)).save(root / "dog" / "big.png")
    with pytest.raises(UserError, match=r"dog/big.png: .*more than 8 bits, mode I;16: save it with 8"):
        own(root)
    (root / "cow").mkdir()
    with pytest.raises(UserError, match="1 of its subfolders are none of the classes cat, dog: move them"):
        own(root)
    (root / "cow").rmdir()
    for path in (root / "cat").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="class cat has no images"):
        own(root)
    (root / "cat").rmdir()
    with pytest.raises(UserError, match="class cat has no images"):
        own(root)
    # what is measured on need not have every class, nor a folder for it
    (root / "dog" / "big.png").unlink()
    known = {"channels": 3, "size": None, "cache": tmp_path}
    assert read_folder(root, CLASSES, "data.dev", **known)[0].labels.tolist() == [1, 1]
    (tmp_path / "empty" / "dog").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data.dev=.*empty: no images there"):
        read_folder(tmp_path / "empty", CLASSES, "data.dev", **known)
    with pytest.raises(UserError, match=r"data.train=.*nowhere: no such folder"):
        own(tmp_path / "nowhere")


def test_a_cache_that_can_not_be_written_or_read_costs_time_alone(tmp_path: Path) -> None:
    images = read_idx_pair(*mnist_pair((image_data.mnist(tmp_path), tmp_path)[1]), classes=10)
    (tmp_path / "file").write_text("in the way")
    assert cached(tmp_path / "file", "content", "here", lambda: images).sha256 == images.sha256
    assert cached(tmp_path, "content", "here", lambda: images).sha256 == images.sha256
    (kept,) = (tmp_path / "images").glob("*.safetensors")
    assert kept.stat().st_mode & 0o077 == 0, "the images may be private"
    kept.write_bytes(kept.read_bytes()[:100])
    assert cached(tmp_path, "content", "there", lambda: images).where == images.where
    assert cached(tmp_path, "content", "there", lambda: None).where == "there"


def test_the_published_files_of_mnist_are_whole(real_data: Path) -> None:
    splits = {
        name: read_idx_pair(
            *(real_data / f"mnist/{name}-{kind}.gz" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")),
            classes=10,
        )
        for name in ("train", "t10k")
    }
    assert {name: len(images) for name, images in splits.items()} == {"train": 60000, "t10k": 10000}
    assert np.bincount(splits["t10k"].labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert splits["train"].pixels.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert splits["train"].pixels.std() / 255 == pytest.approx(0.3081, abs=5e-5)


def test_the_format_counts_in_the_name_of_a_cached_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = read_idx_pair(*mnist_pair((image_data.mnist(tmp_path), tmp_path)[1]), classes=10)
    cached(tmp_path, "content", "here", lambda: images)
    monkeypatch.setattr(image_files, "FORMAT", image_files.FORMAT + 1)
    cached(tmp_path, "content", "here", lambda: images)
    assert len(list((tmp_path / "images").glob("*"))) == 2
