"""Every configuration key of a run: its type, its default and its meaning.

`null` means "let the plan decide" or "none"; each key says which. The keys of `OPEN_SETTINGS` have a default
besides: the plan takes another value where the default does not fit, or takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from hflow.base.validation import CHECKED, DirectoryName, FilePath, FilePaths, FrozenDict, FrozenMapping, Int


def _int_if_whole(number: float) -> float:
    """Return whole numbers as int, so that reports say `max_staleness 2`."""
    return int(number) if number == int(number) else number


def _as_names(names: object) -> object:
    """Return a single name as the only one."""
    return (names,) if isinstance(names, str) else names


WholeOrFraction = Annotated[StrictFloat, AfterValidator(_int_if_whole)]


MAX_BATCH = 65_536
"""Groups of the largest batch. Planning takes time in proportion to a batch."""
MAX_SYNC_EVERY = 1_000
"""Steps between two weight syncs, all of which the plan's period looks at."""
MAX_SEED = 2**63 - 1
ONE_PROCESS = ("inproc", "debug")
"""Values of `workers` with which models and engines run in the process of the command."""
ALL_LINEAR = "all-linear"
"""The value of `LoraConfig.targets` that means every matrix of the decoder layers."""
OPEN_SETTINGS = (
    "schedule.max_concurrent",
    "models.NAME.backend",
    "models.NAME.tokens_per_microbatch",
    "models.NAME.activation_checkpointing",
    "models.NAME.offload",
    "models.NAME.zero_stage",
    "models.NAME.gen.max_running",
)
"""Keys that the plan decides if they are null or not set, besides those whose default is null."""
Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
"""Names, or a single one."""
Offload = Literal["none", "optimizer", "all"]
"""What of a model is in host memory while no node uses it."""
Beta = Annotated[StrictFloat, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=CHECKED)
class WeightGroupConfig:
    """Weights with a learning rate or a weight decay of their own: an entry of `models.NAME.optim.groups`."""

    match: str
    """A pattern of Hugging Face names, as in `*.bias` or `model.embed_tokens.*`."""
    lr: StrictFloat | None = Field(default=None, ge=0)
    """The learning rate of these weights after the warm-up; null: `optim.lr`."""
    weight_decay: StrictFloat | None = Field(default=None, ge=0)
    """The weight decay of these weights, vectors too; null: `optim.weight_decay` for matrices, none for
    vectors."""


@dataclass(frozen=True, config=CHECKED)
class OptimConfig:
    """An optimizer and its learning-rate schedule. Steps are optimizer steps, not those of the run."""

    name: str = "adamw"
    """The optimizer: `adamw`, `adamw_8bit`, `adamw_bf16`, `adamw_cpu`, `muon`, `sgd`, or one that another
    installed package adds."""
    lr: StrictFloat = Field(default=1e-6, ge=0)
    """Learning rate after the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the moving averages of the gradient and of its square."""
    eps: StrictFloat = Field(default=1e-8, ge=0)
    """Added to the root of the second moving average, so that no update is divided by 0."""
    momentum: Beta | None = None
    """Decay of the sum of gradients (`sgd`) or of their moving average (`muon`); null: 0 of `sgd`, 0.95 of
    `muon`."""
    nesterov: StrictBool | None = None
    """Step from where the momentum leads (Nesterov); null: `muon` does, `sgd` does not."""
    weight_decay: StrictFloat = Field(default=0.0, ge=0)
    """Decoupled weight decay: a step multiplies matrices by 1 - lr * weight_decay. Vectors (norms, biases)
    have none, unless they are in one of `groups`."""
    groups: tuple[WeightGroupConfig, ...] = ()
    """Weights with another learning rate or weight decay, by their names. The first entry that matches
    counts."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes from the end of the warm-up to the end of the run, where it is
    `min_lr_ratio * lr`."""
    min_lr_ratio: StrictFloat = Field(default=0.0, ge=0)
    """Final learning rate divided by `lr`, for `linear` and `cosine`."""
    clip_grad: StrictFloat = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 turns clipping off."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens if a gradient is not finite: the run stops and names the samples, or all ranks skip the
    update, which `NODE/skipped_updates` counts, and the ledger names its samples (reason `nonfinite`)."""


@dataclass(frozen=True, config=CHECKED)
class GenConfig:
    """How a model generates: `models.NAME.gen`."""

    engine: str | None = None
    """The generation engine, `embedded` or `vllm`; null: the plan decides, and gives the reason. It takes
    `vllm` on CUDA where it is installed and can serve the model, else `embedded`."""
    layout: str | None = None
    """Layout of the generating replica, such as `d4t1`; null: the plan decides."""
    group: str | None = None
    """Device group of the generating replica, or several, as in `a,b`; null: the plan decides."""
    transport: str = "auto"
    """How new weights reach engines that do not share the trainer's memory. `store`: Ray's object store.
    `disk`: files in the run's directory, which all machines must share. `shared`: shared memory of one
    machine. `collective`: broadcasts from device to device (NCCL; gloo on CPUs). `ipc`: the memory of a GPU
    that trainer and engine share. `auto`: the plan decides, and gives the reason. Other packages can add
    names."""
    delta: StrictBool = False
    """Send only what has changed since the last version, in the engine's dtype. Trainers keep a copy of what
    they sent, and engines of what they received."""
    max_running: Int = Field(default=256, ge=1)
    """Maximum number of sequences that one engine decodes at once; null: the plan decides, from 256 on."""
    max_model_len: Int = Field(default=2048, ge=2)
    """Maximum number of tokens of prompt and completion together."""
    cuda_graphs: StrictBool = True
    """Launch the kernels of a decode step on a GPU at once, as a CUDA graph. False: one by one
    (`enforce_eager` of vLLM), which takes no memory for graphs, but longer where few sequences run."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: a vLLM engine quantises the matrices of decoder layers whenever it loads weights, in blocks of
    128 x 128 with a scale each. Embeddings, output matrix, norms, biases and routers keep the model's dtype.
    Null: the engine computes in the model's dtype."""
    cache_dtype: Literal["fp8"] | None = None
    """`fp8`: a vLLM engine keeps keys and values in FP8 (E4M3) without a scale, so that 448 is the largest.
    Null: it keeps them in the model's dtype."""
    cache_gib: StrictFloat | None = Field(default=None, gt=0)
    """KV cache of each rank of an engine, in GiB; null: what the load needs, as far as the memory of the
    device allows. On a CPU the embedded engine has a slot for each of `max_running` sequences instead."""

    @property
    def precisions(self) -> dict[str, str]:
        """The keys by which an engine rounds to less than the model's dtype, where they are set."""
        keys = {"quantization": self.quantization, "cache_dtype": self.cache_dtype}
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def engine_options(self) -> dict[str, Any]:
        """What every engine is built with."""
        keys = "max_running", "max_model_len", "cuda_graphs"
        return {**{key: getattr(self, key) for key in keys}, **self.precisions}


@dataclass(frozen=True, config=CHECKED)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) of a trained model: `models.NAME.lora`. Only they are trained."""

    r: Int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: WholeOrFraction = Field(default=32, gt=0)
    """The adapters' output is scaled by alpha / r, or by alpha / sqrt(r) with `rslora`."""
    rslora: StrictBool = False
    """Scale by alpha / sqrt(r), so that the size of updates does not depend on r (Kalajdzievski 2023)."""
    dora: StrictBool = False
    """Learn the length of each row of a matrix apart from its direction, which A and B change (Liu et al.
    2024, DoRA)."""
    targets: Names = (ALL_LINEAR,)
    """Modules that get adapters, such as `[q_proj,v_proj]`; `all-linear`: all matrices of decoder layers.
    `embed_tokens` and `lm_head` are the embedding and the output matrix, where they are two;
    `experts.gate_up_proj` and `experts.down_proj` the matrices of all experts."""
    base: Literal["nf4"] | None = None
    """`nf4`: keep the frozen matrices of decoder layers in 4 bits (Dettmers et al. 2023, QLoRA), by
    bitsandbytes, whole on every rank; engines have the same rounded ones. Null: in `dtype`."""
    save_merged: StrictBool = False
    """Save also the merged model, as Hugging Face files in `merged/` beside the adapter."""

    def chosen(self, all_linear: Iterable[str]) -> Names:
        """Return the modules that get adapters, given those that `all-linear` means."""
        meant = tuple(all_linear)
        return tuple(dict.fromkeys(x for y in self.targets for x in (meant if y == ALL_LINEAR else (y,))))

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


@dataclass(frozen=True, config=CHECKED)
class BalanceConfig:
    """How the experts of a trained mixture are kept equally busy: `models.NAME.balance`."""

    coefficient: StrictFloat = Field(default=0.0, ge=0)
    """Factor of a loss that is added in every layer with experts: the sum of f * P over them, which is 1 if
    all have the same load. f is an expert's load relative to the mean, P its mean probability."""
    over: Literal["sequence", "batch"] | None = None
    """The tokens that f and P belong to. `sequence`: those of a sequence, of which the loss is the mean.
    `batch`: those of all sequences of an optimizer step, which a forward pass before the others counts. null:
    `sequence`."""
    bias_rate: StrictFloat = Field(default=0.0, ge=0)
    """What each optimizer step adds to the bias of an expert that was chosen less often than the mean, and
    takes from that of one chosen more often; for families whose routers choose by biased scores."""


@dataclass(frozen=True, config=CHECKED)
class ImagesConfig:
    """How a model that sees gets images: `models.NAME.images`."""

    min_pixels: Int | None = Field(default=None, ge=1)
    """Smaller images are enlarged to so many pixels; null: as the checkpoint says."""
    max_pixels: Int | None = Field(default=None, ge=1)
    """Larger images are made smaller, to so many pixels; null: as the checkpoint says. The tokens of an image
    are in proportion to its pixels."""

    def over(self, other: ImagesConfig) -> ImagesConfig:
        """Return these limits, with those of another model where there are none."""
        return ImagesConfig(self.min_pixels or other.min_pixels, self.max_pixels or other.max_pixels)


@dataclass(frozen=True, config=CHECKED)
class ModelConfig:
    """One model of the recipe: `models.NAME`."""

    path: FilePath | None = None
    """A model of the Hugging Face Hub, as in `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`, or a directory
    with a Hugging Face checkpoint: config, weights and tokenizer. What is a directory here means that."""
    architecture: FrozenMapping[str, Any] | None = None
    """A Hugging Face config as a mapping with `model_type`. Without `path`, weights are random. With `path`,
    the planner uses this while the checkpoint does not exist yet."""
    alphabet: str | None = None
    """Characters of a character tokenizer, for an `architecture` without a tokenizer of its own. A tokenizer
    in `path` is used instead."""
    chat_template: str | None = None
    """A Jinja chat template, or a file with one (Jinja, or `.json` with a key `chat_template`). A path in a
    YAML file is relative to that file. It replaces the template of the tokenizer, and that of the model it
    starts from."""
    template_kwargs: FrozenMapping[str, Any] = Field(default_factory=FrozenDict)
    """Variables of the chat template, as in `{enable_thinking: false}`, for every conversation. The template
    must use them."""
    backend: str = "torch"
    """The backend for training and inference: `torch` (transformers, data parallelism by FSDP2) or `megatron`
    (megatron-core: tensor, pipeline and data parallelism). null: `torch`, but on GPUs `megatron` for all
    models that leave it open if it is installed, with Transformer Engine, can run them, and makes a step at
    least 5 % shorter."""
    layout: str | None = None
    """Layout of the replica that trains or infers, such as `d2t2p1`; null: the plan decides."""
    group: str | None = None
    """Device group of that replica, or several, as in `a,b`; replicas of one group share its devices and take
    turns. null: the plan decides."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Precision of forward and backward pass; null: that of the model it is initialised from, else bf16 on
    CUDA and fp32 on CPUs. An optimizer's weights are fp32."""
    tokens_per_microbatch: Int = Field(default=16384, ge=1)
    """Maximum number of tokens that one forward pass computes. A prompt that answers share counts once.
    It does not change any result. null: the plan decides, from 16,384 on."""
    activation_checkpointing: StrictBool = False
    """Recompute activations in the backward pass instead of keeping them; null: the plan does where they do
    not fit otherwise."""
    offload_activations: StrictBool = False
    """Keep what `activation_checkpointing` does not recompute, the input of each layer, in (pinned) host
    memory until the backward pass needs it. For sequences so long that these inputs do not fit."""
    zero_stage: Literal[1, 2, 3] = 3
    """What the ranks of a sharded model divide while it trains, besides the optimizer's states (`torch`
    backend). 3: weights and gradients; every micro-batch gathers and scatters them. 2: gradients; weights are
    gathered once, and kept until the last micro-batch. 1: nothing; gradients too are summed over ranks once.
    Results change by rounding. null: the plan decides."""
    compile: StrictBool = False
    """Compile the decoder layers with `torch.compile` (`torch` backend). The first step takes tens of seconds
    longer, every machine needs a C++ compiler, and results change by rounding."""
    offload: Offload = "none"
    """What is kept in (pinned) host memory while no node uses the model, and copied back when its next node
    starts. `optimizer`: the optimizer's states, and with megatron the fp32 weights and gradients. `all`: the
    weights as well. It does not change any result. null: the plan decides, `none` if it fits."""
    save_optimizer: StrictBool = True
    """Save the optimizer state of a trained model with its checkpoints, in `shards/` beside the Hugging Face
    files. It takes 4 bytes per parameter and the states, 12 with AdamW. Every rank writes its part, so all
    machines must share `out`."""
    resume: StrictBool = False
    """Load weights and optimizer state from `shards/` in `path`. The layout and backend may differ from those
    that saved it."""
    kernels: Literal["auto", "torch", "transformer_engine"] = "auto"
    """What computes the layers of a megatron model: functions of torch, or modules of Transformer Engine,
    which fuse norms, activations and the products of experts. `auto`: Transformer Engine on CUDA where it is
    installed, for models in bf16; the plan gives the reason."""
    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Multiply the matrices of a megatron model's layers in FP8, forward and backward, by Transformer Engine.
    Weights, gradients and the optimizer's state stay as without it. `tensorwise`: a scale for each tensor, on
    Ada, Hopper and Blackwell; `blockwise`: one for 128 values, on Hopper with CUDA 12.9; `mxfp8`: one for 32
    values, on data center Blackwell. Null: multiply in `dtype`."""
    sequence_parallel: StrictBool | None = None
    """Use megatron's sequence parallelism; null: on CUDA, where it saves memory at no cost."""
    lora: LoraConfig | None = None
    """Train low-rank adapters beside frozen weights, as in `{r: 16, alpha: 32}`; null: train the weights."""
    base_of: str | None = None
    """A model with adapters, whose frozen weights this model uses in place of its own: with adapters of its
    own, or with none if it is frozen. Both are on the same devices, with the same layout; null: it has its
    own weights."""
    balance: BalanceConfig | None = None
    """Balance the load of a mixture's experts while it trains, as in `{coefficient: 1e-3}` or `{bias_rate:
    1e-3}`; null: the router is trained by the recipe's loss alone."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer of a trained model."""
    gen: GenConfig = Field(default_factory=GenConfig)
    """How the model generates."""
    freeze: Literal["vision"] | None = None
    """The part that is not trained: `vision`, the tower of a model that sees, with its projection. It has no
    gradients and no optimizer state; null: all of the model is trained."""
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    """How the model gets images, if the recipe declares it with `vision=True`."""

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16"]:
        """`dtype` where it is decided, else fp32."""
        return self.dtype or "fp32"

    def uses_sequence_parallel(self, on_cpu: bool, has_experts: bool) -> bool:
        """Return whether the tensor ranks of a training replica share the tokens between their matrices.

        They do in models with experts, as each sends its own tokens to them.
        """
        if has_experts:
            return True
        return not on_cpu if self.sequence_parallel is None else self.sequence_parallel


@dataclass(frozen=True, config=CHECKED)
class SourceConfig:
    """Where rows come from. Set either `path` or `generator`."""

    path: FilePaths = None
    """A `.jsonl` or `.parquet` file, a pattern such as `data/*.jsonl`, a directory that `save_to_disk` of the
    library `datasets` wrote, a dataset of the Hugging Face Hub as `hf:OWNER/NAME` or `hf:OWNER/NAME/CONFIG`
    (`@` and a branch, tag or commit may follow), or a list of these. In a YAML file it is relative to that
    file. The first 20,000 rows of each are checked before a run starts, others when they are read."""
    generator: str | None = None
    """A named generator of rows, such as `addition` or `reasoning-gym:chain_sum`, or the name of a function
    of the recipe that `@rows` decorates."""
    arguments: FrozenMapping[str, Any] = Field(default_factory=FrozenDict)
    """The arguments of a generator that has some, as in `{min_terms: 2}`."""
    split: str = "train"
    """The split to use of a generator, of a dataset of the Hub, or of what `save_to_disk` wrote. Of a Hub
    dataset it may be a part, such as `train[:10%]`. Files have no splits."""
    map: FrozenMapping[str, str] = Field(default_factory=FrozenDict)
    """The source's name of a column that the recipe declares, as in `{prompt: question}`."""
    limit: Int | None = Field(default=None, ge=1)
    """Maximum number of rows; null: all."""
    fetch_images: StrictBool = False
    """Whether images that rows name by the URL of a website are fetched, whenever a row is read."""


@dataclass(frozen=True, config=CHECKED)
class WeightedSourceConfig(SourceConfig):
    """One of several sources of a dataset: `data.NAME.sources.SOURCE`."""

    weight: StrictFloat = Field(default=1.0, gt=0)
    """Share of the trained rows, relative to the other sources. Evaluations read every row once."""


@dataclass(frozen=True, config=CHECKED)
class DataConfig(SourceConfig):
    """The rows of one dataset of the recipe: `data.NAME`. Set `path`, `generator` or `sources`."""

    sources: FrozenMapping[str, WeightedSourceConfig] = Field(default_factory=FrozenDict)
    """Several sources, by names of your own."""
    shuffle: StrictBool = True
    """Shuffle the rows of each source on every pass, seeded by `seed`."""
    sampler: str | None = None
    """What chooses the next row of the trained dataset from earlier results: `skip_settled`,
    `difficulty_pools`, or a function of the recipe that `@sampler` decorates; null: their order."""
    sampler_arguments: FrozenMapping[str, Any] = Field(default_factory=FrozenDict)
    """The arguments of the sampler, as in `{rest: 5}`."""


@dataclass(frozen=True, config=CHECKED)
class WorkloadImages:
    """Images of a prompt that the plan's estimates assume of models that see: `workload.images`."""

    count: Int = Field(default=1, ge=0)
    """Number of images of every prompt."""
    width: Int | None = Field(default=None, ge=1)
    """Pixels of a row, before a model's processor changes the size; null: 640, or where images would take
    more than half of `max_model_len`, a half of it, a quarter, and so on."""
    height: Int | None = Field(default=None, ge=1)
    """Pixels of a column; null: 480, or less where `width` is less."""


@dataclass(frozen=True, config=CHECKED)
class WorkloadConfig:
    """Lengths in tokens that the plan's estimates assume. The plan says which of them are hflow's guess."""

    prompt: Int | None = Field(default=None, ge=1)
    """Tokens of a prompt, those of its images included; null: what `max_tokens` leaves of `max_model_len`, at
    most 512 beside the images."""
    response_mean: StrictFloat | None = Field(default=None, ge=1)
    """Mean number of tokens of a response; null: half of `max_tokens`."""
    response_cv: StrictFloat | None = Field(default=None, ge=0)
    """Standard deviation of the response lengths divided by their mean; 0: all are equal, null: 0.6."""
    shares: FrozenMapping[str, Annotated[StrictFloat, Field(gt=0, le=1)]] = Field(default_factory=FrozenDict)
    """Fraction of the samples for which a field of `mask=` is true, as in `{is_math: 0.3}`. An infer node
    computes these only; it is assumed to compute all where none is given."""
    images: WorkloadImages = Field(default_factory=WorkloadImages)
    """Number and size of images, where a model sees."""


@dataclass(frozen=True, config=CHECKED)
class ScheduleConfig:
    """How far generation may run ahead of training, and what happens to stale samples: `schedule`."""

    max_staleness: WholeOrFraction = Field(default=0, ge=0, le=1_000_000)
    """Weight syncs by which a trained token may lag (eta): 0 is synchronous, 2 to 8 is typical. With 0.5,
    generation may start half of the next sync's groups early."""
    sync_every: StrictInt = Field(default=1, ge=1, le=MAX_SYNC_EVERY)
    """Steps between two weight syncs of the generation engines (s)."""
    max_concurrent: Int = Field(default=256, ge=1)
    """Maximum number of samples in flight, over all streams and engines; null: the plan decides: all that
    `max_staleness` allows, where the models' sizes are known."""
    interrupt: StrictBool = True
    """Whether a weight sync interrupts running samples, which keep their tokens and resume with the new
    weights (partial rollout). If false, engines finish running samples before they take new weights."""
    age_rule: StrictBool = True
    """Whether samples are dropped or aborted before they would train too old."""
    drop_older_than: Int | None = Field(default=None, ge=0)
    """Limit of the age rule, in versions; null: the lag that the plan certifies, ceil((eta + 1) s) - 1."""
    queue: Int | None = Field(default=None, ge=1)
    """Maximum number of accepted groups that wait for a batch; beyond it the oldest group is dropped.
    null: only admission limits them."""
    max_refused_per_step: Int = Field(default=1000, ge=0)
    """Groups that may be refused since the last batch was formed; with more, the run is saved and stops."""

    @property
    def runs_ahead(self) -> bool:
        """Whether generation may start a batch before the engines have the newest weights."""
        return self.max_staleness > 0 or self.sync_every > 1

    @property
    def steps_ahead(self) -> int:
        """Batches that generation may start ahead: eta s, rounded up."""
        return math.ceil(_rounded(self.max_staleness * self.sync_every))

    @property
    def splits_batch(self) -> bool:
        """Whether generation may start a part of a batch early, but not all of it."""
        return self.steps_ahead != _rounded(self.max_staleness * self.sync_every)

    @property
    def certified_lag(self) -> int:
        """The largest lag of a token whose group is never overtaken: L = ceil((eta + 1) s) - 1.

        A group admitted at the n-th sync is among the first `(eta + n + 1) * s * B`. Taken in the order of
        admission it trains at step `ceil((eta + n + 1) * s) - 1` at the latest, with weights of step `n * s`.
        """
        return self.sync_every + self.steps_ahead - 1

    def admission_limit(self, version: int, batch: int) -> int:
        """Return the groups that may be accepted or running in total under the weights of `version`.

        A fraction of eta is rounded down to whole groups.

        Args:
            version: steps completed in the weights that the engines hold.
            batch: groups per step (B).
        """
        groups_per_sync = self.sync_every * max(1, batch)
        num_syncs = version // self.sync_every
        num_ahead = math.floor(_rounded(self.max_staleness * groups_per_sync))
        return (num_syncs + 1) * groups_per_sync + num_ahead


def _rounded(product: float) -> float:
    """Remove the rounding error of a product of decimals, so that 0.7 * 10 is not more than 7."""
    return round(product, 6)


@dataclass(frozen=True, config=CHECKED)
class ReportConfig:
    """What a run shows while it runs, and where it is logged: `report`."""

    show: tuple[str, ...] | None = None
    """Metrics in the live panel and the plain lines, as names or globs of `metrics.jsonl`, such as
    `[time/*,actor_train/grad_norm]`; null: losses, scores of samples, entropy and lengths."""
    samples: Int = Field(default=8, ge=0, le=1000)
    """Samples of each batch and evaluation, and refused ones of each step, whose text is kept, in
    `samples/step-N.jsonl`, in time by hundreds of steps, and in TensorBoard; 0: none."""
    wandb: str | None = None
    """Project of Weights & Biases that the run is logged to, as PROJECT or ENTITY/PROJECT; null: none."""
    mlflow: str | None = None
    """Tracking URI of MLflow that the run is logged to, such as `http://HOST:5000` or `sqlite:///FILE.db`;
    null: none."""
    trackers: FrozenMapping[str, str] = Field(default_factory=FrozenDict)
    """Tracker that another installed package adds -> where it logs the run."""
    max_engine_kl: StrictFloat | None = Field(default=0.01, ge=0)
    """Warn when `NODE/engine_kl`, the KL between the engine's and the trainer's distribution with the same
    weights, is above this; null: never."""

    @property
    def targets(self) -> Mapping[str, str]:
        """Tracker -> where it logs the run."""
        own = {"wandb": self.wandb, "mlflow": self.mlflow}
        return {name: target for name, target in {**own, **self.trackers}.items() if target is not None}

    def without_trackers(self) -> ReportConfig:
        """Return the configuration of a run that no tracker logs."""
        return replace(self, wandb=None, mlflow=None, trackers=FrozenDict())


@dataclass(frozen=True, config=CHECKED)
class FaultsConfig:
    """What a run on Ray survives by itself: `faults`."""

    max_restarts: Int = Field(default=3, ge=0)
    """How often a run continues from its last checkpoint after a worker, an engine's process or a machine has
    failed. A new checkpoint starts the count again."""
    hang_seconds: StrictFloat | None = Field(default=60.0, ge=1)
    """Seconds after which a worker's process that does not answer counts as failed: it is stopped, or blocks
    Python's interpreter. It is killed then. null: only collectives notice it (`collective_timeout`)."""


@dataclass(frozen=True, config=CHECKED)
class ServiceConfig:
    """A remote service that bodies call, such as a judge: `services.NAME`. Its limits hold for the run."""

    url: str | None = None
    """The URL that paths are added to, such as `https://api.openai.com/v1`. It must be set."""
    model: str | None = None
    """The model of a chat API."""
    key_variable: str | None = None
    """The environment variable with the key of the service, such as `OPENAI_API_KEY`; null: it needs none."""
    requests_per_minute: Int | None = Field(default=None, ge=1)
    """Most requests that begin within any minute, further attempts included; null: any number."""
    tokens_per_minute: Int | None = Field(default=None, ge=1)
    """Most tokens within any minute, as replies report them in `usage`; null: any number."""
    connections: Int = Field(default=64, ge=1)
    """Most requests under way at once."""
    timeout: StrictFloat = Field(default=60.0, gt=0)
    """Seconds that one request may take."""
    patience: StrictFloat = Field(default=300.0, ge=0)
    """Seconds for which a request that fails is made again, waits included, but not those for limits."""
    backoff: StrictFloat = Field(default=1.0, ge=0)
    """Seconds before the first further attempt. Each wait is twice as long as the one before, up to a minute,
    a little random, and at least as long as the service asks for (`Retry-After`)."""
    budget: StrictFloat | None = Field(default=None, gt=0)
    """What all requests of the run may cost, at the prices below; null: there is no limit. The run is saved
    and ends when it is used up."""
    max_requests: Int | None = Field(default=None, ge=1)
    """Most requests of the run; null: any number. The run is saved and ends when they are used up."""
    request_price: StrictFloat = Field(default=0.0, ge=0)
    """Price of a request that succeeds."""
    input_price: StrictFloat = Field(default=0.0, ge=0)
    """Price of a million tokens that the service reads."""
    output_price: StrictFloat = Field(default=0.0, ge=0)
    """Price of a million tokens that the service writes."""


@dataclass(frozen=True, config=CHECKED)
class RunConfig:
    """The whole configuration of a run."""

    name: DirectoryName
    """Name of the run, by default the recipe's file name. Results are written to OUT/NAME/TIME."""
    out: FilePath = "runs"
    """Directory of results. All paths are relative to the working directory, except those of `data` in a YAML
    file, which are relative to that file."""
    seed: StrictInt = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of data order, sampling, minibatches and random weights."""
    deterministic: StrictBool = False
    """Make two runs with the same plan and versions equal bit for bit, also on GPUs, where it takes time:
    kernels and collectives add in a fixed order, samples have a fixed engine, and an operation of torch that
    cannot be repeated ends the run. It needs a synchronous `schedule`. The plan says what it does not cover.
    """
    steps: Int = Field(default=100, ge=1)
    """Number of training steps."""
    batch: StrictInt = Field(default=32, ge=1, le=MAX_BATCH)
    """Groups per step; a group is one prompt with its samples."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """How far generation may run ahead of training."""
    save_every: Int = Field(default=0, ge=0)
    """Training steps between two checkpoints; 0: only `save_minutes` and the end of the run decide."""
    save_minutes: StrictFloat = Field(default=10.0, ge=0)
    """Minutes between two checkpoints, besides those of `save_every`; 0: there are no others."""
    keep_checkpoints: Int | None = Field(default=2, ge=1)
    """Number of the newest checkpoints to keep; null: all."""
    keep_best: str | None = None
    """A metric of `metrics.jsonl`, such as `eval_gen/reward`, whose highest value chooses a checkpoint that
    is kept too, as `checkpoints/best`; with a `-` before the name the lowest. It needs `save_every`."""
    report: ReportConfig = Field(default_factory=ReportConfig)
    """What the run shows while it runs."""
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    """What a run survives by itself."""
    workers: Literal["ray", "inproc", "debug"] = "ray"
    """Where workers run: in processes that Ray starts (`ray`), or all in this process (`inproc`). With
    `debug`, bodies of samples and groups run in this process too, without time limits, so that `breakpoint()`
    works."""
    env: FrozenMapping[str, str] = Field(default_factory=FrozenDict)
    """Environment variables of worker processes on Ray, as in `env.NCCL_DEBUG=INFO`. They replace those that
    backends set."""
    collective_timeout: StrictFloat = Field(default=600.0, ge=1)
    """Seconds that a rank waits in a collective. After that the run ends and names the missing ranks."""
    endpoint_host: str = "127.0.0.1"
    """The address that endpoints of episodes listen on; 0.0.0.0: all of the machine's, for agents that run on
    other machines."""
    cluster: str = "here"
    """Devices: `h100-8x8` is eight machines with eight H100 each, `h100-4x8+a100-80g-2x8` are machines of two
    kinds; a `cpu` device is one process. `here`: the GPUs of this machine, or its cores and memory."""
    cores: tuple[Int, ...] | None = None
    """Number of processor cores that each device's worker is bound to, as in `[6,2]`, or one number for all,
    as in `[4]`. Bound workers do not compete for cores; plans count with as many threads. null: those that
    train or infer on a GPU are bound to the cores on its socket, others not; plans count with one core."""
    network: str | None = None
    """The link between machines, such as `ib-ndr`; null: the device's usual one."""
    calibration: FilePath | None = None
    """File of what programs reach on these devices, as `hflow profile` writes it; null: shipped figures."""
    calibrate: FilePath | None = None
    """A run whose measured seconds correct the figures, and whose lengths hold where `workload` leaves them
    open: the directory of a run, or NAME for the latest run in `runs/NAME`; null: none."""
    device_memory_gib: StrictFloat | None = Field(default=None, ge=0, le=1_000_000)
    """Memory of one device that the plan may use; null: all of it."""
    placement: str | None = None
    """Devices and layouts in short form, as in `actor=0-3:d2t2p1 actor.gen=4-7:d4`; the planner places other
    replicas. `auto`: it places all of them, and keeps `groups`, and the `group` and `layout` of models. null:
    these decide, and on accelerators where no model names a group it is `auto`."""
    groups: FrozenMapping[str, tuple[Int, ...]] = Field(default_factory=FrozenDict)
    """Devices of device groups that models name, as in `groups.gen=[4,5,6,7]`; empty: the plan decides."""
    models: FrozenMapping[str, ModelConfig] = Field(default_factory=FrozenDict)
    """By model name in the recipe."""
    data: FrozenMapping[str, DataConfig] = Field(default_factory=FrozenDict)
    """By dataset name in the recipe."""
    nodes: FrozenMapping[str, Mapping[str, Any]] = Field(default_factory=FrozenDict)
    """By node name in the recipe: knobs and decorator options, as in `nodes.actor_train.clip`."""
    services: FrozenMapping[str, ServiceConfig] = Field(default_factory=FrozenDict)
    """Remote services that bodies call, by names of your own, such as `services.judge.url`."""
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    """What the plan's estimates assume about the data."""
