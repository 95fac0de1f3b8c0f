"""TRL: the keys of `GRPOConfig` and of `trl grpo`, and the translation of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hflow.translate.given import Given
from hflow.translate.recipe import RecipeDraft
from hflow.translate.shared import REPLAYED, num_devices, set_model, set_paths, set_sampling_limits
from hflow.translate.table import Row, automatic, manual, missing, same

LOSSES = {
    "dapo": "`nodes.actor_train` with `reduce=token-mean`",
    "grpo": "`nodes.actor_train` with `reduce=seq-mean-token-mean`",
    "bnpo": "`nodes.actor_train` with `reduce=token-mean`, of a minibatch and not of a micro-batch",
    "dr_grpo": "`nodes.actor_train` with `reduce=token-sum/N`, N the samples of a minibatch times "
    "`max_completion_length`",
    "cispo": "`nodes.cispo_train` with `clip=1.0` and `clip_high` = `epsilon_high - 1`: TRL bounds the ratio "
    "itself",
    "sapo": "`nodes.sapo_train` with `reduce=seq-mean-token-mean`",
    "luspo": "`nodes.gspo_train` with `by_length=true`",
    "vespo": "`nodes.vespo_train`",
}
"""Value of `loss_type` -> hflow's node, in words."""
_PPO_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo")
"""Values of `loss_type` that differ in the reduction only."""
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "sgd": "sgd",
}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_PACKED = "sequences are packed, and micro-batches are a number of tokens: `hflow plan`"
_LAYERS = "no result depends on it"
_PLACED = "the plan decides how models are divided: `hflow plan`, layouts"
_BODY = "a `@train` body in the recipe"

TABLES: dict[str, Sequence[Row]] = {
    "Batches": [
        same(
            "generation_batch_size",
            "batch",
            "completions in TRL, prompts here: divided by `num_generations`",
        ),
        same(
            "per_device_train_batch_size",
            "batch",
            "`per_device_train_batch_size * processes * steps_per_generation / num_generations`",
        ),
        same("steps_per_generation", "batch nodes.actor_train.minibatches", "see the row above"),
        same(
            "gradient_accumulation_steps",
            "nodes.actor_train.minibatches",
            "`steps_per_generation / gradient_accumulation_steps`",
        ),
        same("num_generations", "nodes.actor_gen.group"),
        same("num_iterations", "nodes.actor_train.epochs"),
        same("max_steps", "steps", "optimizer steps in TRL: divided by those of a step"),
        manual("num_train_epochs", "`steps`: epochs * rows / batch"),
        automatic("auto_find_batch_size", _PACKED, "models.actor.tokens_per_microbatch"),
        automatic("average_tokens_across_devices", "denominators always count all devices"),
    ],
    "Advantages and loss": [
        same(
            "scale_rewards",
            "nodes.group_advantage.std nodes.group_advantage.std_over",
            values={"group": "`std=true`", "batch": "`std_over=batch`", "none": "`std=false`"},
        ),
        same(
            "multi_objective_aggregation",
            "",
            "`normalize_then_sum` is not translated: `nodes.gdpo_advantage`, with a node for each reward",
        ),
        same("loss_type", "nodes.actor_train.reduce", values=LOSSES),
        same(
            "importance_sampling_level",
            "",
            values={
                "token": "a ratio per token",
                "sequence": "`nodes.gspo_train`, as with `loss_type: grpo`; of `sapo`, `level=sequence`",
            },
        ),
        same("epsilon", "nodes.actor_train.clip"),
        same("epsilon_high", "nodes.actor_train.clip_high"),
        same("delta", "nodes.actor_train.dual_clip", "if it is at least 1 + `epsilon_high`"),
        same("beta", "nodes.actor_train.kl_coef", "with a model `ref`. hflow bounds a token's KL at 10 nats"),
        same(
            "use_bias_correction_kl",
            "nodes.actor_train.kl_importance",
            "the ratio to the engine's log-probs here, and to those at the start of the step in TRL",
        ),
        same(
            "entropy_coef",
            "nodes.actor_train.entropy_coef",
            "a mean over tokens in TRL, reduced as the loss here",
        ),
        same("mask_truncated_completions", "nodes.actor_train.mask"),
        same("sapo_temperature_pos", "nodes.sapo_train.tau_positive"),
        same("sapo_temperature_neg", "nodes.sapo_train.tau_negative"),
        same("vespo_k_pos", "nodes.vespo_train.k_positive"),
        same("vespo_lambda_pos", "nodes.vespo_train.lambda_positive"),
        same("vespo_k_neg", "nodes.vespo_train.k_negative"),
        same("vespo_lambda_neg", "nodes.vespo_train.lambda_negative"),
        same(
            "top_entropy_quantile",
            "nodes.high_entropy_train.share",
            "of a minibatch here, of each forward pass in TRL; with PPO's loss, without `delta`",
        ),
        manual(
            "use_adaptive_entropy",
            "`nodes.adaptive_entropy` and `nodes.entropy_inf`, once per step of the run",
        ),
        manual("entropy_coef_*", note="`nodes.adaptive_entropy`: `change`, `upper`"),
        manual("entropy_target", "`nodes.adaptive_entropy.target`"),
        same(
            "off_policy_mask_threshold",
            "nodes.actor_train.off_policy_limit",
            "the drift is from the engine's log-probs here, in TRL with vLLM only",
        ),
        missing("router_aux_loss_coef", "the router is trained by the recipe's loss"),
        manual(
            "sync_ref_model", "an `@update` node: [`ema_teacher.py`](../../recipes/custom/ema_teacher.py)"
        ),
        manual("ref_model_mixup_alpha", "see `sync_ref_model`"),
        manual("ref_model_sync_steps", "see `sync_ref_model`"),
        missing("label_smoothing_factor"),
        missing("neftune_noise_alpha"),
    ],
    "vLLM's log-probs": [
        same(
            "vllm_importance_sampling_correction",
            "nodes.actor_train.prox",
            "`recompute`, and `nodes.behav_weights`; without it, or without vLLM, the weight 1",
        ),
        same(
            "vllm_importance_sampling_mode",
            "nodes.behav_weights.level nodes.behav_weights.outside",
            "`sequence_mask` is `level=sequence outside=mask`",
        ),
        same("vllm_importance_sampling_clip_max", "nodes.behav_weights.upper"),
        same("vllm_importance_sampling_clip_min", "nodes.behav_weights.lower"),
        same("vllm_importance_sampling_cap", "nodes.behav_weights.upper", "the old name of `..._clip_max`"),
    ],
    "Rewards and data": [
        manual("reward_funcs", "the body of `score`; [rewards](../rewards.md) has ready ones"),
        manual("reward_weights", "`rewards.combine(a=1.0, b=0.5)`"),
        manual(
            "reward_model_name_or_path",
            '`Model("rm", head="score")` and `nodes.rew_inf`: [reward models](../rewards.md#reward-models)',
        ),
        same("dataset_name", "data.train.path", "`hf:OWNER/NAME`; its column `prompt` has messages"),
        same("dataset_config", "data.train.path", "`hf:OWNER/NAME/CONFIG`"),
        same("dataset_train_split", "data.train.split"),
        same("dataset_test_split", "data.heldout.split"),
        same("shuffle_dataset", "data.train.shuffle"),
        same("seed", "seed", "other random numbers"),
        manual("datasets", "`data.train.sources`"),
        manual("test_split_size", "`data.train.split`, as in `train[10%:]`"),
        missing("streaming", "files of rows"),
        missing("dataset_streaming", "files of rows"),
        automatic("data_seed", "`seed` of the run"),
        automatic("remove_unused_columns", "a recipe declares the columns that it reads"),
        automatic("dataloader_*", "workers read their rows themselves"),
        automatic("ignore_data_skip", "a resumed run continues with the next row"),
        automatic("train_sampling_strategy", "rows are shuffled on every pass", "data.train.shuffle"),
        automatic("length_column_name", _PACKED),
        missing("label_names"),
    ],
    "Generation": [
        same("max_completion_length", "nodes.actor_gen.max_tokens"),
        same("temperature", "nodes.actor_gen.temperature"),
        same("top_p", "nodes.actor_gen.top_p", REPLAYED),
        same("top_k", "nodes.actor_gen.top_k", REPLAYED),
        same("min_p", "nodes.actor_gen.min_p", REPLAYED),
        same("chat_template_kwargs", "models.actor.template_kwargs"),
        same("use_vllm", "models.actor.gen.engine", "true: `vllm`; false: the plan decides"),
        same("vllm_mode", "placement", "`server`: the plan places the engines among the devices"),
        same("vllm_tensor_parallel_size", "models.actor.gen.layout", "2 is `d4t2` on 8 devices"),
        same("vllm_max_model_length", "models.actor.gen.max_model_len"),
        automatic(
            "vllm_gpu_memory_utilization", "`hflow plan`, section memory", "models.actor.gen.cache_gib"
        ),
        automatic("vllm_enable_sleep_mode", "engines that share devices sleep: `hflow plan`, memory"),
        automatic("vllm_server_*", "engines are processes of the run"),
        automatic("vllm_group_port", "`hflow plan`, weights", "models.actor.gen.transport"),
        automatic("ds3_gather_for_generation", "`hflow plan`, weights", "models.actor.gen.transport"),
        automatic("use_transformers_continuous_batching", "engines always batch continuously"),
        automatic("use_transformers_paged", "engines always batch continuously"),
        missing("transformers_continuous_batching_config"),
        missing("repetition_penalty"),
        missing("generation_kwargs"),
        missing("cache_implementation"),
        missing("vllm_model_impl"),
        missing("vllm_structured_outputs_regex"),
        manual(
            "max_tool_calling_iterations", "`engine.complete(tools=)` in an episode: [agents](../agents.md)"
        ),
    ],
    "The model": [
        same("model_name_or_path", "models.actor.path"),
        same("model_revision", "models.actor.path", "`OWNER/NAME@REVISION`"),
        same("bf16", "models.actor.dtype", "null is true, unless `fp16`"),
        same("gradient_checkpointing", "models.actor.activation_checkpointing", "off by default here"),
        same("torch_compile", "models.actor.compile", "the [decoder layers](../engines.md#compiled-layers)"),
        same("use_peft", "models.actor.lora"),
        same("lora_r", "models.actor.lora.r"),
        same("lora_alpha", "models.actor.lora.alpha"),
        same("lora_target_modules", "models.actor.lora.targets", "null: PEFT's choice; `all-linear` here"),
        same("lora_target_parameters", "models.actor.lora.targets", "those of experts"),
        same("lora_dropout", "", "0 only: adapters have no dropout"),
        manual("lora_*", note="[LoRA](../lora.md)"),
        same("use_rslora", "models.actor.lora.rslora"),
        same("use_dora", "models.actor.lora.dora"),
        same("load_in_4bit", "models.actor.lora.base", "`nf4`"),
        same("bnb_4bit_quant_type", "", "`nf4` only"),
        automatic("use_bnb_nested_quant", "factors of blocks have 8 bits"),
        automatic("disable_dropout", "models compute without dropout"),
        automatic("attn_implementation", "`hflow plan`, section attention"),
        automatic("pad_to_multiple_of", _PACKED),
        automatic("gradient_checkpointing_kwargs", _LAYERS),
        missing("fp16", "`bf16` and `fp32`"),
        missing("dtype", "weights of an optimizer are fp32"),
        missing("model_init_kwargs"),
        missing("trust_remote_code", "no code of a checkpoint is run"),
        missing("cast_lm_head_to_fp32"),
        missing("use_liger_kernel"),
        missing("liger_kernel_config"),
        missing("load_in_*", note="weights in 4 bits"),
        missing("bnb_*", note="packed in bytes"),
        manual("torch_compile_*", note="`models.actor.compile`"),
        missing("tf32"),
        missing("use_cache"),
    ],
    "The optimizer": [
        same("learning_rate", "models.actor.optim.lr"),
        same("weight_decay", "models.actor.optim.weight_decay"),
        same("adam_beta1", "models.actor.optim.betas"),
        same("adam_beta2", "models.actor.optim.betas"),
        same("adam_epsilon", "models.actor.optim.eps"),
        same("max_grad_norm", "models.actor.optim.clip_grad"),
        same("optim", "models.actor.optim.name", "AdamW, also in 8 bits, and `sgd`"),
        same("lr_scheduler_type", "models.actor.optim.schedule", "`constant` is the default here"),
        same(
            "warmup_steps", "models.actor.optim.warmup_steps", "TRL begins at 0, hflow at `lr / warmup_steps`"
        ),
        manual("lr_scheduler_kwargs", "`models.actor.optim.min_lr_ratio`"),
        missing("optim_args"),
        missing("optim_target_modules"),
    ],
    "The run": [
        same("output_dir", "out"),
        same("run_name", "name"),
        same("save_strategy", "save_every", "`steps` or `no`"),
        same("save_steps", "save_every", "optimizer steps in TRL: divided by those of a step"),
        same("save_total_limit", "keep_checkpoints"),
        same("save_only_model", "models.actor.save_optimizer"),
        same("eval_strategy", "nodes.eval_gen.every", "`steps` or `no`"),
        same("eval_steps", "nodes.eval_gen.every", "optimizer steps in TRL: divided by those of a step"),
        same("eval_on_start", "nodes.eval_gen.after", "true is 0"),
        same("num_generations_eval", "nodes.eval_gen.group"),
        same("report_to", "report.wandb", "`wandb`; TensorBoard is always on"),
        same("project", "report.wandb"),
        same("full_determinism", "deterministic"),
        manual("eval_delay", "`nodes.eval_gen.after`"),
        manual("load_best_model_at_end", "`keep_best`"),
        manual("metric_for_best_model", "`keep_best`"),
        manual("greater_is_better", "`keep_best`"),
        manual("resume_from_checkpoint", "`hflow run --resume RUN`"),
        manual("env", "`env.NAME=VALUE`"),
        manual("push_to_hub", "`hflow export --push`"),
        manual("hub_*", note="`hflow export --push`"),
        manual("trackio_*", note="[trackers](../metrics.md#trackers)"),
        missing("log_completions_hub_repo"),
        automatic("log_completions", "`samples/step-N.jsonl`", "report.samples"),
        automatic("num_completions_to_print", "`samples/step-N.jsonl`", "report.samples"),
        automatic("log_unique_prompts", "`samples/step-N.jsonl`", "report.samples"),
        automatic("log_multimodal", "texts only"),
        automatic("logging_*", "every step is logged: `metrics.jsonl`"),
        automatic("log_*", "every step is logged: `metrics.jsonl`"),
        automatic("include_num_input_tokens_seen", "every step is logged: `metrics.jsonl`"),
        automatic("disable_tqdm", "plain lines where the output is no terminal"),
        automatic("per_device_eval_batch_size", "an evaluation is a stream of its own"),
        automatic("eval_*", "an evaluation is a stream of its own"),
        automatic("prediction_loss_only", "an evaluation is a stream of its own"),
        automatic("batch_eval_metrics", "an evaluation is a stream of its own"),
        automatic("include_for_metrics", "an evaluation is a stream of its own"),
        automatic("bf16_full_eval", "engines generate in the actor's precision"),
        automatic("fp16_full_eval", "engines generate in the actor's precision"),
        automatic("save_on_each_node", "checkpoints are written once"),
        automatic("enable_jit_checkpoint", "SIGTERM saves a run"),
        automatic("restore_callback_states_from_checkpoint", "a resumed run loads all"),
        automatic("do_*", "from the recipe"),
        automatic("local_rank", "workers have their ranks from the plan"),
        automatic("fsdp*", _PLACED, "models.actor.layout"),
        automatic("deepspeed", _PLACED, "models.actor.layout"),
        automatic("parallelism_config", _PLACED, "models.actor.layout"),
        automatic("accelerator_config", _PLACED, "models.actor.layout"),
        automatic("ddp_*", _PLACED, "models.actor.layout"),
        automatic("ignore_bias_buffers", _LAYERS),
        automatic("torch_empty_cache_steps", "the plan decides: `hflow plan`, section memory"),
        automatic("use_cpu", "from `cluster`", "cluster"),
        manual("debug", "[debugging](../debug.md)"),
        manual("skip_memory_metrics", "`hflow plan`, section memory"),
    ],
}


def translate(given: Given, cluster: str | None) -> RecipeDraft:
    """Return the recipe of a configuration of TRL, with a process for each device; None: one H100."""
    draft = RecipeDraft()
    processes = num_devices(cluster or "h100-1x1")
    if cluster is None:
        note = (
            "one process is assumed: TRL's configuration does not have their number, on which batch depends; "
            "translate with --cluster, as in --cluster h100-1x8"
        )
        given.differs("per_device_train_batch_size", note)
    draft.set("cluster", cluster or "h100-1x1")
    draft.loss = _loss_node(given)
    _batches(given, draft, processes)
    _advantages(given, draft)
    _loss(given, draft)
    _correction(given, draft)
    _generation(given, draft, processes)
    updates = draft.settings[f"nodes.{draft.loss}.minibatches"] * draft.settings[f"nodes.{draft.loss}.epochs"]
    steps = _run(given, draft, updates)
    _model_settings(given, draft)
    _optimizer_settings(given, draft, None if steps is None else steps * updates)
    _data(given, draft)
    return draft


def _loss_node(given: Given) -> str:
    note = LOSSES.get(str(given.value("loss_type")), "").removeprefix("not translated: ")
    translated = [name for name, text in LOSSES.items() if text.startswith("`")]
    given.choice("loss_type", translated, f"{note or 'it is not known'}. The loss of dapo is written")
    level = given.choice("importance_sampling_level", ("token", "sequence"))
    kind = _loss_type(given)
    if kind == "luspo" and level == "token":
        note = "nodes.gspo_train has ratios of sequences, as LUSPO; set importance_sampling_level: sequence"
        given.differs("importance_sampling_level", note)
    if kind == "luspo":
        return "gspo_train"
    if level == "sequence" and kind in _PPO_LOSSES:
        if kind != "grpo":
            note = (
                f"nodes.gspo_train is the mean over sequences, as of grpo; with {kind} long ones count more"
            )
            given.differs("importance_sampling_level", note)
        return "gspo_train"
    if level == "sequence" and kind != "sapo":
        given.leave("importance_sampling_level", f"nodes.{kind}_train has no ratios of whole sequences")
    if kind in _PPO_LOSSES and (given.number("top_entropy_quantile") or 1) < 1:
        return "high_entropy_train"
    return f"{kind}_train" if kind in ("cispo", "sapo", "vespo") else "actor_train"


def _loss_type(given: Given) -> str:
    kind = str(given.value("loss_type"))
    return kind if LOSSES.get(kind, "").startswith("`") else "dapo"


def _batches(given: Given, draft: RecipeDraft, processes: int) -> None:
    group = given.whole("num_generations") or 8
    per_pass = (given.whole("per_device_train_batch_size") or 8) * processes
    accumulated = given.whole("gradient_accumulation_steps") or 1
    completions = given.whole("generation_batch_size")
    if completions is None:
        completions = per_pass * (given.whole("steps_per_generation") or accumulated)
    passes = max(1, completions // per_pass)
    epochs = given.whole("num_iterations") or 1
    minibatches = max(1, passes // accumulated)
    if passes < accumulated:
        completions = per_pass * accumulated
        key = "generation_batch_size" if given.is_set("generation_batch_size") else "steps_per_generation"
        given.differs(key, "one optimizer step trains several generation batches; they are one batch here")
        if epochs > 1:
            given.leave(
                "num_iterations", "it is not translated where a step trains several generation batches"
            )
            epochs = 1
    elif passes % accumulated:
        note = f"{passes} passes cannot be divided by it; {minibatches} minibatches are written"
        given.leave("gradient_accumulation_steps", note)
    if completions % group:
        given.leave("num_generations", f"{completions} completions of a batch cannot be divided by it")
    if minibatches > 1 and _loss_type(given) in ("dapo", "cispo", "vespo"):
        given.differs(
            "loss_type",
            "TRL divides by the mean number of tokens of a batch's minibatches, hflow by each own",
        )
    draft.set("batch", max(1, completions // group))
    draft.set("nodes.actor_gen.group", group)
    draft.set_loss(minibatches=minibatches, epochs=epochs)


def _advantages(given: Given, draft: RecipeDraft) -> None:
    scale = given.value("scale_rewards")
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if scale == "none":
        draft.set("nodes.group_advantage.std", False)
    elif scale == "batch":
        draft.set("nodes.group_advantage.std_over", "batch")
    elif scale != "group":
        given.leave("scale_rewards", "it is not known; group is written")
    note = "list nodes.gdpo_advantage, and a node for each reward; nodes.group_advantage is written"
    given.choice("multi_objective_aggregation", ("sum_then_normalize",), note)


def _loss(given: Given, draft: RecipeDraft) -> None:
    kind = _loss_type(given)
    if draft.loss == "sapo_train":
        draft.set_loss(
            tau_positive=given.number("sapo_temperature_pos"),
            tau_negative=given.number("sapo_temperature_neg"),
        )
        if given.value("importance_sampling_level") == "sequence":
            draft.set_loss(level="sequence")
    elif draft.loss == "vespo_train":
        ends = {"positive": "pos", "negative": "neg"}
        names = ("k", "lambda")
        draft.set_loss(
            **{f"{n}_{ours}": given.number(f"vespo_{n}_{end}") for ours, end in ends.items() for n in names}
        )
    elif draft.loss == "cispo_train":
        _cispo_range(given, draft)
    else:
        _clip_range(given, draft)
    reductions = {
        "grpo": "seq-mean-token-mean",
        "sapo": "seq-mean-token-mean",
        "dr_grpo": _constant_reduction(given, draft) if kind == "dr_grpo" else "",
    }
    reduction = "seq-mean" if draft.loss == "gspo_train" else reductions.get(kind, "token-mean")
    draft.set_loss(reduce=reduction)
    if kind == "bnpo":
        given.differs("loss_type", "the mean is over the tokens of a minibatch here, of a micro-batch in TRL")
    if kind == "luspo":
        draft.set_loss(by_length=True)
    _kl(given, draft)
    _masks(given, draft)
    entropy = given.number("entropy_coef")
    if entropy and draft.loss == "gspo_train":
        given.leave("entropy_coef", "nodes.gspo_train has no entropy bonus")
    elif entropy:
        draft.set_loss(entropy_coef=entropy)
        if reduction != "token-mean":
            given.differs(
                "entropy_coef",
                f"the entropy is reduced by {reduction} here, and by the mean over tokens in TRL",
            )
    if given.flag("mask_truncated_completions"):
        draft.masks_truncated = True
        draft.set_loss(mask="ended")
        if reduction.startswith("seq-mean") or kind == "dr_grpo":
            note = "cut-off answers do not count in the number of sequences here, and do in TRL"
            if reduction.startswith("seq-mean"):
                given.differs("mask_truncated_completions", note)


def _masks(given: Given, draft: RecipeDraft) -> None:
    """Set which tokens and sequences have no loss."""
    limit = given.number("off_policy_mask_threshold")
    if limit is not None and limit <= 0:
        given.leave("off_policy_mask_threshold", "it is more than 0 here")
    elif limit is not None:
        draft.set_loss(off_policy_limit=limit)
        if not given.flag("use_vllm"):
            note = "the drift is measured from the engine's log-probs here, from recomputed ones in TRL"
            given.differs("off_policy_mask_threshold", note)
    share = given.number("top_entropy_quantile")
    if share is None or share >= 1:
        return
    if draft.loss != "high_entropy_train":
        given.leave("top_entropy_quantile", f"nodes.high_entropy_train has PPO's loss, not {draft.loss}'s")
        return
    draft.set_loss(share=share)
    note = "the tokens are chosen in a minibatch here, in each forward pass in TRL"
    if given.number("entropy_coef"):
        note += "; the entropy bonus is of all tokens here, of the chosen ones in TRL"
    given.differs("top_entropy_quantile", note)


def _cispo_range(given: Given, draft: RecipeDraft) -> None:
    high = given.number("epsilon_high")
    high = given.number("epsilon") if high is None else high
    if high is None or high < 1:
        given.leave(
            "epsilon_high",
            "cispo bounds the ratio itself by it, from above; clip_high=4.0, TRL's 5.0, is written",
        )
        high = 5.0
    draft.set_loss(clip=1.0, clip_high=high - 1)


def _clip_range(given: Given, draft: RecipeDraft) -> None:
    low, high, bound = (given.number(key) for key in ("epsilon", "epsilon_high", "delta"))
    high = low if high is None else high
    draft.set_loss(clip=low, clip_high=high)
    if bound is None:
        return
    if draft.loss == "high_entropy_train":
        given.leave("delta", "nodes.high_entropy_train has no dual_clip")
    elif bound < 1 + (high or 0):
        given.leave(
            "delta", "below 1 + epsilon_high it also bounds positive advantages, which dual_clip does not"
        )
    else:
        draft.set_loss(dual_clip=bound)


def _constant_reduction(given: Given, draft: RecipeDraft) -> str:
    """Return the reduction of Dr. GRPO: completions of a minibatch times the largest length."""
    samples = draft.settings["batch"] * draft.settings["nodes.actor_gen.group"]
    samples //= draft.settings[f"nodes.{draft.loss}.minibatches"]
    return f"token-sum/{samples * (given.whole('max_completion_length') or 512)}"


def _kl(given: Given, draft: RecipeDraft) -> None:
    beta = given.number("beta")
    if not beta:
        return
    if draft.loss == "gspo_train":
        given.leave("beta", "nodes.gspo_train has no KL; nodes.kl_reward is one in the reward")
        return
    draft.has_reference = True
    draft.set_loss(kl_coef=beta)
    if given.flag("use_bias_correction_kl"):
        draft.set_loss(kl_importance=True)
        note = "the KL is weighed by the ratio to the engine's log-probs here, and to recomputed ones in TRL"
        given.differs("use_bias_correction_kl", note)


def _correction(given: Given, draft: RecipeDraft) -> None:
    """Set how the loss treats the difference between the engine's and the trainer's log-probs."""
    corrects = given.flag("use_vllm") and given.flag("vllm_importance_sampling_correction")
    if draft.loss in ("gspo_train", "vespo_train"):
        draft.set_loss(prox="none")
        note = {
            "gspo_train": "nodes.gspo_train has its ratios relative to the engine's log-probs here; set "
            "prox=recompute to weigh answers by prox / behav",
            "vespo_train": "the ratio of a sequence is theta / behav here; TRL bounds its part prox / behav "
            "token by token",
        }[draft.loss]
        if given.flag("use_vllm"):
            given.differs("vllm_importance_sampling_correction", note)
        return
    draft.set_loss(prox="recompute")
    draft.weights = "behav_weights" if corrects else "unweighted"
    if not corrects:
        return
    modes = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
    level, _, outside = given.choice("vllm_importance_sampling_mode", modes).partition("_")
    lower, upper = (given.number(f"vllm_importance_sampling_clip_{end}") for end in ("min", "max"))
    old_bound = given.number("vllm_importance_sampling_cap")
    upper = upper if old_bound is None else old_bound
    draft.set("nodes.behav_weights.level", level)
    draft.set("nodes.behav_weights.lower", lower)
    draft.set("nodes.behav_weights.upper", upper)
    if lower is not None or upper is not None:
        draft.set("nodes.behav_weights.outside", outside)


def _generation(given: Given, draft: RecipeDraft, devices: int) -> None:
    length = given.whole("max_completion_length") or 512
    draft.set("nodes.actor_gen.max_tokens", length)
    draft.set("nodes.actor_gen.temperature", given.number("temperature"))
    set_sampling_limits(given, draft, "top_p", "top_k", "min_p")
    longest = given.whole("vllm_max_model_length")
    if longest is None:
        longest = length + 1024
        note = f"models.actor.gen.max_model_len={longest} leaves 1,024 tokens for a prompt; TRL has no limit"
        given.differs("vllm_max_model_length", note)
    draft.set("models.actor.gen.max_model_len", longest)
    kwargs = given.value("chat_template_kwargs")
    if kwargs:
        draft.set("models.actor.template_kwargs", kwargs)
    samples = draft.settings["batch"] * draft.settings["nodes.actor_gen.group"]
    draft.set("schedule.max_concurrent", min(samples, 256 * devices))
    if not given.flag("use_vllm"):
        return
    draft.set("models.actor.gen.engine", "vllm")
    if given.choice("vllm_mode", ("colocate", "server")) == "server":
        given.differs(
            "vllm_mode", "the GPUs of the server must be counted in cluster; the plan places the engines"
        )
        return
    ranks = given.whole("vllm_tensor_parallel_size") or 1
    if devices % ranks:
        note = f"{devices} devices cannot be divided by it; the plan chooses the layout"
        given.leave("vllm_tensor_parallel_size", note)
    else:
        draft.set("models.actor.gen.layout", f"d{devices // ranks}t{ranks}")


def _run(given: Given, draft: RecipeDraft, updates: int) -> int | None:
    """Set what concerns the run. Return its number of steps; None if it depends on the number of rows."""
    limit = given.whole("max_steps") or -1
    steps = None
    if limit > 0:
        steps = max(1, _in_steps(given, "max_steps", limit, updates))
        draft.set("steps", steps)
        given.ignore("num_train_epochs", "max_steps")
    else:
        epochs = given.number("num_train_epochs")
        note = (
            f"steps = {epochs} * rows / {draft.settings['batch']}; set it, as the number of rows is not known"
        )
        given.leave("num_train_epochs", note)
    if given.value("save_strategy") == "steps":
        every = given.number("save_steps")
        if every is not None and every >= 1:
            draft.set("save_every", _in_steps(given, "save_steps", int(every), updates))
        else:
            given.leave("save_steps", "a share of all steps; set save_every")
    elif given.value("save_strategy") != "no":
        given.leave("save_strategy", "set save_every")
    draft.set("keep_checkpoints", given.whole("save_total_limit"))
    draft.set("models.actor.save_optimizer", not given.flag("save_only_model"))
    draft.set("seed", given.whole("seed"))
    if given.flag("full_determinism"):
        draft.set("deterministic", True)
    for key, ours in (("output_dir", "out"), ("run_name", "name")):
        text = given.text(key)
        if text is not None:
            draft.set(ours, text if ours == "out" else text.replace("/", "-"))
    trackers = given.value("report_to")
    trackers = trackers if isinstance(trackers, list) else [trackers]
    if "wandb" in trackers:
        draft.set("report.wandb", given.text("project"))
    others = [str(tracker) for tracker in trackers if tracker not in ("wandb", "tensorboard", "none", None)]
    if others:
        given.leave("report_to", f"{', '.join(others)}: see report.mlflow and report.trackers")
    _evaluation(given, draft, updates)
    return steps


def _in_steps(given: Given, key: str, count: int, updates: int) -> int:
    """Return a number of optimizer steps as steps of the run, which have several."""
    if count % updates:
        given.differs(key, f"{count} optimizer steps are not a whole number of steps with {updates} each")
    return max(1, round(count / updates))


def _evaluation(given: Given, draft: RecipeDraft, updates: int) -> None:
    strategy = given.choice(
        "eval_strategy", ("steps", "no"), "no evaluation is written; see nodes.eval_gen.every"
    )
    if strategy != "steps":
        return
    every = given.number("eval_steps")
    if every is None or every < 1:
        given.leave("eval_steps", "a number of steps is expected; nodes.eval_gen.every=20 is written")
        every = 20 * updates
    draft.evaluates = True
    steps = _in_steps(given, "eval_steps", int(every), updates)
    draft.set("nodes.eval_gen.every", steps)
    if not given.flag("eval_on_start"):
        draft.set("nodes.eval_gen.after", steps)
    draft.set(
        "nodes.eval_gen.group", given.whole("num_generations_eval") or draft.settings["nodes.actor_gen.group"]
    )
    for name in ("max_tokens", "temperature"):
        draft.set(f"nodes.eval_gen.{name}", draft.settings[f"nodes.actor_gen.{name}"])


def _model_settings(given: Given, draft: RecipeDraft) -> None:
    if given.is_set("model_name_or_path"):
        revision = given.text("model_revision")
        set_model(
            given, draft, "model_name_or_path", "models.actor.path", None if revision == "main" else revision
        )
    else:
        given.leave("model_name_or_path", "set models.actor.path")
    in_bf16 = given.value("bf16")
    draft.set("models.actor.dtype", "bf16" if in_bf16 is None or given.flag("bf16") else "fp32")
    draft.set("models.actor.activation_checkpointing", given.flag("gradient_checkpointing"))
    if given.flag("torch_compile"):
        draft.set("models.actor.compile", True)
    if not given.flag("use_peft"):
        return
    draft.set("models.actor.lora.r", given.whole("lora_r"))
    draft.set("models.actor.lora.alpha", given.number("lora_alpha"))
    if given.flag("use_rslora"):
        draft.set("models.actor.lora.rslora", True)
    if given.flag("use_dora"):
        draft.set("models.actor.lora.dora", True)
    if given.flag("load_in_4bit"):
        draft.set("models.actor.lora.base", "nf4")
        if given.value("bnb_4bit_quant_type") != "nf4":
            given.leave("bnb_4bit_quant_type", "weights in 4 bits are nf4")
    targets = given.value("lora_target_modules")
    if of_experts := given.value("lora_target_parameters"):  # peft knows them by the ends of their names
        modules = [targets] if isinstance(targets, str) else targets or []
        targets = [*modules, *(".".join(name.split(".")[-2:]) for name in of_experts)]
    if targets is None:
        given.differs(
            "lora_target_modules", "all matrices of decoder layers here; PEFT chooses by the model's family"
        )
    else:
        draft.set("models.actor.lora.targets", targets)
    if given.number("lora_dropout"):
        given.leave("lora_dropout", "adapters have no dropout")


def _optimizer_settings(given: Given, draft: RecipeDraft, total: int | None) -> None:
    """Set the optimizer; `total` is the number of its steps in the run, if it is known."""
    ours = "models.actor.optim"
    names = {
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "clip_grad": "max_grad_norm",
    }
    for name, key in names.items():
        draft.set(f"{ours}.{name}", given.number(key))
    optimizer = _OPTIMIZERS[
        given.choice("optim", _OPTIMIZERS, "AdamW is written; see models.NAME.optim.name")
    ]
    if optimizer != "sgd":
        draft.set(f"{ours}.eps", given.number("adam_epsilon"))
        draft.set(f"{ours}.betas", [given.number("adam_beta1"), given.number("adam_beta2")])
    if optimizer != "adamw":
        draft.set(f"{ours}.name", optimizer)
    note = "linear is written; see models.NAME.optim.schedule"
    kind = given.choice("lr_scheduler_type", _SCHEDULES, note)
    draft.set(f"{ours}.schedule", _SCHEDULES[kind])
    if kind == "constant":  # it has no warm-up in transformers
        return
    warmup = given.number("warmup_steps") or 0
    if 0 < warmup < 1 and total is None:
        given.leave("warmup_steps", "a share of all optimizer steps, whose number is not known")
        warmup = 0
    draft.set(f"{ours}.warmup_steps", -int(-warmup * (total or 0) // 1) if warmup < 1 else int(warmup))


def _data(given: Given, draft: RecipeDraft) -> None:
    if not given.flag("shuffle_dataset"):
        draft.set("data.train.shuffle", False)
    name: Any = given.text("dataset_name")
    datasets = ["train", *(["heldout"] if draft.evaluates else [])]
    if name is None:
        given.leave("dataset_name", "set data.train.path")
        return
    given.differs(
        "dataset_name",
        "the column prompt has messages here; for texts without a chat template, use nodes.actor_gen",
    )
    for dataset, split in zip(datasets, ("train", "test"), strict=False):
        if name.startswith((".", "/", "~")) or name.endswith((".json", ".jsonl", ".parquet")):
            set_paths(given, draft, "dataset_name", f"data.{dataset}.path")
        elif "/" in name:
            config = given.text("dataset_config")
            draft.set(f"data.{dataset}.path", f"hf:{name}" + (f"/{config}" if config else ""))
            draft.set(f"data.{dataset}.split", given.text(f"dataset_{split}_split"))
        else:
            given.leave("dataset_name", f"set data.{dataset}.path to hf:OWNER/NAME, with the owner")
