"""Builds the device. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

here = Path(__file__).parent
sources = sorted(str(p.relative_to(here)) for p in here.glob("csrc/*.cpp"))
headers = sorted(str(p.relative_to(here)) for p in here.glob("csrc/*.h"))

setup(
    ext_modules=[
        CppExtension(
            "torch_virtual._C",
            sources,
            depends=headers,
            extra_compile_args=["-O2", "-g0", "-Wall", "-Wno-unused-function"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
