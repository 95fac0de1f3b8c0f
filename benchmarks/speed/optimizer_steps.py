"""Seconds of a core in a step of each optimizer beside torch's fused AdamW, with the weights of SmolLM2-135M.

Both step in turn, with one thread of a CPU, in a process for each optimizer. The norm of the gradient and
clipping, which all share, are left out. Seconds are those of the process, which other programs change little.
Muon's products of matrices are also measured alone.

python -m benchmarks.speed.optimizer_steps [--rounds 3] [--layers 30]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable

import torch

from benchmarks.lib import harness
from hflow.config.schema import OptimConfig
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.plan.optimizers import OPTIMIZERS, optimizer_traits
from hflow.training.fsdp.backend import TorchModel
from hflow.training.optimizers.muon.iterations import NUM_ITERATIONS

SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
MOMENTUM = "sgd, momentum=0.9"
TORCH, PRODUCTS = "torch", "products"
"""torch's fused AdamW; the products of Newton-Schulz iterations."""


def seconds_of(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that the process computes."""
    start = time.process_time()
    step()
    return {"seconds": time.process_time() - start}


def products(weights: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Return a function that computes only the products of Muon's updates, each in its own memory."""
    factors = []
    for weight in weights:
        x = torch.randn(1, min(weight.shape), max(weight.shape)).bfloat16()
        gram = x.new_empty(1, x.shape[1], x.shape[1])
        factors.append((x, gram, torch.randn_like(gram), torch.empty_like(x)))

    def compute() -> None:
        for x, gram, polynomial, other in factors:
            for _ in range(NUM_ITERATIONS):
                torch.bmm(x, x.mT, out=gram)
                torch.bmm(polynomial, polynomial, out=gram)
                torch.bmm(polynomial, x, out=other)

    return compute


def measure(name: str, num_layers: int, rounds: int) -> None:
    """Print the seconds of the steps of an optimizer and of torch's AdamW."""
    torch.set_num_threads(1)
    options = {"name": "sgd", "momentum": 0.9} if name == MOMENTUM else {"name": name}
    settings = ModelSettings(
        name="m",
        trainable=True,
        architecture=SMOLLM2_135M | {"num_hidden_layers": num_layers},
        optim=OptimConfig(weight_decay=0.1, **options),  # type: ignore[arg-type]
        dtype="bf16",
    )
    optimizer = TorchModel(settings, RankPosition())._optimizer
    assert optimizer is not None
    weights = optimizer._shards
    gradients = [torch.randn_like(weight) for weight in weights]

    def step() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient  # Muon's is overwritten by updates, which take as long to average
        optimizer._update_matrices([optimizer._optimizer])
        optimizer._optimizer.step()

    other = torch.optim.AdamW(weights, fused=True)
    step()
    other.step()  # allocates states
    steps: dict[str, Callable[[], object]] = {TORCH: other.step, name: step}
    found, matrix_flops = {}, optimizer_traits(options["name"]).matrix_flops
    if matrix_flops is not None:
        groups = [group["params"] for group in optimizer._param_groups() if group["in_layers"]]
        matrices = [weight.detach() for params in groups for weight in params]
        steps[PRODUCTS] = products(matrices)
        found["gflop"] = sum(matrix_flops(*weight.shape) for weight in matrices) / 1e9
    rows = harness.interleave({key: lambda one=one: seconds_of(one) for key, one in steps.items()}, rounds)
    parameters = sum(weight.numel() for weight in weights)
    print(json.dumps({"parameters": parameters, **found, **harness.compare(rows, "seconds", TORCH)}))


def main() -> None:
    """Print a row for each optimizer, and write all to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--names", nargs="*", default=[*OPTIMIZERS, MOMENTUM])
    parser.add_argument("--measure")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.layers, args.rounds)
        return
    found = {}
    print("| optimizer | seconds | torch's fused AdamW | ratio |\n|-|-|-|-|")
    for name in args.names:
        options = ["--layers", str(args.layers), "--rounds", str(args.rounds), "--measure", name]
        found[name] = harness.run_once([sys.executable, "-m", "benchmarks.speed.optimizer_steps", *options])
        own, base = found[name][name], found[name][TORCH]
        ratio = own[f"ratio_to_{TORCH}"]
        print(f"| `{name}` | {own['median']:.3f} | {base['median']:.3f} | {ratio:.2f} |", flush=True)
        if alone := found[name].get(PRODUCTS):
            print(f"| its products, {found[name]['gflop']:.0f} GFLOP | {alone['median']:.3f} | | |")
    print(harness.write("optimizer-steps", {"arguments": harness.numbers(args), "steps": found}))


if __name__ == "__main__":
    main()
