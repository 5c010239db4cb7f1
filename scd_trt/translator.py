"""The translator: what `distill` writes and both servers load. A directory with `translator.json` and a safetensors file.

Owns: the fitted maps of every layer, the manifest (pair, modes, ranks, code layout, measured quality), the digest that
detects a truncated or edited file, and the fingerprint that two servers compare before any codes flow.

Shapes: F = num_kv_heads * head_dim of one layer, M hidden size, R rank. Maps act on rows: `y_TO = x_TI @ weight_IO + bias_O`.
Modes of a layer (METHOD, sections 1 and 2.4):

    reuse   codes  z_k[R_k] z_v[R_v]   affine maps of pre-RoPE keys and of values, into B's keys and values
    patch   codes  z_h[R_h]            affine map of A's normalised attention input; B's own projections are folded in
    raw     codes  k[F] v[F]           the pool's rows; keys keep A's RoPE where both models rotate alike, else pre-RoPE

Bytes of one token of a layer: its code elements in `code_dtype` (raw: `raw_dtype`), little endian, in the order above.
A *group* is a half-open range of layers whose codes travel together; the codes of one group are `[T, bytes_per_token]`.

Deliberately not here: fitting (distill), arithmetic on codes (codec). Nothing is pickled; a file is trusted only after its
digest, every tensor's shape and dtype, and the manifest's schema have been checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from scd_trt.config import Dtype, ScdError
from scd_trt.model_spec import ModelSpec

FORMAT_VERSION: Literal[1] = 1
MANIFEST_FILE = "translator.json"
TENSORS_FILE = "translator.safetensors"
MAX_MANIFEST_BYTES = 16 << 20


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


LayerMode = Annotated[ReuseMode | PatchMode | RawMode, Field(discriminator="mode")]


class Manifest(_Frozen):
    """Content of `translator.json`."""

    format_version: Literal[1] = FORMAT_VERSION
    name: str
    policy: Literal["paper", "exact"]
    code_dtype: Dtype
    raw_dtype: Dtype
    producer: ModelSpec
    consumer: ModelSpec
    layers: tuple[LayerMode, ...]
    groups: tuple[tuple[int, int], ...] = Field(description="half-open layer ranges that travel together")
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

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one token's codes of one layer."""
        mode = self.layers[layer]
        if isinstance(mode, ReuseMode):
            return (mode.r_k + mode.r_v) * _itemsize(self.code_dtype)
        if isinstance(mode, PatchMode):
            return mode.r_h * _itemsize(self.code_dtype)
        return 2 * self.consumer.num_kv_heads * self.consumer.head_dim * _itemsize(self.raw_dtype)

    @property
    def bytes_per_token(self) -> tuple[int, ...]:
        """Bytes of one token's codes, for each group."""
        return tuple(sum(self.layer_bytes(layer) for layer in range(*group)) for group in self.groups)

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

    names: ClassVar[tuple[str, ...]] = ()


LayerMaps = ReuseLayer | PatchLayer | RawLayer


@dataclass(frozen=True)
class Translator:
    """A manifest and the maps of its layers."""

    manifest: Manifest
    layers: tuple[LayerMaps, ...]

    def check_producer(self, spec: ModelSpec) -> None:
        """Raise `TranslatorError` unless the prefill server runs the model that this translator was fitted for."""
        _check_model("producer", self.manifest.producer, spec)

    def check_consumer(self, spec: ModelSpec) -> None:
        """Raise `TranslatorError` unless the decode server runs the model that this translator was fitted for."""
        _check_model("consumer", self.manifest.consumer, spec)


def build(manifest_fields: Mapping[str, Any], layers: tuple[LayerMaps, ...]) -> Translator:
    """Make a translator from fitted maps; modes and the tensors' digest are derived from them."""
    data = save_tensors(_tensors(layers))
    manifest = Manifest(
        layers=tuple(_mode_of(maps) for maps in layers), tensors_digest=_digest(data), **manifest_fields
    )
    _check_groups(Path(manifest.name), manifest)
    translator = Translator(manifest, layers)
    _check_shapes(translator)
    return translator


def save(translator: Translator, directory: Path) -> None:
    """Write the artifact; the manifest is replaced last, so a reader never sees half of it."""
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / TENSORS_FILE, save_tensors(_tensors(translator.layers)))
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
    translator = Translator(manifest, tuple(_read_layers(manifest, tensors, path)))
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
    if len(manifest.layers) != manifest.consumer.num_layers:
        raise TranslatorError(f"{path}: {len(manifest.layers)} layers for a model of {manifest.consumer.num_layers}")


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
    width = spec.num_kv_heads * spec.head_dim
    for index, (mode, maps) in enumerate(zip(translator.manifest.layers, translator.layers, strict=True)):
        for name, found, expected in _expected_shapes(mode, maps, width, rows, spec.head_dim):
            if found.dtype != torch.float32 or tuple(found.shape) != expected:
                raise TranslatorError(
                    f"layer {index} {name}: {tuple(found.shape)} {found.dtype}; expected {expected} torch.float32"
                )
            if not bool(found.isfinite().all()):
                raise TranslatorError(f"layer {index} {name}: holds values that are not finite; distil again")


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


def _mode_of(maps: LayerMaps) -> ReuseMode | PatchMode | RawMode:
    if isinstance(maps, ReuseLayer):
        return ReuseMode(r_k=maps.encode_k.weight.shape[1], r_v=maps.encode_v.weight.shape[1])
    if isinstance(maps, PatchLayer):
        return PatchMode(
            r_h=maps.encode_h.weight.shape[1],
            mlp_hidden=None if maps.hidden is None else maps.hidden.weight.shape[1],
            k_norm_eps=None if maps.k_norm_D is None else maps.k_norm_eps,
        )
    return RawMode()


def _tensors(layers: tuple[LayerMaps, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, maps in enumerate(layers):
        for name, value in vars(maps).items():
            if isinstance(value, AffineMap):
                tensors[f"layers.{index}.{name}.weight"] = value.weight.contiguous()
                tensors[f"layers.{index}.{name}.bias"] = value.bias.contiguous()
            elif isinstance(value, Tensor):
                tensors[f"layers.{index}.{name}"] = value.contiguous()
    return tensors


def _read_layers(manifest: Manifest, tensors: dict[str, Tensor], path: Path) -> Iterator[LayerMaps]:
    remaining = dict(tensors)

    def take(name: str) -> Tensor:
        if name not in remaining:
            raise TranslatorError(f"{path}: tensor {name} is missing; distil again")
        return remaining.pop(name)

    def affine(index: int, name: str) -> AffineMap:
        return AffineMap(take(f"layers.{index}.{name}.weight"), take(f"layers.{index}.{name}.bias"))

    for index, mode in enumerate(manifest.layers):
        if isinstance(mode, ReuseMode):
            names = ("encode_k", "decode_k", "encode_v", "decode_v")
            yield ReuseLayer(**{name: affine(index, name) for name in names})
        elif isinstance(mode, PatchMode):
            yield PatchLayer(
                encode_h=affine(index, "encode_h"),
                project=affine(index, "project"),
                hidden=affine(index, "hidden") if mode.mlp_hidden else None,
                k_norm_D=take(f"layers.{index}.k_norm_D") if mode.k_norm_eps is not None else None,
                k_norm_eps=mode.k_norm_eps or 0.0,
            )
        else:
            yield RawLayer()
    if remaining:
        raise TranslatorError(
            f"{path}: {len(remaining)} tensors that the manifest does not know: {sorted(remaining)[:3]}"
        )


def _itemsize(dtype: Dtype) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
