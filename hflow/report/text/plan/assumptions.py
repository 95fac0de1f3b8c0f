"""The section on assumptions: lengths, figures of devices and links, and what is unknown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hflow.planner.plan.calibration import Calibration
from hflow.planner.plan.cluster import ClusterSpec, used_links
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.workload import Workload, expected_max
from hflow.report.formatting import count_text, share_text
from hflow.report.text.section import NO_FIGURES, Section

NOTE = "Estimates are as good as these numbers: bytes and seconds above follow from them."


def assumptions_section(plan: Plan, width: int) -> Section:
    """Return a line for each number, and for each thing that could not be estimated."""
    if plan.forecast is None:
        return Section("Assumptions", absent=NO_FIGURES)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for label, value in _rows(plan):
        grid.add_row(Text(label), Text(value))
    return Section("Assumptions", NOTE, (grid,))


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    assert plan.forecast is not None
    for stream, lengths in plan.forecast.workload:
        yield f"lengths of {stream}", lengths_text(lengths)
    if plan.hardware is not None:
        yield from _hardware(plan.hardware, plan.cluster)
    for line in plan.forecast.missing:
        yield "not estimated", line


def lengths_text(lengths: Workload) -> str:
    """Return the lengths of prompts and responses, and where the numbers come from."""
    mean, most = count_text(expected_max(lengths, 1)), count_text(lengths.max_response)
    tokens = f"prompts of {count_text(lengths.prompt)} tokens, responses of {mean} on average"
    spread = f"(deviation {share_text(lengths.response_cv)}), at most {most}"
    origin = (
        "assumed; set workload.prompt, .response_mean, .response_cv"
        if lengths.is_assumed
        else "set by workload, or measured by the run of calibrate"
    )
    return f"{tokens} {spread}; {origin}"


def _hardware(hardware: Hardware, cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    device, calibration = hardware.device, hardware.calibration
    rates = ", ".join(f"{count_text(device.tflops[dtype])} in {dtype}" for dtype in sorted(device.tflops))
    yield (
        device.name,
        f"TFLOP/s {rates}; memory {count_text(device.memory_gb_per_s)} GB/s; {device.overhead_gib:g} GiB for "
        "the runtime itself",
    )
    host = [(hardware.host, "to the host")] if device.type == "cuda" else []
    for link, where in (*used_links(cluster, hardware), *host):
        yield (
            link.name,
            f"{count_text(link.gb_per_s)} GB/s a device {where}; {count_text(link.latency_us)} µs for the "
            "smallest message",
        )
    yield "calibration", f"{calibration_text(calibration)}. {reached_text(calibration)}"


def calibration_text(calibration: Calibration) -> str:
    """Return the calibration's name, its origin, and how far it missed on what it had not seen."""
    if not calibration.is_measured:
        return f"{calibration.name}, shipped figures ({calibration.source}); hflow profile measures your own"
    text = f"{calibration.name}, {calibration.source}"
    if missed := ", ".join(f"{part} by {share_text(error)}" for part, error in calibration.missed.items()):
        text += f"; on other measurements it missed {missed}"
    if calibration.unmeasured:
        text += f"; shipped figures for {', '.join(calibration.unmeasured)}"
    return text


def reached_text(calibration: Calibration) -> str:
    """Return the fractions of the data sheet's figures that programs reach."""
    matmul = calibration.matmul["bf16"].share
    return (
        f"Programs reach {share_text(matmul)} of the FLOP/s in large products, "
        f"{share_text(calibration.memory.decode)} of the memory bandwidth in decoding, "
        f"{share_text(calibration.intra.share)} of the links within machines and "
        f"{share_text(calibration.inter.share)} between them"
    )
