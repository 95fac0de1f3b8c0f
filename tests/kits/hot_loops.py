"""Which code runs once per decode step or micro-batch, and a check that it does not wait for a device.

A wait leaves the device without work until the host has launched more. The check reads the source, so it also
sees branches that no test takes; `pretend_device.host_syncs` records the waits of what runs, of which some
cannot be seen in the source, such as boolean indexes.

A line that waits on purpose says how often, and a line whose values are on the host says so:

    norm.item()  # waits: once per update
    lengths.tolist()  # host: numpy

Both may also be the comment above a statement. One that is not needed is an error, too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

EVERYTHING = None
HOT: Mapping[str, Collection[str] | None] = {
    "algo/advantages.py": EVERYTHING,
    "algo/kl.py": EVERYTHING,
    "algo/losses.py": EVERYTHING,
    "algo/off_policy.py": EVERYTHING,
    "algo/pass_at_k.py": EVERYTHING,
    "algo/ratios.py": EVERYTHING,
    "algo/selection.py": EVERYTHING,
    "engines/embedded/step_images.py": EVERYTHING,
    "models/adapter.py": ("forward", "output_adapter"),
    "models/attention_kernels.py": EVERYTHING,
    "models/attention_sinks.py": EVERYTHING,
    "models/decode_kernels.py": EVERYTHING,
    "models/nf4.py": ("weight", "forward", "backward", "_whole"),
    "models/packed_attention.py": EVERYTHING,
    "models/expert_adapters.py": ("forward", "_forward", "multiply"),
    "models/expert_balance.py": EVERYTHING,
    "models/expert_replay.py": EVERYTHING,
    "training/loop/first_pass.py": EVERYTHING,
    "models/host_offload.py": ("to_host", "to_device", "take", "_return", "release", "copy", "limit_leaving"),
    "training/loop/infer.py": EVERYTHING,
    "training/loop/inputs.py": EVERYTHING,
    "training/loop/kept_sets.py": EVERYTHING,
    "training/optimizers/learning_rate.py": EVERYTHING,
    "vision/embedding.py": EVERYTHING,
    "training/loop/loss.py": EVERYTHING,
    "training/loop/logit_kernels.py": EVERYTHING,
    "training/loop/logprobs.py": EVERYTHING,
    "training/loop/metrics.py": EVERYTHING,
    "training/loop/microbatches.py": EVERYTHING,
    "training/loop/output.py": EVERYTHING,
    "training/loop/prox.py": EVERYTHING,
    "models/seeds.py": EVERYTHING,
    "training/loop/train.py": EVERYTHING,
    "engines/embedded/attention.py": EVERYTHING,
    "engines/embedded/cache.py": EVERYTHING,
    "engines/embedded/decode_graphs.py": EVERYTHING,
    "engines/embedded/dense_decoder.py": ("__call__",),
    "engines/embedded/engine.py": EVERYTHING,
    "engines/embedded/expert_recorder.py": EVERYTHING,
    "engines/embedded/packing.py": EVERYTHING,
    "engines/embedded/pages.py": EVERYTHING,
    "engines/embedded/replay.py": EVERYTHING,
    "engines/embedded/sampling.py": EVERYTHING,
    "training/megatron/adapters.py": EVERYTHING,
    "training/megatron/attention.py": EVERYTHING,
    "training/megatron/context_parallel.py": EVERYTHING,
    "training/megatron/experts.py": EVERYTHING,
    "training/megatron/hf_ranges.py": EVERYTHING,
    "training/megatron/latent_attention.py": EVERYTHING,
    "training/megatron/layers.py": EVERYTHING,
    "training/megatron/model.py": (
        "inputs",
        "replayed_here",
        "logits",
        "zero_loss",
        "_postprocess",
        "_prepare_embedded",
        "_for_logits",
        "_for_scalar_head",
    ),
    "training/megatron/optimizer.py": EVERYTHING,
    "training/megatron/runner.py": EVERYTHING,
    "training/megatron/schedule.py": EVERYTHING,
    "training/megatron/te_layers.py": EVERYTHING,
    "training/megatron/stage_output.py": EVERYTHING,
    "training/fsdp/backend.py": ("train", "infer"),
    "training/fsdp/sharding.py": ("_run_cast",),
    "models/heads.py": ("forward",),
    "training/fsdp/optimizer.py": EVERYTHING,
    "training/gradient_norm.py": EVERYTHING,
    "training/optimizers/adamw/optimizer.py": EVERYTHING,
    "training/optimizers/adamw_8bit/optimizer.py": EVERYTHING,
    "training/optimizers/adamw_bf16/optimizer.py": EVERYTHING,
    "training/optimizers/adamw_cpu/optimizer.py": EVERYTHING,
    "training/optimizers/base.py": EVERYTHING,
    "training/optimizers/muon/optimizer.py": EVERYTHING,
    "training/optimizers/sgd/optimizer.py": EVERYTHING,
    "training/optimizers/whole_matrices.py": EVERYTHING,
    "training/fsdp/packed_model.py": EVERYTHING,
    "training/fsdp/runner.py": EVERYTHING,
    "training/fsdp/shard_collectives.py": EVERYTHING,
    "data/batches/batch_arguments.py": EVERYTHING,
    "data/batches/device_copy.py": EVERYTHING,
    "data/batches/shared_prefix.py": EVERYTHING,
    "data/batches/unpack_returns.py": EVERYTHING,
    "types/sequences.py": EVERYTHING,
    "weights/adapters.py": EVERYTHING,
    "weights/buckets.py": EVERYTHING,
    "weights/checksum.py": EVERYTHING,
    "weights/delta.py": EVERYTHING,
    "weights/handover.py": EVERYTHING,
    "weights/incoming.py": EVERYTHING,
    "weights/loading.py": EVERYTHING,
    "weights/outgoing.py": EVERYTHING,
    "models/host_copy.py": ("host_payload", "pin", "unpin"),
    "weights/publisher.py": EVERYTHING,
}
"""File -> the functions that are hot; None: all of the file."""

WAITING_METHODS = frozenset(
    (
        *("item", "tolist", "numpy", "cpu", "cuda", "synchronize"),
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
    )
)
"""Methods, and functions of torch, whose result or its shape the host waits for."""
MAKERS = frozenset(("tensor", "as_tensor", "asarray"))
"""Functions of torch that make a tensor of values of the host: on a device they copy pageable memory."""
REDUCTIONS = frozenset(
    ("all", "any", "sum", "mean", "min", "max", "amin", "amax", "norm", "prod", "count_nonzero", "isfinite")
)
"""Methods whose results are often made numbers or conditions."""
NUMBERS = frozenset(("bool", "float", "int"))
HOST_MODULES = frozenset(("np", "math"))
"""Modules whose results are on the host."""
HOST_TYPES = re.compile(r"\b(?:NDArray|ndarray|Ints|Rows)\b")
"""Annotations of values on the host."""

MARK = re.compile(r"#\s*(?:waits|host)\b(?P<reason>.*)")
MARK_WITH_REASON = re.compile(r"#\s*(?:waits|host): \w.*")


@dataclass(frozen=True)
class Wait:
    """A line that may wait for the device, or a mark without a reason or without such a line."""

    line: int
    what: str


def find_waits(source: str, functions: Collection[str] | None = EVERYTHING) -> list[Wait]:
    """Return the lines of a module that may wait for the device and do not say so, and useless marks."""
    tree, marks = ast.parse(source), _marks(source)
    found, used = [], set()
    for scope in _hot_scopes(tree, functions):
        for statement, node, what in _Scope(tree, scope).waits():
            # Its own lines, and the comment above the statement.
            lines = {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            own = lines & marks.keys()
            above = statement.lineno - 1
            if not own and above in marks and marks[above].is_alone:
                own = {above}
            used |= own
            if not any(marks[line].has_reason for line in own):
                found.append(Wait(node.lineno, what))
    spans = [(scope.lineno, scope.end_lineno) for scope in _hot_scopes(tree, functions) if scope is not tree]
    for line, mark in marks.items():
        is_inside = functions is EVERYTHING or any(start <= line <= end for start, end in spans)
        if is_inside and line not in used:
            found.append(Wait(line, "nothing waits here, so remove the mark"))
        elif is_inside and not mark.has_reason:
            found.append(Wait(line, "the mark has no reason"))
    return sorted(set(found), key=lambda wait: (wait.line, wait.what))


def missing_functions(source: str, functions: Collection[str]) -> set[str]:
    """Return the functions that a module does not have."""
    return {*functions} - {scope.name for scope in ast.walk(ast.parse(source)) if _is_function(scope)}


@dataclass(frozen=True)
class _Mark:
    is_alone: bool
    """Whether there is no code on the line."""
    has_reason: bool


def _marks(source: str) -> dict[int, _Mark]:
    """Return the marks by line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and MARK.match(token.string):
            is_alone = token.line.lstrip().startswith("#")
            found[token.start[0]] = _Mark(is_alone, bool(MARK_WITH_REASON.match(token.string)))
    return found


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _hot_scopes(tree: ast.Module, functions: Collection[str] | None) -> list[ast.AST]:
    if functions is EVERYTHING:
        return [tree]
    return [node for node in ast.walk(tree) if _is_function(node) and node.name in functions]


class _Scope:
    """A hot function, or a whole module."""

    def __init__(self, tree: ast.Module, scope: ast.AST) -> None:
        self._scope = scope
        functions = [node for node in ast.walk(tree) if _is_function(node)]
        self._functions = {id(node): function for function in functions for node in ast.walk(function)}
        """Node -> its innermost function, as inner functions come later."""
        outside = [node for node in ast.walk(tree) if id(node) not in self._functions]
        self._hosts = {0: _host_names(set(HOST_MODULES), outside)}
        """Function -> names of values on the host; 0: of the module."""
        for function in functions:
            arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            self._hosts[id(function)] = _host_names(self._hosts[0] - arguments, list(ast.walk(function)))

    def _is_of_host(self, node: ast.expr) -> bool:
        function = self._functions.get(id(node))
        return _is_host(node, self._hosts[id(function) if function else 0])

    def waits(self) -> Iterator[tuple[ast.stmt, ast.expr, str]]:
        """Yield expressions that may wait, with their statements."""
        for statement in ast.walk(self._scope):
            if not isinstance(statement, ast.stmt):
                continue
            conditions = [statement.test] if isinstance(statement, ast.If | ast.While | ast.Assert) else []
            for node in _expressions(statement):
                if isinstance(node, ast.Call) and (what := self._call(node)):
                    yield statement, node, what
                conditions += [node.test] if isinstance(node, ast.IfExp) else []
                conditions += node.ifs if isinstance(node, ast.comprehension) else []
            for condition in conditions:
                for part in _parts(condition):
                    if self._is_reduction(part):
                        yield statement, part, f"a condition of {ast.unparse(part.func)}()"

    def _call(self, node: ast.Call) -> str | None:
        """Return what a call is if it may wait."""
        if isinstance(node.func, ast.Name):
            if node.func.id not in NUMBERS or not node.args or self._is_of_host(node.args[0]):
                return None
            parts = ast.walk(node.args[0])
            if any(isinstance(part, ast.expr) and self._is_reduction(part) for part in parts):
                return f"{node.func.id}() of a tensor"
            return "bool() of what may be a tensor" if node.func.id == "bool" else None
        if not isinstance(node.func, ast.Attribute) or self._is_of_host(node.func.value):
            return None
        name, of_torch = node.func.attr, _is_torch(node.func.value)
        if name in WAITING_METHODS:
            return f".{name}()"
        if of_torch and name in MAKERS and _has_device(node, first=2):
            return f"torch.{name}() on a device"
        if of_torch and name == "where" and len(node.args) == 1:
            return "torch.where() of one argument"
        if name == "repeat_interleave" and not _has_fixed_size(node, of_torch):
            return "repeat_interleave() without output_size"
        if name == "to" and _has_device(node, first=0) and not _is_nonblocking(node):
            return ".to(device) without non_blocking"
        return None

    def _is_reduction(self, node: ast.expr) -> bool:
        """Return whether an expression is `x.any()`, where x may be a tensor."""
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        return is_method and node.func.attr in REDUCTIONS and not self._is_of_host(node.func.value)


def _host_names(known: set[str], nodes: list[ast.AST]) -> set[str]:
    """Return the names of a function's values on the host: by annotations, and by all that they are assigned.

    Args:
        known: names that are on the host already.
        nodes: of the function.
    """
    names, others = set(known), set()
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation and HOST_TYPES.search(ast.unparse(node.annotation)):
            names.add(node.arg)
    statements = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    for statement in sorted(statements, key=lambda node: node.lineno):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            for part, value in _pairs(target, statement.value):
                stored = {x.id for x in ast.walk(part) if isinstance(x, ast.Name) and _is_stored(x)}
                (names if _is_host(value, names) else others).update(stored)
    return names - others


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return what an assignment assigns: `a, b = c, d` assigns two values."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_host(node: ast.expr, names: set[str]) -> bool:
    """Return whether an expression is made of values on the host."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        return _is_host(node.value, names)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and _is_host(node.func.value, names)
    if isinstance(node, ast.UnaryOp):
        return _is_host(node.operand, names)
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    values = [part for part in parts if not isinstance(part, ast.Constant)]
    return bool(values) and all(_is_host(part, names) for part in values)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without those of statements inside of it."""
    rest: list[ast.AST] = [*ast.iter_child_nodes(statement)]
    while rest:
        node = rest.pop()
        if not isinstance(node, ast.stmt):
            yield node
            rest += ast.iter_child_nodes(node)


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of `a and not b`, and of `a.sum() > 0`."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _parts(test.operand)
    elif isinstance(test, ast.Compare):
        yield from (test.left, *test.comparators)
    else:
        yield test


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _has_device(node: ast.Call, first: int) -> bool:
    """Return whether a call has a device among its arguments: as keyword, or by its name."""
    named = any(keyword.arg == "device" for keyword in node.keywords)
    return named or any(map(_names_device, node.args[first:]))


def _names_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value != "meta"
    last = node.func if isinstance(node, ast.Call) else node
    name = last.attr if isinstance(last, ast.Attribute) else getattr(last, "id", "")
    return "device" in name


def _has_fixed_size(node: ast.Call, of_torch: bool) -> bool:
    """Return whether `repeat_interleave` has an output size, or repeats each row equally often."""
    if any(keyword.arg == "output_size" for keyword in node.keywords):
        return True
    repeats = [ast.unparse(argument) for argument in node.args[int(of_torch) :][:1]]
    return all(text[0].isdigit() or text.startswith("num_") or "shape" in text for text in repeats)


def _is_nonblocking(node: ast.Call) -> bool:
    values = [keyword.value for keyword in node.keywords if keyword.arg == "non_blocking"]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)
