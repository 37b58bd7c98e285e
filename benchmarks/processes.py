"""Checks of many networks, each in a process of its own with limits on time and memory.

Results are appended to a JSON lines file; the same command resumes an interrupted run.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

NETWORKS = tomllib.loads((Path(__file__).parent / "networks.toml").read_text())
CNNS: dict[str, list[str]] = NETWORKS["cnns"]
HYBRIDS: dict[str, list[str]] = NETWORKS["hybrids"]

#: Networks that accept only inputs of their original size.
OWN_SIZE = {
    "alexnet",
    "bat_resnext26ts",
    "inception_resnet_v2",
    "inception_v3",
    "inception_v4",
    "timm:inception_v3",
}
OWN_SIZE.update(name for names in HYBRIDS.values() for name in names)

MEMORY_LIMIT_GIB = 24
#: Largest side of the inputs, where the network allows it: the channels do not depend on the size.
MAX_SIDE = 128


def all_names() -> list[str]:
    names = [name for names in (*CNNS.values(), *HYBRIDS.values()) for name in names]
    assert len(names) == len(set(names)), "networks.toml names a network twice: it would count twice"
    return names


def input_size(name: str) -> tuple[int, int, int]:
    from peel import zoo

    channels, height, width = zoo.find(name).input_size
    if name in OWN_SIZE:
        return channels, height, width
    return channels, min(height, MAX_SIDE), min(width, MAX_SIDE)


def run_check(check: Callable[[str], dict[str, Any]], name: str) -> None:
    """Run a check in this process and print the result as one line of JSON."""
    warnings.simplefilter("ignore")
    limit = MEMORY_LIMIT_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        result = check(name)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        first = str(error).splitlines()[0] if str(error) else ""
        result = {"ok": False, "problem": f"{type(error).__name__}: {first}"[:300]}
        result["where"] = f"{Path(where.filename).name}:{where.lineno}"
    print("RESULT " + json.dumps(result))


def run_all(script: str, names: Iterable[str], limits: Mapping[str, float], results: Path, jobs: int) -> None:
    """Run `SCRIPT --one TOOL NAME` for every tool and name without a result. `limits`: tool -> seconds."""
    done = {(row["tool"], row["name"]) for row in read(results)}
    results.parent.mkdir(parents=True, exist_ok=True)
    pending = [(tool, name) for tool in limits for name in names if (tool, name) not in done]
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        rows = [
            pool.submit(_run_process, script, tool, name, limits[tool], threads) for tool, name in pending
        ]
        for i, row in enumerate((future.result() for future in as_completed(rows)), start=1):
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            verdict = "ok" if row["ok"] else f"NOT OK: {row['problem'][:200]} {row.get('where', '')}"
            print(
                f"[{i}/{len(pending)}] {row['tool']:14}{row['name']:32}{row['total_s']:7.1f} s  {verdict}",
                flush=True,
            )


def _run_process(script: str, tool: str, name: str, limit: float, threads: int) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, script, "--one", tool, name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
        line = next((line for line in output.stdout.splitlines() if line.startswith("RESULT ")), None)
        result = (
            json.loads(line[7:])
            if line
            else {"ok": False, "problem": f"the process ended with {output.returncode}"}
        )
    except subprocess.TimeoutExpired:
        result = {"ok": False, "problem": f"no result after {limit:.0f} s"}
    return {"tool": tool, "name": name, "total_s": round(time.perf_counter() - began, 1), **result}


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def write_between(path: Path, marker: str, text: str) -> None:
    """Replace what stands between `<!-- marker -->` and `<!-- /marker -->` in a file."""
    before, _, rest = path.read_text().partition(f"<!-- {marker} -->\n")
    after = rest.partition(f"<!-- /{marker} -->")[2]
    path.write_text(f"{before}<!-- {marker} -->\n{text}<!-- /{marker} -->{after}")
