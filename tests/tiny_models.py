"""Tiny random checkpoints in Hugging Face layout, for tests of mechanics (never of quality).

``save_tiny_model`` writes ``config.json``, ``model.safetensors`` and a byte-level tokenizer with a chat template;
``save_perturbed_copy`` writes the same model with seeded noise on every weight, which stands for a fine-tuned variant.
Vocabulary: id 0..3 are ``<pad> <s> </s> <|turn|>``, then the 256 bytes in byte-level spelling, then padding entries up
to ``VOCAB_SIZE``; any text round-trips, one ASCII character is one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

PAD_ID, BOS_ID, EOS_ID, TURN_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|turn|>")
VOCAB_SIZE = 288
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # random weights of the library's default size (0.02) leave attention flat: mistakes in keys would hardly show
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "dtype": "float32",
}

_FAMILY: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (
        LlamaConfig,
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "mistral": (MistralConfig, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}


def save_tiny_model(path: Path, family: Family = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random checkpoint of `family` to `path` (created) and return it; `overrides` go to its config."""
    config_class, family_fields = _FAMILY[family]
    config = config_class(**{**_COMMON, **family_fields, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        _randomise_vectors(model)
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return path


def save_perturbed_copy(source: Path, path: Path, *, scale: float = 0.05, seed: int = 1, **config: Any) -> Path:
    """Copy the checkpoint `source` to `path` with noise of `scale` times each tensor's spread; `config` edits its JSON."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(source / "model.safetensors")
    noisy = {name: _add_noise(weights[name], scale, generator) for name in sorted(weights)}
    save_file(noisy, path / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            (path / file.name).write_bytes(file.read_bytes())
    edited = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(edited, indent=2))
    return path


def save_tiny_tokenizer(path: Path, *, extra_tokens: tuple[str, ...] = ()) -> Path:
    """Write the byte-level tokenizer of every tiny model; `extra_tokens` make another vocabulary."""
    path.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra_tokens]
    words += [f"<unused{index}>" for index in range(len(words), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2))
    return path


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _randomise_vectors(model: torch.nn.Module) -> None:
    """Biases start at zero and norm weights at a constant: give both a spread, or their handling is not tested."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _add_noise(tensor: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std(correction=0)
    return (tensor.float() + scale * noise).to(tensor.dtype).contiguous()
