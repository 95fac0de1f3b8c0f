"""Test hflow with the newest and the oldest versions that `pyproject.toml` allows, and each extra on its own.

A lane is an environment without any extra: `newest` is what `pip install .` installs today, `oldest` has
every dependency at its lower bound. An extra is installed on top of its lane, in an environment that sees
the lane's packages, and runs the tests that need it. Extras that need a GPU are only resolved. Versions,
counts and the names of tests that failed are written whenever an environment ends. Results of lanes that are
not run again are kept.

    python requirements/versions.py --lanes newest oldest --out benchmarks/results/versions.json
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "agents": "agents",
    "data": "data",
    "lora": "lora",
    "math": "math",
    "megatron": "megatron",
    "mlflow": "mlflow",
    "serve": "serve,agents",  # tests are clients of the server
    "tensordict": "tensordict",
    "wandb": "wandb",
}
"""Each extra that runs on a machine without GPUs, and what its tests install."""
RESOLVED = ("transformer-engine", "vllm")
"""Extras that need a GPU. Their versions must fit hflow's."""
SUITES = ("not ray and not long", "ray and not long")
SHOWN = ("torch", "transformers", "ray", "numpy", "pydantic", "cloudpickle")


def run(*command: str | Path, **options: Any) -> None:
    """Run a command to its end; end this program with its status if it fails."""
    if status := subprocess.run([str(part) for part in command], **options).returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with status {status}")


class Environment:
    """A virtual environment with one resolution of hflow's dependencies."""

    def __init__(self, path: Path, lane: str, base: Environment | None = None) -> None:
        """Make an empty environment, which sees the packages of `base`."""
        self.path, self.lane = path, lane
        self.skipped: dict[str, set[str]] = collections.defaultdict(set)
        """Extra -> files with tests that were skipped for want of it."""
        self.python = path / "bin" / "python"
        self.uv: Path = path / "bin" / "uv" if base is None else base.uv
        shutil.rmtree(path, ignore_errors=True)
        run(sys.executable, "-m", "venv", path)
        if base is not None:
            (self.packages / "lane.pth").write_text(f"{base.packages}\n")

    @property
    def packages(self) -> Path:
        """The directory of its packages."""
        return next((self.path / "lib").glob("python*")) / "site-packages"

    def pip(self, *arguments: str | Path) -> None:
        """Install packages."""
        run(self.python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments)

    def install(self, extras: str) -> None:
        """Install hflow's dependencies with these extras, as the lane asks, and the tools of its tests."""
        pins: list[str | Path] = []
        target = f"{ROOT}[{extras}]" if extras else str(ROOT)
        if self.lane == "oldest":
            listed = self.path / "oldest.txt"
            listed.write_text(self.resolve(*filter(None, extras.split(","))))
            self.pip("-r", listed)
            pins = ["-c", listed]
        self.pip(target, *pins)
        self.pip(*PROJECT["optional-dependencies"]["tools"], *pins)
        self.pip("--no-deps", "--no-build-isolation", "--editable", ROOT)

    def resolve(self, *extras: str) -> str:
        """Return a requirement for every package of the lane with these extras."""
        self.pip("uv")
        resolution = "lowest-direct" if self.lane == "oldest" else "highest"
        options = ["--quiet", "--resolution", resolution, "--no-annotate", "--no-header"]
        names = [word for extra in extras for word in ("--extra", extra)]
        command = [self.uv, "pip", "compile", *options, *names, "pyproject.toml"]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout

    def versions(self) -> dict[str, str]:
        """Return the version of every distribution that it has or sees."""
        code = "import json; from importlib.metadata import distributions as all; "
        code += "print(json.dumps([(one.name, one.version) for one in reversed(list(all()))]))"
        found = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return dict(json.loads(found.stdout))

    def test(self, *files: str) -> dict[str, Any]:
        """Run the tests of some files, or all; return counts by outcome and the tests that failed."""
        report, counts, failed = self.path / "report.xml", collections.Counter[str](), []
        paths = {"PYTHONPATH": str(ROOT), "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        for suite in SUITES:
            command = [self.python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", suite, *files]
            subprocess.run(
                [*command, "--junitxml", report],
                cwd=ROOT,
                env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
                preexec_fn=_obey_signals,
            )
            for case in ElementTree.parse(report).iter("testcase"):
                module = case.get("classname") or case.get("name") or ""
                for skipped in case.iter("skipped"):
                    reason = f"{skipped.get('message')} {skipped.text}"
                    for extra in re.findall(r"needs hflow\[([\w-]+)\]", reason):
                        self.skipped[extra].add(module.replace(".", "/") + ".py")
                outcome = next((child.tag for child in case if child.tag != "properties"), "passed")
                counts[{"failure": "failed", "error": "failed"}.get(outcome, outcome)] += 1
                if outcome in ("failure", "error"):
                    failed.append(f"{case.get('classname')}::{case.get('name')}")
        return {"tests": dict(counts), "failed": failed}


def _obey_signals() -> None:
    """Let tests send signals that a job in the background, or of `nohup`, ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Test the lanes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", nargs="+", choices=["newest", "oldest"], default=["newest", "oldest"])
    parser.add_argument("--extras", nargs="*", choices=EXTRAS, default=list(EXTRAS))
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "versions", help="of environments")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "versions.json")
    options = parser.parse_args()
    earlier = json.loads(options.out.read_text())["lanes"] if options.out.is_file() else []
    results = [row for row in earlier if row["lane"] not in options.lanes]
    for lane in options.lanes:
        base = Environment(options.directory / lane, lane)
        base.install("")
        known = base.versions()
        results.append({"lane": lane, "extra": None, "versions": known, **base.test()})
        report(results, options.out)
        for extra in RESOLVED:
            base.resolve(extra)
        for extra in options.extras:
            files = set().union(*(base.skipped[part] for part in EXTRAS[extra].split(",")))
            if not files:
                continue
            layered = Environment(options.directory / f"{lane}-{extra}", lane, base)
            layered.install(EXTRAS[extra])
            changed = {
                name: version for name, version in layered.versions().items() if known.get(name) != version
            }
            row = {
                "lane": lane,
                "extra": extra,
                "versions": changed,
                **layered.test(*sorted(files)),
            }
            results.append(row)
            report(results, options.out)
    sys.exit(1 if any(row["failed"] for row in results) else 0)


def report(results: list[dict[str, Any]], out: Path) -> None:
    """Print the newest result, and write all."""
    row = results[-1]
    named = row["extra"] or ", ".join(f"{name} {row['versions'][name]}" for name in SHOWN)
    print(f"{row['lane']}: {named}: {row['tests']}", *row["failed"], sep="\n    ", flush=True)
    document = {"date": datetime.date.today().isoformat(), "python": sys.version.split()[0], "lanes": results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
