"""The Python side of the build: an interpreter, and what pip installs from a lock file.

`python_interpreter` finds a CPython, makes a virtual environment of it and offers it as toolchain,
so that each py_test and py_binary runs under it. `pip_install` installs one hash-locked
requirements file and has a py_library for each distribution: `@pypi//:jax`, `@pypi//:absl_py`.
"""

# The releases that the lock files are tested with, best first, and the oldest that may do.
_TESTED = ["3.13", "3.12"]
_OLDEST = [3, 12]

# Says what an interpreter is, or why it will not do. Candidates are judged by running them, for a
# pyenv shim may exist and fail.
_PROBE = """
import platform, struct, sys, sysconfig
print("%d.%d.%d" % sys.version_info[:3])
print(sys.executable)
if platform.python_implementation() != "CPython":
  print("is not CPython")
elif sys.version_info[:2] < (3, 12):
  print("is older than 3.12")
elif sys.version_info.releaselevel != "final":
  print("is a pre-release")
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
  print("is a free-threaded build")
elif struct.calcsize("P") != 8:
  print("is not a 64-bit build")
else:
  try:
    import ensurepip, venv
    print("ok")
  except ImportError:
    print("has no venv or ensurepip (on Debian and Ubuntu: python3-venv)")
"""

_RUNTIME_BUILD = """\
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

# {version}, from {base}
py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    # The start-up script of a target runs under this interpreter too: a look-up less.
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

exports_files(["interpreter.txt"])
"""

def _say(ctx, what):
    """Tells the person who waits: in the progress line, and where there is none, as a line."""
    ctx.report_progress(what)
    ctx.execute(["echo", "@%s: %s" % (ctx.name, what)], quiet = False)

def _give_up(ctx, what, details):
    """Fails. Bazel repeats the message some times over; the details it gets to see once."""
    ctx.execute(["echo", details], quiet = False)
    fail(what)

def _probe(ctx, path):
    """Runs one candidate; returns struct(path, version, base, problem)."""
    result = ctx.execute([path, "-I", "-c", _PROBE], timeout = 60)
    lines = result.stdout.strip().split("\n")
    if result.return_code != 0 or len(lines) != 3:
        words = result.stderr.strip() or "exit status %d" % result.return_code
        problem = "is no working Python: " + words.split("\n")[0][:100]
        return struct(path = path, version = None, base = None, problem = problem)
    problem = None if lines[2] == "ok" else "(%s) %s" % (lines[0], lines[2])
    return struct(path = path, version = lines[0], base = lines[1], problem = problem)

def _candidates(ctx):
    """Every file that is named like a Python: on PATH in order, then in pyenv's versions."""
    folders = [f for f in ctx.os.environ.get("PATH", "").split(":") if f.startswith("/")]
    root = ctx.os.environ.get("PYENV_ROOT") or ctx.os.environ.get("HOME", "") + "/.pyenv"
    if root.startswith("/") and ctx.path(root + "/versions").exists:
        folders += sorted(["%s/bin" % v for v in ctx.path(root + "/versions").readdir()])
    names = ["python3.%d" % minor for minor in range(_OLDEST[1], _OLDEST[1] + 8)] + ["python3", "python"]

    paths = {}
    for folder in folders:
        for name in names:
            path = ctx.path(folder + "/" + name)
            if path.exists and path.realpath not in paths:
                paths[path.realpath] = str(path)
    return paths.values()

def _rank(found):
    """Tested releases first, then the newest: a lower tuple is better."""
    minor = ".".join(found.version.split(".")[:2])
    tested = _TESTED.index(minor) if minor in _TESTED else len(_TESTED)
    return [tested] + [-int(part) for part in found.version.split(".")]

def _find_python(ctx):
    named = ctx.os.environ.get("DSA_PYTHON")
    if named:
        path = named if named.startswith("/") else str(ctx.which(named) or "")
        if not path or not ctx.path(path).exists:
            fail("DSA_PYTHON=%s does not exist: it should name a CPython 3.12 or newer" % named)
        found = _probe(ctx, path)
        if found.problem:
            fail("DSA_PYTHON=%s %s; it should name a CPython 3.12 or newer" %
                 (named, found.problem))
        return found

    rejected = []
    hinted = ctx.os.environ.get("PYTHON_BIN_PATH", "")
    if hinted.startswith("/") and ctx.path(hinted).exists:
        found = _probe(ctx, hinted)
        if not found.problem:
            return found
        rejected.append(found)

    best = None
    for path in _candidates(ctx):
        found = _probe(ctx, path)
        if found.problem:
            rejected.append(found)
        elif not best or _rank(found) < _rank(best):
            best = found
    if best:
        return best
    return _give_up(
        ctx,
        "found no Python 3.12 or newer on PATH or in pyenv's versions: install one, or name it " +
        "with DSA_PYTHON=/path/to/python3",
        "\n".join(["%s %s" % (r.path, r.problem) for r in rejected]),
    )

def _python_interpreter_impl(ctx):
    ctx.report_progress("looking for a Python 3.12 or newer")
    found = _find_python(ctx)
    _say(ctx, "using Python %s, %s" % (found.version, found.base))

    # Its own environment, so that nothing installed elsewhere on the machine can be imported.
    result = ctx.execute([found.base, "-I", "-m", "venv", "venv"], timeout = 600)
    if result.return_code != 0:
        _give_up(
            ctx,
            "%s could not make a virtual environment (its words stand above)" % found.base,
            _tail(result.stdout + result.stderr),
        )
    python = str(ctx.path("venv")) + "/bin/python3"
    ctx.file("interpreter.txt", "%s %s\n" % (found.version, found.base), executable = False)
    ctx.file("BUILD", _RUNTIME_BUILD.format(
        version = found.version,
        base = found.base,
        python = python,
    ), executable = False)

python_interpreter = repository_rule(
    implementation = _python_interpreter_impl,
    # Not PATH: it differs from shell to shell, and each change would install everything anew.
    environ = ["DSA_PYTHON", "PYTHON_BIN_PATH"],
    doc = """A virtual environment of one Python, and a toolchain that runs it.

The Python is the one that DSA_PYTHON names (nothing else will do then), else the one that
PYTHON_BIN_PATH names, if it serves, else the best one on PATH and in pyenv's versions: the newest
that the lock files are tested with, or the newest of all where none of these is there.""",
)

def _pip_install_impl(ctx):
    # The look at interpreter.txt makes this rule run again when the interpreter is another one.
    interpreter = ctx.path(ctx.attr.interpreter)
    described = ctx.read(interpreter).strip()
    python = str(interpreter.dirname) + "/venv/bin/python3"
    lock = ctx.path(ctx.attr.lock)
    describe = ctx.path(ctx.attr._describe)
    _say(ctx, "pip installs what %s pins (once; a minute or more)" % lock.basename)
    ctx.file("tmp/README", "pip's scratch space\n", executable = False)
    result = ctx.execute(
        [
            python,
            "-I",
            "-m",
            "pip",
            "install",
            "--no-compile",
            "--no-deps",
            "--no-user",
            "--no-input",
            "--only-binary=:all:",
            "--require-hashes",
            "--disable-pip-version-check",
            "--no-warn-conflicts",
            "--progress-bar=off",
            "--quiet",
            "--target=" + str(ctx.path("site-packages")),
            "--requirement=" + str(lock),
        ],
        # On the same disk, so that pip moves what it unpacked instead of copying it.
        environment = {"TMPDIR": str(ctx.path("tmp"))},
        timeout = 3600,
    )
    if result.return_code != 0:
        _give_up(
            ctx,
            "pip could not install %s for Python %s (its words stand above)" % (lock, described),
            _tail(result.stderr or result.stdout),
        )
    ctx.delete("tmp")

    # A file that does not compile (a template, say) is its owner's business, and nobody here runs
    # the tests of others.
    ctx.report_progress("compiling what pip installed")
    ctx.execute(
        [
            python,
            "-I",
            "-m",
            "compileall",
            "-q",
            "-j0",
            "-x",
            "/tests?/",
            "--invalidation-mode=unchecked-hash",
            "site-packages",
        ],
        timeout = 3600,
    )
    result = ctx.execute([python, "-I", str(describe), "site-packages"])
    if result.return_code != 0:
        _give_up(
            ctx,
            "what %s brought could not be described (see above)" % lock,
            _tail(result.stderr),
        )

def _tail(text):
    lines = [line for line in text.strip().split("\n") if line.strip()]
    return "\n".join(lines[-12:])

pip_install = repository_rule(
    implementation = _pip_install_impl,
    attrs = {
        "interpreter": attr.label(
            default = "@dsa_python//:interpreter.txt",
            doc = "From python_interpreter.",
        ),
        "lock": attr.label(
            mandatory = True,
            allow_single_file = True,
            doc = "A requirements file that pins every distribution, with hashes.",
        ),
        "_describe": attr.label(
            default = "//third_party:describe_site_packages.py",
            allow_single_file = True,
        ),
    },
    doc = """The distributions of one lock file, each as a py_library.

pip's own configuration (index, proxy, cache) is the user's and is respected. All of site-packages
stands in the runfiles as one folder: listing its files would cost half a minute a test. Since Bazel
does not look into such a folder, each py_library also has a small file that changes with its
distribution or with anything that this one requires.""",
)
