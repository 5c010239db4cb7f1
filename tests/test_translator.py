"""The artifact: what is saved is what is loaded, and nothing else is accepted."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_translators import (
    HIDDEN,
    KEY_RUNS,
    VALUE_RUNS,
    WIDTH,
    group_translator,
    random_group,
    random_patch,
    random_reuse,
    random_translator,
    tiny_spec,
)

from scd_trt import translator as translators
from scd_trt.bit_packing import BitLayout
from scd_trt.translator import (
    MANIFEST_FILE,
    TENSORS_FILE,
    AffineMap,
    GroupLayout,
    GroupTransform,
    RawLayer,
    TransformLayer,
    TransformMode,
    TranslatorError,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    translators.save(random_translator(quality={"controls": {"oracle": {"kl": 0.0}}}, config_digest="cc"), directory)
    return directory


@pytest.fixture
def artifact(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _edit(directory, **fields):
    path = directory / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_round_trip(artifact):
    original, loaded = random_translator(quality={"controls": {"oracle": {"kl": 0.0}}}, config_digest="cc"), None
    loaded = translators.load(artifact)
    assert loaded.manifest == original.manifest
    assert loaded.manifest.fingerprint == original.manifest.fingerprint
    assert translators.load_manifest(artifact) == loaded.manifest
    for mine, theirs in zip(original.layers, loaded.layers, strict=True):
        assert type(mine) is type(theirs)
        for name, value in vars(mine).items():
            other = getattr(theirs, name)
            if isinstance(value, AffineMap):
                assert torch.equal(value.weight, other.weight)
                assert torch.equal(value.bias, other.bias)
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, other)
            else:
                assert value == other


def test_saving_twice_gives_the_same_bytes_and_leaves_nothing_else(artifact, tmp_path):
    before = {file.name: file.read_bytes() for file in artifact.iterdir()}
    translators.save(translators.load(artifact), artifact)
    assert {file.name: file.read_bytes() for file in artifact.iterdir()} == before
    assert sorted(before) == [MANIFEST_FILE, TENSORS_FILE]


def test_layout_of_codes():
    manifest = random_translator(groups=((0, 2), (2, 3), (3, 4))).manifest
    # reuse (5 + 7) * 2, patch 6 * 2; raw 2 * 16 * 2; patch 6 * 2
    assert manifest.bytes_per_token == (36, 64, 12)
    assert manifest.dense_bytes_per_token == 4 * 2 * WIDTH * 2
    assert manifest.patch_layers == (1, 3)


def test_fingerprint_covers_maps_pair_and_layout_but_not_names_and_quality():
    fingerprint = random_translator().manifest.fingerprint
    same = random_translator(name="other", quality={"a": 1}, config_digest="x", producer=tiny_spec(4, name="elsewhere"))
    assert same.manifest.fingerprint == fingerprint
    layers = list(random_translator().layers)
    others = [
        random_translator(random_reuse(seed=99), *layers[1:]),
        random_translator(code_dtype="bfloat16"),
        random_translator(raw_dtype="float16"),
        random_translator(groups=((0, 4),)),
        random_translator(producer=tiny_spec(4, weights_digest="zz")),
        random_translator(consumer=tiny_spec(4, theta=5e5)),
    ]
    assert len({fingerprint, *(other.manifest.fingerprint for other in others)}) == 7


@pytest.mark.parametrize("file", [MANIFEST_FILE, TENSORS_FILE])
def test_missing_file_is_refused(artifact, file):
    (artifact / file).unlink()
    with pytest.raises(TranslatorError, match=rf"{file}: cannot be read .*scd-trt distill"):
        translators.load(artifact)


@pytest.mark.parametrize("file", [MANIFEST_FILE, TENSORS_FILE])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_truncated_file_is_refused(artifact, file, share):
    data = (artifact / file).read_bytes()
    (artifact / file).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TranslatorError, match=rf"{file}: .*truncated or edited"):
        translators.load(artifact)


@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_any_flipped_byte_of_the_tensors_is_noticed(saved, tmp_path_factory, position, flip):
    directory = tmp_path_factory.mktemp("flipped")
    data = bytearray((saved / TENSORS_FILE).read_bytes())
    data[int(position * len(data))] ^= flip
    (directory / TENSORS_FILE).write_bytes(data)
    (directory / MANIFEST_FILE).write_bytes((saved / MANIFEST_FILE).read_bytes())
    with pytest.raises(TranslatorError, match="truncated or edited"):
        translators.load(directory)


def test_edited_manifest_is_refused(artifact):
    _edit(artifact, code_dtype="bfloat16")
    with pytest.raises(TranslatorError, match=r"states fingerprint \w{32} but its content has \w{32}: edited"):
        translators.load(artifact)


def test_quality_may_be_filled_in_later(artifact):
    _edit(artifact, quality={"f1": 0.5})
    assert translators.load(artifact).manifest.quality == {"f1": 0.5}


@pytest.mark.parametrize("version", [0, 2, 4, "3", None, [3]])
def test_other_version_is_refused(artifact, version):
    _edit(artifact, format_version=version)
    with pytest.raises(TranslatorError, match=rf"format version {re.escape(repr(version))}; this scd_trt reads 3"):
        translators.load(artifact)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"format_version": 3}', "wrong fields"),
        ('{"format_version": 3, "extra": 1}', "wrong fields"),
    ],
    ids=["list", "half", "deep", "empty", "extra"],
)
def test_manifest_of_another_kind_is_refused(artifact, content, message):
    (artifact / MANIFEST_FILE).write_text(content)
    with pytest.raises(TranslatorError, match=message):
        translators.load(artifact)


def test_huge_manifest_is_not_read(artifact):
    with (artifact / MANIFEST_FILE).open("ab") as file:
        file.truncate(translators.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(TranslatorError, match="too large"):
        translators.load(artifact)


def _forge(directory, change):
    """Rewrite the tensors and make digest and fingerprint agree: only checks of the content itself are left."""
    tensors = load_file(directory / TENSORS_FILE)
    change(tensors)
    save_file(tensors, directory / TENSORS_FILE)
    digest = translators._digest((directory / TENSORS_FILE).read_bytes())
    manifest = translators.load_manifest(directory).model_copy(update={"tensors_digest": digest})
    _edit(directory, tensors_digest=digest, fingerprint=manifest.fingerprint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.encode_k.bias"), "tensor layers.0.encode_k.bias is missing"),
        (lambda t: t.update(odd=torch.zeros(1)), r"1 tensors that the manifest does not know: \['odd'\]"),
        (
            lambda t: t.update({"layers.1.encode_h.weight": torch.zeros(HIDDEN, 5)}),
            r"layer 1 encode_h\.weight: \(24, 5\) .*; expected \(24, 6\)",
        ),
        (
            lambda t: t.update({"layers.1.encode_h.weight": t["layers.1.encode_h.weight"].half()}),
            r"layer 1 encode_h\.weight: .*float16; expected",
        ),
        (lambda t: t["layers.0.decode_v.weight"].fill_(float("nan")), r"layer 0 decode_v\.weight: .*not finite"),
    ],
    ids=["missing", "extra", "shape", "dtype", "nan"],
)
def test_wrong_tensors_are_refused_even_under_a_right_digest(artifact, change, message):
    _forge(artifact, change)
    with pytest.raises(TranslatorError, match=message):
        translators.load(artifact)


def test_forging_without_a_change_is_accepted(artifact):
    _forge(artifact, lambda tensors: None)
    translators.load(artifact)


@pytest.mark.parametrize("groups", [((0, 3),), ((0, 2), (3, 4)), ((0, 4), (4, 4)), ((1, 4), (0, 1)), ()])
def test_groups_must_cover_the_layers(groups):
    with pytest.raises(TranslatorError, match="do not cover layers"):
        random_translator(groups=groups)


def test_number_of_layers_must_be_the_models():
    with pytest.raises(TranslatorError, match="1 layers for a model of 2"):
        random_translator(RawLayer(), consumer=tiny_spec(2))


def test_maps_of_another_width_are_refused():
    with pytest.raises(TranslatorError, match=r"layer 0 encode_h\.weight: \(24, 6\) .*expected \(32, 6\)"):
        random_translator(random_patch(), producer=tiny_spec(1, hidden_size=32))


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_translator_of_another_pair_is_refused_with_both_values(role):
    translator = random_translator()
    check = getattr(translator, f"check_{role}")
    check(tiny_spec(4, name="copied elsewhere"))
    with pytest.raises(
        TranslatorError, match=rf"another {role}.*weights_digest: translator has 'bb', server runs 'zz'"
    ):
        check(tiny_spec(4, weights_digest="zz"))
    with pytest.raises(TranslatorError, match=r"rope: translator has .*theta=10000"):
        check(tiny_spec(4, theta=5e5))


# ---- groups that are transformed ------------------------------------------------------------------------------------


SHIFTS = [(kind, side) for kind in ("keys", "values") for side in ("in_KI", "out_KO")]
SINK_CASES = ["sinks", "all sinks", "wide sinks", "no sinks"]


@pytest.fixture
def groups(tmp_path):
    """A saved artifact of a group of two layers and one of one."""
    translators.save(group_translator(), tmp_path)
    return tmp_path


def test_groups_survive_a_round_trip(groups):
    original, loaded = group_translator(), translators.load(groups)
    assert loaded.manifest == original.manifest
    assert loaded.layers == (TransformLayer(),) * 3
    for group in range(2):
        for kind in ("keys", "values"):
            mine, theirs = (getattr(side.transform(group), kind) for side in (original, loaded))
            assert mine.layout == theirs.layout
            for name in ("mean_I", "encode_IS", "decode_SO", "bias_O", "sink_in_KI", "sink_out_KO"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
    before = {file.name: file.read_bytes() for file in groups.iterdir()}
    translators.save(loaded, groups)
    assert {file.name: file.read_bytes() for file in groups.iterdir()} == before


def test_groups_and_single_layers_may_be_mixed(tmp_path):
    mixed = translators.build(
        _fields(3) | {"groups": ((0, 2), (2, 3))},
        (TransformLayer(), TransformLayer(), random_reuse()),
        (random_group(2), None),
    )
    translators.save(mixed, tmp_path)
    loaded = translators.load(tmp_path)
    assert loaded.manifest.bytes_per_token == (16, 24)
    assert loaded.transform(0) is not None
    assert loaded.transform(1) is None
    with pytest.raises(ValueError, match="layer 1 is coded with its group"):
        loaded.manifest.layer_bytes(1)


def _fields(num_layers):
    manifest = random_translator(*[RawLayer()] * num_layers).manifest
    names = ("name", "policy", "code_dtype", "raw_dtype", "producer", "consumer")
    return {name: getattr(manifest, name) for name in names}


def test_bytes_of_groups():
    manifest = group_translator(random_group(2), random_group(1, key_runs=VALUE_RUNS, value_runs=())).manifest
    assert manifest.bytes_per_token == (16, 5)
    layout = GroupLayout(keys=BitLayout(runs=KEY_RUNS), values=BitLayout(runs=VALUE_RUNS), num_sink_rows=3)
    assert manifest.transforms[0] == layout
    # 3 + 3 + 1 + 3 + 1, and 3 + 2
    assert layout.bytes_per_token == 16


def test_fingerprint_covers_layout_and_maps_of_groups():
    plain = group_translator().manifest
    relabelled = plain.model_copy(
        update={
            "transforms": (plain.transforms[0], GroupLayout(keys=BitLayout(runs=((8, 3),)), values=BitLayout(runs=())))
        }
    )
    swapped = GroupLayout(keys=plain.transforms[0].values, values=plain.transforms[0].keys)
    exchanged = plain.model_copy(update={"transforms": (swapped, plain.transforms[1])})
    others = [
        relabelled,
        exchanged,
        group_translator(random_group(2, seed=77), random_group(1, seed=40)).manifest,
        group_translator(random_group(1), random_group(2, seed=40)).manifest,
        group_translator(random_group(3)).manifest,
    ]
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert group_translator(quality={"frontier": []}, name="other").manifest.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("groups.1.values.bias_O"), r"tensor groups\.1\.values\.bias_O is missing"),
        (lambda t: t.update({"groups.2.keys.bias_O": torch.zeros(1)}), r"does not know: \['groups\.2\.keys\.bias_O'\]"),
        (
            lambda t: t.update({"groups.0.keys.encode_IS": torch.zeros(32, 20)}),
            r"group 0 keys\.encode: \(32, 20\) .*; expected \(32, 21\)",
        ),
        (
            lambda t: t.update({"groups.0.values.decode_SO": torch.zeros(12, 16)}),
            r"group 0 values\.decode: \(12, 16\) .*; expected \(12, 32\)",
        ),
        (
            lambda t: t.update({"groups.1.keys.mean_I": torch.zeros(32)}),
            r"group 1 keys\.mean: \(32,\) .*expected \(16,\)",
        ),
        (
            lambda t: t.update({"groups.1.keys.bias_O": torch.zeros(16, dtype=torch.float64)}),
            r"group 1 keys\.bias: .*float64; expected .*float32",
        ),
        (
            lambda t: t.update({"groups.1.keys.decode_SO": t["groups.1.keys.decode_SO"].float()}),
            r"group 1 keys\.decode: \(21, 16\) torch\.float32; expected \(21, 16\) torch\.bfloat16",
        ),
        (lambda t: t["groups.0.values.encode_IS"].fill_(float("inf")), r"group 0 values\.encode: .*not finite"),
        (
            lambda t: t.update({"groups.0.keys.sink_in_KI": torch.zeros(4, 32)}),
            r"group 0 keys\.sink_in_KI: \(4, 32\) .*; expected \(3, 32\)",
        ),
        (
            lambda t: t.update({f"groups.0.{kind}.sink_{side}": torch.zeros(4, 32) for kind, side in SHIFTS}),
            r"group 0 keys\.sink_in_KI: \(4, 32\) .*; expected \(3, 32\)",
        ),
        (
            lambda t: t.update({"groups.1.values.sink_out_KO": torch.zeros(3, 32)}),
            r"group 1 values\.sink_out_KO: \(3, 32\) .*; expected \(3, 16\)",
        ),
        (lambda t: t.pop("groups.1.keys.sink_in_KI"), r"tensor groups\.1\.keys\.sink_in_KI is missing"),
    ],
    ids=["missing", "extra", "components", "outputs", "features", "dtype", "matrix", "infinite", *SINK_CASES],
)
def test_wrong_tensors_of_groups_are_refused_by_name(groups, change, message):
    _forge(groups, change)
    with pytest.raises(TranslatorError, match=message):
        translators.load(groups)


def _relabel(directory, **fields):
    """Edit the manifest and make its fingerprint agree."""
    path = directory / MANIFEST_FILE
    data = json.loads(path.read_text()) | fields
    data.pop("fingerprint")
    data["fingerprint"] = translators.Manifest.model_validate(data).fingerprint
    path.write_text(json.dumps(data))


ONE_RUN = {"keys": {"runs": [[8, 3]]}, "values": {"runs": []}, "num_sink_rows": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transforms": []}, "layer 0 and group 0 disagree"),
        ({"transforms": [None, ONE_RUN]}, "layer 0 and group 0 disagree"),
        ({"transforms": [ONE_RUN]}, "1 transforms for 2 groups"),
        ({"transforms": [ONE_RUN] * 3}, "3 transforms for 2 groups"),
        ({"transforms": [ONE_RUN] * 2}, r"group 0 keys\.encode: \(32, 21\) .*expected \(32, 3\)"),
        ({"transforms": [ONE_RUN | {"num_sink_rows": 0}] * 2}, "8 tensors that the manifest does not know"),
        ({"groups": [[0, 1], [1, 3]]}, r"group 0 keys\.mean: \(32,\) .*expected \(16,\)"),
        ({"layers": [{"mode": "transform"}, {"mode": "raw"}, {"mode": "transform"}]}, "layer 1 and group 0 disagree"),
    ],
    ids=["none", "half", "few", "many", "layout", "sinks", "cut", "mode"],
)
def test_manifests_that_disagree_with_their_groups_are_refused(groups, fields, message):
    _relabel(groups, **fields)
    with pytest.raises(TranslatorError, match=message):
        translators.load(groups)


@pytest.mark.parametrize("runs", [[[2, 4], [8, 1]], [[8, 1], [8, 1]], [[6, 3]], [[5, 8]], [[8, 0]], [[8, -1]]], ids=str)
def test_layouts_that_are_none_are_refused(groups, runs):
    data = json.loads((groups / MANIFEST_FILE).read_text())
    data["transforms"][1]["keys"]["runs"] = runs
    (groups / MANIFEST_FILE).write_text(json.dumps(data))
    with pytest.raises(TranslatorError, match=r"wrong fields, first: .*transforms"):
        translators.load(groups)


@pytest.mark.parametrize(
    ("layers", "transforms", "message"),
    [
        ((TransformLayer(), TransformLayer()), (), "layer 0 and group 0 disagree"),
        ((RawLayer(), RawLayer()), (random_group(2),), "layer 0 and group 0 disagree"),
        ((TransformLayer(), RawLayer()), (random_group(2),), "layer 1 and group 0 disagree"),
        ((TransformLayer(), TransformLayer()), (random_group(2), None), "2 transforms for 1 groups"),
        ((TransformLayer(), TransformLayer()), (random_group(3),), r"group 0 keys\.mean: \(48,\) .*expected \(32,\)"),
    ],
    ids=["no transform", "no mode", "half", "many", "wide"],
)
def test_maps_that_disagree_are_not_built(layers, transforms, message):
    with pytest.raises(TranslatorError, match=message):
        translators.build(_fields(2) | {"groups": ((0, 2),)}, layers, transforms)


def test_keys_and_values_have_the_same_sinks():
    mixed = GroupTransform(keys=random_group(1).keys, values=random_group(1, num_sinks=0).values)
    with pytest.raises(TranslatorError, match=r"group 0 values\.sink_in_KI: \(0, 16\) .*; expected \(3, 16\)"):
        group_translator(mixed)
    half = GroupTransform(
        keys=replace(random_group(1).keys, sink_in_KI=None), values=random_group(1, num_sinks=0).values
    )
    with pytest.raises(TranslatorError, match=r"group 0 keys\.sink_out_KO: \(3, 16\) .*; expected \(0, 16\)"):
        group_translator(half)


def test_transform_mode_has_no_settings():
    assert group_translator().manifest.layers == (TransformMode(),) * 3
