"""Keys of other libraries and what they are called here, for the error message of an unknown key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Counterpart:
    """The key of hflow that means what a key of another library does."""

    key: str
    """The dotted key; a part in capitals is a name of the recipe."""
    note: str = ""
    """How its values differ; empty: they are the same."""

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return self.key.rpartition(".")[2]

    def fits(self, path: str) -> bool:
        """Return whether a dotted key of a configuration is this key."""
        parts, wanted = path.split("."), self.key.split(".")
        return len(parts) == len(wanted) and all(
            name in (part, "NAME", "NODE") for part, name in zip(parts, wanted, strict=True)
        )


_EPOCHS = Counterpart("steps", "epochs * rows / batch")
_STEPS = Counterpart("steps")
_BATCH = Counterpart("batch", "counts prompts")
_LORA_RANK = Counterpart("models.NAME.lora.r")
_LORA_ALPHA = Counterpart("models.NAME.lora.alpha")
_CHECKPOINTING = Counterpart("models.NAME.activation_checkpointing")
_COMPILE = Counterpart("models.NAME.compile", "of the decoder layers")
_CLIP_GRAD = Counterpart("models.NAME.optim.clip_grad")
_LR = Counterpart("models.NAME.optim.lr")
_LR_SCHEDULE = Counterpart("models.NAME.optim.schedule")
_TOKENS = Counterpart("models.NAME.tokens_per_microbatch")
_MODEL_LENGTH = Counterpart("models.NAME.gen.max_model_len")
_STALENESS = Counterpart("schedule.max_staleness")
_GROUP = Counterpart("nodes.NODE.group")
_MAX_TOKENS = Counterpart("nodes.NODE.max_tokens")
_KL = Counterpart("nodes.NODE.kl_coef")
_CLIP = Counterpart("nodes.NODE.clip")
_CLIP_HIGH = Counterpart("nodes.NODE.clip_high")

COUNTERPARTS: Mapping[str, Counterpart] = {
    "adam_offload": Counterpart("models.NAME.offload", "true is optimizer"),
    "beta": _KL,
    "clip_ratio": _CLIP,
    "clip_ratio_high": _CLIP_HIGH,
    "enable_gradient_checkpointing": _CHECKPOINTING,
    "enable_rollout_routing_replay": Counterpart("nodes.NODE.routing_replay"),
    "entropy_coeff": Counterpart("nodes.NODE.entropy_coef"),
    "epochs": _EPOCHS,
    "eps_clip": _CLIP,
    "eps_clip_higher": _CLIP_HIGH,
    "epsilon": _CLIP,
    "epsilon_high": Counterpart("nodes.NODE.clip_high", "with loss=cispo, 1 less"),
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_clipping": _CLIP_GRAD,
    "kl_loss_coef": _KL,
    "learning_rate": _LR,
    "lora_alpha": _LORA_ALPHA,
    "lora_r": _LORA_RANK,
    "lora_rank": _LORA_RANK,
    "lr_scheduler_type": _LR_SCHEDULE,
    "lr_warmup_steps": Counterpart("models.NAME.optim.warmup_steps"),
    "max_actor_ckpt_to_keep": Counterpart("keep_checkpoints"),
    "max_completion_length": _MAX_TOKENS,
    "max_grad_norm": _CLIP_GRAD,
    "max_head_offpolicyness": _STALENESS,
    "max_new_tokens": _MAX_TOKENS,
    "max_num_seqs": Counterpart("models.NAME.gen.max_running"),
    "max_response_length": _MAX_TOKENS,
    "max_steps": _STEPS,
    "max_tokens_per_mb": _TOKENS,
    "n_samples": _GROUP,
    "n_samples_per_prompt": _GROUP,
    "num_generations": _GROUP,
    "num_iterations": Counterpart("nodes.NODE.epochs"),
    "num_train_epochs": _EPOCHS,
    "output_dir": Counterpart("out"),
    "optimizer_offload": Counterpart("models.NAME.offload", "true is optimizer"),
    "param_offload": Counterpart("models.NAME.offload", "true is all, with the optimizer"),
    "ppo_epochs": Counterpart("nodes.NODE.epochs"),
    "ppo_max_token_len_per_gpu": _TOKENS,
    "rank": _LORA_RANK,
    "rollout_batch_size": _BATCH,
    "save_freq": Counterpart("save_every"),
    "save_steps": Counterpart("save_every"),
    "save_total_limit": Counterpart("keep_checkpoints"),
    "staleness_threshold": _STALENESS,
    "torch_compile": _COMPILE,
    "total_epochs": _EPOCHS,
    "total_train_epochs": _EPOCHS,
    "total_train_steps": _STEPS,
    "total_training_steps": _STEPS,
    "train_batch_size": _BATCH,
    "use_torch_compile": _COMPILE,
    "vllm_max_model_length": _MODEL_LENGTH,
}
"""Key of TRL, verl, OpenRLHF or AReaL, its last part -> the key of hflow; see `docs/coming-from`."""
