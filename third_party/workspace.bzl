"""All that a workspace needs to build and test dsa: one macro for WORKSPACE.

From another workspace:

    local_repository(name = "dsa_jax", path = "...")
    load("@dsa_jax//third_party:workspace.bzl", "dsa_jax_dependencies")
    dsa_jax_dependencies()

A repository that the caller declared before, under one of the names below, is left as it is.
"""

load(":python.bzl", "pip_install", "python_interpreter")
load(":stubs.bzl", "declare_stubs")

def dsa_jax_dependencies():
    """Declares @rules_python, @dsa_python (with its toolchain), @pypi and @libtpu."""
    declare_stubs()
    _declare(python_interpreter, name = "dsa_python")
    _declare(pip_install, name = "pypi", lock = Label("//third_party:requirements.lock"))

    # Large, and of use to the tests alone that compile for TPU ahead of time.
    _declare(pip_install, name = "libtpu", lock = Label("//third_party:libtpu.lock"))
    native.register_toolchains("@dsa_python//:toolchain")

def _declare(rule, name, **kwargs):
    if not native.existing_rule(name):
        rule(name = name, **kwargs)
