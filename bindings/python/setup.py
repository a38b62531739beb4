"""The tag of a wheel, which pyproject.toml cannot say: it runs on any Python 3, and with libNVFP4.so in it on one platform alone."""

import pathlib

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARY = pathlib.Path(__file__).parent / "nvfp4" / "libNVFP4.so"


class Distribution(setuptools.Distribution):
    def has_ext_modules(self):
        return LIBRARY.exists()


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setuptools.setup(distclass=Distribution, cmdclass={"bdist_wheel": Wheel})
