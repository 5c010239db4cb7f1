"""The report beside an artifact: `report.md` and figures, drawn from the manifest alone, so it can be made again.

Figures, as far as the manifest has their data: gain per cost over the number of Patch layers, restore-one profile, error of
the query path per layer, quality by rank. Files are PNG without dates: the same manifest gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scd_trt.translator import Manifest

REPORT_FILE = "report.md"
_REUSE_COLOR, _SCD_COLOR, _NEUTRAL = "#c1662f", "#2a6f97", "#8a8f98"


def exists(directory: Path) -> bool:
    """Whether the artifact's directory has a finished report."""
    return (directory / REPORT_FILE).exists()


def remove(directory: Path) -> None:
    """Delete the report of an artifact that is about to be replaced."""
    for name in (REPORT_FILE, *(f"{figure}.png" for figure in _FIGURES)):
        (directory / name).unlink(missing_ok=True)


def write(manifest: Manifest, directory: Path) -> None:
    """Write the figures and then `report.md` into the artifact's directory."""
    drawn = [name for name, (key, _, _) in _FIGURES.items() if manifest.quality.get(key)]
    for name in drawn:
        _draw(manifest, name, directory / f"{name}.png")
    (directory / REPORT_FILE).write_text("\n".join(_markdown(manifest, drawn)), encoding="utf-8")


def _draw(manifest: Manifest, name: str, path: Path) -> None:
    _, _, plot = _FIGURES[name]
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plot(axes, manifest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)


def _plot_efficiency(axes: Axes, manifest: Manifest) -> None:
    steps = manifest.quality["selection"]
    counts = [len(step["layers"]) for step in steps]
    efficiency = [1e3 * step["efficiency"] for step in steps]
    axes.plot(counts, efficiency, "o-", color=_SCD_COLOR)
    for count, value, step in zip(counts, efficiency, steps, strict=True):
        axes.annotate(f"+{step['layers'][-1]}", (count, value), textcoords="offset points", xytext=(5, 6), fontsize=9)
    kept = len(manifest.patch_layers)
    if kept:
        axes.axvline(kept, color=_NEUTRAL, linestyle=":")
        axes.text(kept, axes.get_ylim()[0], " kept", color=_NEUTRAL, va="bottom")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="Patch layers k (label: layer added)", ylabel="fall of KL per kB of Patch codes")
    axes.set_title("Efficiency dF(S_k) / cost(S_k) of adding Patch layers")


def _plot_profile(axes: Axes, manifest: Manifest) -> None:
    gains = manifest.quality["restore_one"]
    patched = set(manifest.patch_layers)
    colors = [_SCD_COLOR if layer in patched else _NEUTRAL for layer in range(len(gains))]
    axes.bar(range(len(gains)), gains, color=colors)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer whose own cache is restored (blue: patched)", ylabel="fall of KL, nats per token")
    axes.set_title("Restore-one sensitivity over all-Reuse")


def _plot_query_error(axes: Axes, manifest: Manifest) -> None:
    labels = {"reuse": ("Reuse only", _REUSE_COLOR), "scd": ("with Patch", _SCD_COLOR)}
    for row, errors in manifest.quality["query_error"].items():
        label, color = labels[row]
        axes.plot(range(len(errors)), errors, "o-", markersize=4, label=label, color=color)
    for layer in manifest.patch_layers:
        axes.axvline(layer, color=_NEUTRAL, linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer (dotted: patched)", ylabel="relative error of the consumer's queries")
    axes.set_title("Error of the query path on the scored tokens")
    axes.legend(frameon=False)


def _plot_sweep(axes: Axes, manifest: Manifest) -> None:
    sweep = manifest.quality["rank_sweep"]
    for row, label, color in (("reuse", "Reuse only", _REUSE_COLOR), ("scd", "with Patch", _SCD_COLOR)):
        sizes = [point[row]["bytes_per_token"] for point in sweep]
        axes.plot(sizes, [point[row]["kl"] for point in sweep], "o-", label=label, color=color)
    for point in sweep:
        where = (point["reuse"]["bytes_per_token"], point["reuse"]["kl"])
        axes.annotate(f"rank {point['rank']}", where, textcoords="offset points", xytext=(6, 4), fontsize=9)
    raw = manifest.quality["controls"]["raw"]
    axes.plot([raw["bytes_per_token"]], [raw["kl"]], "s", color=_NEUTRAL, label="raw reuse")
    axes.set_yscale("log")
    axes.set(xlabel="bytes per token", ylabel="KL to the oracle, nats per token")
    axes.set_title("Quality by rank of the Reuse codes")
    axes.legend(frameon=False)


def _plot_frontier(axes: Axes, manifest: Manifest) -> None:
    points, rows = manifest.quality["frontier"], manifest.quality["controls"]
    sizes = [point["bytes_per_token"] for point in points]
    axes.plot(sizes, [point["kl"] for point in points], "o-", color=_SCD_COLOR, label="rate-distortion codes")
    axes.plot(sizes, [point["kl_worst_decile"] for point in points], ":", color=_SCD_COLOR, label="worst decile")
    for point in points:
        where = (point["bytes_per_token"], point["kl"])
        axes.annotate(f"{point['ratio']:g}x", where, textcoords="offset points", xytext=(5, 5), fontsize=9)
    axes.plot([rows["rd"]["bytes_per_token"]], [rows["rd"]["kl"]], "D", color=_REUSE_COLOR, label="this artifact")
    axes.plot([rows["raw"]["bytes_per_token"]], [rows["raw"]["kl"]], "s", color=_NEUTRAL, label="raw reuse")
    axes.axhline(rows["translation"]["kl"], linestyle="--", color=_NEUTRAL, linewidth=1, label="translation, 8 bits")
    axes.set(xscale="log", yscale="log", xlabel="bytes per token", ylabel="KL to the oracle, nats per token")
    axes.set_title("Loss by size of the codes")
    axes.legend(frameon=False)


_FIGURES: dict[str, tuple[str, str, Callable[[Axes, Manifest], None]]] = {
    "efficiency": ("selection", "Gain per cost over the number of Patch layers", _plot_efficiency),
    "restore_one": ("restore_one", "Which layers hurt most", _plot_profile),
    "query_error": ("query_error", "Error of the query path per layer", _plot_query_error),
    "rank_sweep": ("rank_sweep", "Quality by rank", _plot_sweep),
    "frontier": ("frontier", "Loss by size of the codes", _plot_frontier),
}


def _markdown(manifest: Manifest, drawn: list[str]) -> list[str]:
    size, dense = sum(manifest.bytes_per_token), manifest.dense_bytes_per_token
    lines = [
        f"# Translator {manifest.name}",
        "",
        f"- fingerprint `{manifest.fingerprint}`, policy `{manifest.policy}`",
        f"- {size} bytes per token, {dense} dense: {dense / size:.2f}x fewer",
        f"- patched layers: {', '.join(map(str, manifest.patch_layers)) or 'none'}",
        *_sample_line(manifest.quality),
        *_aligner_line(manifest.quality),
        "",
    ]
    rows = manifest.quality.get("controls", {})
    if rows:
        lines += ["## Held-out quality", "", *_table(rows), "", *_CAVEAT, ""]
    for name in drawn:
        lines += [f"## {_FIGURES[name][1]}", "", f"![{_FIGURES[name][1]}]({name}.png)", ""]
    return lines


def _sample_line(quality: dict[str, Any]) -> list[str]:
    if "heldout_sequences" not in quality:
        return ["- nothing was measured: both models are the same, and rows are sent as they are"]
    return [
        f"- fitted on {quality['calibration_tokens']} tokens; measured on {quality['heldout_sequences']} sequences: "
        f"prefix of {quality['heldout_prefix_tokens']} tokens, {quality['heldout_scored_tokens']} scored"
    ]


def _aligner_line(quality: dict[str, Any]) -> list[str]:
    by_aligner = quality.get("aligner_kl")
    if not by_aligner:
        return []
    kept = min(by_aligner, key=lambda name: (by_aligner[name], name))
    text = ", ".join(f"{name} {value:.4f}" for name, value in by_aligner.items())
    return [f"- aligner: {kept} is kept (held-out KL: {text})"]


def _table(rows: dict[str, dict[str, Any]]) -> list[str]:
    columns = list(next(iter(rows.values())))
    lines = [f"| cache given to the consumer | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, values in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(values[column]) for column in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


_CAVEAT = [
    "KL in nats per token from the consumer with its own cache (oracle); worst decile over sequences. Patch layers were",
    "chosen on the same held-out text, so the last rows are slightly optimistic: `scd-trt evaluate` measures on test text.",
]
