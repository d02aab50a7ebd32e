"""Modules in place of packages that an engine imports and that are not installed, or need a GPU."""

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _AnyClass(type):
    """A class with every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(cls, name, value)
        return value


class _Stand(metaclass=_AnyClass):
    """What is made of it, inherited from it or used as a type does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema  # type: ignore[import-not-found, unused-ignore]

        return core_schema.any_schema()


class _Module(ModuleType):
    """A module with everything in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyClass(name, (_Stand,), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class StandIns(Loader, MetaPathFinder):
    """Finds them."""

    def __init__(self, packages: Sequence[str], absent_for: str, optional: Sequence[str]) -> None:
        """``packages`` are replaced for all, ``optional`` ones for all but the package ``absent_for``, which asks
        whether they are there."""
        self.packages, self.absent_for, self.optional = frozenset(packages), absent_for, frozenset(optional)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A module of a package to replace."""
        del path, target
        package = fullname.partition(".")[0]
        if package in self.optional:
            frame: Any = sys._getframe(1)
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            replaces = frame is not None and self.absent_for not in frame.f_code.co_filename
        else:
            replaces = package in self.packages
        return ModuleSpec(fullname, self, is_package=True) if replaces else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty one, which is a package."""
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install(packages: Sequence[str], absent_for: str = "", optional: Sequence[str] = ()) -> None:
    """Let imports find them."""
    sys.meta_path.insert(0, StandIns(packages, absent_for, optional))


def pretend_versions() -> None:
    """Say that what has no version has a high one. torch has to be imported before: it believes that."""
    version = importlib.metadata.version

    def any_version(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            return "99.0.0"

    vars(importlib.metadata)["version"] = any_version
