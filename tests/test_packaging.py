"""What is built and installed: the libraries' symbols, the wheel, the names it makes importable, set-up errors."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".*", "__pycache__", "*.so", "*.egg-info", "build", "dist")


def run(command, *, cwd, env=None):
    """Run and return (exit status, all output); QUEST_* and CUDA_* of the caller do not leak in."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("QUEST_", "CUDA_", "PYTHON"))}
    command = [str(word) for word in command]
    done = subprocess.run(
        command, cwd=cwd, env=clean | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def need(tool):
    return shutil.which(tool) or pytest.skip(f"{tool} is not installed")


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of the repository with the objects of the last build, so that building in it is quick."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    if (ROOT / "build/quest").exists():
        shutil.copytree(ROOT / "build/quest", copy / "build/quest")
    return copy


def hook(tree, name, into):
    """Call one hook of the build backend, as an installer would, and return the file it made."""
    into.mkdir()
    code = f"from setuptools import build_meta; print(build_meta.{name}({str(into)!r}))"
    status, output = run([sys.executable, "-c", code], cwd=tree)
    assert status == 0, output
    return next(into.iterdir())


@pytest.fixture(scope="session")
def wheel(tree):
    # --no-index: whatever would be downloaded, a second torch above all, fails instead.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
    ]
    status, output = run(command, cwd=tree)
    assert status == 0, output
    (path,) = (tree / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel):
    """The folder that a wheel's files are in after an installation."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_is_for_one_python(wheel):
    """quest._host is; the libraries that torch loads are not."""
    python = "cp{}{}".format(*sys.version_info)
    assert re.fullmatch(rf"quest_attention-0\.1\.0(\+cu\d+)?-{python}-{python}-\w+\.whl", wheel.name)


def test_wheel_holds_libraries_types_and_folders_from_the_top(wheel, tree):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(tree)) for path in (tree / "quest").rglob("*.py")}
    for folder in ("bench", "triton_kernels"):
        expected |= {f"quest/{path.relative_to(tree)}" for path in (tree / folder).glob("*.py")}
    host = f"quest/_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert names >= expected | {"quest/py.typed", "quest/_host.pyi", "quest/_C.abi3.so", host}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"quest"}
    has_cuda = "quest/_C_cuda.abi3.so" in names
    assert has_cuda == ("+cu" in wheel.name)


def test_wheel_metadata(installed):
    (info,) = installed.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "\nRequires-Dist: torch>=2.11\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "quest = quest.cli:app" in (info / "entry_points.txt").read_text()
    assert (info / "licenses/LICENSE").read_text().lstrip().startswith("Apache License")


def test_build_requirements_name_no_torch():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert not [requirement for requirement in requires if "torch" in requirement]


def test_source_distribution_holds_what_a_build_needs(tree):
    with tarfile.open(hook(tree, "build_sdist", tree / "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {str(path.relative_to(tree)) for path in (tree / "csrc").rglob("*") if path.is_file()}
    needed |= {"quest/py.typed", "quest/_host.pyi", "tests/test_packaging.py"}
    assert names >= needed | {"setup.py", "pyproject.toml", "LICENSE"}


# --- symbols ---------------------------------------------------------------------------------------------------------


def test_libraries_use_only_the_stable_abi(installed):
    """No C++ symbol of torch: those change between releases, and between CPU and CUDA builds."""
    nm = need("nm")
    for library in (installed / "quest").glob("*.abi3.so"):
        status, output = run([nm, "-D", "--undefined-only", "-C", library], cwd=installed)
        assert status == 0, output
        assert "aoti_torch_" in output or "torch_" in output, f"{library.name}: nm shows no symbol of torch at all"
        unstable = [line.strip() for line in output.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
        assert unstable == [], library.name


def test_no_code_is_shared_between_instruction_sets(wheel, tree):
    """The linker keeps one copy of an inline function: if AVX-512 code provided it, older processors would crash."""
    nm = need("nm")
    owners = defaultdict(set)
    for obj in (tree / "build/quest").rglob("*.o"):
        isa = next((isa for isa in ("avx2", "avx512_bf16", "avx512") if isa in obj.name), "the architecture's own")
        _, output = run([nm, "--defined-only", obj], cwd=tree)
        for line in output.splitlines():
            *_, kind, name = line.split()
            if kind in "WVu":
                owners[name].add(isa)
    assert {name: isas for name, isas in owners.items() if len(isas) > 1} == {}


def test_host_module_needs_no_torch(installed):
    (library,) = installed.glob("quest/_host.*.so")
    status, output = run([need("readelf"), "-d", library], cwd=library.parent)
    assert status == 0, output
    assert [name for name in re.findall(r"NEEDED.*\[(.*)\]", output) if "torch" in name or "c10" in name] == []


@pytest.fixture
def cuda_library(installed):
    library = installed / "quest/_C_cuda.abi3.so"
    return library if library.exists() else pytest.skip("no CUDA toolkit here: built without quest._C_cuda")


def test_cuda_library_brings_its_own_runtime(cuda_library):
    status, output = run([need("readelf"), "-d", cuda_library], cwd=cuda_library.parent)
    assert status == 0, output
    needed = re.findall(r"NEEDED.*\[(.*)\]", output)
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert [name for name in needed if "cuda" in name or "nv" in name] == []


def test_cuda_library_holds_the_machine_code_it_claims(cuda_library):
    """What setup.py's default asks for, and PTX for cards to come."""
    cuobjdump = pytest.importorskip("gpu_report_cuda").cuobjdump()
    found = {}
    for kind in ("elf", "ptx"):
        status, output = run([cuobjdump, f"--list-{kind}", cuda_library], cwd=cuda_library.parent)
        assert status == 0, output
        found[kind] = sorted({int(arch) for arch in re.findall(r"\.sm_(\d+)\.", output)})
    assert found == {"elf": [80, 90, 100, 120], "ptx": [120]}


# --- importable names ------------------------------------------------------------------------------------------------

NAMES_SEEN = """
import importlib.util, json, pathlib, site, sys
site.addsitedir(sys.argv[1])
sys.path += json.loads(sys.argv[2])
top = [importlib.util.find_spec(name) for name in ("bench", "triton_kernels")]
print(json.dumps([str(spec.origin or list(spec.submodule_search_locations)) for spec in top if spec]))
print(json.dumps([str(importlib.util.find_spec(name).origin) for name in sys.argv[3:]]))
"""


def names_seen(folder, names, cwd):
    """In a Python that sees `folder` and the packages of this one: where the top-level names and `names` are found."""
    others = [entry for entry in sys.path if entry and not Path(entry).resolve().is_relative_to(ROOT / "tests")]
    others = [entry for entry in others if Path(entry).resolve() != ROOT and "__editable__" not in entry]
    command = [sys.executable, "-I", "-S", "-c", NAMES_SEEN, folder, json.dumps(others), *names]
    status, output = run(command, cwd=cwd)
    assert status == 0, output
    top, inside = (json.loads(line) for line in output.splitlines()[-2:])
    return top, inside


def packages(tree):
    return [f"quest.{folder}" for folder in ("bench", "triton_kernels") if list((tree / folder).glob("*.py"))]


def test_folders_from_the_top_are_only_seen_inside_quest(installed, tree, tmp_path):
    top, inside = names_seen(installed, ["quest", *packages(tree)], tmp_path)
    assert [place for place in top if str(tree) in place or str(ROOT) in place] == []
    assert all(place.startswith(str(installed / "quest")) for place in inside)


def test_editable_install_shows_the_same_names(tree, tmp_path):
    with zipfile.ZipFile(hook(tree, "build_editable", tmp_path / "wheel")) as archive:
        archive.extractall(tmp_path / "site")
    top, inside = names_seen(tmp_path / "site", ["quest", *packages(tree)], tmp_path)
    assert [place for place in top if str(tree) in place or str(ROOT) in place] == []
    folders = [tree / name.removeprefix("quest.") for name in ["quest", *packages(tree)]]
    assert inside == [str(folder / "__init__.py") for folder in folders]
    assert (tree / "quest/_C.abi3.so").exists()


# --- set-up errors ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path):
    """A function that runs setup.py in an environment with setuptools and, if a version is given, a torch of sorts."""
    setuptools = pytest.importorskip("setuptools")
    venv.create(tmp_path / "venv", symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (packages / name).symlink_to(Path(setuptools.__file__).parents[1] / name)

    def setup_py(tree, torch=None):
        if torch:
            (packages / "torch").mkdir()
            (packages / "torch/__init__.py").touch()
            (packages / "torch/version.py").write_text(f"__version__ = '{torch}'\n")
        return run([tmp_path / "venv/bin/python", "setup.py", "build_ext"], cwd=tree, env={"PYTHONPATH": str(packages)})

    return setup_py


def test_missing_torch_is_one_sentence(bare, tree):
    status, output = bare(tree)
    assert status != 0
    assert re.fullmatch(r"quest-attention: torch 2\.11 or newer .*must be installed.*pip install.*\n", output), output


def test_old_torch_is_named(bare, tree):
    status, output = bare(tree, torch="2.9.1+cpu")
    assert status != 0
    assert re.fullmatch(r"quest-attention: torch 2\.11 or newer .*2\.9\.1\+cpu is installed.*\n", output), output


@pytest.fixture
def set_up(tmp_path):
    """A function that asks setup.py for the version, in a folder with or without CUDA sources."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "csrc/cuda").mkdir(parents=True)

    def version(*, cuda_sources, **env):
        if cuda_sources:
            (tmp_path / "csrc/cuda/score.cu").touch()
        status, output = run([sys.executable, "setup.py", "--version"], cwd=tmp_path, env=env)
        return status, output.splitlines()[-1]

    return version


def test_cuda_asked_for_without_sources(set_up):
    status, last = set_up(cuda_sources=False, QUEST_CUDA="1")
    assert status != 0
    assert last.startswith("quest-attention: QUEST_CUDA=1 was asked for, but this version has no CUDA sources")


def test_cuda_asked_for_without_toolkit(set_up, tmp_path):
    status, last = set_up(cuda_sources=True, QUEST_CUDA="1", CUDA_HOME=str(tmp_path))
    assert status != 0
    assert last.startswith(f"quest-attention: QUEST_CUDA=1 was asked for, but no CUDA toolkit is in {tmp_path}")


def test_unknown_cuda_setting_lists_the_options(set_up):
    status, last = set_up(cuda_sources=False, QUEST_CUDA="yes")
    assert status != 0
    assert last == "quest-attention: QUEST_CUDA must be auto, 0 or 1, not 'yes'."


@pytest.mark.parametrize("wish", ["auto", "0"])
def test_cpu_only_version_is_plain(set_up, wish, tmp_path):
    assert set_up(cuda_sources=True, QUEST_CUDA=wish, CUDA_HOME=str(tmp_path)) == (0, "0.1.0")
