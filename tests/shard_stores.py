"""Prepared text, copied to where a test wants it; a web server on loopback that serves a folder."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import torch

from dd_lightning.tasks.text import TextDataModule

LIKE = {"sequence_length": 8, "batch_size": 4}


def prepared_text(folder: Path) -> TextDataModule:
    """40 short texts in 8 training shards, two groups, byte pairs."""
    draw = random.Random(0)
    for index in range(40):
        texts = folder / "texts" / "ab"[index % 2]
        texts.mkdir(parents=True, exist_ok=True)
        (texts / f"{index}.txt").write_text("".join(draw.choices("etaoin shrdlu", k=200)))
    made = TextDataModule(
        source="folder", path=str(folder / "texts"), num_shards=8, tokenizer="bpe", vocabulary=270,
        cache_dir=str(folder / "made"), **LIKE,
    )  # fmt: skip
    made.prepare_data()
    return made


def upload(folder: Path, url: str) -> str:
    """Copy a prepared folder to a URL, which is returned."""
    system, path = fsspec.core.url_to_fs(url)
    system.makedirs(path, exist_ok=True)
    for file in folder.iterdir():
        system.pipe_file(f"{path}/{file.name}", file.read_bytes())
    return url


def text_at(path: str, cache: Path, **changes: Any) -> TextDataModule:
    """A datamodule of the prepared text at `path`, not yet prepared."""
    given = {"source": "shards", "path": path, "tokenizer": "bpe", "vocabulary": 270, **LIKE}
    return TextDataModule(**{**given, "cache_dir": str(cache), **changes})


def take(datamodule: TextDataModule, count: int) -> torch.Tensor:
    """The next training batches."""
    batches = itertools.islice(iter(datamodule.train_dataloader()), count)
    return torch.stack([batch["input_ids"] for batch in batches])


class Handler(SimpleHTTPRequestHandler):
    """Counts what is asked for; breaks off the first answers of a file as often as it is told."""

    def do_GET(self) -> None:
        name = Path(self.path).name
        self.server.asked.append(name)
        if self.server.breaks.get(name, 0) > 0:
            self.server.breaks[name] -= 1
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"the beginning")
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@contextmanager
def served(folder: Path) -> Iterator[ThreadingHTTPServer]:
    """A server of `folder`: `url`, `asked` (file names), `breaks` (answers to break off)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.asked, server.breaks = [], {}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
