"""Episodes with images: prompts, tools that return them, the endpoint, and the journal."""

from __future__ import annotations

import asyncio
from typing import Any

import endpoint_kit
import numpy as np
import pytest
import torch_kit
import vision_kit as kit
from episode_kit import driving, episode, new_effects

from hflow.base.errors import EpisodeError
from hflow.data.images.files import read_image
from hflow.data.text.messages import image_urls
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.types import Image, Trajectory

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<eos>' if m.role == 'assistant' else '?' }}{% endfor %}"
)
FAMILY = "qwen3_vl"


def crop(image: Image, left: int) -> Any:
    return image.open().crop((left, 0, left + 16, 16))


@pytest.fixture(scope="module", params=[None, TEMPLATE], ids=["raw", "template"])
def tokenizer(request):
    return kit.tokenizer(FAMILY, chat_template=request.param)


@pytest.fixture(scope="module")
def backend():
    return kit.model(FAMILY)


@pytest.fixture(scope="module")
def driver(backend):
    with driving(EmbeddedEngine(kit.settings(FAMILY), {}, backend.shared_module())) as made:
        yield made


async def look_closer(engine: Any, picture: Image) -> Trajectory:
    """Ask for an image, then for a part of it, which a tool cuts out."""
    talk = await engine.complete("what", images=[picture])
    part = await engine.call(crop, image=picture, left=8)
    assert isinstance(part, Image)
    return await engine.complete(talk.add("tool", [part, "and now"]))


def check_logprobs(backend: Any, talk: Trajectory) -> None:
    """Check that the trainer gives the tokens the log-probs with which the engine drew them."""
    (computed,) = backend.infer(torch_kit.call(torch_kit.logprobs, "token", []), [kit.batch_of([talk])])
    np.testing.assert_allclose(computed.columns["result"].values, talk.behav_logprobs, atol=1e-5)


def test_a_tool_returns_an_image(tokenizer, driver, backend):
    picture, effects = read_image(kit.picture(40, 24)), new_effects()
    talk = asyncio.run(look_closer(episode(driver, tokenizer, effects), picture))
    assert [placed.image.num_tokens for placed in talk.pixels] == [15, 4]
    assert len(image_urls([m for m in talk.messages if m["role"] != "assistant"])) == 2
    token = tokenizer.images.config["image_token_id"]
    masked = [
        i
        for i, (x, learned) in enumerate(zip(talk.input_ids, talk.loss_mask, strict=True))
        if x == token and not learned
    ]
    assert [placed.start for placed in talk.pixels] == [masked[0], masked[15]]
    check_logprobs(backend, talk)

    replayed = new_effects(effects.journal)
    again = asyncio.run(look_closer(episode(driver, tokenizer, replayed), picture))
    assert (again, again.pixels) == (talk, talk.pixels)
    other = read_image(kit.picture(40, 24, seed=5))
    with pytest.raises(EpisodeError, match="the journal has"):
        asyncio.run(look_closer(episode(driver, tokenizer, new_effects(effects.journal)), other))


def test_the_endpoint_takes_images(tokenizer, driver, backend):
    if not tokenizer.has_chat_template:
        pytest.skip("conversations need a template")
    url = read_image(kit.picture(16, 24)).url
    said = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]

    async def ask(client: Any, endpoint: Any) -> Trajectory:
        talk = [{"role": "user", "content": said}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=talk)
        talk += [reply.choices[0].message.to_dict(), {"role": "user", "content": [*said, said[1]]}]
        await client.chat.completions.create(model=endpoint.model, messages=talk)
        web = [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]
        asked = client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": web}]
        )
        with pytest.raises(Exception, match="send it as a data URL"):
            await asked
        return endpoint.trajectory

    talk = endpoint_kit.play(ask, driver, tokenizer)
    assert [placed.image.num_tokens for placed in talk.pixels] == [6, 6]
    assert talk.pixels[0].image is talk.pixels[1].image
    check_logprobs(backend, talk)


def test_images_that_refuse_the_sample(tokenizer, driver):
    buffer = read_image(kit.picture(60, 40)).data[:-400]

    async def ask(images: list[Any], prompt: Any = "what") -> None:
        await episode(driver, tokenizer, new_effects()).complete(prompt, images=images)

    for images, message in (
        ([Image.of_file(buffer)], "cannot be decoded"),
        ([kit.picture(1000, 2)], "crop it"),
    ):
        with pytest.raises(EpisodeError, match=message):
            asyncio.run(ask(images))
    with pytest.raises(Exception, match="shorten it"):
        asyncio.run(ask([kit.picture(300, 300)]))
