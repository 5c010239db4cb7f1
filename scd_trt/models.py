"""Hugging Face models: getting a checkpoint, loading it, tapping it, and running it over a KV cache from outside.

The only file that imports `transformers` (and, when needed, `peft`). Everything else sees `LoadedModel`, plain tensors,
and the seam `KvCache`; no other code needs to know a model family.

Legend: `T` new tokens, `S` tokens of the whole sequence, `H` kv heads, `D` head_dim, `F` = H*D, `M` hidden size,
`V` vocabulary, `Q` query heads. Per-layer results are tuples with one tensor per layer. Keys in a cache are post-RoPE
`[S, H, D]`; keys in a trace are pre-RoPE, after the key norm where the family has one, flattened to `[T, F]`.
`x` is the normalised attention input, that is what `k_proj` sees. Where caches or tokens carry a leading dimension N
(several caches at once), every result carries it too.

A cache from outside always holds the whole prefix, in layers with a sliding window too: the library masks by absolute
index, while its own sliding caches would cut the prefix off. Nothing here samples, batches requests or owns a pool.

A cache may have holes (`PartialLayers`): tokens that some heads dropped. They keep their place, and no query sees them.

Errors: `ModelLoadError` (weights or adapter do not fit), and those of `model_references`, `model_spec` and `rope`.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from scd_trt.config import Dtype, ScdError
from scd_trt.config import cache_root as default_cache_root
from scd_trt.model_references import (
    GgufSource,
    build_once,
    cached_path,
    checkpoint_files,
    digest_files,
    resolve,
    whole_gguf,
)
from scd_trt.model_spec import ModelSpec
from scd_trt.rope import Rope, RopeTables, shared_ropes, shared_tables

logger = logging.getLogger(__name__)

Capture = Literal["kv", "x", "q", "hidden", "logits"]
CacheLayers = Sequence[tuple[Tensor, Tensor]]
"""Per layer: post-RoPE keys `[S, H, D]` and values `[S, H, D]`, or both with a leading N."""
Progress = Callable[[str], None]


class ModelLoadError(ScdError):
    """A checkpoint or adapter whose tensors do not fit the model that its configuration describes."""


class KvCache(Protocol):
    """A KV cache outside the model: it takes new tokens layer by layer and hands back the whole sequence."""

    def extend(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new tokens' post-RoPE keys and values; return those of the whole sequence, `[S, H, D]` each."""


class PartialLayers(list[tuple[Tensor, Tensor]]):
    """`CacheLayers` that may have holes: some heads dropped some tokens, other heads or layers other ones.

    Attributes:
        keep: per layer `[S, H]`, bool, with the leading N of the layers if they have one: False is a hole. What stands in
            it must be finite and is never seen. None: there are no holes.
    """

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor]], keep: Sequence[Tensor] | None) -> None:
        super().__init__(layers)
        self.keep = keep
        for layer, ((keys, _), keep_SH) in enumerate(zip(self, keep or (), strict=keep is not None)):
            if keep_SH.dtype != torch.bool or keep_SH.shape != keys.shape[:-1]:
                found = f"{keep_SH.dtype} {tuple(keep_SH.shape)}"
                raise ValueError(f"layer {layer}: keep is {found}; expected torch.bool {tuple(keys.shape[:-1])}")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode whose parameters take no gradient, with its tokenizer and specification."""

    model: Any
    tokenizer: Any
    spec: ModelSpec
    path: Path

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary embedding per layer; layers with equal parameters share one object."""
        return shared_ropes(self.spec.rope)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        eos = self.model.generation_config.eos_token_id
        return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)


@dataclass(frozen=True)
class ModelTrace:
    """What a forward pass computed, per layer; what was not asked for is empty or None."""

    k_TF: tuple[Tensor, ...] = ()
    v_TF: tuple[Tensor, ...] = ()
    x_TM: tuple[Tensor, ...] = ()
    q_TQD: tuple[Tensor, ...] = ()
    """Queries after norm and RoPE."""
    hidden_TM: tuple[Tensor, ...] = ()
    """What enters each layer, before its first norm."""
    logits_TV: Tensor | None = None


@dataclass(frozen=True)
class ProjectionWeights:
    """A layer's map from normalised input to pre-RoPE keys and to values."""

    k_weight_FM: Tensor
    k_bias_F: Tensor | None
    v_weight_FM: Tensor
    v_bias_F: Tensor | None
    k_norm_weight_D: Tensor | None
    k_norm_eps: float
    k_norm_unit_offset: bool
    """The norm multiplies by 1 + weight (Gemma) instead of weight."""


def materialize(
    reference: str, *, adapter: Path | None = None, cache_dir: Path | None = None, progress: Progress | None = None
) -> Path:
    """Directory with safetensors and tokenizer of the referenced model, with `adapter` merged in.

    A Hugging Face directory without adapter is returned as it is. A GGUF is dequantised to bfloat16 and an adapter is
    merged in float32 and rounded to bfloat16, once; the result stays in the cache.

    Args:
        reference: a directory, a `.gguf` file, `package:<name>`, or `recipe:<pair>`.
        adapter: directory of a PEFT LoRA adapter (adapter_config.json, adapter_model.safetensors).
        cache_dir: instead of `scd_trt.config.cache_root()`.
        progress: is told in words what takes long.

    Raises:
        ModelReferenceError, ModelLoadError, ModelFilesError, UnsupportedModelError.
    """
    tell = progress or logger.info
    root = cache_dir or default_cache_root()
    source = resolve(reference)
    directory = source if isinstance(source, Path) else _converted(source, root, tell)
    return directory if adapter is None else _merged(directory, adapter, root, tell)


def load_model(path: Path, *, dtype: Dtype = "float32", device: str = "cpu") -> LoadedModel:
    """Load a Hugging Face directory for inference. Code that comes with a checkpoint is never run.

    Raises:
        ModelFilesError, UnsupportedModelError, RopeError: see `ModelSpec.from_directory`.
        ModelLoadError: tensors are missing, left over, or of another shape than the configuration says.
    """
    spec = ModelSpec.from_directory(path)
    # asking for the dtype here, not by model.to(), keeps the rotary frequencies in float32
    model = _load_weights(path, getattr(torch, dtype)).to(device)
    model.eval().requires_grad_(False)
    return LoadedModel(model=model, tokenizer=load_tokenizer(path), spec=spec, path=path)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a Hugging Face directory, with its chat template."""
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The transformer layers, first to last."""
    return list(model.base_model.layers)


def attention_module(layer: nn.Module) -> nn.Module:
    """The attention of a decoder layer: it has `q_proj`, `k_proj`, `v_proj`, and `k_norm`, `q_norm` in some families."""
    attention: nn.Module = layer.get_submodule("self_attn")
    return attention


@torch.no_grad()
def trace(
    loaded: LoadedModel,
    token_ids: Tensor | Sequence[int],
    *,
    capture: Set[Capture] = frozenset({"kv", "x"}),
    past: CacheLayers | None = None,
    positions: Tensor | None = None,
) -> ModelTrace:
    """Run the model and return what `capture` asks for.

    Args:
        token_ids: `[T]`, or `[N, T]`.
        past: cache that the tokens continue; without it they start a sequence.
        positions: `[T]`, where rotary positions differ from the index in the sequence.
    """
    return run_with_cache(
        loaded,
        _ids_for(past, token_ids),
        _GivenPrefix(past),
        start_position=0 if past is None else past[0][0].shape[-3],
        capture=capture,
        positions=positions,
        keep=holes(past),
    )


@torch.no_grad()
def trace_from(
    loaded: LoadedModel,
    token_ids: Tensor | Sequence[int],
    hidden_TM: Tensor,
    *,
    layer: int,
    capture: Set[Capture] = frozenset({"kv"}),
) -> ModelTrace:
    """As `trace` of a whole sequence, but with `hidden_TM` entering `layer`; what earlier layers give means nothing."""

    def enter(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        given = arguments[0]
        return (hidden_TM.to(given).expand_as(given), *arguments[1:])

    handle = decoder_layers(loaded.model)[layer].register_forward_pre_hook(enter)
    try:
        return trace(loaded, token_ids, capture=capture)
    finally:
        handle.remove()


def forward_with_cache(
    loaded: LoadedModel,
    token_ids: Tensor | Sequence[int],
    layers: CacheLayers,
    *,
    start_position: int,
    num_logits: int | None = None,
) -> Tensor:
    """Logits `[T, V]` of tokens that continue a given cache; `[N, T, V]` for N caches at once.

    Gradients flow into the cache where its tensors ask for them. Only the last `num_logits` rows are computed if given.

    Raises:
        ValueError: the cache does not hold exactly the tokens before `start_position`.
    """
    if any(tensor.shape[-3] != start_position for pair in layers for tensor in pair):
        held = sorted({tensor.shape[-3] for pair in layers for tensor in pair})
        raise ValueError(
            f"the cache holds {held} tokens per layer; it must hold all {start_position} before the new ones"
        )
    captured: Set[Capture] = frozenset({"logits"})
    result = run_with_cache(
        loaded,
        _ids_for(layers, token_ids),
        _GivenPrefix(layers),
        start_position=start_position,
        capture=captured,
        num_logits=num_logits,
        keep=holes(layers),
    )
    if result.logits_TV is None:
        raise ValueError("logits were asked for and not computed")
    return result.logits_TV


def run_with_cache(
    loaded: LoadedModel,
    token_ids: Tensor | Sequence[int],
    cache: KvCache,
    *,
    start_position: int,
    capture: Set[Capture] = frozenset({"logits"}),
    num_logits: int | None = None,
    positions: Tensor | None = None,
    keep: Sequence[Tensor] | None = None,
) -> ModelTrace:
    """Run tokens over a cache that lives elsewhere (a paged pool, for one).

    Args:
        cache: must already hold the `start_position` tokens before these; `extend` is called once per layer, in order,
            and may block or stream. It sees a leading N only if `token_ids` have one.
        num_logits: rows of logits, counted from the end; None is all.
        keep: per layer, which of the first tokens of the sequence each kv head sees; see `PartialLayers`.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=loaded.device)
    batched = ids.dim() == 2
    ids_NT = ids if batched else ids.unsqueeze(0)
    where = torch.arange(start_position, start_position + ids_NT.shape[1], device=loaded.device)
    positions_T = where if positions is None else positions.to(loaded.device)
    with _taps(loaded, capture) as tapped, _hidden(loaded, keep, start_position):
        logits = _forward(
            loaded,
            ids_NT,
            positions_T=positions_T,
            cache=_library_cache(cache, loaded.spec.num_layers, start_position, batched),
            num_logits=num_logits if "logits" in capture else None,
            with_logits="logits" in capture,
        )
    return _trace_from(loaded, tapped, logits, positions_T, batched=batched)


def cache_layers(loaded: LoadedModel, traced: ModelTrace, *, start_position: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The cache that a traced sequence leaves behind: post-RoPE keys and values `[T, H, D]` per layer."""
    num_tokens = traced.k_TF[0].shape[-2]
    positions_T = torch.arange(start_position, start_position + num_tokens, device=loaded.device)
    tables = _tables(loaded, positions_T, start_position + num_tokens)
    return [
        (table.apply(_heads(loaded, k_TF)), _heads(loaded, v_TF))
        for table, k_TF, v_TF in zip(tables, traced.k_TF, traced.v_TF, strict=True)
    ]


@torch.no_grad()
def project_kv(loaded: LoadedModel, layer: int, x_TM: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own pre-RoPE keys (after the key norm) and values `[T, F]` for a normalised attention input."""
    attention: Any = attention_module(decoder_layers(loaded.model)[layer])
    x = x_TM.to(loaded.dtype)
    return _normed(loaded, attention, "k_norm", attention.k_proj(x)).flatten(-2), attention.v_proj(x)


def projection_weights(loaded: LoadedModel, layer: int) -> ProjectionWeights:
    """The weights behind `project_kv`, shared with the model, not copied."""
    attention: Any = attention_module(decoder_layers(loaded.model)[layer])
    return ProjectionWeights(
        k_weight_FM=attention.k_proj.weight,
        k_bias_F=attention.k_proj.bias,
        v_weight_FM=attention.v_proj.weight,
        v_bias_F=attention.v_proj.bias,
        k_norm_weight_D=attention.k_norm.weight if loaded.spec.has_qk_norm else None,
        k_norm_eps=loaded.spec.norm_eps,
        k_norm_unit_offset=loaded.spec.has_qk_norm and loaded.spec.family == "gemma3",
    )


def holes(layers: CacheLayers | None) -> Sequence[Tensor] | None:
    """Which tokens each head keeps, per layer, where the cache has holes; for `run_with_cache`."""
    return layers.keep if isinstance(layers, PartialLayers) else None


class _GivenPrefix:
    """A `KvCache` over given tensors; it keeps nothing of what it is shown."""

    def __init__(self, layers: CacheLayers | None) -> None:
        self._layers = layers

    def extend(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        if self._layers is None:
            return k_THD, v_THD
        k_past, v_past = self._layers[layer]
        return torch.cat([k_past.to(k_THD), k_THD], dim=-3), torch.cat([v_past.to(v_THD), v_THD], dim=-3)


def _ids_for(past: CacheLayers | None, token_ids: Tensor | Sequence[int]) -> Tensor:
    """Token ids with a leading N where the cache has one: the same tokens continue each of N caches."""
    ids = torch.as_tensor(token_ids, dtype=torch.long)
    several = past is not None and past[0][0].dim() == 4
    return ids.expand(past[0][0].shape[0], -1) if several and past is not None else ids


class _OutsideLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `KvCache` in the library's terms: `[N, H, T, D]`, and sizes for its masks."""

    def __init__(self, cache: KvCache, layer: int, num_past: int, batched: bool) -> None:
        super().__init__()
        self._cache, self._layer, self._num_past, self._batched = cache, layer, num_past, batched

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        k_THD, v_THD = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self._batched:
            keys, values = self._cache.extend(self._layer, k_THD, v_THD)
        else:
            keys, values = (t.unsqueeze(0) for t in self._cache.extend(self._layer, k_THD[0], v_THD[0]))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self) -> int:
        return self._num_past


def _library_cache(cache: KvCache, num_layers: int, num_past: int, batched: bool) -> Any:
    return Cache(layers=[_OutsideLayer(cache, layer, num_past, batched) for layer in range(num_layers)])


def _forward(
    loaded: LoadedModel,
    ids_NT: Tensor,
    *,
    positions_T: Tensor,
    cache: Any,
    num_logits: int | None,
    with_logits: bool,
) -> Tensor | None:
    arguments = {
        "input_ids": ids_NT,
        "position_ids": positions_T.unsqueeze(0),
        _cache_argument(loaded.model): cache,
        "use_cache": True,
    }
    if not with_logits:
        loaded.model.base_model(**arguments)
        return None
    # 0 is the library's spelling of "all rows"
    logits: Tensor = loaded.model(**arguments, logits_to_keep=num_logits or 0).logits
    return logits


def _cache_argument(model: Any) -> str:
    """`past_key_values` is called `cache` in newer releases, which warn at the old name."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


_TAPPED: dict[str, tuple[Capture, str]] = {"k_proj": ("kv", "k"), "v_proj": ("kv", "v"), "q_proj": ("q", "q")}


@contextmanager
def _taps(loaded: LoadedModel, capture: Set[Capture]) -> Iterator[list[dict[str, Tensor]]]:
    """While open, each forward pass leaves the captured projections of every layer in the yielded list."""
    layers = decoder_layers(loaded.model)
    tapped: list[dict[str, Tensor]] = [{} for _ in layers]
    with ExitStack() as hooks:
        for layer, seen in zip(layers, tapped, strict=True):
            attention = attention_module(layer)
            for projection, (kind, name) in _TAPPED.items():
                if kind in capture:
                    handle = attention.get_submodule(projection).register_forward_hook(_keep_output(seen, name))
                    hooks.callback(handle.remove)
            if "x" in capture:
                handle = attention.get_submodule("k_proj").register_forward_pre_hook(_keep_input(seen, "x"))
                hooks.callback(handle.remove)
            if "hidden" in capture:
                handle = layer.register_forward_pre_hook(_keep_input(seen, "hidden"))
                hooks.callback(handle.remove)
        yield tapped


def _keep_output(seen: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen[name] = output

    return hook


def _keep_input(seen: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0]

    return hook


@contextmanager
def _hidden(loaded: LoadedModel, keep: Sequence[Tensor] | None, num_past: int) -> Iterator[None]:
    """While open, no query sees the tokens that its kv head dropped."""
    layers = [] if keep is None else decoder_layers(loaded.model)
    with ExitStack() as hooks:
        for layer, keep_SH in zip(layers, keep or (), strict=True):
            hook = _masking(keep_SH.to(loaded.device), num_past, loaded.spec.num_heads)
            hooks.callback(attention_module(layer).register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _masking(keep: Tensor, num_past: int, num_heads: int) -> Callable[..., tuple[Any, dict[str, Any]]]:
    keep_NHS = (keep if keep.dim() == 3 else keep.unsqueeze(0)).transpose(1, 2)
    keep_NQ1S = keep_NHS.repeat_interleave(num_heads // keep_NHS.shape[1], dim=1).unsqueeze(2)

    def hook(_module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        num_new = named["hidden_states"].shape[1]
        mask = named["attention_mask"]
        if mask is None:
            # the library leaves out the mask of a plain causal sequence
            whole = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=keep.device)
            mask = whole.tril(num_past)[None, None]
        later = (0, num_past + num_new - keep_NQ1S.shape[-1])
        return arguments, named | {"attention_mask": mask & nn.functional.pad(keep_NQ1S, later, value=True)}

    return hook


def _trace_from(
    loaded: LoadedModel, tapped: list[dict[str, Tensor]], logits: Tensor | None, positions_T: Tensor, *, batched: bool
) -> ModelTrace:
    attentions = [attention_module(layer) for layer in decoder_layers(loaded.model)]

    def collect(name: str, norm: str | None = None) -> tuple[Tensor, ...]:
        found = [_unbatched(seen[name], batched) for seen in tapped if name in seen]
        if norm is None:
            return tuple(found)
        return tuple(_normed(loaded, attention, norm, flat) for attention, flat in zip(attentions, found, strict=False))

    queries = collect("q", norm="q_norm")
    tables = _tables(loaded, positions_T, int(positions_T.max()) + 1) if queries else []
    return ModelTrace(
        k_TF=tuple(k_THD.flatten(-2) for k_THD in collect("k", norm="k_norm")),
        v_TF=collect("v"),
        x_TM=collect("x"),
        hidden_TM=collect("hidden"),
        q_TQD=tuple(table.apply(q_TQD) for table, q_TQD in zip(tables, queries, strict=True)),
        logits_TV=None if logits is None else _unbatched(logits, batched),
    )


def _unbatched(tensor: Tensor, batched: bool) -> Tensor:
    return tensor if batched else tensor[0]


def _heads(loaded: LoadedModel, flat: Tensor) -> Tensor:
    return flat.reshape(*flat.shape[:-1], -1, loaded.spec.head_dim)


def _normed(loaded: LoadedModel, attention: Any, norm: str, flat: Tensor) -> Tensor:
    """Projection output `[.., F]` as heads `[.., H, D]`, through the family's per-head norm if it has one."""
    heads = _heads(loaded, flat)
    return getattr(attention, norm)(heads) if loaded.spec.has_qk_norm else heads


def _tables(loaded: LoadedModel, positions_T: Tensor, seq_len: int) -> list[RopeTables]:
    return shared_tables(loaded.ropes, positions_T, seq_len=seq_len)


def _converted(source: GgufSource, root: Path, tell: Progress) -> Path:
    def build(target: Path) -> None:
        _require_library("gguf", extra="gguf")
        tell(f"dequantising {source.name} to bfloat16 (once, up to a minute)")
        with whole_gguf(source, target) as gguf:
            model, tokenizer = _read_gguf(gguf)
        _save(model, tokenizer, target)

    return build_once(cached_path(root, source.name, source.sha256), build)


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    place = {"gguf_file": gguf.name, "local_files_only": True}
    # newer releases would keep the weights in GGUF blocks where a kernel for them is installed
    newer = (
        {}
        if not hasattr(transformers, "GgufConfig")
        else {"quantization_config": transformers.GgufConfig(dequantize=True)}
    )
    try:
        # the GGUF reader draws a bar of its own, which the library's switch does not reach
        with _quiet_library(), redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.bfloat16, **place, **newer
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **place)
    except ValueError as error:
        raise ModelLoadError(f"{gguf}: not a GGUF of a supported architecture ({error})") from error
    return model, tokenizer


def _merged(base: Path, adapter: Path, root: Path, tell: Progress) -> Path:
    adapter_files = _adapter_files(adapter)
    digests = [f"{file.name} {digest_files([file])}" for file in (*checkpoint_files(base), *adapter_files)]

    def build(target: Path) -> None:
        tell(f"merging adapter {adapter} into {base.name}")
        model = _load_weights(base, torch.float32)
        _save(_merge_adapter(model, adapter).to(torch.bfloat16), load_tokenizer(base), target)

    return build_once(cached_path(root, f"{base.name}-{adapter.resolve().name}", *digests), build)


def _adapter_files(adapter: Path) -> list[Path]:
    files = [adapter / "adapter_config.json", adapter / "adapter_model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(
            f"adapter {adapter}: {', '.join(missing)} missing; expected a PEFT LoRA directory saved as safetensors"
        )
    try:
        kind = json.loads(files[0].read_text(encoding="utf-8")).get("peft_type")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ModelLoadError(f"adapter {adapter}: adapter_config.json is not a JSON object ({error})") from error
    if kind != "LORA":
        raise ModelLoadError(f"adapter {adapter}: peft_type is {kind!r}; only LORA can be merged into the weights")
    return files


def _merge_adapter(model: Any, adapter: Path) -> Any:
    _require_library("peft", extra="adapters")
    import peft  # heavy, and optional: only adapters need it
    from safetensors import safe_open

    with warnings.catch_warnings():
        # peft reads an old name of a model attribute; and what it only warns of here is an error below
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
        try:
            adapted = peft.PeftModel.from_pretrained(model, adapter, torch_device="cpu")
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"adapter {adapter} does not fit {model.config.model_type} weights: {error}"
            ) from error
    with safe_open(adapter / "adapter_model.safetensors", "pt") as stored:
        unused = set(stored.keys()) ^ set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if unused:
        raise ModelLoadError(f"adapter {adapter}: {len(unused)} tensors do not fit the model, such as {min(unused)}")
    return adapted.merge_and_unload(safe_merge=True)


def _require_library(name: str, *, extra: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ModelLoadError(f"the library {name!r} is not installed; run: pip install 'scd-trt[{extra}]'")


def _load_weights(path: Path, dtype: torch.dtype) -> Any:
    with _quiet_library():
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    # the library fills what is missing with random numbers and goes on
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(problem) or ())
        if names:
            raise ModelLoadError(f"{path}: {len(names)} {problem.replace('_', ' ')}, such as {names[0]}")
    return model


def _save(model: Any, tokenizer: Any, target: Path) -> None:
    # traces of the quantised file would make the saved configuration claim that the weights still are
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    with _quiet_library():
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Keep the library's progress bars off the terminal: the command line draws its own."""
    bars = transformers.utils.logging
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()
