"""Stand-ins for Bazel's own rule sets, so that nothing is fetched but Python distributions.

Bazel up to 7 has the Python rules built in, and BUILD files load them from @rules_python, where
Bazel 8 and later have them: the stub makes one form serve all. Bazel 4 moreover fetches three rule
sets as soon as there is a py_test, though it uses next to nothing of them.
"""

_RULES_PYTHON = {
    "BUILD": "",
    "python/BUILD": "",
    "python/defs.bzl": """\
load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

py_binary = native.py_binary
py_library = native.py_library
py_runtime = native.py_runtime
py_runtime_pair = _py_runtime_pair
py_test = native.py_test
""",
}

_RULES_CC = {
    "BUILD": "",
    "cc/BUILD": """\
alias(
    name = "toolchain_type",
    actual = "@bazel_tools//tools/cpp:toolchain_type",
    visibility = ["//visibility:public"],
)
""",
    "cc/defs.bzl": """\
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_proto_library = native.cc_proto_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_import = native.objc_import
objc_library = native.objc_library
""",
}

_RULES_JAVA = {
    "BUILD": "",
    "java/BUILD": """\
alias(
    name = "toolchain_type",
    actual = "@bazel_tools//tools/jdk:toolchain_type",
    visibility = ["//visibility:public"],
)
""",
    "java/defs.bzl": """\
java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_package_configuration = native.java_package_configuration
java_plugin = native.java_plugin
java_runtime = native.java_runtime
java_test = native.java_test
java_toolchain = native.java_toolchain
""",
}

_REMOTE_COVERAGE_TOOLS = {
    "BUILD": """\
package(default_visibility = ["//visibility:public"])

[sh_binary(
    name = name,
    srcs = ["unavailable.sh"],
) for name in ["coverage_report_generator", "lcov_merger"]]
""",
    "unavailable.sh": """\
#!/bin/sh
echo "coverage is not set up for this Bazel: see third_party/stubs.bzl" >&2
exit 1
""",
}

def _stub_repository_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    for path, content in ctx.attr.files.items():
        ctx.file(path, content, executable = path.endswith(".sh"))

_stub_repository = repository_rule(
    implementation = _stub_repository_impl,
    attrs = {"files": attr.string_dict(mandatory = True, doc = "Content of each file.")},
    doc = "A repository that holds just these files.",
)

def declare_stubs():
    """Declares the stubs that this Bazel needs, where the caller has none of his own."""

    # Debian's build of 4.2.3 reports no version.
    version = native.bazel_version or "4"
    major = int(version.split(".")[0].split("-")[0])
    stubs = {}
    if major < 8:
        stubs["rules_python"] = _RULES_PYTHON
    if major < 5:
        stubs["rules_cc"] = _RULES_CC
        stubs["rules_java"] = _RULES_JAVA
        stubs["remote_coverage_tools"] = _REMOTE_COVERAGE_TOOLS
    for name, files in stubs.items():
        if not native.existing_rule(name):
            _stub_repository(name = name, files = files)
