"""The section on assumptions: lengths, figures of devices and links, and what is unknown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hflow.base.devices import is_gpu
from hflow.base.text import format_count, format_share
from hflow.planner.plan.calibration import Calibration, PublishedError
from hflow.planner.plan.cluster import ClusterSpec, used_links
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.workload import Workload, expected_max
from hflow.report.text.section import Section

NOTE = "Estimates are as good as these numbers: bytes and seconds above follow from them."


def assumptions_section(plan: Plan, width: int) -> Section:
    """Return a line for each number, and for each thing that could not be estimated."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    missing = (("not estimated", line) for line in plan.forecast.missing)
    for label, value in (*assumption_lines(plan), *missing):
        grid.add_row(Text(label), Text(value))
    return Section("Assumptions", NOTE, (grid,))


def assumption_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield a label and a line for each number that estimates use."""
    for stream, lengths in plan.forecast.workload:
        yield f"lengths of {stream}", lengths_text(lengths)
    shares = dict(plan.forecast.workload[0][1].shares) if plan.forecast.workload else {}
    for node in plan.graph.nodes:
        mask = node.spec.option("mask") if node.spec.verb == "infer" else None
        if mask is not None:
            yield f"samples of {node.name}", share_text(mask, shares.get(mask))
    for part, kind in zip(plan.cluster.kinds, plan.hardware.kinds, strict=True):
        yield from _hardware(kind, part)


def lengths_text(lengths: Workload) -> str:
    """Return the lengths of prompts and responses, and where the numbers come from."""
    mean, most = format_count(expected_max(lengths, 1)), format_count(lengths.max_response)
    seen = f" ({lengths.images.tokens:,} of them {lengths.images})" if lengths.images is not None else ""
    tokens = f"prompts of {format_count(lengths.prompt)} tokens{seen}, responses of {mean} on average"
    spread = f"(deviation {format_share(lengths.response_cv)}), at most {most}"
    origin = (
        "assumed; set workload.prompt, .response_mean, .response_cv"
        if lengths.is_assumed
        else "set by workload, or measured by the run of calibrate"
    )
    return f"{tokens} {spread}; {origin}"


def share_text(mask: str, share: float | None) -> str:
    """Return the fraction of samples that an infer node with `mask=` is assumed to compute."""
    if share is None:
        return f"all, though it computes only what {mask} marks; set workload.shares.{mask} to their fraction"
    return f"{format_share(share)}, which {mask} marks, set by workload.shares; memory is for all of them"


def _hardware(hardware: Hardware, cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    device, calibration = hardware.device, hardware.calibration
    rates = ", ".join(f"{format_count(device.tflops[dtype])} in {dtype}" for dtype in sorted(device.tflops))
    yield (
        device.name,
        f"TFLOP/s {rates}; memory {format_count(device.memory_gb_per_s)} GB/s; {device.overhead_gib:g} GiB "
        "for the runtime itself",
    )
    host = [(hardware.host, "to the host")] if is_gpu(device.type) else []
    for link, where in (*used_links(cluster, hardware), *host):
        yield (
            link.name,
            f"{format_count(link.gb_per_s)} GB/s a device {where}; {format_count(link.latency_us)} µs for "
            "the smallest message",
        )
    yield "calibration", f"{calibration_text(calibration)}. {reached_text(calibration)}"
    if not calibration.is_measured:
        yield "accuracy", accuracy_text(calibration, device.name)


def calibration_text(calibration: Calibration) -> str:
    """Return the calibration's name, its origin, and how far it missed on what it had not seen."""
    if not calibration.is_measured:
        return f"{calibration.name}, shipped figures ({calibration.source}); hflow profile measures your own"
    text = f"{calibration.name}, {calibration.source}"
    if missed := ", ".join(f"{part} by {format_share(error)}" for part, error in calibration.missed.items()):
        text += f"; on other measurements it missed {missed}"
    if calibration.unmeasured:
        text += f"; shipped figures for {', '.join(calibration.unmeasured)}"
    return text


def accuracy_text(calibration: Calibration, device: str) -> str:
    """Return the errors of plans with shipped figures against published runs, by kind of figure."""
    if not calibration.published:
        return f"no published run on {device} was compared"
    kinds = "; ".join(
        f"{kind} {format_share(one.error)} off ({one.rows} runs, {_direction(one)})"
        for kind, one in calibration.published.items()
    )
    return (
        f"of plans for devices like {device} against published runs of other programs, to which nothing was "
        f"fitted: {kinds}"
    )


def _direction(one: PublishedError) -> str:
    """Return the side on which half of the predictions are, or for gains how many have the right sign."""
    if one.right_signs is not None:
        return f"{one.right_signs} on the right side of 1"
    if round(one.ratio, 2) == 1:
        return "median as measured"
    return f"median {format_share(abs(1 - one.ratio))} {'too low' if one.ratio < 1 else 'too high'}"


def reached_text(calibration: Calibration) -> str:
    """Return the fractions of the data sheet's figures that programs reach."""
    matmul = calibration.matmul["bf16"].share
    return (
        f"Programs reach {format_share(matmul)} of the FLOP/s in large products, "
        f"{format_share(calibration.memory.decode)} of the memory bandwidth in decoding, "
        f"{format_share(calibration.intra.share)} of the links within machines and "
        f"{format_share(calibration.inter.share)} between them"
    )
