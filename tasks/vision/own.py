"""The user's own pictures: a folder of class folders, or webdataset tars with an image and a class.

Both are read once, at preparation; training reads the shards that are made of them.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import webdataset as wds

from dd_lightning.tasks.data import Origin
from dd_lightning.tasks.data.fetch import fingerprint, known_to_fsspec, local_path, opened

from .pictures import Picture, decode, picture

IMAGE_FIELDS = ("png", "jpg", "jpeg", "webp", "ppm", "bmp")
LABEL_FIELD = "cls"


def image_folder(path: Path) -> Any:
    """torchvision's ImageFolder: one folder below `path` for each class.

    Raises:
        ValueError: no such folder, or a class without pictures.
    """
    from torchvision.datasets import ImageFolder

    try:
        return ImageFolder(str(path))
    except FileNotFoundError as error:
        raise ValueError(
            f"task.data.path is {str(path)!r}; allowed with source=folder: a folder of one folder "
            f"of pictures for each class ({error})"
        ) from error


def folder_origin(path: Path) -> Origin:
    """Hash of the pictures and their class names, so a changed file means another data set."""
    digest = hashlib.sha256()
    for name, _ in image_folder(path).samples:
        file = Path(name)
        digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return Origin("folder", "the user's own", "", {"sha256": digest.hexdigest()})


def folder_pictures(path: Path, size: int) -> Iterator[Picture]:
    """Every picture below the class folders; classes are numbered by their sorted names."""
    for name, label in image_folder(path).samples:
        yield picture(decode(Path(name).read_bytes()), label, size)


def tar_urls(path: str) -> list[str]:
    """Shards of a webdataset pattern, as `/data/x-{000..007}.tar` or `https://...`."""
    return list(wds.shardlists.expand_urls(path))


def webdataset_origin(path: str) -> Origin:
    """Hash of the tars' contents, where they are files here, else of their URLs and what their
    store tells of them (size, ETag, time); of a `pipe:` its command is all that is known."""
    urls = tar_urls(path)
    digest = hashlib.sha256()
    for url in urls:
        if (file := local_path(url)) is not None and file.is_file():
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
            continue
        digest.update(url.encode())
        if known_to_fsspec(url):
            digest.update(fingerprint(url).encode())
    versions = {"tars": str(len(urls)), "sha256": digest.hexdigest()}
    return Origin("webdataset", "the user's own", "", versions)


def webdataset_records(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every record of the tars, and the URL of its tar.

    Raises:
        ValueError: a tar cannot be opened.
    """
    for url in tar_urls(path):
        with _opened(url) as stream:
            members = wds.tariterators.tar_file_expander([{"url": url, "stream": stream}])
            for record in wds.tariterators.group_by_keys(members):
                yield record, url


def _opened(url: str) -> AbstractContextManager[Any]:
    """A stream of a tar: by fsspec where that knows the protocol, else by webdataset."""
    if known_to_fsspec(url):
        return opened(url)
    try:
        return wds.gopen(url)
    except (OSError, ValueError) as error:
        raise ValueError(f"task.data.path: {url} cannot be opened ({error})") from error


def webdataset_pictures(path: str, size: int) -> Iterator[Picture]:
    """Every record of the tars: an image field, and the number of its class in `cls`.

    Raises:
        ValueError: a tar cannot be opened, or a record lacks a field.
    """
    for record, url in webdataset_records(path):
        yield _picture_of(record, url, size)


def _picture_of(record: dict[str, Any], url: str, size: int) -> Picture:
    fields = [name for name in IMAGE_FIELDS if name in record]
    if not fields or not str(record.get(LABEL_FIELD, b""), "ascii").strip().isdigit():
        held = sorted(name for name in record if not name.startswith("__"))
        raise ValueError(
            f"record {record['__key__']} of {url} holds {held}; allowed with source=webdataset: an "
            f"image in one of {IMAGE_FIELDS} and the number of its class in {LABEL_FIELD}"
        )
    return picture(decode(record[fields[0]]), int(record[LABEL_FIELD]), size)
