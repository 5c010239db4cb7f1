"""Rules on the tree that no linter states."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "scd_trt").rglob("*.py"))


def test_nixl_and_tensorrt_llm_are_loaded_in_one_file_each() -> None:
    # modules loaded by name escape the import linter
    loads = re.compile(r"^\s*(?:import|from)\s+(nixl\w*|tensorrt\w*)|import_module\(f?\"(nixl|tensorrt)", re.M)
    found = {str(path.relative_to(ROOT)) for path in SOURCES if loads.search(path.read_text())}
    assert found <= {"scd_trt/transfer/nixl.py", "scd_trt/serving/trtllm.py"}
    assert '"nixl_cu12"' in (ROOT / "scd_trt/transfer/nixl.py").read_text()


def test_nothing_unpickles_or_runs_code_of_a_checkpoint() -> None:
    forbidden = re.compile(r"pickle|torch\.load\(|trust_remote_code=True|deserialize_descs")
    for path in SOURCES:
        code = re.sub(r'""".*?"""|#.*', "", path.read_text(), flags=re.S)
        assert not forbidden.search(code), f"{path}: {forbidden.search(code)}"


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", text))
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    for page in re.findall(r"\b((?:docs|scd_trt|examples)/[\w/.-]+\.md)", text):
        assert (ROOT / page).is_file(), page
