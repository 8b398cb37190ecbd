"""The compiled part of ferryman; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("native")


class BuildLibrary(build_ext):
    """Builds a plain shared library, which ctypes loads: it knows neither Python nor torch, so no version of either."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


setup(
    ext_modules=[
        Extension(
            "ferryman.runtime.libferryman",
            sources=[str(path) for path in sorted(NATIVE.glob("*.cpp"))],
            depends=[str(path) for path in sorted(NATIVE.iterdir())],
            # No -march and no -ffast-math: the kernels choose the instruction set at run time and keep IEEE arithmetic.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-Wall",
                "-Wextra",
                "-Wno-uninitialized",  # said of the AVX-512 headers of GCC 12, not of ours
                "-Wno-maybe-uninitialized",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # without a compiler the installation succeeds, and torch serves in the library's place
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
