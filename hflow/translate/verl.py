"""verl: the keys of `ppo_trainer.yaml`, and the translation of a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hflow.translate.given import Given
from hflow.translate.recipe import RecipeDraft
from hflow.translate.shared import REPLAYED, num_devices, set_model, set_paths, set_sampling_limits
from hflow.translate.table import Row, automatic, manual, missing, same

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
CORRECTION = "algorithm.rollout_correction"

ADVANTAGES = {
    "gae": "`nodes.gae`, with a critic",
    "grpo": "`nodes.group_advantage`",
    "grpo_vectorized": "`nodes.group_advantage`",
    "rloo": "`nodes.leave_one_out`",
    "rloo_vectorized": "`nodes.leave_one_out`",
    "reinforce_plus_plus": "`nodes.returns_to_go`",
    "reinforce_plus_plus_baseline": "`nodes.reinforce_pp_baseline`",
    "opo": "`nodes.opo_advantage`",
    "remax": "not translated: [`recipes/remax.py`](../../recipes/remax.py), a second, greedy stream",
    "gpg": "not translated: `nodes.gpg_advantage` rescales by other samples than verl, those of groups whose "
    "rewards differ",
    "gdpo": "not translated: `nodes.gdpo_advantage`, with a node for each reward",
    "grpo_passk": "`nodes.best_advantage`",
    "optimal_token_baseline": "`nodes.optimal_token_advantage`, with the probabilities of the 16 likeliest "
    "tokens from `nodes.logit_gradient_inf`",
    "tir_optimal_token_baseline": "not translated: `nodes.optimal_token_advantage`, whose advantage is 0 "
    "where only one answer is left. verl's is the reward there",
}
"""Value of `algorithm.adv_estimator` -> hflow's node, in words."""
_ADVANTAGE_NODES = {
    name: text.split("`")[1].removeprefix("nodes.")
    for name, text in ADVANTAGES.items()
    if not text.startswith("not")
}
_PER_TOKEN = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline")
"""Estimators whose advantages are those of tokens."""
LOSSES = {
    "vanilla": "`nodes.actor_train`",
    "gspo": "`nodes.gspo_train`, if `loss_agg_mode` is `seq-mean-token-mean`",
    "sapo": "`nodes.sapo_train` with `reduce=seq-mean-token-mean`",
    "cispo": "`nodes.cispo_train`",
    "gpg": "`nodes.cispo_train` with `clip=0`: minus A log p, without a ratio",
    "geo_mean": "`nodes.gmpo_train`",
    "dro": "`nodes.dro_train`",
    "clip_cov": "`nodes.clip_cov_train`: statistics of the whole minibatch, of a micro-batch in verl",
    "kl_cov": "`nodes.kl_cov_train`: statistics of the whole minibatch, of a micro-batch in verl",
    "dppo_tv": "not translated: `nodes.dppo_train` measures the divergence from the engine's policy, verl "
    "from the one at the start of the step",
    "dppo_kl": "not translated, as `dppo_tv`",
    "bypass_mode": "set `bypass_mode` of `rollout_correction`",
}
"""Value of `policy_loss.loss_mode` -> hflow's node, in words."""
_LOSS_NODES = {
    name: text.split("`")[1].removeprefix("nodes.")
    for name, text in LOSSES.items()
    if text.startswith("`nodes.")
}
REDUCTIONS = {
    "token-mean": "`token-mean`",
    "token-sum": "`token-sum/1`",
    "seq-mean-token-sum": "`seq-mean-token-sum`",
    "seq-mean-token-mean": "`seq-mean-token-mean`",
    "seq-mean-token-sum-norm": "`token-sum/N`, N the samples of a minibatch times `loss_scale_factor`",
}
"""Value of `loss_agg_mode` -> hflow's reduction, in words."""
KL_IN_LOSS = {
    **dict.fromkeys(("low_var_kl", "k3"), "`k3`"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "`k3+`"),
    **dict.fromkeys(("kl+", "k1+"), "`k1+`"),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), "`k2`"),
    **dict.fromkeys(("kl", "k1"), "not translated: the mean of its gradient is 0"),
    "abs": "not translated",
}
"""Value of `kl_loss_type` -> hflow's estimator, in words."""
_KL_IN_REWARD = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ENGINES = {
    "vllm": "`vllm`",
    "hf": "`embedded`",
    "sglang": "not translated: the plan chooses vLLM or the embedded engine",
    "trtllm": "not translated: the plan chooses vLLM or the embedded engine",
}
"""Value of `rollout.name` -> hflow's engine, in words."""


def _known(texts: dict[str, str]) -> dict[str, str]:
    """Return the values that are translated -> hflow's word for each."""
    return {name: text.split("`")[1] for name, text in texts.items() if text.startswith("`")}


_MEMORY = "the plan decides: `hflow plan`, section memory"
_PACKED = "sequences are packed, and micro-batches are a number of tokens: `hflow plan`"
_LAYERS = "no result depends on it"


def _optimizer(part: str, model: str) -> list[Row]:
    """Return the rows of the optimizer of `actor_rollout_ref.actor` or `critic`."""
    ours, key = f"models.{model}.optim", f"{part}.optim"
    return [
        same(
            f"{key}.optimizer",
            f"{ours}.name",
            "AdamW, also in 8 bits, and SGD; see [optimizers](../optimizers.md)",
        ),
        same(f"{key}.lr", f"{ours}.lr"),
        same(f"{key}.weight_decay", f"{ours}.weight_decay", "vectors have none here"),
        same(f"{key}.betas", f"{ours}.betas"),
        same(f"{key}.clip_grad", f"{ours}.clip_grad"),
        same(
            f"{key}.lr_warmup_steps",
            f"{ours}.warmup_steps",
            "optimizer steps here: times the updates of a step. verl begins at 0, hflow at "
            "`lr / warmup_steps`",
        ),
        same(f"{key}.lr_warmup_steps_ratio", f"{ours}.warmup_steps", "if `total_training_steps` is set"),
        same(f"{key}.lr_scheduler_type", f"{ours}.schedule", "`constant` or `cosine`"),
        same(f"{key}.min_lr_ratio", f"{ours}.min_lr_ratio"),
        missing(f"{key}.num_cycles", "half a cosine"),
        automatic(f"{key}.total_training_steps", "from `steps`"),
        automatic(f"{key}.zero_indexed_step", "see `lr_warmup_steps`"),
        missing(f"{key}.optimizer_impl", "the optimizers of hflow"),
        missing(f"{key}.warmup_style", "the old name of `lr_scheduler_type`"),
        missing(f"{key}.override_optimizer_config"),
    ]


def _model(part: str, model: str, *, is_actor: bool) -> list[Row]:
    """Return the rows of `actor_rollout_ref.model` or `critic.model`."""
    ours = f"models.{model}"
    lora = f"{ours}.lora" if is_actor else ""
    return [
        same(f"{part}.path", f"{ours}.path"),
        same(f"{part}.custom_chat_template", f"{ours}.chat_template")
        if is_actor
        else missing(f"{part}.custom_chat_template", "the critic reads the actor's tokens"),
        same(f"{part}.enable_gradient_checkpointing", f"{ours}.activation_checkpointing"),
        same(f"{part}.enable_activation_offload", f"{ours}.offload_activations"),
        *(
            [
                same(f"{part}.lora_rank", f"{lora}.r", "0: all weights are trained"),
                same(f"{part}.lora_alpha", f"{lora}.alpha"),
                same(f"{part}.target_modules", f"{lora}.targets"),
            ]
            if is_actor
            else [
                manual(f"{part}.lora_rank", f"`{ours}.lora`; verl's adapters of a critic are not translated"),
                manual(f"{part}.lora_alpha", f"`{ours}.lora`"),
                manual(f"{part}.target_modules", f"`{ours}.lora`"),
            ]
        ),
        missing(f"{part}.exclude_modules"),
        missing(f"{part}.lora_adapter_path"),
        automatic(f"{part}.use_remove_padding", _PACKED),
        automatic(f"{part}.use_shm", "weights are read from the page cache"),
        missing(f"{part}.tokenizer_path", "the tokenizer of the model's directory"),
        missing(f"{part}.hf_config_path", "the config of the model's directory"),
        missing(f"{part}.trust_remote_code", "no code of a checkpoint is run"),
        missing(f"{part}.external_lib"),
        missing(f"{part}.override_config"),
        missing(f"{part}.use_liger"),
        missing(f"{part}.use_fused_kernels"),
        missing(f"{part}.fused_kernel_options.*"),
        missing(f"{part}.tiled_mlp.*"),
        missing(f"{part}.mtp.*", note="layers for multi-token prediction are not trained"),
        manual(
            f"{part}.lora.*",
            f"`{ours}.lora`, whose adapters are those of `canonical_lora`: one for each matrix",
        ),
    ]


def _engine(part: str, model: str) -> list[Row]:
    """Return the rows of `fsdp_config` of a model, but for its precision and offloading."""
    return [
        same(
            f"{part}.fsdp_size", f"models.{model}.layout", "8 is `d16r2` on 16 devices; -1: the plan decides"
        ),
        automatic(f"{part}.wrap_policy.*", "each decoder layer is a unit"),
        automatic(f"{part}.reshard_after_forward", _MEMORY),
        automatic(f"{part}.forward_prefetch", _LAYERS),
        automatic(f"{part}.use_orig_params", _LAYERS),
        automatic(f"{part}.use_no_sync_for_gradient_accumulation", _LAYERS),
        automatic(f"{part}.forward_only", "from the recipe: models without a train node"),
        automatic(f"{part}.strategy", "see `strategy` of the model"),
        automatic(f"{part}.pad_to_length*", _PACKED),
        automatic(f"{part}.entropy_*", _MEMORY),
        automatic(f"{part}.seed", "`seed` of the run"),
        missing(f"{part}.offload_policy", "`adamw_cpu` steps on the CPU: [optimizers](../optimizers.md)"),
        missing(f"{part}.model_dtype", "weights of an optimizer are fp32"),
        manual(f"{part}.use_torch_compile", "`models.NAME.compile` compiles the decoder layers"),
        manual(f"{part}.full_determinism", "`deterministic=true`"),
        missing(f"{part}.ulysses_sequence_parallel_size", "see that of the model"),
        missing(f"{part}.qat.*", note="no quantized training"),
        missing(f"{part}.turbo_config.*", note="NPUs"),
    ]


TABLES: dict[str, Sequence[Row]] = {
    "Data": [
        same("data.train_files", "data.train.path"),
        same("data.val_files", "data.heldout.path", "if `test_freq` is set"),
        same("data.prompt_key", "data.train.map", "a column of messages"),
        same("data.train_batch_size", "batch", "prompts in both"),
        same("data.max_response_length", "nodes.actor_gen.max_tokens"),
        same("data.max_prompt_length", "models.actor.gen.max_model_len", "with `max_response_length`"),
        same("data.train_max_samples", "data.train.limit", "the first rows here"),
        same("data.val_max_samples", "data.heldout.limit", "the first rows here"),
        same("data.shuffle", "data.train.shuffle"),
        same("data.seed", "seed", "other random numbers"),
        same("data.apply_chat_template_kwargs", "models.actor.template_kwargs"),
        automatic("data.gen_batch_size", "generation begins with as many prompts as the batch needs"),
        automatic("data.val_batch_size", "an evaluation is a stream of its own"),
        automatic("data.dataloader_num_workers", "workers read their rows themselves"),
        automatic("data.filter_overlong_prompts_workers", "workers read their rows themselves"),
        automatic("data.return_raw_chat", "`prompt` of a body has the messages"),
        automatic("data.return_raw_input_ids", "trajectories have the tokens of the prompt"),
        automatic("data.return_full_prompt", "trajectories have the tokens of the prompt"),
        automatic("data.use_shm", "workers read their rows themselves"),
        missing("data.filter_overlong_prompts", "filter the files"),
        missing("data.truncation", "prompts are never cut"),
        missing("data.validation_shuffle", "evaluations read every row once"),
        manual("data.reward_fn_key", "a parameter of the reward's body"),
        missing("data.tokenizer", "the tokenizer of the model's directory"),
        missing("data.trust_remote_code", "no code of a checkpoint is run"),
        manual("data.custom_cls.*", note="[datasets](../data.md)"),
        manual("data.tool_config_path", "[agents](../agents.md)"),
        manual("data.function_tool_path", "[agents](../agents.md)"),
        *(
            missing(f"data.{key}", "texts only")
            for key in ("image_key", "video_key", "audio_key", "image_patch_size", "mm_processor_kwargs")
        ),
        missing("data.return_multi_modal_inputs", "texts only"),
    ],
    "The actor's model": _model(MODEL, "actor", is_actor=True),
    "Advantages and KL": [
        same("algorithm.adv_estimator", "", values=ADVANTAGES),
        same("algorithm.gamma", "nodes.gae.gamma nodes.returns_to_go.gamma"),
        same("algorithm.lam", "nodes.gae.lam", "0.95 by default here"),
        same("algorithm.norm_adv_by_std_in_grpo", "nodes.group_advantage.std nodes.best_advantage.std"),
        same("algorithm.use_kl_in_reward", "", "`nodes.kl_reward`, of `gae` and `reinforce_plus_plus`"),
        same("algorithm.kl_ctrl.kl_coef", "nodes.kl_reward.beta"),
        same("algorithm.kl_penalty", "nodes.kl_reward.estimator", "`kl` is `k1`, `low_var_kl` is `k3`"),
        same(
            "algorithm.kl_ctrl.type",
            "",
            "`adaptive` is not translated: `nodes.kl_reward.target` is nats of a sequence, verl's of a token",
        ),
        manual("algorithm.kl_ctrl.target_kl", "`nodes.kl_reward.target`, times the mean length"),
        manual("algorithm.kl_ctrl.horizon", "`nodes.kl_reward.horizon`"),
        same("algorithm.filter_groups.enable", "", 'a `@compute(per="group", returns="keep")` body'),
        same("algorithm.filter_groups.metric", "", "the reward; others are columns of that body"),
        manual("algorithm.filter_groups.max_num_gen_batches", "`schedule.max_refused_per_step`, in prompts"),
        automatic("algorithm.filter_groups.max_inflight_gen_batches", "refused prompts are replaced at once"),
        same("algorithm.use_pf_ppo", "", "`nodes.resample`, with `mask=draws`; verl reads it with `gae`"),
        same("algorithm.pf_ppo.reweight_method", "nodes.resample.weights"),
        same("algorithm.pf_ppo.weight_pow", "nodes.resample.power"),
    ],
    "The actor's loss": [
        same(f"{ACTOR}.policy_loss.loss_mode", "", values=LOSSES),
        same(
            f"{ACTOR}.ppo_mini_batch_size",
            "nodes.actor_train.minibatches",
            "a count here: `train_batch_size / ppo_mini_batch_size`; both count prompts",
        ),
        same(f"{ACTOR}.ppo_epochs", "nodes.actor_train.epochs"),
        same(f"{ACTOR}.clip_ratio_low", "nodes.actor_train.clip"),
        same(f"{ACTOR}.clip_ratio_high", "nodes.actor_train.clip_high"),
        same(f"{ACTOR}.clip_ratio", "nodes.actor_train.clip", "where the two above are null"),
        same(f"{ACTOR}.clip_ratio_c", "nodes.actor_train.dual_clip", "of `vanilla`; off by default here"),
        same(f"{ACTOR}.loss_agg_mode", "nodes.actor_train.reduce", values=REDUCTIONS),
        same(f"{ACTOR}.loss_scale_factor", "nodes.actor_train.reduce", "see `loss_agg_mode`"),
        same(f"{ACTOR}.entropy_coeff", "nodes.actor_train.entropy_coef"),
        same(f"{ACTOR}.use_kl_loss", "", "a model `ref` and `nodes.ref_inf`"),
        same(f"{ACTOR}.kl_loss_coef", "nodes.actor_train.kl_coef"),
        same(f"{ACTOR}.kl_loss_type", "nodes.actor_train.kl_estimator", values=KL_IN_LOSS),
        same(f"{ACTOR}.tau_pos", "nodes.sapo_train.tau_positive"),
        same(f"{ACTOR}.tau_neg", "nodes.sapo_train.tau_negative"),
        same(f"{ACTOR}.policy_loss.clip_cov_ratio", "nodes.clip_cov_train.share"),
        same(f"{ACTOR}.policy_loss.clip_cov_lb", "nodes.clip_cov_train.lower"),
        same(f"{ACTOR}.policy_loss.clip_cov_ub", "nodes.clip_cov_train.upper"),
        same(f"{ACTOR}.policy_loss.kl_cov_ratio", "nodes.kl_cov_train.share"),
        same(f"{ACTOR}.policy_loss.ppo_kl_coef", "nodes.kl_cov_train.cov_kl_coef"),
        same(f"{ACTOR}.policy_loss.dro_beta", "nodes.dro_train.dro_beta"),
        automatic(f"{ACTOR}.calculate_entropy", "`actor_train/entropy` is always reported"),
        automatic(f"{ACTOR}.shuffle", "minibatches are drawn with `seed`"),
        automatic(f"{ACTOR}.data_loader_seed", "`seed` of the run"),
        automatic(f"{ACTOR}.rollout_n", "`nodes.actor_gen.group`"),
        automatic(f"{ACTOR}.calculate_sum_pi_squared", "with `nodes.logit_gradient_inf`"),
        missing(f"{ACTOR}.freeze_vision_tower", "texts only"),
    ],
    "The engine's log-probs": [
        same(
            f"{CORRECTION}.bypass_mode",
            "nodes.actor_train.prox",
            "true: `none`. False: `recompute`, and the weight 1 unless `rollout_is` is set",
        ),
        same(
            f"{CORRECTION}.rollout_is",
            "nodes.behav_weights.level",
            values={"token": "`token`", "sequence": "`sequence`"},
        ),
        same(
            f"{CORRECTION}.rollout_is_threshold",
            "nodes.behav_weights.upper nodes.behav_weights.lower nodes.behav_weights.outside",
            "`a_b` is `lower=a upper=b outside=mask`",
        ),
        same(
            f"{CORRECTION}.rollout_is_batch_normalize",
            "nodes.behav_weights.normalise",
            "the mean over learned tokens here; verl's with `sequence` is over sequences",
        ),
        same(
            f"{CORRECTION}.rollout_rs",
            "nodes.is_trusted.statistic nodes.is_trusted.extent",
            "one of them: `seq_mean_k3` is `statistic=k3 extent=sequence-mean`",
        ),
        same(
            f"{CORRECTION}.rollout_rs_threshold",
            "nodes.is_trusted.upper nodes.is_trusted.lower",
            "of `k1`: `a_b` is `lower=-log(b) upper=-log(a)`, as verl's k1 is log(behav / prox)",
        ),
        same(f"{CORRECTION}.loss_type", "", "`ppo_clip`; `reinforce` is `nodes.reinforce_train`"),
    ],
    "The actor's devices": [
        same(f"{ACTOR}.strategy", "models.actor.backend", "`fsdp`, `fsdp2` are `torch`"),
        same(f"{ACTOR}.use_dynamic_bsz", "models.actor.tokens_per_microbatch", "always dynamic here"),
        same(f"{ACTOR}.ppo_max_token_len_per_gpu", "models.actor.tokens_per_microbatch"),
        same(f"{ACTOR}.fsdp_config.dtype", "models.actor.dtype"),
        same(f"{ACTOR}.fsdp_config.param_offload", "models.actor.offload", "`all`, with the optimizer"),
        same(f"{ACTOR}.fsdp_config.optimizer_offload", "models.actor.offload", "`optimizer`"),
        same(f"{ACTOR}.checkpoint.save_contents", "models.actor.save_optimizer"),
        same(
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "",
            "1 only; more needs megatron and a [layout](../parallel.md#long-sequences) with `c`",
        ),
        automatic(f"{ACTOR}.ppo_micro_batch_size*", _PACKED),
        automatic(f"{ACTOR}.use_remove_padding", _PACKED),
        automatic(f"{ACTOR}.pad_to_length", _PACKED),
        automatic(f"{ACTOR}.entropy_*", _MEMORY),
        automatic(f"{ACTOR}.checkpoint.load_contents", "a resumed run loads all"),
        automatic(f"{ACTOR}.checkpoint.strict", "checkpoints are checked"),
        automatic(f"{ACTOR}.checkpoint.async_save", "written aside: `time/checkpoint`"),
        missing(f"{ACTOR}.grad_clip", "verl uses `optim.clip_grad`"),
        manual(f"{ACTOR}.use_torch_compile", "`models.actor.compile` compiles the decoder layers"),
        missing(f"{ACTOR}.use_fused_kernels"),
        missing(f"{ACTOR}.use_prefix_grouper"),
        missing(f"{ACTOR}.qat.*", note="no quantized training"),
        *_engine(f"{ACTOR}.fsdp_config", "actor"),
        *_optimizer(ACTOR, "actor"),
    ],
    "The reference": [
        same("actor_rollout_ref.ref.fsdp_config.param_offload", "models.ref.offload", "`all`"),
        same("actor_rollout_ref.ref.fsdp_config.dtype", "models.ref.dtype"),
        automatic("actor_rollout_ref.ref.fsdp_config.optimizer_offload", "it has no optimizer"),
        automatic("actor_rollout_ref.ref.log_prob_*", _PACKED),
        automatic("actor_rollout_ref.ref.entropy_*", "it computes no entropy"),
        automatic("actor_rollout_ref.ref.pad_to_length", _PACKED),
        automatic("actor_rollout_ref.ref.rollout_n", "`nodes.actor_gen.group`"),
        automatic("actor_rollout_ref.ref.strategy", "the backend of the actor"),
        manual("actor_rollout_ref.ref.use_torch_compile", "`models.ref.compile` compiles the decoder layers"),
        missing("actor_rollout_ref.ref.ulysses_sequence_parallel_size", "see that of the actor"),
        *_engine("actor_rollout_ref.ref.fsdp_config", "ref"),
    ],
    "Generation": [
        same(f"{ROLLOUT}.name", "models.actor.gen.engine", values=ENGINES),
        same(f"{ROLLOUT}.n", "nodes.actor_gen.group"),
        same(f"{ROLLOUT}.temperature", "nodes.actor_gen.temperature"),
        same(f"{ROLLOUT}.top_p", "nodes.actor_gen.top_p", REPLAYED),
        same(f"{ROLLOUT}.top_k", "nodes.actor_gen.top_k", f"-1 is 0 here; {REPLAYED}"),
        same(f"{ROLLOUT}.do_sample", "nodes.actor_gen.temperature", "true only"),
        same(
            f"{ROLLOUT}.tensor_model_parallel_size",
            "models.actor.gen.layout",
            "2 is `d4t2` on 8 devices; left out, the plan decides",
        ),
        same(f"{ROLLOUT}.max_model_len", "models.actor.gen.max_model_len"),
        same(f"{ROLLOUT}.max_num_seqs", "models.actor.gen.max_running schedule.max_concurrent"),
        same(f"{ROLLOUT}.enable_rollout_routing_replay", "nodes.actor_gen.routing_replay"),
        same(f"{ROLLOUT}.val_kwargs.temperature", "nodes.eval_gen.temperature"),
        same(f"{ROLLOUT}.val_kwargs.top_p", "nodes.eval_gen.top_p"),
        same(f"{ROLLOUT}.val_kwargs.top_k", "nodes.eval_gen.top_k", "-1 is 0 here"),
        same(f"{ROLLOUT}.val_kwargs.n", "nodes.eval_gen.group"),
        same(f"{ROLLOUT}.val_kwargs.do_sample", "nodes.eval_gen.temperature", "false is 0"),
        same(f"{ROLLOUT}.multi_turn.enable", "", "true is not translated: [agents](../agents.md)"),
        manual(f"{ROLLOUT}.multi_turn.*", note="an `async` body with `@generate`: [agents](../agents.md)"),
        manual(f"{ROLLOUT}.agent.*", note="an `async` body with `@generate`: [agents](../agents.md)"),
        automatic(f"{ROLLOUT}.mode", "engines answer each sample by itself"),
        automatic(f"{ROLLOUT}.prompt_length", "see `data.max_prompt_length`"),
        automatic(f"{ROLLOUT}.response_length", "see `data.max_response_length`"),
        automatic(f"{ROLLOUT}.gpu_memory_utilization", _MEMORY, "models.actor.gen.cache_gib"),
        automatic(f"{ROLLOUT}.free_cache_engine", "engines that share devices sleep: `hflow plan`, memory"),
        automatic(f"{ROLLOUT}.multi_stage_wake_up", "engines that share devices sleep: `hflow plan`, memory"),
        automatic(f"{ROLLOUT}.log_prob_*", _PACKED),
        automatic(f"{ROLLOUT}.calculate_log_probs", "the engine records them: `behav_logprobs`"),
        automatic(f"{ROLLOUT}.logprobs_mode", "those of the sampled distribution"),
        automatic(f"{ROLLOUT}.dtype", "that of the actor", "models.actor.dtype"),
        automatic(f"{ROLLOUT}.load_format", "engines get the trainer's weights"),
        automatic(f"{ROLLOUT}.layered_summon", "weights are sent in buckets: `hflow plan`, weights"),
        automatic(
            f"{ROLLOUT}.checkpoint_engine.backend", "`hflow plan`, weights", "models.actor.gen.transport"
        ),
        automatic(f"{ROLLOUT}.checkpoint_engine.*", "`hflow plan`, weights", "models.actor.gen.transport"),
        automatic(f"{ROLLOUT}.nnodes", "the plan places engines: `hflow plan`, placement", "placement"),
        automatic(
            f"{ROLLOUT}.n_gpus_per_node", "the plan places engines: `hflow plan`, placement", "placement"
        ),
        automatic(f"{ROLLOUT}.data_parallel_size", "as many engines as devices: `hflow plan`, layouts"),
        automatic(f"{ROLLOUT}.seed", "every sample has a seed of its own, from `seed`"),
        automatic(f"{ROLLOUT}.disable_log_stats", "`metrics.jsonl` has the engines' figures"),
        automatic(f"{ROLLOUT}.skip_tokenizer_init", _LAYERS),
        automatic(f"{ROLLOUT}.enable_prefix_caching", "the engine's default"),
        automatic(f"{ROLLOUT}.enable_chunked_prefill", "the engine's default"),
        automatic(f"{ROLLOUT}.max_num_batched_tokens", "the engine's default"),
        automatic(f"{ROLLOUT}.cudagraph_capture_sizes", "the engine's default"),
        same(f"{ROLLOUT}.enforce_eager", "models.actor.gen.cuda_graphs", "the opposite"),
        automatic(f"{ROLLOUT}.scheduling_policy", "the engine's default"),
        missing(f"{ROLLOUT}.pipeline_model_parallel_size", "engines have no pipeline stages"),
        missing(f"{ROLLOUT}.expert_parallel_size", "engines have no expert ranks"),
        missing(f"{ROLLOUT}.ignore_eos"),
        manual(f"{ROLLOUT}.full_determinism", "`deterministic=true`"),
        manual(f"{ROLLOUT}.over_sample_rate", "`schedule.max_staleness` lets generation run ahead"),
        missing(
            f"{ROLLOUT}.engine_kwargs.*",
            "of what is added, `vllm.kv_cache_dtype=fp8` is `models.actor.gen.cache_dtype`: "
            "[a cache in FP8](../engines.md#kv-cache-in-fp8)",
        ),
        missing(f"{ROLLOUT}.router_config_path"),
        missing(f"{ROLLOUT}.moe_load_balance_metrics_interval"),
        same(
            f"{ROLLOUT}.quantization",
            "models.actor.gen.quantization",
            "`fp8` only, [with vLLM](../engines.md#weights-in-fp8)",
        ),
        missing(f"{ROLLOUT}.quantization_config_file", "`fp8` has no settings"),
        missing(f"{ROLLOUT}.qat*", note="no quantized training"),
        missing(f"{ROLLOUT}.mtp*", note="no speculative decoding"),
        missing(f"{ROLLOUT}.disaggregation.*", note="prefill and decoding share an engine"),
        manual(f"{ROLLOUT}.trace.*", note="`report.samples`, and the ledger: `hflow why`"),
        manual(f"{ROLLOUT}.prometheus.*", note="[trackers](../metrics.md#trackers)"),
    ],
    "The critic": [
        same("critic.enable", "", "null: with `gae`"),
        same("critic.ppo_mini_batch_size", "nodes.critic_train.minibatches", "as the actor's"),
        same("critic.ppo_epochs", "nodes.critic_train.epochs", "as the actor's by default"),
        same("critic.cliprange_value", "nodes.critic_train.clip"),
        same("critic.loss_agg_mode", "nodes.critic_train.reduce", "as the actor's by default"),
        same("critic.loss_scale_factor", "nodes.critic_train.reduce", "as the actor's by default"),
        same("critic.use_dynamic_bsz", "models.critic.tokens_per_microbatch"),
        same("critic.ppo_max_token_len_per_gpu", "models.critic.tokens_per_microbatch"),
        same("critic.strategy", "models.critic.backend", "`fsdp`, `fsdp2` are `torch`"),
        same("critic.fsdp.dtype", "models.critic.dtype"),
        same("critic.fsdp.param_offload", "models.critic.offload", "`all`, with the optimizer"),
        same("critic.fsdp.optimizer_offload", "models.critic.offload", "`optimizer`"),
        same("critic.checkpoint.save_contents", "models.critic.save_optimizer"),
        automatic("critic.ppo_micro_batch_size*", _PACKED),
        automatic("critic.forward_micro_batch_size*", _PACKED),
        automatic("critic.forward_max_token_len_per_gpu", _PACKED),
        automatic("critic.rollout_n", "`nodes.actor_gen.group`"),
        automatic("critic.shuffle", "minibatches are drawn with `seed`"),
        automatic("critic.data_loader_seed", "`seed` of the run"),
        automatic("critic.checkpoint.load_contents", "a resumed run loads all"),
        automatic("critic.checkpoint.async_save", "written aside: `time/checkpoint`"),
        missing("critic.grad_clip", "verl uses `optim.clip_grad`"),
        missing("critic.ulysses_sequence_parallel_size", "see that of the actor"),
        *_engine("critic.fsdp", "critic"),
        *_optimizer("critic", "critic"),
        *_model("critic.model", "critic", is_actor=False),
    ],
    "Rewards": [
        manual("reward.custom_reward_function.path", "the body of `score`"),
        manual("reward.custom_reward_function.name", "the body of `score`"),
        manual("reward.custom_reward_function.*", note="the body of `score`"),
        automatic("reward.num_workers", "rewards run in processes of the workers"),
        manual("reward.reward_manager.name", "the body of `score`; [rewards](../rewards.md) has shaping"),
        manual("reward.reward_manager.*", note="the body of `score`"),
        manual(
            "reward.reward_model.*",
            note='`Model("rm", head="score")`, `nodes.rew_inf`: [reward models](../rewards.md#reward-models)',
        ),
        manual("reward.sandbox_fusion.*", note="[sandboxes](../security.md)"),
        manual("custom_reward_function.*", note="the old place of `reward.custom_reward_function`"),
        manual("reward_model.*", note="the old place of `reward.reward_model`"),
        manual("sandbox_fusion.*", note="the old place of `reward.sandbox_fusion`"),
    ],
    "The run": [
        same("trainer.nnodes", "cluster", "with the device's name: `h100-1x8`"),
        same("trainer.n_gpus_per_node", "cluster", "with the device's name: `h100-1x8`"),
        same("trainer.total_training_steps", "steps"),
        manual("trainer.total_epochs", "`steps`: epochs * rows / batch"),
        same("trainer.save_freq", "save_every", "-1 is 0; see also `save_minutes`"),
        same("trainer.max_actor_ckpt_to_keep", "keep_checkpoints", "null keeps all, in both"),
        same("trainer.test_freq", "nodes.eval_gen.every"),
        same("trainer.val_before_train", "nodes.eval_gen.after", "true is 0"),
        same(
            "trainer.critic_warmup",
            "nodes.actor_train.after",
            "steps count from 1 in verl: 10 leaves out 9 steps, `after=9`",
        ),
        same("trainer.project_name", "report.wandb", "with the logger `wandb`"),
        same("trainer.experiment_name", "name"),
        same("trainer.logger", "report.wandb", "console and TensorBoard are always on"),
        same("trainer.v1.trainer_mode", "", "`sync`; others: [below](#asynchronous-training)"),
        automatic("trainer.balance_batch", "samples are spread by length: `hflow plan`, data"),
        automatic("trainer.default_local_dir", "results are in `OUT/NAME/TIME`", "out"),
        automatic("trainer.max_critic_ckpt_to_keep", "all models are saved together", "keep_checkpoints"),
        automatic("trainer.log_val_generations", "`samples/step-N.jsonl`", "report.samples"),
        automatic("trainer.rollout_data_dir", "`samples/step-N.jsonl`", "report.samples"),
        automatic("trainer.validation_data_dir", "`samples/step-N.jsonl`", "report.samples"),
        automatic("trainer.use_v1", "see `trainer.v1.trainer_mode`"),
        automatic(
            "trainer.ray_wait_register_center_timeout", "Ray's start is watched: the first lines of a run"
        ),
        automatic("trainer.device", "from `cluster`", "cluster"),
        automatic("actor_rollout_ref.hybrid_engine", "the plan places all models: `hflow plan`", "placement"),
        automatic("actor_rollout_ref.nccl_timeout", "a missing rank is named", "collective_timeout"),
        manual("trainer.val_only", "`hflow eval`"),
        manual("trainer.resume_mode", "a run starts anew, unless by `hflow run --resume`"),
        manual("trainer.resume_from_path", "`hflow run --resume RUN`"),
        manual("trainer.esi_redundant_time", "SIGTERM saves a run: [resume](../resume.md)"),
        manual("trainer.checkpoint_callback_class", "an `Observer`: [metrics](../metrics.md)"),
        missing("trainer.default_hdfs_dir"),
        missing("trainer.del_local_ckpt_after_load"),
        manual("trainer.v1.*", note="[asynchronous training](#asynchronous-training)"),
        manual("*profiler*", note="`time/*` of `metrics.jsonl`, and `trace.json`: [metrics](../metrics.md)"),
        manual("distillation.*", note="[`recipes/opd.py`](../../recipes/opd.py)"),
        automatic("transfer_queue.*", "samples stay where they are made: `hflow plan`, data"),
        missing("skip.*"),
        manual("ray_kwargs.*", note="`ray start`: [clusters](../cluster.md)"),
        manual(
            "*.override_transformer_config*",
            note="`models.NAME.backend=megatron` and `activation_checkpointing`; an added `fp8_recipe` is "
            "`models.NAME.fp8`: [FP8](../parallel.md#products-in-fp8)",
        ),
        manual(
            "*.megatron.*", note="`models.NAME.backend=megatron` and `layout`: [parallel](../parallel.md)"
        ),
        automatic("*_target_", "verl's classes"),
    ],
}


_SWITCHES = {
    "distillation": "enabled",
    "reward.reward_model": "enable",
    f"{ROLLOUT}.prometheus": "enable",
    f"{ROLLOUT}.trace": "backend",
}
"""Part of the configuration -> its key that turns it on."""


def translate(given: Given, cluster: str | None) -> RecipeDraft:
    """Return the recipe of a configuration of verl, by default on its number of GPUs, as H100."""
    draft = RecipeDraft()
    minibatches = _batches(given, draft)
    _advantages(given, draft)
    _loss(given, draft)
    _correction(given, draft)
    _resampling(given, draft)
    _generation(given, draft, _cluster(given, draft, cluster))
    _data(given, draft)
    _run(given, draft)
    for model, part in (("actor", ACTOR), ("critic", "critic")):
        if model == "actor" or draft.has_critic:
            _model_settings(given, draft, model, part, minibatches[model])
    for part, switch in _SWITCHES.items():
        if not given.value(f"{part}.{switch}"):
            given.ignore(f"{part}.", f"{part}.{switch}")
    if draft.has_reference:
        _set_fsdp_size(given, draft, "ref", "actor_rollout_ref.ref.fsdp_config.fsdp_size")
        _set_dtype(given, draft, "ref", "actor_rollout_ref.ref.fsdp_config.dtype")
        if given.flag("actor_rollout_ref.ref.fsdp_config.param_offload"):
            draft.set("models.ref.offload", "all")
    return draft


def _batches(given: Given, draft: RecipeDraft) -> dict[str, int]:
    """Set batch and minibatches. Return the updates of each model in a step."""
    batch = given.whole("data.train_batch_size") or 1024
    draft.set("batch", batch)
    updates = {}
    draft.has_critic = _has_critic(given)
    for model, part in (("actor", ACTOR), ("critic", "critic")):
        if model == "critic" and not draft.has_critic:
            continue
        source = part
        if model == "critic" and not given.is_set("critic.ppo_mini_batch_size"):
            source = ACTOR
        size = given.whole(f"{source}.ppo_mini_batch_size") or batch
        if size > batch or batch % size:
            given.leave(
                f"{source}.ppo_mini_batch_size",
                f"{batch} prompts cannot be divided into minibatches of {size}; 1 minibatch is written",
            )
            size = batch
        source = part if model == "actor" or given.is_set("critic.ppo_epochs") else ACTOR
        epochs = given.whole(f"{source}.ppo_epochs") or 1
        node = f"nodes.{_loss_node(given) if model == 'actor' else 'critic_train'}"
        draft.set(f"{node}.minibatches", batch // size)
        draft.set(f"{node}.epochs", epochs)
        updates[model] = batch // size * epochs
    return updates


def _has_critic(given: Given) -> bool:
    """Return whether there is a critic: with `gae`."""
    needs_critic = _estimator(given) == "gae"
    enabled = given.value("critic.enable")
    if enabled is not None and bool(enabled) != needs_critic:
        given.leave("critic.enable", "the critic follows from adv_estimator: only gae has one")
    return needs_critic


def _estimator(given: Given) -> str:
    key = "algorithm.adv_estimator"
    name = given.value(key)
    if name not in _ADVANTAGE_NODES:
        note = ADVANTAGES.get(str(name), f"hflow has no counterpart of {name!r}")
        given.leave(key, f"{note.removeprefix('not translated: ')}. nodes.group_advantage is written")
        return "grpo"
    return str(name)


def _advantages(given: Given, draft: RecipeDraft) -> None:
    estimator = _estimator(given)
    draft.advantage = _ADVANTAGE_NODES[estimator]
    if draft.advantage == "group_advantage":
        if given.flag("algorithm.norm_adv_by_std_in_grpo"):
            draft.set("nodes.group_advantage.eps", 1e-6)
        else:
            draft.set("nodes.group_advantage.std", False)
    elif draft.advantage == "best_advantage" and given.flag("algorithm.norm_adv_by_std_in_grpo"):
        draft.set("nodes.best_advantage.std", True)
        draft.set("nodes.best_advantage.eps", 1e-6)
    elif draft.advantage == "optimal_token_advantage":
        note = "the sum of squared probabilities is that of the 16 likeliest tokens here"
        if given.is_set(f"{CORRECTION}.rollout_is"):
            note += ", and verl also weighs the baseline by the squared weights of rollout_is"
        given.differs("algorithm.adv_estimator", note)
    if draft.needs_token_rewards:
        draft.set(f"nodes.{draft.advantage}.gamma", given.number("algorithm.gamma"))
    if draft.advantage == "gae":
        draft.set("nodes.gae.lam", given.number("algorithm.lam"))
    if given.flag("algorithm.use_kl_in_reward"):
        if draft.needs_token_rewards:
            _kl_reward(given, draft)
        else:
            given.leave(
                "algorithm.use_kl_in_reward",
                f"with {estimator} the KL is in the reward of a whole answer: subtract it in a @compute "
                f"body, or use nodes.{_loss_node(given)}.kl_coef",
            )
    if given.flag("algorithm.filter_groups.enable"):
        draft.filters_groups = True
        metrics = ("reward", "score", "seq_reward", "seq_final_reward")
        note = "the body of has_spread reads the reward; return this metric from a node, and name it there"
        given.choice("algorithm.filter_groups.metric", metrics, note)


def _kl_reward(given: Given, draft: RecipeDraft) -> None:
    draft.kl_in_reward = draft.has_reference = True
    draft.set("nodes.kl_reward.beta", given.number("algorithm.kl_ctrl.kl_coef"))
    note = "no estimator of hflow is this one; k1 is written"
    estimator = str(given.value("algorithm.kl_penalty"))
    if estimator.removesuffix("+") in _KL_IN_REWARD:  # a reward has no gradient, which the + is about
        draft.set("nodes.kl_reward.estimator", _KL_IN_REWARD[estimator.removesuffix("+")])
    else:
        given.leave("algorithm.kl_penalty", note)
    note = "set nodes.kl_reward.target: nats of a sequence, target_kl times the mean length"
    given.choice("algorithm.kl_ctrl.type", ("fixed",), note)


def _loss_node(given: Given) -> str:
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = given.value(key)
    if mode in ("gspo", "geo_mean") and _estimator(given) in _PER_TOKEN:
        note = f"{_LOSS_NODES[mode]} takes an advantage per answer, not per token; actor_train is written"
        given.leave(key, note)
        return "actor_train"
    if mode in _LOSS_NODES:
        if mode == "gspo" and given.value(f"{ACTOR}.loss_agg_mode") != "seq-mean-token-mean":
            given.differs(
                key, "nodes.gspo_train has the paper's mean over sequences, seq-mean-token-mean in verl"
            )
        return _LOSS_NODES[mode]
    note = LOSSES.get(str(mode), f"hflow has no counterpart of {mode!r}")
    given.leave(key, f"{note.removeprefix('not translated: ')}. nodes.actor_train is written")
    return "actor_train"


def _loss(given: Given, draft: RecipeDraft) -> None:
    mode = given.value(f"{ACTOR}.policy_loss.loss_mode")
    draft.loss = _loss_node(given)
    low, high = _clip_range(given)
    if draft.loss in ("actor_train", "gspo_train", "gmpo_train", "clip_cov_train"):
        draft.set_loss(clip=low, clip_high=high)
    elif draft.loss == "cispo_train":
        draft.set_loss(**({"clip": 0.0} if mode == "gpg" else {"clip": low, "clip_high": high}))
    if draft.loss == "actor_train":
        draft.set_loss(dual_clip=given.number(f"{ACTOR}.clip_ratio_c"))
    elif draft.loss == "sapo_train":
        draft.set_loss(
            tau_positive=given.number(f"{ACTOR}.tau_pos"), tau_negative=given.number(f"{ACTOR}.tau_neg")
        )
    elif draft.loss == "dro_train":
        draft.set_loss(dro_beta=given.number(f"{ACTOR}.policy_loss.dro_beta"))
    elif draft.loss == "clip_cov_train":
        names = {"share": "clip_cov_ratio", "lower": "clip_cov_lb", "upper": "clip_cov_ub"}
        draft.set_loss(**{name: given.number(f"{ACTOR}.policy_loss.{key}") for name, key in names.items()})
    elif draft.loss == "kl_cov_train":
        names = {"share": "kl_cov_ratio", "cov_kl_coef": "ppo_kl_coef"}
        draft.set_loss(**{name: given.number(f"{ACTOR}.policy_loss.{key}") for name, key in names.items()})
    if draft.loss in ("clip_cov_train", "kl_cov_train"):
        note = "statistics are those of the whole minibatch here, and of a micro-batch in verl"
        given.differs(f"{ACTOR}.policy_loss.loss_mode", note)
    is_sequence = draft.loss in ("gspo_train", "gmpo_train")
    _shared_loss(given, draft, is_sequence=is_sequence)
    if is_sequence:
        if draft.loss == "gspo_train":
            given.value(f"{ACTOR}.loss_agg_mode")
        draft.set_loss(reduce="seq-mean")
    elif draft.loss == "sapo_train":
        draft.set_loss(reduce="seq-mean-token-mean")
    else:
        size = given.whole(f"{ACTOR}.ppo_mini_batch_size") or draft.settings["batch"]
        draft.set_loss(reduce=_reduction(given, ACTOR, size))


def _clip_range(given: Given) -> tuple[Any, Any]:
    """Return the distances below and above 1. verl takes `clip_ratio` where one of them is null."""
    low, high = given.number(f"{ACTOR}.clip_ratio_low"), given.number(f"{ACTOR}.clip_ratio_high")
    if low is None or high is None:
        both = given.number(f"{ACTOR}.clip_ratio")
        low, high = both if low is None else low, both if high is None else high
    return low, high


def _shared_loss(given: Given, draft: RecipeDraft, *, is_sequence: bool) -> None:
    """Set KL and entropy, which losses of sequences do not have."""
    entropy = given.number(f"{ACTOR}.entropy_coeff")
    if entropy and is_sequence:
        given.leave(f"{ACTOR}.entropy_coeff", f"nodes.{draft.loss} has no entropy bonus")
    elif entropy:
        draft.set_loss(entropy_coef=entropy)
    if not given.flag(f"{ACTOR}.use_kl_loss"):
        return
    if is_sequence:
        given.leave(
            f"{ACTOR}.use_kl_loss", f"nodes.{draft.loss} has no KL; nodes.kl_reward is one in the reward"
        )
        return
    draft.has_reference = True
    estimators = _known(KL_IN_LOSS)
    name = given.choice(
        f"{ACTOR}.kl_loss_type", estimators, "the mean of this estimator's gradient is no KL; k3 is written"
    )
    coefficient = given.number(f"{ACTOR}.kl_loss_coef")
    draft.set_loss(kl_coef=coefficient)
    if coefficient:
        draft.set_loss(kl_estimator=estimators[name])


def _reduction(given: Given, part: str, prompts: int) -> str:
    """Return the reduction of the loss of `actor_rollout_ref.actor` or `critic`, by a minibatch's prompts."""
    key = f"{part}.loss_agg_mode"
    modes = _known(REDUCTIONS)
    mode = given.choice(key, modes)
    if mode != "seq-mean-token-sum-norm":
        return modes[mode]
    factor = given.whole(f"{part}.loss_scale_factor")
    if factor is None:
        factor = given.whole("data.max_response_length") or 512
        given.differs(key, f"verl divides by the length that a batch was padded to, hflow by {factor} always")
    return f"token-sum/{prompts * (given.whole(f'{ROLLOUT}.n') or 1) * factor}"


def _correction(given: Given, draft: RecipeDraft) -> None:
    """Set how the loss treats the difference between the engine's and the trainer's log-probs."""
    level = given.value(f"{CORRECTION}.rollout_is")
    is_sequence = draft.loss in ("gspo_train", "gmpo_train")
    if given.flag(f"{CORRECTION}.bypass_mode"):
        draft.set_loss(prox="none")
        note = "nodes.reinforce_train, with prox=recompute and nodes.behav_weights; PPO's loss is written"
        given.choice(f"{CORRECTION}.loss_type", ("ppo_clip",), note)
        if given.is_set(f"{CORRECTION}.rollout_rs"):
            given.leave(f"{CORRECTION}.rollout_rs", "nodes.is_trusted needs prox=recompute")
        return
    if is_sequence:
        draft.set_loss(prox="none")
        given.differs(
            f"{CORRECTION}.bypass_mode",
            f"nodes.{draft.loss} has its ratios relative to the engine's log-probs here; set "
            "prox=recompute to weigh answers by prox / behav",
        )
        for key in ("rollout_is", "rollout_rs"):
            if given.is_set(f"{CORRECTION}.{key}"):
                given.leave(
                    f"{CORRECTION}.{key}", f"nodes.{draft.loss} has behav_weight_cap and over_cap instead"
                )
        return
    draft.set_loss(prox="recompute")
    draft.weights = "unweighted" if level is None else "behav_weights"
    if level is not None:
        _weights(given, draft, given.choice(f"{CORRECTION}.rollout_is", ("token", "sequence")))
    if given.is_set(f"{CORRECTION}.rollout_rs"):
        _rejection(given, draft)


def _weights(given: Given, draft: RecipeDraft, level: str | None) -> None:
    if level is None:
        draft.weights = "unweighted"
        return
    draft.set("nodes.behav_weights.level", level)
    key = f"{CORRECTION}.rollout_is_threshold"
    bounds = _bounds(given.value(key))
    if bounds is None:
        given.leave(key, "it was not understood; upper=2.0 is written")
        bounds = (None, 2.0)
    lower, upper = bounds
    draft.set("nodes.behav_weights.upper", upper)
    if lower is not None:
        draft.set("nodes.behav_weights.lower", lower)
        draft.set("nodes.behav_weights.outside", "mask")
    if given.flag(f"{CORRECTION}.rollout_is_batch_normalize"):
        draft.set("nodes.behav_weights.normalise", True)
        if level == "sequence":
            note = "hflow's mean is over learned tokens, verl's over sequences"
            given.differs(f"{CORRECTION}.rollout_is_batch_normalize", note)


def _bounds(value: Any) -> tuple[float | None, float] | None:
    """Return the lower and upper bound of `2.0` or `0.5_2.0`; None if it is neither."""
    try:
        parts = [float(part) for part in str(value).split("_")]
    except ValueError:
        return None
    if len(parts) > 2 or any(part <= 0 for part in parts):
        return None
    return (None, parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def _rejection(given: Given, draft: RecipeDraft) -> None:
    key, threshold = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    extent, _, statistic = str(given.value(key)).rpartition("_")
    extents = {
        "token": "token",
        "seq_sum": "sequence-sum",
        "seq_mean": "sequence-mean",
        "seq_max": "sequence-max",
    }
    if extent not in extents or statistic not in ("k1", "k2", "k3"):
        given.leave(key, "one of token_k1 to seq_max_k3 is translated; nodes.is_trusted can be listed once")
        return
    bounds = _bounds(given.value(threshold))
    if bounds is None or (statistic != "k1" and bounds[0] is not None):
        given.leave(threshold, "it was not understood, so rollout_rs is not translated")
        given.leave(key, "see rollout_rs_threshold")
        return
    lower, upper = bounds
    draft.is_trusted = True
    draft.set("nodes.is_trusted.extent", extents[extent])
    draft.set("nodes.is_trusted.statistic", statistic)
    if statistic == "k1":
        low = 1 / upper if lower is None else lower
        draft.set("nodes.is_trusted.lower", round(-math.log(upper), 6))
        draft.set("nodes.is_trusted.upper", round(-math.log(low), 6))
    else:
        draft.set("nodes.is_trusted.upper", upper)
    draft.set_loss(mask="is_trusted")


def _resampling(given: Given, draft: RecipeDraft) -> None:
    """Translate PF-PPO, which verl applies with `gae` only."""
    key, method = "algorithm.use_pf_ppo", "algorithm.pf_ppo.reweight_method"
    if not draft.has_critic or not given.flag(key):
        reason = "algorithm.adv_estimator" if given.flag(key) else key
        given.ignore("algorithm.pf_ppo.", reason)
        given.ignore(key, reason)
        return
    if draft.is_trusted:
        given.leave(
            key, "the loss has one mask, is_trusted; multiply it by the draws of nodes.resample in a body"
        )
        return
    draft.resamples = True
    weights = given.choice(method, ("pow", "max_min", "max_random"), "pow is written")
    draft.set("nodes.resample.weights", weights)
    if weights == "pow":
        draft.set("nodes.resample.power", given.number("algorithm.pf_ppo.weight_pow"))
    else:
        given.ignore("algorithm.pf_ppo.weight_pow", method)
    draft.set_loss(mask="draws")
    draft.set("nodes.critic_train.mask", "draws")
    given.differs(key, "a sample that is drawn twice stays in one minibatch")


def _cluster(given: Given, draft: RecipeDraft, cluster: str | None) -> int:
    """Set the cluster. Return its number of devices."""
    nodes = given.whole("trainer.nnodes") or 1
    per_node = given.whole("trainer.n_gpus_per_node") or 8
    if cluster is None:
        cluster = f"h100-{nodes}x{per_node}"
        note = f"cluster: {cluster} is written, as verl's configuration does not name the device; correct it"
        given.differs("trainer.n_gpus_per_node", note)
    elif num_devices(cluster) != nodes * per_node:
        given.differs("trainer.n_gpus_per_node", f"the configuration has {nodes} machines of {per_node} GPUs")
    draft.set("cluster", cluster)
    return num_devices(cluster)


def _generation(given: Given, draft: RecipeDraft, devices: int) -> None:
    group = given.whole(f"{ROLLOUT}.n") or 1
    response = given.whole("data.max_response_length") or 512
    draft.set("nodes.actor_gen.group", group)
    draft.set("nodes.actor_gen.max_tokens", response)
    if group < 2 and draft.advantage not in ("gae", "returns_to_go"):
        given.leave(
            f"{ROLLOUT}.n", f"nodes.{draft.advantage} compares the answers of a prompt; set 2 or more"
        )
    draft.set("nodes.actor_gen.temperature", given.number(f"{ROLLOUT}.temperature"))
    set_sampling_limits(given, draft, f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
    if given.value(f"{ROLLOUT}.do_sample") is not True:
        given.leave(f"{ROLLOUT}.do_sample", "a group of equal answers has no advantage, so samples are drawn")
    length = given.whole(f"{ROLLOUT}.max_model_len")
    if length is None:
        length = (given.whole("data.max_prompt_length") or 512) + response
    draft.set("models.actor.gen.max_model_len", length)
    note = "no engine of hflow is this one; the plan chooses"
    if given.value(f"{ROLLOUT}.name") is not None:
        engine = _known(ENGINES).get(given.choice(f"{ROLLOUT}.name", _known(ENGINES), note) or "")
        if engine is not None:
            draft.set("models.actor.gen.engine", engine)
    ranks = given.whole(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    if devices % ranks:
        note = f"{devices} devices cannot be divided by it; the plan chooses the layout"
        given.leave(f"{ROLLOUT}.tensor_model_parallel_size", note)
        ranks = 1
    elif draft.settings.get("models.actor.gen.engine") == "vllm":
        draft.set("models.actor.gen.layout", f"d{devices // ranks}t{ranks}")
    running = given.whole(f"{ROLLOUT}.max_num_seqs") or 256
    draft.set("models.actor.gen.max_running", running)
    draft.set("schedule.max_concurrent", min(draft.settings["batch"] * group, devices // ranks * running))
    if given.choice(f"{ROLLOUT}.quantization", (None, "fp8"), "engines quantise weights to fp8, or not"):
        draft.set("models.actor.gen.quantization", "fp8")
    cache = f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype"
    if given.values.get(cache) in ("fp8", "fp8_e4m3"):
        draft.set("models.actor.gen.cache_dtype", "fp8")
        given.differs(
            cache, "models.actor.gen.cache_dtype keeps keys and values without scales: docs/engines.md"
        )
    if given.flag(f"{ROLLOUT}.enforce_eager"):
        draft.set("models.actor.gen.cuda_graphs", False)
    if given.flag(f"{ROLLOUT}.enable_rollout_routing_replay"):
        draft.set("nodes.actor_gen.routing_replay", True)
    if given.flag(f"{ROLLOUT}.multi_turn.enable"):
        given.leave(f"{ROLLOUT}.multi_turn.enable", "write an async body with @generate: docs/agents.md")


def _evaluation(given: Given, draft: RecipeDraft) -> None:
    every = given.whole("trainer.test_freq") or -1
    if every <= 0:
        return
    draft.evaluates = True
    node, key = "nodes.eval_gen", f"{ROLLOUT}.val_kwargs"
    draft.set(f"{node}.every", every)
    if not given.flag("trainer.val_before_train"):
        draft.set(f"{node}.after", every)
    draft.set(f"{node}.max_tokens", draft.settings["nodes.actor_gen.max_tokens"])
    samples = given.flag(f"{key}.do_sample")
    draft.set(f"{node}.temperature", given.number(f"{key}.temperature") if samples else 0.0)
    draft.set(f"{node}.group", given.whole(f"{key}.n") or 1)
    if samples:
        draft.set(f"{node}.top_p", float(given.number(f"{key}.top_p") or 1))
        draft.set(f"{node}.top_k", max(0, given.whole(f"{key}.top_k") or 0))


def _data(given: Given, draft: RecipeDraft) -> None:
    _evaluation(given, draft)
    for name, part in (("train", "train"), ("heldout", "val")):
        if name == "heldout" and not draft.evaluates:
            continue
        set_paths(given, draft, f"data.{part}_files", f"data.{name}.path")
        column = given.text("data.prompt_key")
        if column != "prompt":
            draft.set(f"data.{name}.map", {"prompt": column})
        limit = given.whole(f"data.{part}_max_samples") or -1
        if limit > 0:
            draft.set(f"data.{name}.limit", limit)
            if part == "train" and given.flag("data.shuffle"):
                given.differs("data.train_max_samples", "the first rows here, a random choice in verl")
    if not given.flag("data.shuffle"):
        draft.set("data.train.shuffle", False)
    seed = given.whole("data.seed")
    if seed is not None:
        draft.set("seed", seed)
    kwargs = given.value("data.apply_chat_template_kwargs")
    if kwargs:
        draft.set("models.actor.template_kwargs", kwargs)


def _run(given: Given, draft: RecipeDraft) -> None:
    steps = given.whole("trainer.total_training_steps")
    if steps is not None:
        draft.set("steps", steps)
        given.ignore("trainer.total_epochs", "trainer.total_training_steps")
    else:
        epochs = given.whole("trainer.total_epochs")
        note = (
            f"steps = {epochs} * rows / {draft.settings['batch']}; set it, as the number of rows is not known"
        )
        given.leave("trainer.total_epochs", note)
    draft.set("save_every", max(0, given.whole("trainer.save_freq") or 0))
    draft.set("keep_checkpoints", given.whole("trainer.max_actor_ckpt_to_keep"))
    if draft.has_critic:
        skipped = max(0, (given.whole("trainer.critic_warmup") or 0) - 1)
        if skipped:
            draft.delay_training(skipped)
    name = given.text("trainer.experiment_name")
    if given.is_set("trainer.experiment_name"):
        draft.set("name", (name or "").replace("/", "-"))
    loggers = given.value("trainer.logger")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    if given.is_set("trainer.logger"):
        if "wandb" in loggers:
            draft.set("report.wandb", given.text("trainer.project_name"))
        others = [str(logger) for logger in loggers if logger not in ("console", "wandb", "tensorboard")]
        if others:
            given.leave("trainer.logger", f"{', '.join(others)}: see report.mlflow and report.trackers")
    note = "see schedule.max_staleness; a synchronous run is written"
    given.choice("trainer.v1.trainer_mode", ("sync",), note)


_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}


def _set_dtype(given: Given, draft: RecipeDraft, model: str, key: str) -> None:
    draft.set(f"models.{model}.dtype", _DTYPES[given.choice(key, _DTYPES, "models compute in bf16 or fp32")])


def _set_fsdp_size(given: Given, draft: RecipeDraft, model: str, key: str) -> None:
    """Set the layout of a model whose weights are sharded over some of the devices only."""
    size, devices = given.whole(key), num_devices(draft.settings["cluster"])
    if size is None or size == -1 or size == devices:
        return
    if 1 < size < devices and devices % size == 0:
        draft.set(f"models.{model}.layout", f"d{devices}r{devices // size}")
    else:
        given.leave(key, f"{devices} devices cannot be divided into sets of {size} ranks; the plan decides")


def _model_settings(given: Given, draft: RecipeDraft, model: str, part: str, updates: int) -> None:
    """Set a trained model, `part` in verl: checkpoint, memory and optimizer, with so many updates a step."""
    ours = f"models.{model}"
    source = MODEL if model == "actor" else "critic.model"
    engine = f"{part}.fsdp_config" if model == "actor" else f"{part}.fsdp"
    if model == "actor" or given.value("critic.model.path") != given.value(f"{MODEL}.path"):
        draft.is_critic_of_actor = draft.is_critic_of_actor and model == "actor"
        set_model(given, draft, f"{source}.path", f"{ours}.path")
    draft.set(f"{ours}.activation_checkpointing", given.flag(f"{source}.enable_gradient_checkpointing"))
    if given.flag(f"{source}.enable_activation_offload"):
        draft.set(f"{ours}.offload_activations", True)
    note = "torch is written; for megatron set backend and layout: docs/parallel.md"
    given.choice(f"{part}.strategy", ("fsdp", "fsdp2"), note)
    draft.set(f"{ours}.backend", "torch")
    for key in given.values:
        if key.startswith(f"{part}.megatron.override_transformer_config.fp8"):
            note = f"set {ours}.fp8 to tensorwise, blockwise or mxfp8, with {ours}.backend=megatron"
            given.leave(key, f"{note}: docs/parallel.md")
    if given.flag(f"{part}.use_dynamic_bsz"):
        tokens = given.whole(f"{part}.ppo_max_token_len_per_gpu")
        draft.set(f"{ours}.tokens_per_microbatch", tokens)
    _set_fsdp_size(given, draft, model, f"{engine}.fsdp_size")
    _set_dtype(given, draft, model, f"{engine}.dtype")
    moves_optimizer = given.flag(f"{engine}.optimizer_offload")
    if given.flag(f"{engine}.param_offload"):
        draft.set(f"{ours}.offload", "all")
    elif moves_optimizer:
        draft.set(f"{ours}.offload", "optimizer")
    contents = given.value(f"{part}.checkpoint.save_contents")
    draft.set(f"{ours}.save_optimizer", "optimizer" in (contents or ()))
    if model == "actor":
        _actor_settings(given, draft)
    else:
        draft.set("nodes.critic_train.clip", given.number("critic.cliprange_value"))
        source = part if given.is_set("critic.loss_agg_mode") else ACTOR
        size = draft.settings["batch"] // draft.settings["nodes.critic_train.minibatches"]
        draft.set("nodes.critic_train.reduce", _reduction(given, source, size))
    _optimizer_settings(given, draft, f"{part}.optim", f"{ours}.optim", updates)


def _actor_settings(given: Given, draft: RecipeDraft) -> None:
    template = given.text(f"{MODEL}.custom_chat_template")
    if template is not None:
        draft.set("models.actor.chat_template", template)
    rank = given.whole(f"{MODEL}.lora_rank") or 0
    if rank > 0:
        draft.set("models.actor.lora.r", rank)
        draft.set("models.actor.lora.alpha", given.number(f"{MODEL}.lora_alpha"))
        draft.set("models.actor.lora.targets", given.value(f"{MODEL}.target_modules"))
    if (given.whole(f"{ACTOR}.ulysses_sequence_parallel_size") or 1) > 1:
        note = "set models.actor.backend=megatron and a layout with c: docs/parallel.md"
        given.leave(f"{ACTOR}.ulysses_sequence_parallel_size", note)


_OPTIMIZERS = {"AdamW": "adamw", "AdamW8bit": "adamw_8bit", "SGD": "sgd"}


def _optimizer_settings(given: Given, draft: RecipeDraft, key: str, ours: str, updates: int) -> None:
    note = "AdamW is written; see models.NAME.optim.name"
    name = _OPTIMIZERS[given.choice(f"{key}.optimizer", _OPTIMIZERS, note)]
    for setting in ("lr", "weight_decay", "clip_grad"):
        draft.set(f"{ours}.{setting}", given.number(f"{key}.{setting}"))
    if name != "adamw":
        draft.set(f"{ours}.name", name)
    if name != "sgd":
        draft.set(f"{ours}.betas", list(given.value(f"{key}.betas")))
    note = "constant is written; see models.NAME.optim.schedule"
    schedule = given.choice(f"{key}.lr_scheduler_type", ("constant", "cosine"), note)
    draft.set(f"{ours}.schedule", schedule)
    if schedule == "cosine":
        draft.set(f"{ours}.min_lr_ratio", given.number(f"{key}.min_lr_ratio") or 0.0)
    warmup = given.whole(f"{key}.lr_warmup_steps") or 0
    if warmup <= 0:
        ratio = given.number(f"{key}.lr_warmup_steps_ratio") or 0.0
        steps = given.whole("trainer.total_training_steps")
        if ratio > 0 and steps is None:
            note = f"warmup_steps = {ratio} * steps * {updates}; set it, as the number of steps is not known"
            given.leave(f"{key}.lr_warmup_steps_ratio", note)
        warmup = int(ratio * (steps or 0))
    draft.set(f"{ours}.warmup_steps", max(0, warmup) * updates)
