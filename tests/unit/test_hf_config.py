"""Configurations of models that cannot work are refused with a number that can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch_kit as kit

from hflow.base.errors import BackendError
from hflow.models.hf_config import max_length, read_config
from hflow.models.settings import ModelSettings


def of(**changes: Any) -> ModelSettings:
    return ModelSettings(name="actor", architecture={**kit.ARCHITECTURE, **changes})


def test_a_good_one_is_read() -> None:
    config: Any = read_config(of(num_attention_heads=4, num_key_value_heads=2))
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert max_length(config) == config.max_position_embeddings


def test_a_familys_own_end_of_text_token_is_not_that_of_another_vocabulary() -> None:
    """It would be saved, and end turns of the saved model which continued in training."""
    gemma = {**kit.ARCHITECTURE, "model_type": "gemma", "head_dim": 8}
    gemma.pop("eos_token_id", None)
    config: Any = read_config(ModelSettings(name="actor", architecture=gemma))
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    named: Any = read_config(ModelSettings(name="actor", architecture={**gemma, "eos_token_id": 7}))
    assert named.eos_token_id == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 32, "num_attention_heads": 3, "num_key_value_heads": 1},
            "hidden_size 32 is not a multiple of num_attention_heads 3; set num_attention_heads to 2",
        ),
        (
            {"hidden_size": 32, "num_attention_heads": 3, "num_key_value_heads": 4},
            "hidden_size 32 is not a multiple of num_attention_heads 3; set num_attention_heads to 4",
        ),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3; set num_key_value_heads to 2",
        ),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number of at least 1"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be a whole number of at least 1"),
        ({"hiden_size": 64}, "a qwen2 architecture has no key 'hiden_size'; did you mean 'hidden_size'?"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        ({"model_type": "bert"}, "'bert' attends to later tokens; use a decoder, such as 'qwen2', or call"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as caught:
        read_config(of(**changes))
    text = str(caught.value)
    assert text.startswith("model 'actor': ")
    assert message in text
    assert "\n" not in text


def test_heads_of_a_size_of_their_own_need_not_divide() -> None:
    config: Any = read_config(
        of(model_type="qwen3", hidden_size=32, num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    )
    assert config.head_dim == 16


def test_checkpoints_are_checked_likewise(tmp_path: Path) -> None:
    wrong = {**kit.ARCHITECTURE, "num_attention_heads": 4, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(BackendError, match="is not a multiple of num_key_value_heads 3"):
        read_config(ModelSettings(name="actor", path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(
        BackendError, match=r"model 'actor': .*config.json is not a JSON file: invalid JSON: "
    ):
        read_config(ModelSettings(name="actor", path=str(tmp_path)))
