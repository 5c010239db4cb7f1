"""The report beside an artifact: `report.md` and figures, drawn from the manifest and `frontier.json` alone.

Figures, as far as there are data: gain per cost over the number of Patch layers, restore-one profile, error of the query
path per layer, quality by rank, loss by size of the codes. Files are PNG without dates: equal data give equal bytes.

`frontier.json` holds the finely traced frontier of policy `rd`, if it was asked for: `fingerprint` of the artifact,
`dense_bytes_per_token`, and `points`, a row of measures per ratio. It is no part of the artifact: servers do not read it, and
without it the figure shows the few rates that the manifest has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scd_trt.translator import Manifest

REPORT_FILE, FRONTIER_FILE = "report.md", "frontier.json"
MAX_FRONTIER_BYTES = 1 << 20
Points = Sequence[dict[str, Any]]
_REUSE_COLOR, _SCD_COLOR, _NEUTRAL = "#c1662f", "#2a6f97", "#8a8f98"


@dataclass(frozen=True)
class _Shown:
    """A manifest, and its figures with those that lie beside it."""

    manifest: Manifest
    quality: dict[str, Any]

    @property
    def patch_layers(self) -> tuple[int, ...]:
        return self.manifest.patch_layers


def exists(directory: Path) -> bool:
    """Whether the artifact's directory has a finished report."""
    return (directory / REPORT_FILE).exists()


def remove(directory: Path) -> None:
    """Delete the report of an artifact that is about to be replaced."""
    for name in (REPORT_FILE, FRONTIER_FILE, *(f"{figure}.png" for figure in _FIGURES)):
        (directory / name).unlink(missing_ok=True)


def write(manifest: Manifest, directory: Path, *, frontier: Points = ()) -> None:
    """Write the figures and then `report.md` into the artifact's directory.

    Args:
        frontier: the finely traced frontier; none leaves what an earlier run has traced of this artifact.
    """
    if frontier:
        _write_frontier(manifest, directory, frontier)
    shown = _Shown(manifest, manifest.quality | _finer(manifest, directory))
    drawn = [name for name, (key, _, _) in _FIGURES.items() if shown.quality.get(key)]
    for name in drawn:
        _draw(shown, name, directory / f"{name}.png")
    (directory / REPORT_FILE).write_text("\n".join(_markdown(shown, drawn)), encoding="utf-8")


def read_frontier(directory: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """The finely traced frontier of this artifact; empty if there is none, or one of another artifact."""
    path = directory / FRONTIER_FILE
    if not path.exists() or path.stat().st_size > MAX_FRONTIER_BYTES:
        return []
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        # half a file, left by a run that was cut: it is traced again
        return []
    if not isinstance(data, dict) or data.get("fingerprint") != manifest.fingerprint:
        return []
    points: list[dict[str, Any]] = data.get("points", [])
    return points


def _write_frontier(manifest: Manifest, directory: Path, frontier: Points) -> None:
    data = {
        "fingerprint": manifest.fingerprint,
        "dense_bytes_per_token": manifest.dense_bytes_per_token,
        "points": list(frontier),
    }
    (directory / FRONTIER_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _finer(manifest: Manifest, directory: Path) -> dict[str, Any]:
    points = read_frontier(directory, manifest)
    return {"frontier": points} if points else {}


def _draw(shown: _Shown, name: str, path: Path) -> None:
    _, _, plot = _FIGURES[name]
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plot(axes, shown)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)


def _plot_efficiency(axes: Axes, shown: _Shown) -> None:
    steps = shown.quality["selection"]
    counts = [len(step["layers"]) for step in steps]
    efficiency = [1e3 * step["efficiency"] for step in steps]
    axes.plot(counts, efficiency, "o-", color=_SCD_COLOR)
    for count, value, step in zip(counts, efficiency, steps, strict=True):
        axes.annotate(f"+{step['layers'][-1]}", (count, value), textcoords="offset points", xytext=(5, 6), fontsize=9)
    kept = len(shown.patch_layers)
    if kept:
        axes.axvline(kept, color=_NEUTRAL, linestyle=":")
        axes.text(kept, axes.get_ylim()[0], " kept", color=_NEUTRAL, va="bottom")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="Patch layers k (label: layer added)", ylabel="fall of KL per kB of Patch codes")
    axes.set_title("Efficiency dF(S_k) / cost(S_k) of adding Patch layers")


def _plot_profile(axes: Axes, shown: _Shown) -> None:
    gains = shown.quality["restore_one"]
    patched = set(shown.patch_layers)
    colors = [_SCD_COLOR if layer in patched else _NEUTRAL for layer in range(len(gains))]
    axes.bar(range(len(gains)), gains, color=colors)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer whose own cache is restored (blue: patched)", ylabel="fall of KL, nats per token")
    axes.set_title("Restore-one sensitivity over all-Reuse")


def _plot_query_error(axes: Axes, shown: _Shown) -> None:
    labels = {"reuse": ("Reuse only", _REUSE_COLOR), "scd": ("with Patch", _SCD_COLOR)}
    for row, errors in shown.quality["query_error"].items():
        label, color = labels[row]
        axes.plot(range(len(errors)), errors, "o-", markersize=4, label=label, color=color)
    for layer in shown.patch_layers:
        axes.axvline(layer, color=_NEUTRAL, linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer (dotted: patched)", ylabel="relative error of the consumer's queries")
    axes.set_title("Error of the query path on the scored tokens")
    axes.legend(frameon=False)


def _plot_sweep(axes: Axes, shown: _Shown) -> None:
    sweep = shown.quality["rank_sweep"]
    for row, label, color in (("reuse", "Reuse only", _REUSE_COLOR), ("scd", "with Patch", _SCD_COLOR)):
        sizes = [point[row]["bytes_per_token"] for point in sweep]
        axes.plot(sizes, [point[row]["kl"] for point in sweep], "o-", label=label, color=color)
    for point in sweep:
        where = (point["reuse"]["bytes_per_token"], point["reuse"]["kl"])
        axes.annotate(f"rank {point['rank']}", where, textcoords="offset points", xytext=(6, 4), fontsize=9)
    raw = shown.quality["controls"]["raw"]
    axes.plot([raw["bytes_per_token"]], [raw["kl"]], "s", color=_NEUTRAL, label="raw reuse")
    axes.set_yscale("log")
    axes.set(xlabel="bytes per token", ylabel="KL to the oracle, nats per token")
    axes.set_title("Quality by rank of the Reuse codes")
    axes.legend(frameon=False)


def _plot_frontier(axes: Axes, shown: _Shown) -> None:
    points, rows = shown.quality["frontier"], shown.quality["controls"]
    sizes = [point["bytes_per_token"] for point in points]
    axes.plot(sizes, [point["kl"] for point in points], "o-", color=_SCD_COLOR, label="rate-distortion codes")
    axes.plot(sizes, [point["kl_worst_decile"] for point in points], ":", color=_SCD_COLOR, label="worst decile")
    for point in points:
        where = (point["bytes_per_token"], point["kl"])
        axes.annotate(f"{point['ratio']:g}x", where, textcoords="offset points", xytext=(5, 5), fontsize=9)
    axes.plot([rows["rd"]["bytes_per_token"]], [rows["rd"]["kl"]], "D", color=_REUSE_COLOR, label="this artifact")
    if "raw" in rows:
        axes.plot([rows["raw"]["bytes_per_token"]], [rows["raw"]["kl"]], "s", color=_NEUTRAL, label="raw reuse")
    axes.axhline(rows["translation"]["kl"], linestyle="--", color=_NEUTRAL, linewidth=1, label="translation, 8 bits")
    axes.set(xscale="log", yscale="log", xlabel="bytes per token", ylabel="KL to the oracle, nats per token")
    axes.set_title("Loss by size of the codes")
    axes.legend(frameon=False)


_FIGURES: dict[str, tuple[str, str, Callable[[Axes, _Shown], None]]] = {
    "efficiency": ("selection", "Gain per cost over the number of Patch layers", _plot_efficiency),
    "restore_one": ("restore_one", "Which layers hurt most", _plot_profile),
    "query_error": ("query_error", "Error of the query path per layer", _plot_query_error),
    "rank_sweep": ("rank_sweep", "Quality by rank", _plot_sweep),
    "frontier": ("frontier", "Loss by size of the codes", _plot_frontier),
}


def _markdown(shown: _Shown, drawn: list[str]) -> list[str]:
    manifest, figures = shown.manifest, shown.quality
    size, dense = sum(manifest.bytes_per_token), manifest.dense_bytes_per_token
    lines = [
        f"# Translator {manifest.name}",
        "",
        f"- fingerprint `{manifest.fingerprint}`, policy `{manifest.policy}`",
        f"- {size} bytes per token, {dense} dense: {dense / size:.2f}x fewer",
        f"- patched layers: {', '.join(map(str, manifest.patch_layers)) or 'none'}",
        *_limit_line(figures, dense),
        *_sample_line(figures),
        *_aligner_line(figures),
        *_sources_line(manifest),
        *(f"- {name} is left out: {reason}" for name, reason in figures.get("omitted", {}).items()),
        "",
    ]
    rows = figures.get("controls", {})
    if rows:
        lines += ["## Held-out quality", "", *_table(rows), "", *_CAVEAT, ""]
    lines += [*_modes_section(figures), *_exact_section(figures)]
    for name in drawn:
        lines += [f"## {_FIGURES[name][1]}", "", f"![{_FIGURES[name][1]}]({name}.png)", ""]
    points = figures.get("frontier", [])
    if points:
        lines += [*_table(frontier_rows(points), first="fewer bytes"), ""]
    return lines


def limit_text(quality: dict[str, Any], dense_bytes: int) -> str:
    """Which limit was kept, with which measured figure, at how many bytes; empty where the artifact has no limit."""
    limit = quality.get("limit")
    if not limit:
        return ""
    size = limit["bytes_per_token"]
    sent = f"{size:,} bytes per token, {dense_bytes / size:.1f}x fewer than the cache"
    if limit["name"] == "bytes_per_token":
        asked = "no limit was stated; a tenth of the cache" if limit["is_default"] else "bytes_per_token"
        return f"{asked}, {limit['allowed']:,.0f} bytes, is kept: {sent}"
    if limit["name"] == "max_kl":
        return f"max_kl {limit['allowed']:g} is kept: measured {limit['measured']:.4g} nats per token, at {sent}"
    interval = f"95 % interval {limit['low']:.2%} to {limit['high']:.2%}; rule: {limit['rule']}"
    sample = f"{limit['num_questions']} questions about {limit['num_documents']} texts"
    return (
        f"max_relative_f1_loss {limit['allowed']:.2%} is kept: measured {limit['mean']:.2%} ({interval}) of F1 "
        f"{limit['oracle_f1']:.4f} on {sample}, at {sent}"
    )


def frontier_rows(points: Points) -> dict[str, dict[str, Any]]:
    """The frontier as a table: a row per ratio, modes in words."""
    return {
        f"{point['ratio']:g}x": _without(point, "ratio")
        | {"modes": ", ".join(f"{count} {mode}" for mode, count in point["modes"].items())}
        for point in points
    }


def _limit_line(quality: dict[str, Any], dense_bytes: int) -> list[str]:
    text = limit_text(quality, dense_bytes)
    return [f"- {text}"] if text else []


def _modes_section(quality: dict[str, Any]) -> list[str]:
    found = quality.get("modes")
    if not found:
        return []
    price = (
        f"Predicted nats per scored token, loss + lambda * bytes, lambda {found['nats_per_byte']:.3g} nats per byte."
    )
    rows = _table(mode_rows(found), first="layers")
    return ["## Modes of the groups of layers", "", *rows, "", price, rivals_text(found), ""]


def mode_rows(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The mode of each group, and what each of its modes was predicted to cost; a mode that it cannot have is empty."""
    groups = found["groups"]
    modes = dict.fromkeys(mode for group in groups for mode in group["predicted"])
    return {
        f"{start}..{stop - 1}": {"mode": group["mode"]}
        | {mode: _priced(group["predicted"].get(mode)) for mode in modes}
        for group in groups
        for start, stop in [group["layers"]]
    }


def _priced(candidate: dict[str, Any] | None) -> str:
    if candidate is None:
        return ""
    return f"{candidate['cost']:.4g} = {candidate['loss']:.4g} + {candidate['bytes_per_token']} B"


def rivals_text(found: dict[str, Any]) -> str:
    """Which tables of modes held-out text decided between."""
    if not found["measured"]:
        return "Transforms everywhere were predicted to cost least."
    measured = "; ".join(f"{', '.join(rival['modes'])}: KL {rival['kl']:.4g}" for rival in found["measured"])
    return f"Measured on held-out text, with the same limit on bytes: {measured}."


def _exact_section(quality: dict[str, Any]) -> list[str]:
    rows = {str(row["num_layers"]): _without(row, "num_layers") for row in quality.get("exact_layers", [])}
    if not rows:
        return []
    text = "Held-out KL if the consumer computed its first layers itself; measured only, nothing sends such codes."
    return ["## What exact first layers would buy", "", *_table(rows, first="exact layers"), "", text, ""]


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


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


def _sources_line(manifest: Manifest) -> list[str]:
    if not manifest.sources:
        return []
    parts = [
        f"{start}..{stop - 1} from {', '.join(map(str, sources))}"
        for (start, stop), sources in zip(manifest.groups, manifest.sources, strict=True)
    ]
    return [f"- layers are computed from the producer's: {'; '.join(parts)}"]


def _table(rows: dict[str, dict[str, Any]], *, first: str = "cache given to the consumer") -> list[str]:
    columns = list(next(iter(rows.values())))
    lines = [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, values in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(values[column]) for column in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


_CAVEAT = [
    "KL in nats per token from the consumer with its own cache (oracle); worst decile over sequences. Patch layers were",
    "chosen on the same held-out text, so the last rows are slightly optimistic: `scd-trt evaluate` measures on test text.",
]
