"""Images of datasets, messages and tools: what is read, and what is refused."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import vision_kit as kit
from PIL import Image as Pillow

from hflow.base.errors import DataError
from hflow.data.images.files import ImageSource, read_image, with_images_of_urls, with_urls
from hflow.data.images.thumbnails import SIDE, thumbnail
from hflow.data.rows.datasets import DataSettings, open_dataset
from hflow.data.text.messages import image_urls, normal_messages, with_images
from hflow.types import Unit
from hflow.types.image import MAX_PIXELS, Image
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore


def encoded(picture: Pillow.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


PNG = encoded(kit.picture(6, 4))
COLUMNS = {"image": Unit.IMAGE}


def row_of(file, columns=None, **settings):
    return open_dataset(DataSettings(path=str(file), key="data.train", **settings), columns or COLUMNS).row(0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind):
    image = read_image(encoded(kit.picture(6, 4), kind))
    assert (image.width, image.height) == (6, 4)
    assert image.media_type == f"image/{kind.lower()}"
    assert image.open().size == (6, 4)
    assert read_image(image.url) == image


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        base64.b64encode(PNG).decode(),
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
        {"bytes": PNG, "path": None},
        kit.picture(6, 4),
        Image.of_file(PNG),
    ],
    ids=["bytes", "base64", "url", "datasets", "pillow", "image"],
)
def test_forms(value):
    image = read_image(value)
    assert np.array_equal(np.asarray(image.open()), np.asarray(kit.picture(6, 4)))


def test_orientation_and_transparency():
    turned = Pillow.Exif()
    turned[0x0112] = 6
    image = read_image(encoded(kit.picture(6, 4), "JPEG", exif=turned))
    assert (image.width, image.height) == image.open().size == (4, 6)
    clear = Pillow.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 255))
    assert [read_image(encoded(clear)).open().getpixel((x, 0)) for x in (0, 1)] == [
        (255, 255, 255),
        (255, 0, 0),
    ]
    assert read_image(encoded(Pillow.new("P", (2, 2)))).open().mode == "RGB"


def bomb() -> bytes:
    return encoded(Pillow.new("1", (20_000, 20_000)))


def animation() -> bytes:
    frames = [kit.picture(4, 4, seed) for seed in range(3)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"no image", "no image that Pillow can read"),
        (bomb, f"more than the {MAX_PIXELS:,} pixels"),
        (animation, "animation of 3 frames"),
        (lambda: encoded(Pillow.new("I;16", (4, 4)), "PNG"), "mode I;16"),
        (lambda: encoded(kit.picture(4, 4), "TIFF"), "format TIFF"),
        ("data:image/png,abc", "data:image/png;base64"),
        ("data:image/png;base64,!!", "is not base64"),
        ("pictures/cat.png", "is a path"),
        ("file:///etc/hostname", "is a path"),
        ("https://example.org/cat.png", "is a URL"),
        ({"width": 3}, "neither bytes nor path"),
        (7, "is no image"),
    ],
)
def test_refused(value, message):
    with pytest.raises(DataError, match=message):
        read_image(value() if callable(value) else value)


def test_a_damaged_image_is_found_when_it_is_decoded():
    image = read_image(encoded(kit.picture(60, 40))[:-400])
    with pytest.raises(DataError, match="cannot be decoded"):
        image.open()


def test_messages():
    made = read_image(PNG)
    (message,) = normal_messages([{"role": "user", "content": [{"type": "image", "image": PNG}, "what?"]}])
    url = {"type": "image_url", "image_url": {"url": made.url}}
    assert message["content"] == [url, {"type": "text", "text": "what?"}]
    assert normal_messages([message]) == [message]
    assert image_urls([message]) == [made.url]
    json.dumps(message)
    (text,) = normal_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])
    assert text["content"] == "ab"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "content": [{"type": "image", "image": PNG}]}, "only those of user and tool"),
        ({"role": "user", "content": [{"type": "audio"}]}, "must be text and images"),
        ({"role": "user", "content": [{"type": "image", "image": "cat.png"}]}, "is a path"),
    ],
)
def test_messages_that_are_refused(message, error):
    with pytest.raises(DataError, match=error):
        normal_messages([message])


def test_places():
    made = read_image(PNG)
    part = {"type": "image_url", "image_url": {"url": made.url}}

    def content(said, images):
        return with_images(normal_messages([{"role": "user", "content": said}]), images)[0]["content"]

    assert content("what?", [made]) == [part, {"type": "text", "text": "what?"}]
    assert content("a <image> b", [made]) == [
        {"type": "text", "text": "a "},
        part,
        {"type": "text", "text": " b"},
    ]
    assert content([{"type": "image"}, "b"], [made]) == [part, {"type": "text", "text": "b"}]
    assert content("<image> is a tag", None) == "<image> is a tag"
    for said, images in (("<image>", []), ("<image> <image>", [made]), ("<image>", [made, made])):
        with pytest.raises(DataError, match="places for images"):
            content(said, images)
    with pytest.raises(DataError, match="a place for an image"):
        image_urls(normal_messages([{"role": "user", "content": [{"type": "image"}]}]))


def test_rows_of_json_lines(tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"image": "cat.png", "images": ["cat.png", base64.b64encode(PNG).decode()]}))
    assert row_of(rows)["image"] == read_image(PNG)
    assert row_of(rows, {"images": Unit.IMAGES})["images"] == [read_image(PNG)] * 2
    with pytest.raises(DataError, match=r"rows.jsonl row 0: column 'images' has 2 images; declare it"):
        row_of(rows, {"images": Unit.IMAGE})
    rows.write_text(json.dumps({"image": "dog.png"}))
    with pytest.raises(DataError, match=r"dog.png cannot be read: No such file"):
        row_of(rows)
    talk = [
        {"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]}
    ]
    rows.write_text(json.dumps({"prompt": talk}))
    (message,) = row_of(rows, {"prompt": Unit.MESSAGES})["prompt"]
    assert image_urls([message]) == [read_image(PNG).url]


def test_rows_of_parquet_and_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    value = {"bytes": PNG, "path": None}
    pq.write_table(pa.table({"image": [value]}), tmp_path / "rows.parquet")
    monkeypatch.setenv("HFLOW_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        assert row_of(tmp_path / "rows.parquet")["image"] == read_image(PNG)
    (mapped,) = (tmp_path / "cache" / "rows").iterdir()
    other = read_image(encoded(kit.picture(3, 5)))
    pq.write_table(pa.table({"image": [{"bytes": other.data, "path": None}]}), tmp_path / "rows.parquet")
    assert row_of(tmp_path / "rows.parquet")["image"] == other  # the file was written again
    assert len(list(mapped.parent.iterdir())) == 2
    features = datasets.Features({"image": datasets.Image(), "images": datasets.Sequence(datasets.Image())})
    made = datasets.Dataset.from_dict({"image": [value], "images": [[value, value]]}, features=features)
    made.save_to_disk(tmp_path / "saved")
    both = row_of(tmp_path / "saved", {"image": Unit.IMAGE, "images": Unit.IMAGES})
    assert both == {"image": read_image(PNG), "images": [read_image(PNG)] * 2}


class Site(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/cat.png" else 404)
        self.end_headers()
        self.wfile.write(PNG if self.path == "/cat.png" else b"")

    def log_message(self, *arguments):
        pass


def test_urls_are_fetched_only_if_asked(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_port}"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"image": f"{site}/cat.png"}))
    try:
        with pytest.raises(DataError, match=r"data.train.fetch_images=true"):
            row_of(rows)
        assert row_of(rows, fetch_images=True)["image"] == read_image(PNG)
        rows.write_text(json.dumps({"image": f"{site}/dog.png"}))
        with pytest.raises(DataError, match="cannot be fetched"):
            row_of(rows, fetch_images=True)
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(DataError, match="has no effect"):
        open_dataset(DataSettings(path=str(rows), fetch_images=True), {"image": Unit.TEXT})


def test_thumbnails():
    small = read_image(thumbnail(read_image(kit.picture(1000, 500))))
    assert (small.width, small.height) == (SIDE, SIDE // 2)
    assert read_image(thumbnail(read_image(PNG))) == read_image(encoded(kit.picture(6, 4)))
    assert thumbnail(read_image(encoded(kit.picture(60, 40))[:-400])) is None


def test_results_of_tools():
    image = read_image(PNG)
    for value in (image, [image, "text"], "text", ["a"], {"image": 1}):
        plain, has_images = with_urls(value)
        assert has_images == (image in (value if isinstance(value, list) else [value]))
        assert (with_images_of_urls(json.loads(json.dumps(plain))) if has_images else plain) == value
    assert with_urls(kit.picture(6, 4))[1]


def test_samples_of_a_checkpoint(tmp_path):
    """Images and pixels are read as they were written; samples with an image share it."""
    samples, store = kit.trajectories("qwen3_vl", [[(40, 24)], [], [(40, 24), (16, 16)]]), SampleStore()
    for number, sample in enumerate(samples):
        row = {"image": (Unit.IMAGE, read_image(PNG)), "images": (Unit.IMAGES, [read_image(PNG)] * number)}
        store.put_trajectory("gen", number, 0, sample, row)
        store.add_value("gen", "pixels", Unit.PIXELS, (number,), sample.pixels)
    ids = list(range(len(samples)))
    files = SampleFiles(tmp_path, "worker-0", {"gen": {"gen": store.stored("gen", ids)}}, {})
    files.write()
    assert not files.not_saved
    again = SampleStore()
    again.put_stored("gen", SampleFilesReader(tmp_path, "worker-0").samples(["gen"], ids)["gen"])
    assert again.values("gen", "image", ids) == [read_image(PNG)] * 3
    assert again.values("gen", "images", ids) == [[read_image(PNG)] * number for number in ids]
    found = again.values("gen", "pixels", ids)
    for one, sample in zip(found, samples, strict=True):
        assert [placed.start for placed in one] == [placed.start for placed in sample.pixels]
        for placed, wanted in zip(one, sample.pixels, strict=True):
            assert vars(placed.image).keys() == vars(wanted.image).keys()
            assert np.array_equal(placed.image.pixels, wanted.image.pixels)
            assert placed.image.pixels.dtype == np.uint8
            assert {**vars(placed.image), "pixels": 0} == {**vars(wanted.image), "pixels": 0}
    assert found[0][0].image is found[2][0].image


def test_paths_are_read_relative_to_the_rows(tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    assert read_image("cat.png", ImageSource(tmp_path)) == read_image(PNG)
    assert read_image(f"file://{tmp_path}/cat.png", ImageSource(tmp_path)) == read_image(PNG)
