"""Borders where things plug in: the name of one of a kind occurs in its own folder and in few places."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hflow"

BORDERS = {
    "generation engine": (
        "(?i)vllm",
        "engines/vllm/",
        {
            "planner/plan/traits.py": "the registry",
            "base/validation.py": "a key of another library, which means the same",
            "cli/commands.py": "an example of `hflow serve`",
            "cli/runs.py": "the help of `hflow serve`",
            "doctor/gpus.py": "advice on two settings of GPUs",
            "engines/embedded/descriptor.py": "advice: another engine",
            "translate/trl.py": "keys of another library",
            "translate/verl.py": "keys of another library",
            "weights/channels/ipc/descriptor.py": "advice: what to try",
        },
    ),
    "training backend": (
        r"(?i)megatron(?![-_]core|_lm)",
        "training/megatron/",
        {
            "planner/plan/traits.py": "the registry",
            "cli/runs.py": "the help of `hflow twin`",
            "doctor/__init__.py": "a check of kernels",
            "doctor/gpus.py": "a check of kernels",
            "doctor/layer_check.py": "a check of kernels",
            "doctor/rank_groups.py": "its process groups, which the doctor tries",
            "engines/vllm/descriptor.py": "a trial of both",
            "translate/verl.py": "keys of another library",
            "types/kernels.py": "versions that fit Transformer Engine",
        },
    ),
    "weight channel": (
        r"(?<!pa\.)\bipc\b",
        "weights/channels/ipc/",
        {"planner/plan/channels.py": "the registry"},
    ),
    "optimizer": (
        "(?i)adamw",
        "training/optimizers/adamw",
        {
            "planner/plan/optimizers.py": "the registry",
            "base/validation.py": "a key of another library, which means the same",
            "config/schema.py": "the default",
            "training/optimizers/base.py": "megatron takes no other classes",
            "training/optimizers/muon/descriptor.py": "it updates what Muon does not",
            "training/optimizers/muon/optimizer.py": "it updates what Muon does not",
            "translate/trl.py": "keys of another library",
            "translate/verl.py": "keys of another library",
        },
    ),
    "recorded kind": (
        r"(?i)\b(routed_experts|routing_replay|routing_format)\b",
        "types/routed_experts.py",
        {
            "types/recorded.py": "the registry",
            "base/validation.py": "a key of another library, which means the same",
            "dsl/options.py": "its option",
            "engines/embedded/descriptor.py": "the engine records it",
            "engines/embedded/expert_recorder.py": "the engine records it",
            "engines/vllm/descriptor.py": "the engine records it",
            "engines/vllm/expert_rows.py": "the engine records it",
            "engines/vllm/hf_mapping.py": "a module of vLLM with this name",
            "engines/vllm/launch_options.py": "the engine records it",
            "engines/vllm/stepper.py": "the engine records it",
            "models/expert_replay.py": "routers that replay it",
            "training/loop/inputs.py": "batches for routers that replay it",
            "training/interface.py": "the meaning of a metric",
            "planner/checks/unrunnable.py": "models that cannot replay it",
            "doctor/layer_check.py": "a check of routers that replay it",
            "translate/verl.py": "keys of another library",
        },
    ),
    "recorded kind of samplers": (
        r"(?i)\bsampling_mask\b",
        "types/sampling_mask.py",
        {
            "types/recorded.py": "the registry",
            "engines/request.py": "what is drawn is recorded there",
            "engines/embedded/descriptor.py": "the engine records it",
            "engines/embedded/engine.py": "the engine records it",
            "engines/embedded/sampling.py": "the engine records it",
            "engines/vllm/descriptor.py": "the engine records it",
            "engines/vllm/kept_rows.py": "the engine records it",
            "engines/vllm/launch_options.py": "the engine records it",
            "engines/vllm/stepper.py": "the engine records it",
            "graph/check.py": "sampling that is not replayed",
            "graph/framework_reads.py": "where it is replayed",
            "planner/checks/unrunnable.py": "engines that need a limit",
            "training/loop/inputs.py": "batches that have it",
            "training/loop/kept_sets.py": "log-probs that replay it",
        },
    ),
    "loss of a policy": (
        "cispo",
        "algo/losses.py",
        {
            "algo/__init__.py": "the list of formulas",
            "nodes/__init__.py": "the list of nodes",
            "nodes/training.py": "the node",
            "dsl/bodies.py": "a hint for recipes that choose it by an option",
            "base/validation.py": "a key of another library, which means the same",
            "translate/trl.py": "keys of another library",
            "translate/verl.py": "keys of another library",
        },
    ),
    "tool-call format": (
        "(?i)hermes",
        "data/text/tool_formats/",
        {"dsl/options.py": "the text of the option"},
    ),
    "sandbox provider": (
        r"ProcessSandboxes|sandboxes\.process\b",
        "sandboxes/process/",
        {"types/sandbox.py": "the registry"},
    ),
    "sandbox provider elsewhere": (
        r"(Docker|E2B|Daytona)Sandboxes|sandboxes\.remote\b",
        "sandboxes/remote/",
        {"types/sandbox.py": "the registry"},
    ),
    "tracker": (
        "(?i)wandb",
        "trackers/wandb.py",
        {
            "trackers/registry.py": "the registry",
            "config/schema.py": "its key",
            "translate/trl.py": "keys of another library",
            "translate/verl.py": "keys of another library",
        },
    ),
}
"""Kind -> (one of it, its folder or file, the other places that name it: file -> why)."""


def places(pattern: str, own: str) -> Counter[str]:
    """Count lines of code (no comments, no docstrings) that name something, by file outside of its own."""
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        name, source = str(path.relative_to(PACKAGE)), path.read_text()
        if name.startswith(own) or not re.search(pattern, source):
            continue
        documented = {
            line
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        code = (tokenize.NAME, tokenize.STRING)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        lines = {t.start[0] for t in tokens if t.type in code and re.search(pattern, t.string)} - documented
        found[name] += len(lines)
    return +found


@pytest.mark.parametrize("kind", BORDERS)
def test_one_of_a_kind_is_named_in_its_folder_and_in_few_places(kind: str):
    pattern, own, others = BORDERS[kind]
    assert (PACKAGE / own).exists()
    assert set(places(pattern, own)) == set(others)


def test_kinds_of_devices_are_compared_in_one_place():
    """Elsewhere predicates of `base/devices.py` are called, which the pretend accelerator satisfies too."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(x, ast.Constant) and x.value == "cuda" for x in (node.left, *node.comparators))
    }
    assert found == {"base/devices.py", "training/megatron/cpu_shim.py"}  # the latter reads megatron's code
