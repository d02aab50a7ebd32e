"""What the repository holds: nothing of one machine, no registry's host, nothing large, nothing unfinished."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".csv", ".html", ".css", ".js", "")
MACHINE = re.compile(r"(?<![\w.])/(work|root|home|Users|tmp)/\w")
HOSTS = re.compile("|".join(("py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.(org|com)", "deb" + r"\.debian")))
FUNCTION_LINES, MODULE_LINES, FOLDER_FILES = 60, 600, 20
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")))


def tracked() -> list[Path]:
    listing = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def offences(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        if path.suffix in TEXT:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    return found


@pytest.mark.parametrize("pattern", [MACHINE, HOSTS, UNFINISHED], ids=("machine path", "registry host", "unfinished"))
def test_no_file_has(pattern: re.Pattern[str]) -> None:
    assert offences(pattern) == []


def test_no_file_is_large() -> None:
    assert [str(path) for path in tracked() if path.stat().st_size > 1_000_000] == []


def modules() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def test_no_function_is_long() -> None:
    found = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                found[f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"] = node.end_lineno - node.lineno + 1
    assert {name: lines for name, lines in found.items() if lines > FUNCTION_LINES} == {}


def test_no_module_is_long() -> None:
    found = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: lines for name, lines in found.items() if lines > MODULE_LINES} == {}


def test_no_folder_is_crowded() -> None:
    found = Counter(str(path.parent.relative_to(ROOT)) for path in modules())
    assert {name: files for name, files in found.items() if files > FOLDER_FILES} == {}


def test_folders_of_tests_mirror_the_package() -> None:
    tests, rooms = ROOT / "tests", (ROOT / "src" / "windtunnel", ROOT / "benchmarks")
    folders = {path.parent.relative_to(tests) for path in tests.glob("*/**/test_*.py")} - {Path("oracle", "tests")}
    assert {str(folder) for folder in folders if not any((room / folder).is_dir() for room in rooms)} == set()


def test_every_module_of_the_root_has_a_test() -> None:
    roots = {path.stem for path in (ROOT / "src" / "windtunnel").glob("*.py")} - {"__init__", "__main__", "version"}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert roots - tests == set()


def test_the_readme_fits_a_screen_or_three() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_ci_runs_what_the_readme_says_and_no_more() -> None:
    readme, script = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    for command in ("pip install -c constraints.txt -e", "windtunnel run", "python -m pytest -n 2"):
        assert command in readme
        assert command in script.replace('"$scratch/venv/bin/', "").replace('"', "")


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
