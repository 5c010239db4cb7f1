"""Rotary position embedding: frozen parameters, and applying and stripping it.

Legend: `T` tokens, `H` heads, `D` head_dim, `R` = rotary_dim / 2 frequencies.

For position p and frequency f the pair (x[f], x[f + R]) of every head is turned by the angle `p * inv_freq[f]` and
multiplied by `attention_scaling`; elements past `rotary_dim` stay as they are. This is the half-split ("rotate_half")
layout of Hugging Face checkpoints, not the interleaved one of GPT-J. Arithmetic is float32 whatever the input's dtype,
the result has the input's dtype. `strip` inverts `apply` up to rounding and divides the scaling out again.

Frequencies follow `transformers.modeling_rope_utils` for the types `default`, `linear`, `dynamic` (NTK), `yarn` and
`llama3`. `dynamic` derives its frequencies from the length of the whole sequence, so every call must say `seq_len`: the
length at which the keys in question were computed. Keys that one prompt computed in several steps past `max_position`
then have different frequencies; `Rope` does not hide that. `longrope` and multi-axis types are refused.

Errors: `RopeError` names the parameter, its value and what is supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from torch import Tensor

from scd_trt.config import ScdError

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

_YARN_FIELDS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
_FIELDS_OF_TYPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": _YARN_FIELDS,
    "llama3": _LLAMA3_FIELDS,
}
_OTHER_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
# written by old fine-tuning scripts, read by nobody
_IGNORED_KEYS = {"finetuned"}


class RopeError(ScdError):
    """A rotary embedding that this project cannot apply exactly."""


class RopeParameters(BaseModel):
    """Everything that decides the rotation. Fields that a type does not read stay unset: equal parameters, equal keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: RopeType = "default"
    theta: PositiveFloat = Field(10_000.0, description="base of the wavelengths")
    head_dim: PositiveInt
    rotary_dim: PositiveInt = Field(description="leading elements of a head that are rotated; even")
    factor: PositiveFloat | None = Field(None, description="stretch of the context; all types but default")
    original_max_position: PositiveInt | None = Field(None, description="pretraining context (yarn, llama3)")
    max_position: PositiveInt | None = Field(None, description="length after which dynamic stretches")
    attention_factor: PositiveFloat | None = Field(None, description="yarn: scaling of cos and sin, if given")
    beta_fast: PositiveFloat | None = Field(None, description="yarn: rotations above which nothing is interpolated")
    beta_slow: PositiveFloat | None = Field(None, description="yarn: rotations below which all is interpolated")
    mscale: float | None = Field(None, description="yarn: numerator of the inferred attention factor")
    mscale_all_dim: float | None = Field(None, description="yarn: denominator of the inferred attention factor")
    truncate: bool | None = Field(None, description="yarn: round the interpolation range to whole dimensions")
    low_freq_factor: PositiveFloat | None = Field(None, description="llama3: bound of the stretched wavelengths")
    high_freq_factor: PositiveFloat | None = Field(None, description="llama3: bound of the untouched wavelengths")

    @model_validator(mode="after")
    def _fits_the_type(self) -> RopeParameters:
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}")
        missing = [name for name in _required_fields(self.rope_type) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rope type {self.rope_type!r} needs {', '.join(missing)}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return self

    @classmethod
    def from_config(
        cls,
        rope_parameters: Mapping[str, Any] | None,
        *,
        head_dim: int,
        max_position_embeddings: int,
        default_theta: float = 10_000.0,
    ) -> RopeParameters:
        """Read one rope dictionary of a `config.json`, as transformers 5 (`rope_parameters`) or older releases wrote it.

        Args:
            rope_parameters: for older files `rope_scaling` with `rope_theta` added; see `merge_rope_config`.
            default_theta: used where the dictionary names none.

        Raises:
            RopeError: unsupported type, unknown key, or a value missing or out of range.
        """
        given = dict(rope_parameters or {})
        rope_type = given.get("rope_type") or given.get("type") or "default"
        _check_type_and_keys(rope_type, given)
        fields = {name: given.get(name) for name in _FIELDS_OF_TYPE[rope_type]}
        if rope_type in ("yarn", "llama3"):
            original = given.get("original_max_position_embeddings") or max_position_embeddings
            fields["original_max_position"] = original
        if rope_type == "yarn":
            fields["factor"] = fields["factor"] or max_position_embeddings / original
        if rope_type == "dynamic":
            fields["max_position"] = max_position_embeddings
        try:
            return cls(
                rope_type=rope_type,
                theta=given.get("rope_theta") or default_theta,
                head_dim=head_dim,
                rotary_dim=int(head_dim * (given.get("partial_rotary_factor") or 1.0)),
                **fields,
            )
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
            raise RopeError(f"rope parameters {given}: {problems}") from error


def merge_rope_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope dictionary of a `config.json`: `rope_parameters`, or `rope_scaling` with the top-level keys beside it."""
    merged = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            merged.setdefault(key, config[key])
    if config.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return merged


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of some positions, `[T, R]` float32, attention scaling included.

    Layers with equal parameters can share one. `apply` and `strip` take `x_THD` with the same T; further leading
    dimensions are allowed.
    """

    cos: Tensor
    sin: Tensor
    attention_scaling: float

    def apply(self, x_THD: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rotate; same shape and dtype as the input. With `out`, of both, into that, and then no gradient flows."""
        return self._turn(x_THD, self.cos.unsqueeze(1), self.sin.unsqueeze(1), out)

    def strip(self, x_THD: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rotate back and divide the attention scaling out; result and `out` as of `apply`."""
        # cos^2 + sin^2 is scaling^2 here, so the inverse of the scaled rotation is its transpose over scaling^2
        norm = self.attention_scaling**2
        return self._turn(x_THD, self.cos.unsqueeze(1) / norm, self.sin.unsqueeze(1) / -norm, out)

    def _turn(self, x_THD: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None) -> Tensor:
        half = cos.shape[-1]
        x = x_THD.float()
        first, second = x[..., :half], x[..., half : 2 * half]
        if out is not None:
            torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
            out[..., 2 * half :] = x[..., 2 * half :]
            return out
        # fused, as far as gradients allow: temporaries cost more here than the arithmetic
        turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
        return torch.cat((*turned, x[..., 2 * half :]), dim=-1).to(x_THD.dtype)


class Rope:
    """One rotary embedding: frequencies computed once, tables made per call."""

    def __init__(self, parameters: RopeParameters) -> None:
        self.parameters = parameters
        self.inv_freq = _FREQUENCIES[parameters.rope_type](parameters)
        self.attention_scaling = _yarn_attention_scaling(parameters) if parameters.rope_type == "yarn" else 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the rotation of a position changes with the length of the sequence it stands in."""
        return self.parameters.rope_type == "dynamic"

    def tables(self, positions_T: Tensor, *, seq_len: int | None = None) -> RopeTables:
        """Cosines and sines of `positions_T` (integers), on their device.

        Raises:
            RopeError: the rotation depends on the sequence length and `seq_len` was not given.
        """
        inv_freq = self._inv_freq_at(seq_len).to(positions_T.device)
        angles = positions_T.to(torch.float32).unsqueeze(-1) * inv_freq
        return RopeTables(
            cos=angles.cos() * self.attention_scaling,
            sin=angles.sin() * self.attention_scaling,
            attention_scaling=self.attention_scaling,
        )

    def apply(self, x_THD: Tensor, positions_T: Tensor, *, seq_len: int | None = None) -> Tensor:
        """Rotate keys or queries to their positions."""
        return self.tables(positions_T, seq_len=seq_len).apply(x_THD)

    def strip(self, x_THD: Tensor, positions_T: Tensor, *, seq_len: int | None = None) -> Tensor:
        """Undo `apply`: what the projection (and key norm) gave before the rotation."""
        return self.tables(positions_T, seq_len=seq_len).strip(x_THD)

    def _inv_freq_at(self, seq_len: int | None) -> Tensor:
        if not self.depends_on_length:
            return self.inv_freq
        if seq_len is None:
            raise RopeError("rope type 'dynamic' rotates by the length of the sequence: pass seq_len")
        return _dynamic_frequencies(self.parameters, seq_len)


def shared_ropes(parameters: Sequence[RopeParameters]) -> tuple[Rope, ...]:
    """Rotary embedding per layer; layers with equal parameters share one object."""
    unique = {found: Rope(found) for found in parameters}
    return tuple(unique[found] for found in parameters)


def shared_tables(ropes: Sequence[Rope], positions_T: Tensor, *, seq_len: int | None) -> list[RopeTables]:
    """Tables per layer; layers that share a rotary embedding share them."""
    unique = {rope: rope.tables(positions_T, seq_len=seq_len) for rope in set(ropes)}
    return [unique[rope] for rope in ropes]


def _required_fields(rope_type: RopeType) -> tuple[str, ...]:
    if rope_type == "llama3":
        return (*_LLAMA3_FIELDS, "original_max_position")
    return {"default": (), "linear": ("factor",), "dynamic": ("factor", "max_position")}.get(
        rope_type, ("factor", "original_max_position")
    )


def _check_type_and_keys(rope_type: str, given: Mapping[str, Any]) -> None:
    if rope_type not in get_args(RopeType):
        raise RopeError(f"rope type {rope_type!r} is not supported; supported: {', '.join(get_args(RopeType))}")
    known = _OTHER_KEYS.union(_IGNORED_KEYS, _YARN_FIELDS, _LLAMA3_FIELDS)
    unknown = sorted(set(given) - known)
    if unknown:
        raise RopeError(
            f"rope parameters hold {', '.join(unknown)}, which this version cannot honour; got {dict(given)}"
        )


def _plain_frequencies(parameters: RopeParameters, theta: float | None = None) -> Tensor:
    exponents = torch.arange(0, parameters.rotary_dim, 2, dtype=torch.float32) / parameters.rotary_dim
    return 1.0 / ((theta or parameters.theta) ** exponents)


def _linear_frequencies(parameters: RopeParameters) -> Tensor:
    return _plain_frequencies(parameters) / _given(parameters.factor)


def _dynamic_frequencies(parameters: RopeParameters, seq_len: int = 0) -> Tensor:
    factor, max_position, dim = _given(parameters.factor), _given(parameters.max_position), parameters.rotary_dim
    stretch = factor * max(seq_len, max_position) / max_position - (factor - 1)
    return _plain_frequencies(parameters, parameters.theta * stretch ** (dim / (dim - 2)))


def _yarn_frequencies(parameters: RopeParameters) -> Tensor:
    """Interpolate slow frequencies (divide by factor), keep fast ones, blend linearly between (arXiv 2309.00071)."""
    exponents = torch.arange(0, parameters.rotary_dim, 2, dtype=torch.float32) / parameters.rotary_dim
    wavelengths = parameters.theta**exponents
    kept = 1.0 / wavelengths
    interpolated = 1.0 / (_given(parameters.factor) * wavelengths)
    low, high = _yarn_range(parameters)
    ramp = ((torch.arange(parameters.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _yarn_range(parameters: RopeParameters) -> tuple[float, float]:
    """First and last frequency index of the blend: where `beta` turns fit into the pretraining context."""
    dim, context = parameters.rotary_dim, _given(parameters.original_max_position)

    def index_of(num_rotations: float) -> float:
        return dim * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(parameters.theta))

    low, high = index_of(parameters.beta_fast or 32.0), index_of(parameters.beta_slow or 1.0)
    if parameters.truncate is not False:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    return low, high + 0.001 if low == high else high


def _yarn_attention_scaling(parameters: RopeParameters) -> float:
    factor = _given(parameters.factor)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.mscale and parameters.mscale_all_dim:
        return magnitude(parameters.mscale) / magnitude(parameters.mscale_all_dim)
    return magnitude(1.0)


def _llama3_frequencies(parameters: RopeParameters) -> Tensor:
    """Divide long wavelengths by factor, keep short ones, blend between the two bounds (Llama 3.1)."""
    factor, context = _given(parameters.factor), _given(parameters.original_max_position)
    low, high = _given(parameters.low_freq_factor), _given(parameters.high_freq_factor)
    plain = _plain_frequencies(parameters)
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > context / low, plain / factor, plain)
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, blended, stretched)


def _given(value: float | None) -> float:
    """A field that `RopeParameters` guarantees for this type."""
    if value is None:
        raise ValueError("rope parameters were not validated")
    return value


_FREQUENCIES = {
    "default": _plain_frequencies,
    "linear": _linear_frequencies,
    "dynamic": _dynamic_frequencies,
    "yarn": _yarn_frequencies,
    "llama3": _llama3_frequencies,
}
