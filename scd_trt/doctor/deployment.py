"""Checks of what is to be served: files of TensorRT-LLM, translator, models, secret; each against what it says it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from scd_trt import translator as translators
from scd_trt.config import ModelConfig, ScdError, ServedPair
from scd_trt.deploy.check import FileReport, check_files
from scd_trt.doctor.findings import Finding
from scd_trt.model_references import resolve
from scd_trt.model_spec import ModelSpec
from scd_trt.transfer.connection import SecretError, read_secrets
from scd_trt.translator import Translator

Role = Literal["prefill", "decode"]
STOCK_FILES = ("prefill.yaml", "decode.yaml", "disagg.yaml")


def examine_deployment(
    pair: ServedPair, file: Path, *, role: Role | None = None, reads_models: bool = True
) -> Iterator[Finding]:
    """All of them.

    Args:
        file: that the pair was read from; files of TensorRT-LLM are looked for beside it.
        role: that this host will have: then its model must be here, the other's need not.
        reads_models: digests of models read all their weights.
    """
    yield from check_settings(file)
    yield check_secret(pair)
    try:
        translator = translators.load(pair.translator_path())
    except ScdError as error:
        yield Finding("artifact", "fail", str(error), "copy the same artifact to the same path on every host")
        return
    yield check_artifact(pair, translator)
    for each in ("prefill", "decode"):
        yield check_model(pair, translator, each, is_needed=role == each, reads_models=reads_models)


def check_settings(file: Path) -> Iterator[Finding]:
    """Settings that SCD needs of TensorRT-LLM, in the three files that `config render` writes into one directory."""
    present = [file.parent / name for name in STOCK_FILES if (file.parent / name).exists()]
    if file.name not in STOCK_FILES or not present:
        yield Finding("settings", "skip", f"{file} is a pair file; give the disagg.yaml that is served")
        return
    for report in check_files(present):
        yield _judged(report)


def _judged(report: FileReport) -> Finding:
    wrong = [finding for finding in report.findings if not finding.ok]
    lines = [
        *report.mistakes,
        *(f"line {item.line}: {item.key} is {item.found}, needs {item.required}" for item in wrong),
    ]
    if not lines:
        return Finding("settings", "ok", f"{report.path.name}: {len(report.findings)} settings are as needed")
    cure = f"scd-trt config check --brief {report.path}"
    return Finding("settings", "warn" if report.ok else "fail", f"{report.path.name}: {'; '.join(lines)}", cure)


def check_secret(pair: ServedPair) -> Finding:
    """The control channel's secret can be read, and by its owner only."""
    path = pair.control.secret_file
    try:
        read_secrets(path)
    except SecretError as error:
        return Finding("secret", "fail", str(error), "umask 077; openssl rand -hex 32 > FILE, the same on every host")
    if path is None:
        return Finding("secret", "skip", "control.secret_file is not set; workers then listen on loopback only")
    if path.stat().st_mode & 0o077:
        return Finding("secret", "warn", f"{path} can be read by others", f"chmod 600 {path}")
    return Finding("secret", "ok", str(path))


def check_artifact(pair: ServedPair, translator: Translator) -> Finding:
    """The artifact is whole (`translators.load` has compared its digest) and can be served as configured."""
    manifest = translator.manifest
    ratio = manifest.dense_bytes_per_token / sum(manifest.bytes_per_token)
    text = f"{manifest.name}, fingerprint {manifest.fingerprint}, {ratio:.1f}x fewer bytes than the cache"
    try:
        if pair.method.guard == "cut":
            translator.check_guard()
    except ScdError as error:
        return Finding("artifact", "fail", str(error), "scd-trt distill PAIR.yaml, or scd.guard: 'off'")
    return Finding("artifact", "ok", text, details=(("fingerprint", manifest.fingerprint),))


def check_model(
    pair: ServedPair, translator: Translator, role: Role, *, is_needed: bool, reads_models: bool
) -> Finding:
    """The model's weights are those that the artifact was fitted for."""
    section = pair.producer if role == "prefill" else pair.consumer
    name = f"{role} model"
    if not reads_models:
        return Finding(name, "skip", f"{section.model} was not read")
    try:
        spec = ModelSpec.from_directory(_directory(section))
        (translator.check_producer if role == "prefill" else translator.check_consumer)(spec)
    except ImportError as error:
        return Finding(
            name, "skip", f"{section.model} has to be made first ({error})", "scd-trt config models PAIR.yaml"
        )
    except translators.TranslatorError as error:
        return Finding(name, "fail", str(error), "serve the weights that were distilled, or distil again")
    except ScdError as error:
        cure = "copy the model to the path that the file names" if is_needed else ""
        return Finding(name, "fail" if is_needed else "skip", str(error), cure)
    return Finding(name, "ok", f"{section.model}, digest {spec.weights_digest}")


def _directory(section: ModelConfig) -> Path:
    source = resolve(section.model)
    if isinstance(source, Path) and section.adapter is None:
        return source
    from scd_trt.models import materialize  # needs transformers 5, which worker hosts need not have

    return materialize(section.model, adapter=section.adapter)
