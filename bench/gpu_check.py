"""One command on a machine with an NVIDIA GPU, no network: build, run the tests on the device, measure.

    python bench/gpu_check.py --json bench/results/gpu.json

It builds the package into this Python for the card that is there (or takes --wheel), runs the tests marked `gpu`, which
hold every verb on the device to the reference and replay a CUDA graph with other lengths, and measures each stage and
the whole step as `quest.bench.gpu` says. What the minutes don't allow is left out, and said.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
TEST_SHARE = 0.4  # of the minutes, at most


def main(
    json: Annotated[Path | None, typer.Option(help="Write machine and rows here.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="Install this wheel instead of building.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for all of it.")] = 8.0,
    tests: Annotated[bool, typer.Option(help="Run the tests marked gpu.")] = True,
) -> None:
    """Build, test and measure quest on the GPU of this machine."""
    start = time.monotonic()
    end = start + 60 * minutes
    os.chdir(ROOT)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: torch sees no CUDA device here")
    install(wheel, torch.cuda.get_device_capability())
    print(f"==> installed after {time.monotonic() - start:.0f} s", flush=True)
    tested = run_tests(TEST_SHARE * 60 * minutes) if tests else {}
    print(f"==> tests: {tested or 'not asked for'}", flush=True)
    report(end, tested, json)
    if tested.get("status"):
        raise SystemExit("gpu_check: tests failed or did not end, see above")


def install(wheel: Path | None, capability: tuple[int, int]) -> None:
    """Into this Python, with nothing from an index. The tests of the tree run on the package that is installed."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    what = [str(wheel), "--force-reinstall"] if wheel else ["-e", "."]
    arch = "{}{}".format(*capability)
    subprocess.run([*pip, *what], check=True, env=os.environ | {"QUEST_CUDA": "1", "QUEST_CUDA_ARCHS": arch})


def run_tests(seconds: float) -> dict[str, Any]:
    """Exit status and last line of the tests marked `gpu`; status 124 where they did not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    if importlib.util.find_spec("xdist"):  # most of the time Triton compiles
        command += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = 124, (late.stdout or b"").decode() + f"\nstopped after {seconds:.0f} s"
    lines = output.strip().splitlines()
    print("\n".join(lines[-30:] if status else lines[-3:]), flush=True)
    return {"status": status, "summary": lines[-1] if lines else ""}


def report(end: float, tested: dict[str, Any], json: Path | None) -> None:
    import torch
    from rich.console import Console

    from quest.bench import gpu, gpu_offload
    from quest.bench.machine import describe, write_json

    device, console = torch.device("cuda"), Console(width=200)
    machine = describe() | gpu.describe(device) | {"date": date.today().isoformat(), "tests": tested}
    machine["command"] = " ".join(["python", "bench/gpu_check.py", *sys.argv[1:]])
    machine["copy_gb_per_s"] = (bandwidth := gpu.copy_bandwidth(device)) / 1e9
    rows: list[dict[str, Any]] = []
    for shape in gpu.shapes():
        if time.monotonic() < end:
            rows.append(gpu.measure(shape, bandwidth, device))
        else:
            rows.append(vars(shape) | {"skipped": "no time left"})
        torch.cuda.empty_cache()
        if json is not None:
            write_json(json, machine, rows)
    gpu.show(machine, rows, console)
    offloaded: list[dict[str, Any]] = []
    for shape in gpu_offload.shapes():
        for part in gpu_offload.PARTS:
            if time.monotonic() < end:
                offloaded.append(gpu_offload.measure(shape, part, device))
                torch.cuda.empty_cache()
    if offloaded:
        gpu_offload.show(offloaded, console)
    if json is not None:
        write_json(json, machine | {"offload": offloaded}, rows)
    if json is not None:
        print(f"wrote {json}")


if __name__ == "__main__":
    typer.run(main)
