"""Stands in for two packages that SGLang imports on every platform and never calls on the CPU path.

`torchvision` has no build beside a CPU torch here, and `vllm` would bring another engine. With this folder on
PYTHONPATH every module below these names is an empty one; its attributes are placeholders that can be called,
subclassed and used in annotations, so imports and class bodies work, and nothing computes with them.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = ("torchvision", "vllm")


class _PlaceholderType(type):
    """Class whose unknown attributes are placeholders too, so `Outer.Inner.CONSTANT` resolves."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)

    def __or__(cls, other: object) -> type:
        return cls

    __ror__ = __or__


def _placeholder(name: str) -> type:
    return _PlaceholderType(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.split(".")[0] not in NAMES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"


# Appended: a real installation of either name would be found first.
sys.meta_path.append(_Finder())
