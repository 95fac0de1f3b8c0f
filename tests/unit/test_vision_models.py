"""Models that see compute what transformers computes, sequence by sequence."""

import numpy as np
import pytest
import torch
import torch_kit
import vision_kit as kit
from transformers import AutoConfig, AutoModelForImageTextToText

from hflow.data.images.files import read_image
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.training.interface import TrainShard
from hflow.training.loop.inputs import pack_tokens
from hflow.types import Unit

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
    made = kit.tokenizer(family).images._processor
    pictures = [
        part["image_url"]["url"]
        for m in sample.messages
        for part in m["content"]
        if isinstance(part, dict) and part["type"] == "image_url"
    ]
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


def num_encoded(module, run):
    """Return the number of patches or tiles that go through a tower's first layer while `run` runs."""
    counts = []
    layer = next(m for m in module.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Conv3d))
    handle = layer.register_forward_hook(lambda _, inputs, __: counts.append(len(inputs[0])))
    run()
    handle.remove()
    return sum(counts)


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_a_group_shares_prompt_and_images(family):
    """Samples of one prompt compute its tokens and its image once; another image of its size is another."""
    first, other = (read_image(kit.picture(40, 24, seed)) for seed in (1, 2))
    tokenizer = kit.tokenizer(family)
    answers = [("answer a", first), ("answer b", first), ("answer a", other), ("answer b", other)]
    samples = [tokenizer.join("what is this? ", answer, [image]) for answer, image in answers]
    assert samples[0].input_ids == samples[2].input_ids
    backend = kit.model(family)

    def computed(groups):
        batch = kit.batch_of(samples, groups)
        (result,) = backend.infer(torch_kit.call(torch_kit.logprobs, "token", []), [batch])
        return result.columns["result"].values

    wanted = np.concatenate([alone(reference(backend, family), family, sample) for sample in samples])
    for groups in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 2, 3]):
        np.testing.assert_allclose(computed(groups), wanted, atol=1e-5)
    patches = len(samples[0].pixels[0].image.pixels)
    assert num_encoded(backend.shared_module(), lambda: computed([0, 0, 1, 1])) == 2 * patches
    vision = backend._runner.module.vision
    packed = pack_tokens(
        kit.batch_of(samples, [0, 0, 1, 1]), torch.device("cpu"), torch.float32, vision=vision
    )
    shared = len(samples[0].input_ids) - samples[0].loss_mask.index(True) - 1
    assert (
        len(packed.computed_ids)
        <= packed.layout.cumulative[1][-1] - 2 * samples[0].pixels[0].image.num_tokens
    )
    assert shared > 0


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_the_engine_encodes_an_image_once(family):
    """Its samples and turns share what the tower made of it, until the weights change."""
    samples = kit.trajectories(family, [[(40, 24)], [(40, 24)], [(16, 16)]])
    engine = EmbeddedEngine(kit.settings(family), {"max_running": 2}, kit.model(family).shared_module())

    def run():
        for number, sample in enumerate(samples):
            for copy in range(2):
                engine.add(4 * number + copy, sample.input_ids, SamplingParams(max_tokens=3), sample.pixels)
        while engine.num_unfinished:
            engine.step()

    # With two slots the prompts enter one after the other, and the features of an image are kept.
    images = {x.image.digest: len(x.image.pixels) for sample in samples for x in sample.pixels}
    assert num_encoded(engine._module, run) == sum(images.values())


def weighted(out, behav_logprobs):
    return out.logprobs * behav_logprobs


@pytest.mark.parametrize("family", kit.ARCHITECTURES)
def test_training_changes_the_tower_and_does_not_depend_on_micro_batches(family):
    samples = kit.trajectories(family, SIZES)
    batch = kit.batch_of(samples)
    call = torch_kit.call(
        weighted, "token", [torch_kit.read("behav_logprobs", Unit.TOKEN)], reduce="token-mean"
    )
    found = []
    for tokens in (4096, 40):
        backend = kit.model(family, tokens_per_microbatch=tokens)
        before = torch_kit.weights(backend)
        backend.train(call, [TrainShard((batch,))], 1)
        found.append(torch_kit.weights(backend))
        changed = {name for name, x in before.items() if not torch.equal(x, found[-1][name])}
        assert any("vis" in name for name in changed)
        assert any("layers.2" in name for name in changed)
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=2e-5, rtol=1e-4, msg=name)
