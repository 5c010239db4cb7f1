"""The translator: what `distill` writes and both servers load. A directory with `translator.json` and a safetensors file.

Owns: the fitted maps of every layer, the manifest (pair, modes, ranks, code layout, measured quality), the digest that
detects a truncated or edited file, and the fingerprint that two servers compare before any codes flow.

Shapes: F = num_kv_heads * head_dim of one layer, M hidden size, R rank. Maps act on rows: `y_TO = x_TI @ weight_IO + bias_O`.
Modes of a layer (METHOD, sections 1 and 2.4):

    reuse   codes  z_k[R_k] z_v[R_v]   affine maps of pre-RoPE keys and of values, into B's keys and values
    patch   codes  z_h[R_h]            affine map of A's normalised attention input; B's own projections are folded in
    raw     codes  k[F] v[F]           the pool's rows; keys keep A's RoPE where both models rotate alike, else pre-RoPE
    transform                          the layers of a group are coded together: quantised components of all its keys, then
                                       of all its values, packed as `bit_packing` says

Bytes of one token of any other layer: its code elements in `code_dtype` (raw: `raw_dtype`), little endian, in this order.
A *group* is a half-open range of the consumer's layers whose codes travel together; the codes of one group are
`[T, bytes_per_token]`. Its *sources* are the producer's layers that it is computed from: the same ones, or where the models'
shapes differ (or the fit chose others) those that the manifest names; such a group is always transformed.

Deliberately not here: fitting (distill), arithmetic on codes (codec). Nothing is pickled; a file is trusted only after its
digest, every tensor's shape and dtype, and the manifest's schema have been checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from scd_trt.bit_packing import BitLayout
from scd_trt.config import Dtype, ScdError
from scd_trt.model_spec import ModelSpec, same_shape

FORMAT_VERSION: Literal[3] = 3
MANIFEST_FILE = "translator.json"
TENSORS_FILE = "translator.safetensors"
MAX_MANIFEST_BYTES = 16 << 20
_ROW_TENSORS = ("mean_I", "encode_IS", "decode_SO", "bias_O")
_SINK_TENSORS = ("sink_in_KI", "sink_out_KO")
_GUARD_TENSOR = "guard_IQ"
MATRIX_DTYPE = torch.bfloat16
"""Dtype of the matrices of a `RowTransform`, by far the largest part of an artifact; all else is float32."""


class TranslatorError(ScdError):
    """The artifact is missing, damaged, of another version, or belongs to another pair."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReuseMode(_Frozen):
    """Ranks of a Reuse layer."""

    mode: Literal["reuse"] = "reuse"
    r_k: PositiveInt
    r_v: PositiveInt


class PatchMode(_Frozen):
    """Rank and aligner of a Patch layer."""

    mode: Literal["patch"] = "patch"
    r_h: PositiveInt
    mlp_hidden: PositiveInt | None = Field(None, description="hidden width of the aligner; None: affine")
    k_norm_eps: float | None = Field(None, description="epsilon of the consumer's key norm; None: it has none")


class RawMode(_Frozen):
    """A layer sent as it is."""

    mode: Literal["raw"] = "raw"


class TransformMode(_Frozen):
    """A layer coded together with the others of its group."""

    mode: Literal["transform"] = "transform"


LayerMode = Annotated[ReuseMode | PatchMode | RawMode | TransformMode, Field(discriminator="mode")]


class GuardLayout(_Frozen):
    """What the producer measures of a group's features, and how much of it is still usual."""

    num_directions: PositiveInt
    key_limit: PositiveFloat = Field(
        description="novelty of keys, mean of a block's tokens, beyond which it is not sent"
    )
    value_limit: PositiveFloat = Field(description="the same of values")


class GroupLayout(_Frozen):
    """How the components of a group transform are packed, and what they are computed from."""

    keys: BitLayout
    values: BitLayout
    num_sink_rows: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="rows that position 0 may have, of which its code is the number; 0: it is coded like any other"
    )
    guard: GuardLayout | None = Field(None, description="limits of the guard; None: the group is not guarded")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: components of keys, then of values."""
        return self.keys.bytes_per_token + self.values.bytes_per_token


class Manifest(_Frozen):
    """Content of `translator.json`."""

    format_version: Literal[3] = FORMAT_VERSION
    name: str
    policy: Literal["paper", "rd", "exact"]
    code_dtype: Dtype
    raw_dtype: Dtype
    producer: ModelSpec
    consumer: ModelSpec
    layers: tuple[LayerMode, ...]
    groups: tuple[tuple[int, int], ...] = Field(description="half-open layer ranges that travel together")
    transforms: tuple[GroupLayout | None, ...] = Field((), description="per group, or empty where no group has one")
    sources: tuple[tuple[NonNegativeInt, ...], ...] = Field(
        (), description="producer layers that each group is computed from, ascending; empty: each from its own layers"
    )
    tensors_digest: str
    config_digest: str = Field("", description="digest of the settings the artifact was fitted with")
    quality: dict[str, Any] = Field(default_factory=dict, description="what held-out text measured; not fingerprinted")

    @property
    def fingerprint(self) -> str:
        """Names what both servers must share: format, pair, modes, code layout and maps (32 hex digits)."""
        # names of directories differ between hosts; weights and vocabulary are compared by their digests
        unnamed: dict[str, bool | set[str]] = {
            "quality": True,
            "name": True,
            "config_digest": True,
            "producer": {"name"},
            "consumer": {"name"},
        }
        body = self.model_dump(mode="json", exclude=unnamed)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def source_layers(self, group: int) -> tuple[int, ...]:
        """Producer layers that a group is computed from, ascending."""
        return self.sources[group] if self.sources else tuple(range(*self.groups[group]))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one token's codes of one layer that is coded by itself."""
        mode = self.layers[layer]
        if isinstance(mode, TransformMode):
            raise ValueError(f"layer {layer} is coded with its group; see bytes_per_token")
        if isinstance(mode, ReuseMode):
            return (mode.r_k + mode.r_v) * _itemsize(self.code_dtype)
        if isinstance(mode, PatchMode):
            return mode.r_h * _itemsize(self.code_dtype)
        return 2 * self.consumer.num_kv_heads * self.consumer.head_dim * _itemsize(self.raw_dtype)

    @property
    def bytes_per_token(self) -> tuple[int, ...]:
        """Bytes of one token's codes, for each group."""
        transforms = self.transforms or (None,) * len(self.groups)
        return tuple(
            sum(self.layer_bytes(layer) for layer in range(*group)) if layout is None else layout.bytes_per_token
            for group, layout in zip(self.groups, transforms, strict=True)
        )

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in the pool's dtype: what sending the cache itself would cost."""
        spec = self.consumer
        return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * _itemsize(self.raw_dtype)

    @property
    def patch_layers(self) -> tuple[int, ...]:
        """Layers whose codes come from the hidden state."""
        return tuple(index for index, mode in enumerate(self.layers) if isinstance(mode, PatchMode))


@dataclass(frozen=True)
class AffineMap:
    """`y_TO = x_TI @ weight_IO + bias_O`, float32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.addmm(self.bias, x_TI.to(self.weight.dtype), self.weight)


@dataclass(frozen=True)
class ReuseLayer:
    """Codes of pre-RoPE keys and of values; the decoders end in the consumer's space."""

    encode_k: AffineMap
    decode_k: AffineMap
    encode_v: AffineMap
    decode_v: AffineMap


@dataclass(frozen=True)
class PatchLayer:
    """Code of the producer's normalised attention input; aligner and consumer projections are folded together.

    Affine aligner: `[k v] = project(z)`. MLP aligner: `[k v] = project(silu(hidden(z)))`. Where the architecture has a
    key norm, `k` is then RMS-normalised per head and scaled by `k_norm_D`.
    """

    encode_h: AffineMap
    project: AffineMap
    hidden: AffineMap | None = None
    k_norm_D: Tensor | None = None
    k_norm_eps: float = 0.0


@dataclass(frozen=True)
class RawLayer:
    """No maps: rows of the pool."""


@dataclass(frozen=True)
class TransformLayer:
    """No maps of its own: see the `GroupTransform` of its group."""


LayerMaps = ReuseLayer | PatchLayer | RawLayer | TransformLayer


@dataclass(frozen=True)
class RowGuard:
    """How unusual a row of features is (distill.guard).

    `novelty_T = sum_q ((x_TI - mean_I) @ directions_IQ)_q ** 2`, about 1 on calibration text; beyond `limit`, as the mean of
    a block's tokens, what a transform makes of the rows is not to be trusted. Directions are of `MATRIX_DTYPE`.
    """

    directions_IQ: Tensor
    limit: float


@dataclass(frozen=True)
class RowTransform:
    """Quantised components of one kind of rows of a group (distill.transform).

    With h = 2**(b-1), b = bits of the component: `level_TS = clamp(floor((x_TI - mean_I) @ encode_IS), -h, h - 1) + h` and
    `y_TO = (level_TS - h) @ decode_SO + bias_O`. Both factors of both products are centred, because `encode_IS` and
    `decode_SO` are bfloat16 and the products may be rounded to it; everything else is float32. Features I are the rows of the
    group's source layers, outputs O those of its layers, in order.

    Position 0 is an attention sink: its row lies far from all others, all tokens read it, and it depends on nothing but the
    first token. Its code is the number of a row: the one of `sink_in_KI` (less `mean_I`) that is nearest to `x_TI - mean_I`;
    zeros follow. Decoded, it is that row of `sink_out_KO`.
    """

    layout: BitLayout
    mean_I: Tensor
    encode_IS: Tensor
    decode_SO: Tensor
    bias_O: Tensor
    sink_in_KI: Tensor | None = None
    sink_out_KO: Tensor | None = None
    guard: RowGuard | None = None

    @cached_property
    def half_S(self) -> Tensor:
        """Half the number of levels of each component, `2**(b-1)`, float32; made once, each chunk of codes needs it."""
        widths, counts = zip(*self.layout.runs, strict=True) if self.layout.runs else ((), ())
        return torch.exp2(torch.tensor(widths, dtype=torch.float32) - 1).repeat_interleave(
            torch.tensor(counts, dtype=torch.long)
        )

    @property
    def num_sink_rows(self) -> int:
        """K."""
        return 0 if self.sink_in_KI is None else len(self.sink_in_KI)


@dataclass(frozen=True)
class GroupTransform:
    """Both kinds of rows: keys before RoPE from the producer's keys, values from its values."""

    keys: RowTransform
    values: RowTransform

    @property
    def layout(self) -> GroupLayout:
        """What the manifest says of it."""
        return GroupLayout(
            keys=self.keys.layout,
            values=self.values.layout,
            num_sink_rows=self.keys.num_sink_rows,
            guard=self._guard,
        )

    @property
    def _guard(self) -> GuardLayout | None:
        if self.keys.guard is None or self.values.guard is None:
            return None
        return GuardLayout(
            num_directions=self.keys.guard.directions_IQ.shape[1],
            key_limit=self.keys.guard.limit,
            value_limit=self.values.guard.limit,
        )


@dataclass(frozen=True)
class Translator:
    """A manifest and the maps of its layers."""

    manifest: Manifest
    layers: tuple[LayerMaps, ...]
    transforms: tuple[GroupTransform | None, ...] = ()

    def transform(self, group: int) -> GroupTransform | None:
        """The transform of a group, None where its layers are coded one by one."""
        return self.transforms[group] if self.transforms else None

    def check_guard(self) -> None:
        """Raise `TranslatorError` unless every group that a fitted map codes has limits for what it may be given."""
        transforms = enumerate(self.manifest.transforms)
        unguarded = [group for group, layout in transforms if layout is not None and layout.guard is None]
        if unguarded:
            raise TranslatorError(
                f"{self.manifest.name}: method.guard is cut, but the artifact has no limits for groups {unguarded}; run "
                "`scd-trt distill` again, or send unguarded with guard: off"
            )

    def check_producer(self, spec: ModelSpec) -> None:
        """Raise `TranslatorError` unless the prefill server runs the model that this translator was fitted for."""
        _check_model("producer", self.manifest.producer, spec)

    def check_consumer(self, spec: ModelSpec) -> None:
        """Raise `TranslatorError` unless the decode server runs the model that this translator was fitted for."""
        _check_model("consumer", self.manifest.consumer, spec)


def build(
    manifest_fields: Mapping[str, Any],
    layers: tuple[LayerMaps, ...],
    transforms: tuple[GroupTransform | None, ...] = (),
) -> Translator:
    """Make a translator from fitted maps; modes, layouts and the tensors' digest are derived from them."""
    data = save_tensors(_tensors(layers, transforms))
    manifest = Manifest(
        layers=tuple(_mode_of(maps) for maps in layers),
        transforms=tuple(None if found is None else found.layout for found in transforms),
        tensors_digest=_digest(data),
        **manifest_fields,
    )
    _check_groups(Path(manifest.name), manifest)
    translator = Translator(manifest, layers, transforms)
    _check_shapes(translator)
    return translator


def save(translator: Translator, directory: Path) -> None:
    """Write the artifact; the manifest is replaced last, so a reader never sees half of it."""
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / TENSORS_FILE, save_tensors(_tensors(translator.layers, translator.transforms)))
    text = translator.manifest.model_dump_json(indent=1)
    fingerprint = {"fingerprint": translator.manifest.fingerprint}
    _replace(directory / MANIFEST_FILE, json.dumps(fingerprint | json.loads(text), indent=1).encode() + b"\n")


def load(directory: Path) -> Translator:
    """Read an artifact and check it wholly.

    Raises:
        TranslatorError: missing, damaged, edited, or of another format version; says which file and what to do.
    """
    manifest = load_manifest(directory)
    path = directory / TENSORS_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TranslatorError(f"{path}: cannot be read ({error}); run `scd-trt distill` again") from error
    if _digest(data) != manifest.tensors_digest:
        raise TranslatorError(
            f"{path}: digest {_digest(data)} differs from {manifest.tensors_digest} in {MANIFEST_FILE}: "
            f"the file ({len(data)} bytes) is truncated or edited; copy the artifact again or run `scd-trt distill`"
        )
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise TranslatorError(f"{path}: not a safetensors file ({error})") from error
    translator = _read_maps(manifest, tensors, path)
    _check_shapes(translator)
    return translator


def load_manifest(directory: Path) -> Manifest:
    """Read `translator.json` alone; see `load` for errors."""
    path = directory / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise TranslatorError(f"{path}: {path.stat().st_size} bytes is too large for a manifest")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise TranslatorError(f"{path}: cannot be read ({error}); run `scd-trt distill PAIR.yaml` first") from error
    except (ValueError, RecursionError) as error:
        raise TranslatorError(f"{path}: not JSON ({error}); the file is truncated or edited") from error
    return _parse_manifest(path, data)


def _parse_manifest(path: Path, data: Any) -> Manifest:
    if not isinstance(data, dict):
        raise TranslatorError(f"{path}: expected a JSON object")
    if data.get("format_version") != FORMAT_VERSION:
        found = data.get("format_version")
        raise TranslatorError(f"{path}: format version {found!r}; this scd_trt reads {FORMAT_VERSION}; distil again")
    stated = data.pop("fingerprint", None)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        raise TranslatorError(f"{path}: {error.error_count()} wrong fields, first: {error.errors()[0]}") from error
    if manifest.fingerprint != stated:
        raise TranslatorError(f"{path}: states fingerprint {stated} but its content has {manifest.fingerprint}: edited")
    _check_groups(path, manifest)
    return manifest


def _check_groups(path: Path, manifest: Manifest) -> None:
    edges = [0, *(stop for _, stop in manifest.groups)]
    starts = [start for start, _ in manifest.groups]
    if starts != edges[:-1] or edges[-1] != len(manifest.layers) or sorted(set(edges)) != edges:
        raise TranslatorError(
            f"{path}: groups {manifest.groups} do not cover layers 0..{len(manifest.layers)} in order"
        )
    if manifest.transforms and len(manifest.transforms) != len(manifest.groups):
        raise TranslatorError(f"{path}: {len(manifest.transforms)} transforms for {len(manifest.groups)} groups")
    for group, (start, stop) in enumerate(manifest.groups):
        coded_together = bool(manifest.transforms) and manifest.transforms[group] is not None
        for layer in range(start, stop):
            if isinstance(manifest.layers[layer], TransformMode) != coded_together:
                raise TranslatorError(
                    f"{path}: layer {layer} and group {group} disagree on whether they are transformed"
                )
    if len(manifest.layers) != manifest.consumer.num_layers:
        raise TranslatorError(f"{path}: {len(manifest.layers)} layers for a model of {manifest.consumer.num_layers}")
    _check_sources(path, manifest)


def _check_sources(path: Path, manifest: Manifest) -> None:
    if manifest.sources and len(manifest.sources) != len(manifest.groups):
        raise TranslatorError(f"{path}: sources of {len(manifest.sources)} groups for {len(manifest.groups)}")
    num_layers = manifest.producer.num_layers
    for group, layers in enumerate(manifest.groups):
        sources = manifest.source_layers(group)
        if not sources or list(sources) != sorted(set(sources)) or sources[-1] >= num_layers:
            raise TranslatorError(
                f"{path}: group {group} is computed from layers {sources}; expected ascending ones below {num_layers}"
            )
        is_own = sources == tuple(range(*layers)) and same_shape(manifest.producer, manifest.consumer)
        if not is_own and not (manifest.transforms and manifest.transforms[group]):
            raise TranslatorError(
                f"{path}: group {group} is not computed from its own layers, so it must be transformed"
            )


def _check_model(role: str, expected: ModelSpec, found: ModelSpec) -> None:
    differing = [
        f"{name}: translator has {getattr(expected, name)!r}, server runs {getattr(found, name)!r}"
        for name in ("weights_digest", "vocab_digest", "num_layers", "num_kv_heads", "head_dim", "rope")
        if getattr(expected, name) != getattr(found, name)
    ]
    if differing:
        raise TranslatorError(
            f"translator of another {role}; run `scd-trt distill` for this pair: " + "; ".join(differing)
        )


def _check_shapes(translator: Translator) -> None:
    spec, rows = translator.manifest.consumer, translator.manifest.producer.hidden_size
    for index, (mode, maps) in enumerate(zip(translator.manifest.layers, translator.layers, strict=True)):
        for name, found, expected in _expected_shapes(mode, maps, spec.kv_dim, rows, spec.head_dim):
            _check_tensor(f"layer {index} {name}", found, expected, torch.float32)
    for index, (start, stop) in enumerate(translator.manifest.groups):
        transform, layouts = translator.transform(index), translator.manifest.transforms
        widths = (
            len(translator.manifest.source_layers(index)) * translator.manifest.producer.kv_dim,
            (stop - start) * spec.kv_dim,
        )
        layout = layouts[index] if layouts else None
        if transform is not None and layout is not None:
            for name, found, expected in _expected_transform_shapes(transform, layout, *widths):
                is_matrix = name.endswith((".encode", ".decode", ".guard"))
                _check_tensor(f"group {index} {name}", found, expected, MATRIX_DTYPE if is_matrix else torch.float32)


def _check_tensor(place: str, found: Tensor, expected: tuple[int, ...], dtype: torch.dtype) -> None:
    if found.dtype != dtype or tuple(found.shape) != expected:
        raise TranslatorError(f"{place}: {tuple(found.shape)} {found.dtype}; expected {expected} {dtype}")
    if not bool(found.isfinite().all()):
        raise TranslatorError(f"{place}: holds values that are not finite; distil again")


def _expected_transform_shapes(
    transform: GroupTransform, layout: GroupLayout, width_in: int, width_out: int
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    for kind in ("keys", "values"):
        rows: RowTransform = getattr(transform, kind)
        sent = rows.layout.num_components
        yield f"{kind}.mean", rows.mean_I, (width_in,)
        yield f"{kind}.encode", rows.encode_IS, (width_in, sent)
        yield f"{kind}.decode", rows.decode_SO, (sent, width_out)
        yield f"{kind}.bias", rows.bias_O, (width_out,)
        for name, width in zip(_SINK_TENSORS, (width_in, width_out), strict=True):
            given = getattr(rows, name)
            # no tensor is as good as one of no rows
            yield f"{kind}.{name}", torch.zeros(0, width) if given is None else given, (layout.num_sink_rows, width)
        if layout.guard is not None and rows.guard is not None:
            yield f"{kind}.guard", rows.guard.directions_IQ, (width_in, layout.guard.num_directions)


def _expected_shapes(
    mode: LayerMode, maps: LayerMaps, width: int, rows: int, head_dim: int
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    sizes: list[tuple[str, AffineMap, int, int]] = []
    if isinstance(mode, ReuseMode) and isinstance(maps, ReuseLayer):
        sizes = [
            ("encode_k", maps.encode_k, width, mode.r_k),
            ("decode_k", maps.decode_k, mode.r_k, width),
            ("encode_v", maps.encode_v, width, mode.r_v),
            ("decode_v", maps.decode_v, mode.r_v, width),
        ]
    elif isinstance(mode, PatchMode) and isinstance(maps, PatchLayer):
        sizes = [("encode_h", maps.encode_h, rows, mode.r_h)]
        if maps.hidden is not None and mode.mlp_hidden is not None:
            sizes.append(("hidden", maps.hidden, mode.r_h, mode.mlp_hidden))
        sizes.append(("project", maps.project, mode.mlp_hidden or mode.r_h, 2 * width))
        if maps.k_norm_D is not None:
            yield "k_norm", maps.k_norm_D, (head_dim,)
    for name, affine, size_in, size_out in sizes:
        yield f"{name}.weight", affine.weight, (size_in, size_out)
        yield f"{name}.bias", affine.bias, (size_out,)


def _mode_of(maps: LayerMaps) -> LayerMode:
    if isinstance(maps, ReuseLayer):
        return ReuseMode(r_k=maps.encode_k.weight.shape[1], r_v=maps.encode_v.weight.shape[1])
    if isinstance(maps, PatchLayer):
        return PatchMode(
            r_h=maps.encode_h.weight.shape[1],
            mlp_hidden=None if maps.hidden is None else maps.hidden.weight.shape[1],
            k_norm_eps=None if maps.k_norm_D is None else maps.k_norm_eps,
        )
    return TransformMode() if isinstance(maps, TransformLayer) else RawMode()


def _tensors(layers: tuple[LayerMaps, ...], transforms: tuple[GroupTransform | None, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, transform in enumerate(transforms):
        for kind, rows in vars(transform).items() if transform is not None else ():
            for name in _ROW_TENSORS + _SINK_TENSORS * bool(rows.num_sink_rows):
                tensors[f"groups.{index}.{kind}.{name}"] = getattr(rows, name).contiguous()
            if transform is not None and transform.layout.guard is not None:
                tensors[f"groups.{index}.{kind}.{_GUARD_TENSOR}"] = rows.guard.directions_IQ.contiguous()
    for index, maps in enumerate(layers):
        for name, value in vars(maps).items():
            if isinstance(value, AffineMap):
                tensors[f"layers.{index}.{name}.weight"] = value.weight.contiguous()
                tensors[f"layers.{index}.{name}.bias"] = value.bias.contiguous()
            elif isinstance(value, Tensor):
                tensors[f"layers.{index}.{name}"] = value.contiguous()
    return tensors


def _read_maps(manifest: Manifest, tensors: dict[str, Tensor], path: Path) -> Translator:
    remaining = dict(tensors)

    def take(name: str) -> Tensor:
        if name not in remaining:
            raise TranslatorError(f"{path}: tensor {name} is missing; distil again")
        return remaining.pop(name)

    layers = tuple(_read_layer(f"layers.{index}", mode, take) for index, mode in enumerate(manifest.layers))
    transforms = tuple(
        None if layout is None else _read_transform(f"groups.{index}", layout, take)
        for index, layout in enumerate(manifest.transforms)
    )
    if remaining:
        raise TranslatorError(
            f"{path}: {len(remaining)} tensors that the manifest does not know: {sorted(remaining)[:3]}"
        )
    return Translator(manifest, layers, transforms)


def _read_layer(name: str, mode: LayerMode, take: Callable[[str], Tensor]) -> LayerMaps:
    def affine(part: str) -> AffineMap:
        return AffineMap(take(f"{name}.{part}.weight"), take(f"{name}.{part}.bias"))

    if isinstance(mode, ReuseMode):
        return ReuseLayer(**{part: affine(part) for part in ("encode_k", "decode_k", "encode_v", "decode_v")})
    if isinstance(mode, PatchMode):
        return PatchLayer(
            encode_h=affine("encode_h"),
            project=affine("project"),
            hidden=affine("hidden") if mode.mlp_hidden else None,
            k_norm_D=take(f"{name}.k_norm_D") if mode.k_norm_eps is not None else None,
            k_norm_eps=mode.k_norm_eps or 0.0,
        )
    return TransformLayer() if isinstance(mode, TransformMode) else RawLayer()


def _read_transform(name: str, layout: GroupLayout, take: Callable[[str], Tensor]) -> GroupTransform:
    def rows(kind: str, packed: BitLayout, limit: float | None) -> RowTransform:
        names = _ROW_TENSORS + _SINK_TENSORS * bool(layout.num_sink_rows)
        tensors: dict[str, Any] = {part: take(f"{name}.{kind}.{part}") for part in names}
        found = RowTransform(packed, **tensors)
        return found if limit is None else replace(found, guard=RowGuard(take(f"{name}.{kind}.{_GUARD_TENSOR}"), limit))

    limits = (None, None) if layout.guard is None else (layout.guard.key_limit, layout.guard.value_limit)
    return GroupTransform(keys=rows("keys", layout.keys, limits[0]), values=rows("values", layout.values, limits[1]))


def _itemsize(dtype: Dtype) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
