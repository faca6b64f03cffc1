"""Stands in for packages that the peers' test modules import and that tests of a server do not use.

Every name of such a package is a class that accepts everything: calls, attributes, subscripts, comparisons (false), and
as the type of a pydantic field any value.
"""

import importlib.abc
import importlib.machinery
import pathlib
import sys
import types


class StubType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)

    def __bool__(cls):
        return False

    def __iter__(cls):
        return iter(())


def stub(name: str) -> type:
    return StubType(name, (StubBase,), {})


class StubBase(metaclass=StubType):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        # A decorator gives back what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else stub("result")()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)()

    def __class_getitem__(cls, item):
        return cls

    def __getitem__(self, item):
        return stub("item")()

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None

    def __lt__(self, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __add__(self, other):
        return self

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __add__

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = stub(name)
        setattr(self, name, value)
        return value


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for the packages in `stubbed`, except for the modules for which `is_real` is true.

    Those are found below `root`.
    """

    def __init__(self, stubbed: set[str], root: pathlib.Path, is_real):
        self.stubbed = stubbed
        self.root = root
        self.is_real = is_real

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.stubbed or self.is_real(name):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        spec.submodule_search_locations = [str(self.root / spec.name.replace(".", "/"))]
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


def install(stubbed: set[str], root: pathlib.Path, is_real):
    sys.meta_path.insert(0, StubFinder(stubbed, root, is_real))
