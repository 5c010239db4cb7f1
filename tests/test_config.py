"""The pair file: what loads, and what a user is told when it does not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scd_trt.config import ConfigError, PairConfig, cache_root, load_pair, reference

MINIMAL = """\
name: demo
producer: {model: package:smollm2-135m-instruct}
consumer: {model: ./tuned, adapter: adapter}
calibration: {source: package:narrativeqa}
heldout: {source: texts}
"""


def load(tmp_path: Path, text: str) -> PairConfig:
    path = tmp_path / "pair.yaml"
    path.write_text(text)
    return load_pair(path)


def failure(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_minimal_file_loads_and_paths_are_relative_to_it(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.consumer.model == str(tmp_path / "tuned")
    assert config.consumer.adapter == tmp_path / "adapter"
    assert config.producer.model == "package:smollm2-135m-instruct"
    assert config.heldout.source == str(tmp_path / "texts")
    assert config.translator_path() == cache_root() / "translators" / "demo"


def test_a_consumer_may_be_a_recipes_and_text_a_mixture(tmp_path: Path) -> None:
    text = MINIMAL.replace("./tuned, adapter: adapter", "recipe:smollm2_rope").replace(
        "package:narrativeqa", "[package:xsum, a.txt]"
    )
    config = load(tmp_path, text)
    assert config.consumer.model == "recipe:smollm2_rope"
    assert config.calibration.source == ("package:xsum", str(tmp_path / "a.txt"))


def test_unknown_key_names_line_key_and_nearest(tmp_path: Path) -> None:
    text = failure(tmp_path, MINIMAL + "method:\n  policy: paper\n  patch_layer: auto\n")
    assert "pair.yaml:8: method.patch_layer: unknown key; did you mean 'patch_layers'?" in text


def test_wrong_literal_names_value_allowed_and_nearest(tmp_path: Path) -> None:
    text = failure(tmp_path, MINIMAL + "transport: {lane: tpc}\n")
    assert "pair.yaml:6: transport.lane:" in text
    assert "'auto', 'tcp' or 'shm'" in text
    assert "found 'tpc'; did you mean 'tcp'?" in text


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("engine: {num_blocks: 0}", "engine.num_blocks: Input should be greater than 0; found 0"),
        ("method: {r_k: -3}", "method.r_k: Input should be greater than 0; found -3"),
        ("method: {patch_layers: [1, x]}", "method.patch_layers.1"),
        ("servers: {router: {port: 70000}}", "servers.router.port"),
        ("servers: {router: {port: 8001}}", "router.port and prefill.port both use 127.0.0.1:8001"),
        ("control: {heartbeat_s: 2, peer_timeout_s: 3}", "must be at least twice heartbeat_s"),
    ],
)
def test_wrong_values(tmp_path: Path, addition: str, expected: str) -> None:
    assert expected in failure(tmp_path, MINIMAL + addition + "\n")


def test_several_mistakes_are_all_told(tmp_path: Path) -> None:
    text = failure(tmp_path, MINIMAL.replace("name: demo", "nam: demo"))
    assert len(text.splitlines()) == 2
    assert "name: missing" in text
    assert "nam: unknown key; did you mean 'name'?" in text


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "\x00"])
def test_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "pair.yaml" in failure(tmp_path, text)


def test_key_given_twice_is_told_and_a_merge_is_none(tmp_path: Path) -> None:
    text = failure(tmp_path, MINIMAL + "engine: {num_blocks: 4, num_blocks: 8}\n")
    assert "pair.yaml:6: engine.num_blocks: key given twice; keep one" in text
    merged = MINIMAL.replace(
        "heldout: {source: texts}", "heldout: {<<: &h {source: texts, num_sequences: 2}, source: b}"
    )
    assert load(tmp_path, merged).heldout.num_sequences == 2
    assert "engine.num_blocks" in failure(tmp_path, MINIMAL + "engine: &e {num_blocks: *e}\n")


def test_missing_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_pair(tmp_path / "nowhere.yaml")


def test_ranks_may_be_given_per_layer(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + "method: {r_k: [4, 8], r_v: 6, patch_layers: [0, 2]}\n")
    assert (config.method.r_k, config.method.r_v, config.method.patch_layers) == ((4, 8), 6, (0, 2))


def test_method_digest_follows_the_method_and_not_the_servers(tmp_path: Path) -> None:
    base = load(tmp_path, MINIMAL).method_digest()
    assert load(tmp_path, MINIMAL + "servers: {router: {port: 9000}}\n").method_digest() == base
    assert load(tmp_path, MINIMAL + "method: {seed: 1}\n").method_digest() != base


@given(
    st.recursive(st.none() | st.integers() | st.text() | st.floats(allow_nan=False), lambda x: st.lists(x, max_size=3))
)
def test_any_value_in_any_place_is_an_explained_error(value: object) -> None:
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pair.yaml"
        path.write_text(json.dumps({"name": value, "producer": value, "method": {"r_k": value}}))
        with pytest.raises(ConfigError, match="producer"):
            load_pair(path)


def test_reference_page_is_current_and_names_every_section() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "run `python -m scd_trt.config`"
    assert "| `servers.decode.control_port` | `8102` | whole number |" in page


SHIPPED = sorted((Path(__file__).parents[1] / "engine_configs").glob("*/*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_pair_file_loads_and_finds_its_adapter(path: Path) -> None:
    config = load_pair(path)
    assert config.consumer.adapter is None or (config.consumer.adapter / "adapter_config.json").is_file()
    # the artifact goes by the name: two files of one name would overwrite each other's
    assert config.name == path.parent.name + ("" if path.stem == "pair" else f"-{path.stem}")
