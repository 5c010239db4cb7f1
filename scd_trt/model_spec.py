"""What the project needs to know of a model, read from its files without loading it.

Owns `ModelSpec` (shapes, rotary parameters and attention window per layer, digests of vocabulary and weights) and
`check_pair`, which says whether two models can share codes. Input is a Hugging Face directory: `config.json`,
`tokenizer.json`, `*.safetensors`. Nothing is imported from a model library, so a server can compare models cheaply.

Digests are blake2b-128 in hex. `vocab_digest` covers the token -> id map with added tokens, in id order, so it does not
depend on the order in a file, nor on merges or normalisation (two tokenizers that cut text differently only share fewer
prefixes). `weights_digest` covers every byte of every `*.safetensors` file, in name order: about a second per gigabyte.

Errors: `ModelFilesError` (the directory is not a usable checkpoint), `UnsupportedModelError` (a checkpoint of a kind that
this project does not handle), `PairMismatchError` (two models that cannot form a pair). All say which value and why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from scd_trt.config import ScdError
from scd_trt.rope import RopeParameters, merge_rope_config

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]

_FAMILY_OF_MODEL_TYPE: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 22
_EXPECTED_FILES = "expected a Hugging Face directory with config.json, tokenizer.json and *.safetensors"


class ModelFilesError(ScdError):
    """The path is not a checkpoint directory, or one of its files is missing or malformed."""


class UnsupportedModelError(ScdError):
    """The checkpoint is of an architecture or format that this project does not handle."""


class PairMismatchError(ScdError):
    """Two models that cannot share codes; the message holds every differing field with both values."""


class ModelSpec(BaseModel):
    """Shapes, rotary parameters and identity of one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="for people: name of the directory; not part of any comparison")
    family: Family
    num_layers: PositiveInt
    num_heads: PositiveInt = Field(description="query heads")
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden_size: PositiveInt
    max_position: PositiveInt = Field(description="longest context, in tokens")
    rope: tuple[RopeParameters, ...] = Field(description="per layer")
    sliding_windows: tuple[PositiveInt | None, ...] = Field(description="per layer: tokens seen, or null for all")
    has_qk_norm: bool = Field(description="queries and keys are normalised per head before the rotation")
    has_attention_bias: bool = Field(description="query, key and value projections have a bias")
    norm_eps: PositiveFloat
    dtype: str = Field(description="dtype of the stored weights")
    vocab_size: PositiveInt = Field(description="rows of the embedding; may exceed the tokenizer's vocabulary")
    vocab_digest: str
    weights_digest: str

    @property
    def kv_dim(self) -> int:
        """Elements of one token's keys, or values, in one layer (F)."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_directory(cls, path: Path) -> ModelSpec:
        """Read a Hugging Face directory.

        Raises:
            ModelFilesError: not a directory, or a file missing or malformed.
            UnsupportedModelError: a kind of model that is not handled; the message says which and what is.
            RopeError: a rotary embedding that is not handled.
        """
        config = _read_json(path, "config.json")
        family = _check_supported(path, config)
        tokenizer = _read_json(path, "tokenizer.json")
        weights = _weight_files(path)
        shapes = _naming(path / "config.json", lambda: _shape_fields(family, config))
        try:
            return cls(
                name=path.resolve().name,
                family=family,
                vocab_digest=_vocab_digest(path, tokenizer),
                weights_digest=_files_digest(weights),
                **shapes,
            )
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ModelFilesError(f"{path / 'config.json'}: {problems}") from error


SHAPE_FIELDS = ("num_layers", "num_kv_heads", "head_dim")
"""What decides the shape of a model's KV cache."""


OTHER_SHAPE = "the models' caches have different shapes, so one cannot be read as the other"
"""Why a pair of different size has no controls that reuse the producer's cache layer by layer."""


def same_shape(producer: ModelSpec, consumer: ModelSpec) -> bool:
    """Whether a cache of one could be read as a cache of the other."""
    return all(getattr(producer, field) == getattr(consumer, field) for field in SHAPE_FIELDS)


def check_pair(producer: ModelSpec, consumer: ModelSpec, *, allow_other_shape: bool = False) -> None:
    """Raise unless codes of `producer` can become KV of `consumer`.

    Rotary parameters, windows, hidden size and weights may differ: keys travel without rotary, and the maps are fitted
    on this very pair.

    Args:
        allow_other_shape: numbers of layers and heads, and head sizes, may differ too: the maps go from groups of layers to
            groups of layers.
    Raises:
        PairMismatchError: another architecture, shape of KV, or vocabulary; all differences in one message.
    """
    fields = {
        "family": "fine-tuned variants of one base model share it",
        "num_layers": "layer l feeds layer l",
        "num_kv_heads": "heads are matched one to one",
        "head_dim": "heads are matched one to one",
        "vocab_digest": "the same token ids must mean the same text",
    }
    if allow_other_shape:
        fields = {field: reason for field, reason in fields.items() if field not in SHAPE_FIELDS}
    differences = [
        f"{field}: producer {getattr(producer, field)}, consumer {getattr(consumer, field)} ({reason})"
        for field, reason in fields.items()
        if getattr(producer, field) != getattr(consumer, field)
    ]
    if differences:
        raise PairMismatchError(
            f"{producer.name} cannot feed {consumer.name}: {'; '.join(differences)}. "
            f"Choose two models with the same architecture and tokenizer{_shape_cure(producer, consumer)}"
        )


def _shape_cure(producer: ModelSpec, consumer: ModelSpec) -> str:
    of_one_kind = (producer.family, producer.vocab_digest) == (consumer.family, consumer.vocab_digest)
    return "; between sizes of one model only method.policy rd can translate" if of_one_kind else ""


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    file = directory / name
    if not directory.is_dir():
        raise ModelFilesError(f"{directory.absolute()}: no such directory; {_EXPECTED_FILES}")
    if not file.is_file():
        raise ModelFilesError(f"{directory}: {name} is missing; {_EXPECTED_FILES}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def _weight_files(directory: Path) -> list[Path]:
    # an adapter beside the weights is not part of the model; models.materialize merges adapters
    files = [file for file in directory.glob("*.safetensors") if not file.name.startswith("adapter_")]
    if not files:
        pickles = [file.name for file in directory.glob("*.bin")]
        found = f"; {pickles[0]} is a pickle, which is never loaded: convert it" if pickles else ""
        raise ModelFilesError(f"{directory}: no *.safetensors{found}; {_EXPECTED_FILES}")
    return sorted(files, key=lambda file: file.name)


def _check_supported(path: Path, config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    refusal = next((reason for reason in (rule(config) for rule in _REFUSALS) if reason), None)
    if refusal:
        raise UnsupportedModelError(f"{path}: {refusal}")
    if model_type not in _FAMILY_OF_MODEL_TYPE:
        raise UnsupportedModelError(
            f"{path}: model_type {model_type!r} is not supported; supported: {', '.join(_FAMILY_OF_MODEL_TYPE)}"
        )
    return _FAMILY_OF_MODEL_TYPE[model_type]


def _refuse_vision(config: Mapping[str, Any]) -> str | None:
    if "vision_config" in config or "text_config" in config or config.get("model_type") == "gemma3":
        kind = (config.get("architectures") or [config.get("model_type")])[0]
        return f"{kind} wraps a language model for images; save its text model alone (Gemma3ForCausalLM for Gemma 3)"
    return None


def _refuse_encoder_decoder(config: Mapping[str, Any]) -> str | None:
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder model (is_encoder_decoder): only decoder-only models have the KV cache coded here"
    return None


def _refuse_latent_attention(config: Mapping[str, Any]) -> str | None:
    if config.get("kv_lora_rank") is not None:
        return f"multi-head latent attention (kv_lora_rank {config['kv_lora_rank']}): its cache is compressed already"
    return None


def _refuse_recurrent(config: Mapping[str, Any]) -> str | None:
    others = sorted({str(kind) for kind in config.get("layer_types") or []} - {"full_attention", "sliding_attention"})
    marks = others or [key for key in _RECURRENT_KEYS if config.get(key) is not None]
    if marks:
        return f"recurrent or hybrid layers ({', '.join(marks)}): only layers with plain attention have a KV cache"
    return None


def _refuse_quantized(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        return f"quantized weights (quant_method {method}); give the unquantized checkpoint, or a .gguf file"
    return None


def _refuse_odd_attention(config: Mapping[str, Any]) -> str | None:
    if config.get("use_bidirectional_attention"):
        return "use_bidirectional_attention: keys would depend on later tokens, so a prefix cannot be shared"
    return None


_RECURRENT_KEYS = ("ssm_cfg", "state_size", "mamba_d_state", "linear_num_key_heads", "attn_layer_period", "lru_width")
_REFUSALS: tuple[Callable[[Mapping[str, Any]], str | None], ...] = (
    _refuse_encoder_decoder,
    _refuse_latent_attention,
    _refuse_recurrent,
    _refuse_vision,
    _refuse_quantized,
    _refuse_odd_attention,
)


def _naming(file: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `read`, and let its errors say which file they speak of."""
    try:
        return read()
    except ScdError as error:
        raise type(error)(f"{file}: {error}") from error
    except KeyError as error:
        raise ModelFilesError(f"{file}: key {error} is missing; it cannot be guessed") from error
    except (TypeError, ValueError) as error:
        raise ModelFilesError(f"{file}: a value of the wrong kind ({error})") from error


def _shape_fields(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or _default_head_dim(family, config)
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is None:
        # absent in old Llama files, where it means one kv head per query head; other families' defaults vary
        num_kv_heads = num_heads if family == "llama" else config["num_key_value_heads"]
    kinds = _layer_kinds(family, config)
    if len(kinds) != num_layers:
        raise ModelFilesError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    window = config.get("sliding_window", 4096)
    return {
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": config["hidden_size"],
        "max_position": config["max_position_embeddings"],
        "rope": _ropes(family, config, kinds, head_dim),
        "sliding_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "has_qk_norm": family in ("qwen3", "gemma3"),
        "has_attention_bias": _has_attention_bias(family, config),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        "vocab_size": config["vocab_size"],
    }


def _default_head_dim(family: Family, config: Mapping[str, Any]) -> int:
    fixed = {"qwen3": 128, "gemma3": 256}.get(family)
    return fixed or int(config["hidden_size"]) // int(config["num_attention_heads"])


def _has_attention_bias(family: Family, config: Mapping[str, Any]) -> bool:
    fixed = {"mistral": False, "qwen2": True}.get(family)
    return bool(config.get("attention_bias", False)) if fixed is None else fixed


def _layer_kinds(family: Family, config: Mapping[str, Any]) -> list[str]:
    """`sliding_attention` or `full_attention` per layer, by the rules with which each family fills a missing list."""
    layers = range(int(config["num_hidden_layers"]))
    if family == "mistral":
        # 4096 is what an absent key means; null switches the window off
        return ["full_attention" if config.get("sliding_window", 4096) is None else "sliding_attention"] * len(layers)
    if family == "llama":
        return ["full_attention"] * len(layers)
    if config.get("layer_types") is not None:
        return _without_unused_window(family, config, list(config["layer_types"]))
    if family == "gemma3":
        pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
        return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    first_sliding = int(config.get("max_window_layers", 28)) if config.get("use_sliding_window") else len(layers)
    return ["sliding_attention" if layer >= first_sliding else "full_attention" for layer in layers]


def _without_unused_window(family: Family, config: Mapping[str, Any], kinds: list[str]) -> list[str]:
    needs_window = family in ("qwen2", "qwen3") and not config.get("use_sliding_window")
    if "sliding_attention" in kinds and (needs_window or config.get("sliding_window", 4096) is None):
        raise ModelFilesError("layer_types asks for sliding attention, but no sliding_window is in force")
    return kinds


def _ropes(family: Family, config: Mapping[str, Any], kinds: list[str], head_dim: int) -> tuple[RopeParameters, ...]:
    def read(parameters: Mapping[str, Any] | None, default_theta: float = 10_000.0) -> RopeParameters:
        rope = RopeParameters.from_config(
            parameters,
            head_dim=head_dim,
            max_position_embeddings=config["max_position_embeddings"],
            default_theta=default_theta,
        )
        if rope.rotary_dim != head_dim:
            raise UnsupportedModelError(
                f"partial_rotary_factor rotates {rope.rotary_dim} of {head_dim}: {family} models rotate whole heads"
            )
        return rope

    if family != "gemma3":
        return (read(merge_rope_config(config)),) * len(kinds)
    nested = config.get("rope_parameters") or _old_gemma_ropes(config)
    of_kind = {
        "full_attention": read(nested.get("full_attention"), 1_000_000.0),
        "sliding_attention": read(nested.get("sliding_attention"), 10_000.0),
    }
    return tuple(of_kind[kind] for kind in kinds)


def _old_gemma_ropes(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    full = dict(config.get("rope_scaling") or {})
    return {
        "full_attention": full | {"rope_theta": config.get("rope_theta")},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq")},
    }


def _vocab_digest(path: Path, tokenizer: Mapping[str, Any]) -> str:
    try:
        ids = dict(_token_ids(tokenizer))
        lines = [json.dumps([ids[token], token]) for token in sorted(ids, key=lambda token: (ids[token], token))]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"{path / 'tokenizer.json'}: no token table in it ({error!r})") from error
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _token_ids(tokenizer: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, Mapping):
        yield from vocab.items()
    else:  # Unigram: [token, score] in id order
        yield from ((entry[0], index) for index, entry in enumerate(vocab))
    yield from ((token["content"], token["id"]) for token in tokenizer.get("added_tokens") or [])


def _files_digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in files:
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
