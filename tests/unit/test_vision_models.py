"""Models that see compute what transformers computes, sequence by sequence."""

import numpy as np
import pytest
import torch
import torch_kit
import vision_kit as kit
from transformers import AutoConfig, AutoModelForImageTextToText

from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.vision.interface import vision_family

SIZES = [[(40, 24)], [], [(16, 16), (24, 40)], [(40, 24)]]


def reference(backend, family):
    values = {key: value for key, value in kit.ARCHITECTURES[family].items() if key != "model_type"}
    config = AutoConfig.for_model(family, **values)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    report = model.load_state_dict(torch_kit.weights(backend), strict=False)
    assert not report.unexpected_keys
    model.tie_weights()
    return model.eval()


def processed(family, sample):
    """Return the pixels and the grids of a sample's images by transformers' processor."""
    made = vision_family(kit.config_of(family)).processor(
        kit.config_of(family), kit.IMAGE_SETTINGS.get(family, {})
    )
    pictures = [
        part["image_url"]["url"]
        for m in sample.messages
        for part in m["content"]
        if isinstance(part, dict) and part["type"] == "image_url"
    ]
    from hflow.data.images.files import read_image

    images = [read_image(url).open() for url in pictures]
    if not images:
        return {}
    batch = made(images=[images] if family == "smolvlm" else images, return_tensors="pt")
    return {key: value for key, value in batch.items() if torch.is_tensor(value)}


@torch.no_grad()
def alone(model, family, sample):
    """Return the log-probs of one sequence by transformers."""
    ids = torch.tensor(sample.input_ids)[None]
    arguments = processed(family, sample)
    if "image_grid_thw" in arguments:
        arguments["mm_token_type_ids"] = (ids == kit.ARCHITECTURES[family]["image_token_id"]).int()
    logits = model(input_ids=ids, **arguments).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    drawn = torch.cat([torch.zeros(1), logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]])
    return (drawn * torch.tensor(sample.loss_mask)).numpy()


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_logprobs_are_those_of_transformers(family):
    backend, samples = kit.model(family), kit.trajectories(family, SIZES)
    model = reference(backend, family)
    wanted = np.concatenate([alone(model, family, sample) for sample in samples])
    (result,) = backend.infer(torch_kit.call(torch_kit.logprobs, "token", []), [kit.batch_of(samples)])
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(result.columns["result"].values, wanted, atol=1e-5)


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_the_engine_draws_what_the_trainer_computes(family):
    """Greedy sequences of the embedded engine have the log-probs that the trainer gives them."""
    made, samples = kit.tokenizer(family), kit.trajectories(family, SIZES)
    backend = kit.model(family)
    engine = EmbeddedEngine(kit.settings(family), {"max_running": 3}, backend.shared_module(), made.decode)
    engine.wake_cache()
    for number, sample in enumerate(samples):
        for copy in range(2):
            params = SamplingParams(max_tokens=6 + copy, seed=number)
            prompt = sample.input_ids[: kit.prompt_length(sample)]
            engine.add(2 * number + copy, prompt, params, sample.pixels)
    results = dict(finished for _ in range(40) for finished in engine.step())
    assert len(results) == 2 * len(samples)
    kit.assert_logprobs(
        backend, [kit.drawn(samples[i // 2], result) for i, result in sorted(results.items())]
    )
