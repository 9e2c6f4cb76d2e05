"""What a reader of a ledger must know before trusting its figures."""

from __future__ import annotations

from sim.catalog.gpus import GIB

from .fit import Fit
from .ops import total


def cautions(fit: Fit) -> list[str]:
    """Sentences, with numbers, on whatever about the account is unusual, unsafe or uncertain."""
    shape, device, settings, account = fit.model, fit.gpu, fit.settings, fit.account
    found = list(account.warnings)
    form = settings.weight_format
    if form is not None and form.compute == "fp8" and device.fp8_flops_per_s is None:
        found.append(
            f"{device.name} has no fp8 matrix units: fp8 weights save memory, and are multiplied in {settings.dtype}"
        )
    layout = account.layout
    if shape.has_window and not layout.is_hybrid and any(group.window is None for group in layout.groups):
        found.append(
            f"this release keeps every token of {shape.name}'s sliding-window layers: {account.kv_bytes_per_token} KV bytes a "
            f"token, where {shape.kv_bytes_per_token(settings.kv_cache_dtype, windowed=False)} would last"
        )
    if layout.padding_layers:
        places = len(layout.groups) * layout.layers_per_group
        found.append(f"{layout.padding_layers} of {places} layer places of a KV block are padding, and wasted")
    outside = device.total_bytes - account.budget_bytes
    if not settings.release.graphs_in_budget and account.graphs_bytes > outside - total(account.context):
        found.append(
            f"CUDA graphs (about {account.graphs_bytes / GIB:.2f} GiB) are captured on top of the budget, and only "
            f"{max(0, outside - total(account.context)) / GIB:.2f} GiB lie outside it: capture may run out of memory; "
            "lower gpu_memory_utilization"
        )
    found += [
        f"{phase.phase} of {phase.bytes / GIB:.2f} GiB is in no profile and above the {account.peak.bytes / GIB:.2f} GiB kept "
        "for activations: it can run out of memory; lower max_num_seqs"
        for phase in account.phases
        if phase.phase == "verification" and phase.bytes > account.peak.bytes
    ]
    if "total_bytes" in device.unverified:
        found.append(f"the physical memory of {device.name}, {device.total_gib:.2f} GiB, is not confirmed by a log")
    return found
