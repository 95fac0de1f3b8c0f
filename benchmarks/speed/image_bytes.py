"""Bytes that images move to the ranks that train on them, and the work to make them.

python -m benchmarks.speed.image_bytes

One data rank gets 64 samples, eight of each of eight prompts, with a photograph of 1024 x 768 pixels in every
prompt, prepared for Qwen2.5-VL. Compared are messages (pickles of protocol 5) with
- `normalised`: the processor's fp32 pixels for every sample, as trainers move that keep them with the sample;
- `encoded`: the JPEG file for every sample, decoded and resized again where it arrives;
- `hflow`: the colours of 8 bits, once for each image.
"""

from __future__ import annotations

import json
import pickle
import time
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from PIL import ImageFilter
from transformers import AutoConfig

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.data.images.files import read_image
from hflow.types import Image, Unit
from hflow.types.image import PlacedImage
from hflow.vision.embedding import normalised
from hflow.vision.interface import vision_family
from hflow.vision.processor import ImageProcessor

NUM_PROMPTS, GROUP, SIZE = 8, 8, (1024, 768)
TOKENS = 2048


def photograph(seed: int) -> Image:
    """Return a JPEG with smooth colours, which compresses as photographs do."""
    noise = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8)
    picture = Pillow.fromarray(noise).resize(SIZE, Pillow.Resampling.BICUBIC)
    grain = np.random.default_rng(seed).normal(0, 6, (SIZE[1], SIZE[0], 3))
    made = Pillow.fromarray((np.asarray(picture) + grain).clip(0, 255).astype(np.uint8))
    buffer = BytesIO()
    made.filter(ImageFilter.GaussianBlur(1)).save(buffer, "JPEG", quality=90)
    return read_image(buffer.getvalue())


def message(column: Column) -> int:
    """Return the bytes of a message with the images of all samples, buffers included."""
    count = NUM_PROMPTS * GROUP
    batch = Batch(np.arange(count), np.arange(count) // GROUP, np.full(count, TOKENS), {"images": column})
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return len(content) + sum(buffer.raw().nbytes for buffer in buffers)


def milliseconds(start: float) -> float:
    return round(1000 * (time.perf_counter() - start), 1)


def main() -> None:
    torch.set_num_threads(1)
    config = AutoConfig.for_model("qwen2_5_vl").to_dict()
    family = vision_family(config)
    assert family is not None
    processor = ImageProcessor(family, config, {})
    photographs = [photograph(seed) for seed in range(NUM_PROMPTS)]
    urls = [image.url for image in photographs]
    start = time.perf_counter()
    made = [processor.image(url) for url in urls]
    first = milliseconds(start)
    start = time.perf_counter()
    for _ in range(GROUP - 1):
        again = [processor.image(url) for url in urls]
    repeated = milliseconds(start)
    assert all(one is other for one, other in zip(made, again, strict=True))
    start = time.perf_counter()
    pixels = [family.patch_values(normalised(torch.from_numpy(x.pixels), x)).numpy() for x in made]
    on_device = milliseconds(start)
    sizes = {
        "normalised": message(Column(Unit.JSON, [x.copy() for x in pixels for _ in range(GROUP)])),
        "encoded": message(
            Column(Unit.JSON, [bytes(bytearray(x.data)) for x in photographs for _ in range(GROUP)])
        ),
        "hflow": message(Column(Unit.PIXELS, [(PlacedImage(0, x),) for x in made for _ in range(GROUP)])),
    }
    result: dict[str, Any] = {
        "images": NUM_PROMPTS,
        "samples": NUM_PROMPTS * GROUP,
        "pixels": list(SIZE),
        "tokens_per_image": made[0].num_tokens,
        "bytes": sizes,
        "ratio_to_hflow": {name: round(size / sizes["hflow"], 2) for name, size in sizes.items()},
        "milliseconds": {
            "processing each image once": first,
            f"the other {GROUP - 1} samples of each": repeated,
            "normalising each image on the device, one CPU thread": on_device,
        },
    }
    print(json.dumps(result, indent=2))
    print(harness.write("image-bytes", result))


if __name__ == "__main__":
    main()
