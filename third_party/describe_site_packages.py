"""Writes a BUILD file with one py_library for each installed distribution.

`pip_install` in python.bzl runs this in its repository. Beside BUILD it writes
`markers/<name>`: name, version and the hash of RECORD of the distribution and
of everything it requires, so that a target is built anew when, and only when,
one of them has changed.
"""

import hashlib
import importlib.metadata
import pathlib
import sys

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

_HEADER = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])
"""

_LIBRARY = """
py_library(
    name = "{label}",
    data = [
        "markers/{label}",
        "site-packages",
    ],
    imports = ["site-packages"],
)
"""


def label_of(name: str) -> str:
  """Returns the label of a distribution: `absl_py` for `absl-py`."""
  return canonicalize_name(name).replace("-", "_")


def requirements_of(
  dist: importlib.metadata.Distribution, extras: frozenset[str]
) -> list[Requirement]:
  """Returns what a distribution requires on this machine, with extras."""
  requirements = [Requirement(line) for line in dist.requires or []]
  return [
    r
    for r in requirements
    if r.marker is None
    or any(r.marker.evaluate({"extra": e}) for e in {"", *extras})
  ]


def closure_of(
  name: str, dists: dict[str, importlib.metadata.Distribution]
) -> set[str]:
  """Returns the labels of a distribution and of all that it requires.

  A requirement that is not installed is left out: a lock file may hold but the
  plug-in of what another lock file holds.
  """
  seen: set[tuple[str, frozenset[str]]] = set()
  pending = [(name, frozenset[str]())]
  while pending:
    node = pending.pop()
    if node in seen:
      continue
    seen.add(node)
    for requirement in requirements_of(dists[node[0]], node[1]):
      required = label_of(requirement.name)
      if required in dists:
        pending.append((required, frozenset(requirement.extras)))
  return {label for label, _ in seen}


def main(site_packages: str) -> None:
  """Writes BUILD and the markers into the working directory."""
  dists = {
    label_of(dist.metadata["Name"]): dist
    for dist in importlib.metadata.distributions(path=[site_packages])
  }
  if not dists:
    sys.exit("holds no distribution for this machine")
  lines = {
    label: "{}=={} {}\n".format(
      label,
      dist.version,
      hashlib.sha256((dist.read_text("RECORD") or "").encode()).hexdigest(),
    )
    for label, dist in dists.items()
  }
  markers = pathlib.Path("markers")
  markers.mkdir(exist_ok=True)
  for label in dists:
    closure = sorted(closure_of(label, dists))
    (markers / label).write_text("".join(lines[other] for other in closure))
  libraries = [_LIBRARY.format(label=label) for label in sorted(dists)]
  pathlib.Path("BUILD").write_text("".join([_HEADER, *libraries]))


if __name__ == "__main__":
  main(sys.argv[1])
